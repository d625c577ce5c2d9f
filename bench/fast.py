# SPDX-License-Identifier: Apache-2.0
"""Figure 7: what goes through the node, by the fast path and without it, beside no proxy at all.

Three loads on two ways, each in the states ``none`` (the endpoint's own address, the node without any proxy: no
programs, no nftables table, no conntrack), ``off`` and ``on`` (the Service, with the agent), in turns:

* ``connect``: connect, one byte, one byte back, reset, 64 at a time (``connections``);
* ``exchange``: one byte there, one back, on one connection (``pingpong``);
* ``stream``: one TCP stream (iperf3, with the real-time priority that the other two give themselves).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pyebpf_proxy.lab import manifests
from pyebpf_proxy.lab.addresses import Dual, cluster_ip
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.namespace import Namespace

from .measure import TOOLS, Result, Row, machine, say, speed, summary

PORTS = {"connect": 8080, "exchange": 8081, "stream": 8082}
NODE_PORTS = {"connect": 30080, "exchange": 30081, "stream": 30082}
GOALS = {"connect": 0.97, "exchange": 1.03, "stream": 1.0}
UNITS = {"connect": "/s", "exchange": "/s", "stream": "Gbit/s"}
WORDS = {"connect": "connect-request-reset", "exchange": "request-response, one connection", "stream": "TCP stream"}
WAYS = {"pod": "pod → ClusterIP, same node", "client": "client → NodePort"}
ADDRESS = cluster_ip(10)


class Ground:
    """A node, a pod that serves, a pod and a client from outside that ask."""

    def __init__(self, lab: Lab, seconds: float, stack: ExitStack) -> None:
        self._seconds = seconds
        self._node = lab.nodes[0]
        pod = lab.add_pod("client-pod", self._node, serve=False)
        self._from: dict[str, Namespace] = {"pod": pod.namespace, "client": lab.client}
        self._server = lab.add_pod("server-pod", self._node, serve=False)
        ports = [manifests.Port(name, PORTS[name], PORTS[name], "TCP", NODE_PORTS[name]) for name in PORTS]
        lab.write("service.yaml", [manifests.service("bench", ports, ADDRESS)])
        lab.write("slices.yaml", manifests.slices("bench", ports, [(self._server.address, self._node.name)]))
        lab.write("node.yaml", [manifests.node(self._node.name, self._node.address, self._node.pod_cidr)])
        for command in (
            [str(TOOLS / "connections"), "serve", str(PORTS["connect"])],
            [str(TOOLS / "pingpong"), "serve", str(PORTS["exchange"])],
            ["chrt", "-f", "1", "iperf3", "-s", "-p", str(PORTS["stream"]), "--forceflush"],
        ):
            stack.enter_context(_server(self._server.namespace, command))

    def load(self, what: str, way: str, state: str, family: int) -> float:
        """One load: in its unit."""
        address, port = self._target(what, way, state)
        call = self._from[way].run
        to, number, seconds = address.of(family), str(port), str(self._seconds)
        if what == "connect":
            outcome = json.loads(call(str(TOOLS / "connections"), "load", to, number, "64", "0.3", seconds))
            if outcome["failed"]:
                raise RuntimeError(f"{outcome['failed']} connections to {to} failed")
            return float(outcome["per_second"])
        if what == "exchange":
            return float(json.loads(call(str(TOOLS / "pingpong"), "load", to, number, seconds))["per_second"])
        text = call("chrt", "-f", "1", "iperf3", "-c", to, "-p", number, "-t", str(max(1, round(self._seconds))), "-J")
        return float(json.loads(text)["end"]["sum_received"]["bits_per_second"]) / 1e9

    def _target(self, what: str, way: str, state: str) -> tuple[Dual, int]:
        if state == "none":
            return self._server.address, PORTS[what]
        return (ADDRESS, PORTS[what]) if way == "pod" else (self._node.address, NODE_PORTS[what])

    @contextmanager
    def proxy(self, state: str) -> Iterator[None]:
        """The node in this state; afterwards it is as it was before."""
        if state == "none":
            yield
            return
        agent = self._node.agent
        agent.start(own={"fastPath": state == "on"})
        agent.wait_synced()
        try:
            yield
        finally:
            agent.stop()
            agent.cleanup()
            # Flows through the service and flows to the pod have the same reply.
            self._node.namespace.run("conntrack", "-F")


@contextmanager
def _server(namespace: Namespace, command: list[str]) -> Iterator[None]:
    command = ["ip", "netns", "exec", namespace.name, *command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            while "listening" not in (line := process.stdout.readline()):
                if not line:
                    raise RuntimeError(f"{command[4]} does not listen")
            yield
        finally:
            process.terminate()


def run(quick: bool) -> Result:
    rounds, seconds, families = (2, 0.6, (4,)) if quick else (5, 1.0, (4, 6))
    speeds = speed(1)
    samples: dict[str, list[float]] = {}
    with ExitStack() as stack:
        ground = Ground(stack.enter_context(Lab(nodes=1)), seconds, stack)
        for number in range(rounds):
            # Neighbours are compared; who is first in odd rounds is last in even ones.
            for state in ("none", "off", "on")[:: 1 if number % 2 else -1]:
                with ground.proxy(state):
                    for family in families:
                        for way in WAYS:
                            for what in PORTS:
                                key = f"{what} {way} IPv{family} {state}"
                                samples.setdefault(key, []).append(ground.load(what, way, state, family))
            speeds += speed(1)
            say(f"fast {number + 1}: " + ", ".join(f"{key} {values[-1]:.4g}" for key, values in samples.items()))
    return Result(
        figure="fast",
        title="The fast path, on and off, beside no proxy",
        quick=quick,
        machine=machine(speeds),
        rows=list(_rows(samples, families)),
        samples={**samples, "speed_seconds": speeds},
    )


def _rows(samples: dict[str, list[float]], families: tuple[int, ...]) -> Iterator[Row]:
    for what in PORTS:
        for way in WAYS:
            for family in families:
                for state, other in (("on", "none"), ("off", "none"), ("on", "off")):
                    mine, theirs = (samples[f"{what} {way} IPv{family} {each}"] for each in (state, other))
                    ratio = summary([a / b for a, b in zip(mine, theirs, strict=True)])
                    judged = (state, other) == ("on", "none")
                    yield Row(
                        what=f"{WORDS[what]}, {WAYS[way]}, IPv{family}: fast path {state}",
                        unit=UNITS[what],
                        measured=summary(mine),
                        compared_with="no proxy" if other == "none" else "fast path off",
                        compared=summary(theirs),
                        judged=ratio,
                        judged_unit="of it",
                        at_normal_speed=ratio.median,
                        goal=f"≥ {GOALS[what]} of it" if judged else "",
                        met=ratio.median >= GOALS[what] if judged else None,
                    )
