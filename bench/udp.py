# SPDX-License-Identifier: Apache-2.0
"""Figure: UDP of 64 bytes from outside to a NodePort, through one CPU: one flow, many, every packet a new one.

``flood`` makes frames, a batch at a time, and gives them to the node's device; before it makes more, the same CPU does
all the way to the pod in its softirq, where an XDP program counts and drops. So a rate has in it what making costs, the
same for all. Nothing passes between CPUs: on a virtual machine that costs from 20 to 300 ns a packet, as the host
places its CPUs, and was more than what is measured here. Established flows have had traffic both ways for more than
two seconds, as conntrack wants it to call them assured, and have an answer to one packet of 256 later on.

Limits beside it: the same frames to the pod's own address with no proxy; sent there by an XDP program that asks
nothing; dropped by XDP where they come in.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from pyebpf_proxy.lab.namespace import Namespace

from .contenders import FORWARD, LIMIT, LIMITS, NODE_PORT, NONE, PROXIES, UDP, Field, Ground, turns
from .loads import Samples, rows
from .measure import TOOLS, Result, Row, machine, say, speed
from .proxies import IPTABLES, NFTABLES

KINDS = {"1 flow": 1, "10 000 flows": 10_000, "every packet a new flow": 0}
#: Of kube-proxy nftables, by kind, with XDP.
GOALS = dict(zip(KINDS, (4.2, 3.0, 1.5), strict=True))
NAMES = (*(name for name in PROXIES if name != "socket"), "xdp", *LIMITS)
PAIRS = [("xdp", NFTABLES), ("fast", NFTABLES), ("direct", NFTABLES), ("netfilter", NFTABLES), (IPTABLES, NFTABLES)]
PAIRS += [("xdp", NONE), (NFTABLES, NONE), ("xdp", FORWARD), (FORWARD, NFTABLES), ("xdp", LIMIT), (NONE, LIMIT)]
SOURCES = "198.18.0.0"
WARM_UP_SECONDS = 0.5
ASSURED_SECONDS = 2.2
#: Of new flows there must not be more than conntrack holds.
NEW_SECONDS = 0.2
ECHO = 256
TRIES = 3


class Way:
    """From outside through the node of one contender, ready to be flooded."""

    def __init__(self, ground: Ground, stack: ExitStack) -> None:
        self._ground = ground
        node = ground.node
        for device in ("eth0", ground.server.device):
            # Frames that an XDP program redirects to a veth need somebody who polls at its other end.
            node.namespace.run("ethtool", "-K", device, "gro", "on")
        ground.lab.core.ip(f"route add blackhole {SOURCES}/15")
        self._to = _mac(node.namespace)
        self._programs: list[subprocess.Popen[str]] = []
        stack.callback(self._close)
        if ground.contender.name == FORWARD:
            self._begin(node.namespace, "pass_on", ground.server.device, _mac(ground.server.namespace))
        self._sink = self._begin(node.namespace if ground.contender.name == LIMIT else ground.server.namespace, "sink")

    def _begin(self, where: Namespace, program: str, *arguments: str) -> subprocess.Popen[str]:
        """A program of the flood on eth0, attached when this returns."""
        command = ["ip", "netns", "exec", where.name, str(TOOLS / "flood"), program, str(TOOLS / "flood.bpf.o"), "eth0"]
        made = subprocess.Popen([*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._programs.append(made)
        if _line(made) != "listening":
            raise RuntimeError(f"{program} of the flood does not listen")
        return made

    def flood(self, flows: int, seconds: float, echo: int) -> float:
        """Packets a second that reach the end."""
        direct = self._ground.contender.past
        to = self._ground.server.address if direct else self._ground.node.address
        port = UDP if direct else NODE_PORT[UDP]
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
            made = json.loads(self._ground.lab.core.run(*command))
            if made["made"] and (count := self._count(0) - before):
                return float(count / made["seconds"])
            # Somebody else of real-time priority had the CPU all the while.
        raise RuntimeError(f"{self._ground.contender.words}: no packet reached the end: {made}")

    def forget_flows(self) -> None:
        """No flow is known."""
        self._ground.node.namespace.run("conntrack", "-F")

    def check_assured(self, flows: int) -> None:
        """Raises RuntimeError unless conntrack, where there is one, calls nearly all flows assured."""
        if self._ground.contender.past:
            return
        found = self._ground.node.namespace.run("conntrack", "-L", "-p", "udp").count("[ASSURED]")
        if found < 0.99 * flows:
            raise RuntimeError(f"{self._ground.contender.words}: only {found} of {flows} flows are assured")

    def check_room(self) -> None:
        """Raises RuntimeError if conntrack was full."""
        most = int(self._ground.node.namespace.run("sysctl", "-n", "net.netfilter.nf_conntrack_max"))
        if (found := int(self._ground.node.namespace.run("conntrack", "-C"))) > 0.95 * most:
            raise RuntimeError(f"{self._ground.contender.words}: {found} flows, conntrack has room for {most}")

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


def run(quick: bool) -> Result:
    rounds, seconds = (5, 0.2) if quick else (9, 0.6)
    speeds = speed(1)
    samples: Samples = {kind: {} for kind in KINDS}
    grounds = Field()
    try:
        with ExitStack() as stack:
            ways = {ground.contender.name: Way(ground, stack) for ground in grounds.grounds(NAMES)}
            for kind, flows in KINDS.items():
                if flows:
                    _establish(list(ways.values()), flows)
                for _, order in turns(rounds, grounds.grounds(list(ways))):
                    for ground in order:
                        name = ground.contender.name
                        samples[kind].setdefault(name, []).append(_once(ways[name], flows, seconds))
                say(f"udp: {kind}: " + ", ".join(f"{name} {of[-1] / 1e3:.0f}" for name, of in samples[kind].items()))
                speeds += speed(1)
    finally:
        grounds.close()
    return Result(
        figure="udp",
        title="UDP, 64 bytes, from outside to a pod, one CPU",
        quick=quick,
        machine=machine(speeds),
        rows=list(table(samples)),
        samples={**samples, "speed_seconds": speeds},
    )


def _establish(ways: Sequence[Way], flows: int) -> None:
    """Traffic both ways, twice: conntrack calls a flow assured that goes on after ASSURED_SECONDS."""
    for pause in (ASSURED_SECONDS, 0):
        for way in ways:
            way.flood(flows, WARM_UP_SECONDS, 1)
        # Not a condition that could be looked for: conntrack looks at the clock when the next packet comes.
        time.sleep(pause)
    for way in ways:
        way.check_assured(flows)


def _once(way: Way, flows: int, seconds: float) -> float:
    if flows:
        return way.flood(flows, seconds, ECHO)
    way.forget_flows()
    try:
        rate = way.flood(0, NEW_SECONDS, 0)
        way.check_room()
    finally:
        # Every namespace's flows are in one hash table: the next contender is not to walk past them.
        way.forget_flows()
    return rate


def table(samples: Samples, pairs: Sequence[tuple[str, str]] = tuple(PAIRS)) -> Iterator[Row]:
    """Contenders beside each other; the goals are those of XDP."""
    for kind, of in samples.items():
        yield from rows({kind: of}, "UDP, 64 bytes", "packets/s", pairs, {("xdp", NFTABLES): GOALS[kind]})
