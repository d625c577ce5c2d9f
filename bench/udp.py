# SPDX-License-Identifier: Apache-2.0
"""Figure: UDP of 64 bytes from outside to a NodePort, through one CPU: one flow, many flows, each packet a new flow.

``flood`` generates a batch of frames and passes them to the node's interface. Before the next batch, the same CPU
processes them in its softirq up to the pod, where a program counts and drops them. So a rate includes the cost of
generating frames, which is the same for all. No frame passes between CPUs: on a virtual machine this costs 20 to 300 ns
per packet, depending on where the host places CPUs, which was more than the measured differences. Established flows
have had traffic in both directions for more than two seconds, so that conntrack sets ASSURED; later, one packet in 256
gets a reply.

The receiver is a tc program: pods have no XDP program, and one in the pod prevents bpf_redirect_peer(). XDP on the
node's interface avoids the allocation of an sk_buff. To show this, the receiver must be an XDP program, also for
kube-proxy in the comparison.

Limits for comparison: the same frames to the pod's own address without a proxy, redirected there by an XDP program
without lookups, and dropped by XDP on arrival.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from pyebpf_proxy.lab.namespace import Namespace

from .contenders import (
    FORWARD,
    IPTABLES,
    LIMIT,
    LIMITS,
    LOCAL_NODE_PORT,
    NFTABLES,
    NONE,
    OURS,
    UDP,
    USUAL,
    XDP,
    Field,
    Ground,
    turns,
)
from .loads import Options, Samples, rows
from .measure import TOOLS, Result, Row, machine, say, speed

KINDS = {"1 flow": 1, "10 000 flows": 10_000, "every packet a new flow": 0}
#: Labels of the kinds whose receiver is an XDP program.
BY_XDP = ", to an XDP program in the pod"
#: Goals by kind, compared with kube-proxy in mode nftables: with tc only, and with XDP.
GOALS = {kind: {OURS: tc} for kind, tc in zip(KINDS, (2.2, 2.0, 2.0), strict=True)}
GOALS |= {kind + BY_XDP: {XDP: xdp} for kind, xdp in zip(KINDS, (5.0, 4.5, 3.0), strict=True)}
PAIRS = [(OURS, NFTABLES), (XDP, NFTABLES), (IPTABLES, NFTABLES), (OURS, NONE), (XDP, NONE), (NFTABLES, NONE)]
PAIRS += [(XDP, FORWARD), (FORWARD, NFTABLES), (XDP, LIMIT), (NONE, LIMIT)]
SOURCES = "198.18.0.0"
WARM_UP_SECONDS = 0.5
ASSURED_SECONDS = 2.2
#: New flows are sent only for this long: conntrack must not become full.
NEW_SECONDS = 0.2
ECHO = 256
TRIES = 3


class Way:
    """The path from outside through the node of one contender, ready to be flooded.

    ``port``: the pod's port, for contenders whose loads go to the pod itself. ``end``: the receiving program.
    """

    def __init__(self, ground: Ground, stack: ExitStack, port: int = UDP, end: str = "sink") -> None:
        self.ground = ground
        self._port = port
        node = ground.node
        for device in ("eth0", ground.server.device):
            # If an XDP program redirects frames to a veth, its other end must have NAPI, which GRO enables.
            node.namespace.run("ethtool", "-K", device, "gro", "on")
        ground.lab.core.ip(f"route replace blackhole {SOURCES}/15")
        self._to = _mac(node.namespace)
        self._programs: list[subprocess.Popen[str]] = []
        stack.callback(self._close)
        if ground.contender.name == FORWARD:
            self._begin(node.namespace, "pass_on", ground.server.device, _mac(ground.server.namespace))
        where = node.namespace if ground.contender.name == LIMIT else ground.server.namespace
        self._sink = self._begin(where, end)

    def _begin(self, where: Namespace, program: str, *arguments: str) -> subprocess.Popen[str]:
        """Attach a program of ``flood`` to eth0, and wait until it is attached."""
        command = ["ip", "netns", "exec", where.name, str(TOOLS / "flood"), program, str(TOOLS / "flood.bpf.o"), "eth0"]
        made = subprocess.Popen([*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._programs.append(made)
        if _line(made) != "listening":
            raise RuntimeError(f"{program} of the flood does not listen")
        return made

    def flood(self, flows: int, seconds: float, echo: int) -> float:
        """Packets per second that reach the receiver."""
        past = self.ground.contender.past
        to = self.ground.server.address if past else self.ground.node.address
        port = self._port if past else LOCAL_NODE_PORT[UDP]
        arguments = [
            "node1",
            str(max(os.sched_getaffinity(0))),
            self._to,
            SOURCES,
            to.v4,
            str(port),
            str(flows),
            str(seconds),
        ]
        command = [str(TOOLS / "flood"), "make", str(TOOLS / "flood.bpf.o"), *arguments]
        for _ in range(TRIES):
            before = self._count(echo)
            made = json.loads(self.ground.lab.core.run(*command))
            if made["made"] and (count := self._count(0) - before):
                return float(count / made["seconds"])
            # Retry: another task with real-time priority has used the CPU all the time.
        raise RuntimeError(f"{self.ground.contender.words}: no packet reached the end: {made}")

    def check_assured(self, flows: int) -> None:
        """For proxies whose flows are all in conntrack: RuntimeError unless nearly all are assured."""
        if self.ground.contender.name not in (IPTABLES, NFTABLES):
            return
        found = self.ground.node.namespace.run("conntrack", "-L", "-p", "udp").count("[ASSURED]")
        if found < 0.99 * flows:
            raise RuntimeError(f"{self.ground.contender.words}: only {found} of {flows} flows are assured")

    def check_room(self) -> None:
        """RuntimeError if conntrack was full."""
        most = int(self.ground.node.namespace.run("sysctl", "-n", "net.netfilter.nf_conntrack_max"))
        if (found := int(self.ground.node.namespace.run("conntrack", "-C"))) > 0.95 * most:
            raise RuntimeError(f"{self.ground.contender.words}: {found} flows, conntrack has room for {most}")

    def _count(self, echo: int) -> int:
        assert self._sink.stdin is not None
        self._sink.stdin.write(f"{echo}\n")
        self._sink.stdin.flush()
        return int(_line(self._sink))

    def _close(self) -> None:
        for each in self._programs:
            each.kill()
            each.communicate()


def _line(of: subprocess.Popen[str]) -> str:
    assert of.stdout is not None
    return of.stdout.readline().strip()


def _mac(namespace: Namespace) -> str:
    words = namespace.run("ip", "-o", "link", "show", "eth0").split()
    return words[words.index("link/ether") + 1]


def run(asked: Options) -> Result:
    """Measure it. Only a complete run measures the limits."""
    rounds, seconds = asked.rounds or (5 if asked.quick else 11), asked.seconds or (0.3 if asked.quick else 0.6)
    # The contenders that take part, by receiver and by suffix of the kind.
    parts = {
        ("sink", ""): [*USUAL, *(name for name in asked.also if name != XDP)],
        ("sink_xdp", BY_XDP): [NONE, NFTABLES, XDP, *(() if asked.quick else LIMITS)],
    }
    speeds = speed(1)
    samples: Samples = {}
    grounds = Field()
    try:
        for (end, added), names in parts.items():
            with ExitStack() as stack:
                ways = {each.contender.name: Way(each, stack, end=end) for each in grounds.grounds(names)}
                for kind, flows in KINDS.items():
                    of: dict[str, list[float]] = samples.setdefault(kind + added, {})
                    if flows:
                        establish(list(ways.values()), flows)
                    for _, order in turns(rounds, grounds.grounds(list(ways))):
                        for ground in order:
                            name = ground.contender.name
                            of.setdefault(name, []).append(_once(ways[name], flows, seconds))
                    last = (f"{name} {rates[-1] / 1e3:.0f}" for name, rates in of.items())
                    say(f"udp: {kind}{added}: " + ", ".join(last))
                    speeds += speed(1)
    finally:
        grounds.close()
    return Result(
        figure="udp",
        title="UDP, 64 bytes, from outside to a pod, one CPU",
        quick=asked.quick,
        machine=machine(speeds),
        rows=list(table(samples)),
        samples={**samples, "speed_seconds": speeds},
    )


def establish(ways: Sequence[Way], flows: int) -> None:
    """Send traffic in both directions twice: conntrack sets ASSURED for flows that continue after ASSURED_SECONDS."""
    for pause in (ASSURED_SECONDS, 0):
        for way in ways:
            way.flood(flows, WARM_UP_SECONDS, 1)
        # Polling does not help: conntrack checks the time only when the next packet arrives.
        time.sleep(pause)
    for way in ways:
        way.check_assured(flows)


def _once(way: Way, flows: int, seconds: float) -> float:
    if flows:
        return way.flood(flows, seconds, ECHO)
    way.ground.forget_flows()
    try:
        rate = way.flood(0, NEW_SECONDS, 0)
        way.check_room()
    finally:
        # The flows of all namespaces share one hash table, which must be empty for the next contender.
        way.ground.forget_flows()
    return rate


def table(samples: Samples, pairs: Sequence[tuple[str, str]] = tuple(PAIRS)) -> Iterator[Row]:
    """Compare contenders. Goals are relative to kube-proxy in mode nftables."""
    for kind, of in samples.items():
        goals = {(name, NFTABLES): goal for name, goal in GOALS.get(kind, {}).items()}
        yield from rows({kind: of}, "UDP, 64 bytes", "packets/s", pairs, goals)
