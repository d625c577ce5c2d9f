# SPDX-License-Identifier: Apache-2.0
"""Figure 4: connect, one byte there, one back, reset; as often as two pods of one node can.

The same load tool in the same two pods, in turns, with the node in different states:

* ``none``: to the pod's address, the node without any proxy: no programs, no nftables table, no conntrack;
* ``service``: to the ClusterIP, with the agent;
* ``socket``: to the ClusterIP, with the agent and ``socketLB: all``: translated at connect, tracked, but not translated
  again;
* ``beside``: to the pod's address, with the agent: what flows pay that are none of its business;
* ``conntrack``: to the pod's address, no proxy, but one rule that makes the kernel track connections, as every node
  of Kubernetes has;
* ``nft``: to the ClusterIP, no proxy, one DNAT rule: less than any kube-proxy does.
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

IN_FLIGHT = 64
WARM_UP_SECONDS = 0.4
PORT, TARGET = 80, 8080
#: Of the second's rate, by the states that are compared.
GOALS = {("service", "none"): 0.95, ("socket", "none"): 0.99}
ADDRESS = cluster_ip(10)

WORDS = {
    "none": "to the pod, no proxy",
    "service": "through the ClusterIP",
    "socket": "through the ClusterIP at the socket (socketLB: all)",
    "beside": "to the pod, with the proxy",
    "conntrack": "to the pod, no proxy, connections tracked",
    "nft": "through one nftables DNAT rule, no proxy",
}
_TRACKING = "table inet bench { chain c { type filter hook prerouting priority 0; ct state invalid counter; }; }"
_DNAT = """table inet bench { chain c { type nat hook prerouting priority -100;
 ip daddr {v4} tcp dport {port} dnat ip to {pod4}:{target}
 ip6 daddr {v6} tcp dport {port} dnat ip6 to [{pod6}]:{target}
}; }"""


@contextmanager
def _server(namespace: Namespace) -> Iterator[None]:
    command = ["ip", "netns", "exec", namespace.name, str(TOOLS / "connections"), "serve", str(TARGET)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "listening\n":
            raise RuntimeError("the server of the load tool does not listen")
        yield
        process.stdin.close()  # its sign to end


class Pair:
    """Two pods of one node, and the node in one of the states."""

    def __init__(self, lab: Lab, seconds: float) -> None:
        self._lab = lab
        self._seconds = seconds
        self._node = lab.nodes[0]
        self.client = lab.add_pod("client-pod", self._node, serve=False)
        self.server = lab.add_pod("server-pod", self._node, serve=False)
        port = manifests.Port("main", PORT, TARGET)
        lab.write("service.yaml", [manifests.service("bench", [port], ADDRESS)])
        lab.write("slices.yaml", manifests.slices("bench", [port], [(self.server.address, self._node.name)]))
        lab.write("node.yaml", [manifests.node(self._node.name, self._node.address, self._node.pod_cidr)])

    def load(self, to: Dual, port: int, family: int) -> dict[str, float]:
        command = [str(TOOLS / "connections"), "load", to.of(family), str(port), str(IN_FLIGHT)]
        outcome: dict[str, float] = json.loads(
            self.client.namespace.run(*command, str(WARM_UP_SECONDS), str(self._seconds))
        )
        if outcome["failed"]:
            raise RuntimeError(f"{outcome['failed']:.0f} connections to {to.of(family)} failed: {outcome}")
        return outcome

    @contextmanager
    def agent(self, socket_lb: str = "node") -> Iterator[None]:
        """With the proxy; afterwards the node is as it was before."""
        agent = self._node.agent
        agent.start(own={"socketLB": socket_lb})
        agent.wait_synced()
        try:
            yield
        finally:
            agent.stop()
            agent.cleanup()
            left = self._node.namespace.run("nft", "list", "ruleset").strip()
            if left:
                raise RuntimeError(f"the proxy left something behind:\n{left}")

    @contextmanager
    def rules(self, text: str) -> Iterator[None]:
        """With an nftables table of ours instead."""
        node = self._node.namespace
        node.run("nft", "-f", "-", stdin=text)
        try:
            yield
        finally:
            node.run("nft", "delete", "table", "inet", "bench")

    def round(self, families: tuple[int, ...]) -> Iterator[tuple[str, int, dict[str, float]]]:
        """Every state once: its name, the family, what the load tool said."""
        pod = self.server.address
        dnat = _DNAT.replace("{v4}", ADDRESS.v4).replace("{v6}", ADDRESS.v6).replace("{port}", str(PORT))
        dnat = dnat.replace("{pod4}", pod.v4).replace("{pod6}", pod.v6).replace("{target}", str(TARGET))
        # The two that are compared are neighbours, once in each order.
        for family in families:
            yield "none", family, self.load(pod, TARGET, family)
        with self.agent():
            for family in families * 2:
                yield "service", family, self.load(ADDRESS, PORT, family)
            self.forget_flows()
            for family in families:
                yield "beside", family, self.load(pod, TARGET, family)
        for family in families:
            yield "none", family, self.load(pod, TARGET, family)
        with self.agent("all"):
            for family in families * 2:
                yield "socket", family, self.load(ADDRESS, PORT, family)
        self.forget_flows()
        with self.rules(_TRACKING):
            for family in families:
                yield "conntrack", family, self.load(pod, TARGET, family)
        self.forget_flows()
        with self.rules(dnat):
            for family in families:
                yield "nft", family, self.load(ADDRESS, PORT, family)
        self.forget_flows()

    def forget_flows(self) -> None:
        """Flows through the service and flows to the pod have the same reply; the next load must not meet them."""
        self._node.namespace.run("conntrack", "-F")


def run(quick: bool) -> Result:
    rounds, seconds, families = (2, 0.6, (4, 6)) if quick else (10, 1.2, (4, 6))
    speeds = speed(1)
    samples: list[dict[str, float | str | int]] = []
    with ExitStack() as stack:
        pair = Pair(stack.enter_context(Lab(nodes=1)), seconds)
        stack.enter_context(_server(pair.server.namespace))
        for number in range(rounds):
            for state, family, outcome in pair.round(families):
                samples.append({"round": number, "state": state, "family": family, **outcome})
            speeds += speed(1)
            shown = ", ".join(f"{s} {_mean(samples, number, s, 4):.0f}" for s in WORDS)
            slow = sum(int(s["slow"]) for s in samples if s["round"] == number)
            say(f"connect {number + 1}: IPv4 per second: {shown}" + (f"; {slow} slower than 0.2 s" if slow else ""))
    rows = []
    for family in families:
        rates = {state: [_mean(samples, n, state, family) for n in range(rounds)] for state in WORDS}
        pairs = [("service", "none"), ("service", "conntrack")]
        pairs += [("socket", "none"), ("socket", "service"), ("socket", "beside")]
        pairs += [(state, "none") for state in ("beside", "conntrack", "nft")]
        for state, reference in pairs:
            ratio = summary([a / b for a, b in zip(rates[state], rates[reference], strict=True)])
            goal = GOALS.get((state, reference))
            rows.append(
                Row(
                    what=f"connect-request-reset, IPv{family}: {WORDS[state]}",
                    unit="/s",
                    measured=summary(rates[state]),
                    compared_with=WORDS[reference],
                    compared=summary(rates[reference]),
                    judged=ratio,
                    judged_unit="of it",
                    at_normal_speed=ratio.median,
                    goal=f"≥ {goal} of it" if goal else "",
                    met=ratio.median >= goal if goal else None,
                )
            )
    return Result(
        figure="connect",
        title="Connect, request, reset between two pods of one node",
        quick=quick,
        machine=machine(speeds),
        rows=rows,
        samples={"runs": samples, "speed_seconds": speeds},
    )


def _mean(samples: list[dict[str, float | str | int]], number: int, state: str, family: int) -> float:
    """Connections per second in one state in one round."""
    found = [s for s in samples if (s["round"], s["state"], s["family"]) == (number, state, family)]
    return sum(float(s["connections"]) for s in found) / sum(float(s["seconds"]) for s in found)
