# SPDX-License-Identifier: Apache-2.0
"""Figure: UDP of 64 bytes from outside to a NodePort, through one CPU: one flow, many, every packet a new one.

``flood`` makes frames on one CPU, faster than anybody forwards them. The node's device takes them on another CPU, in a
kernel thread of its own (threaded NAPI), and that CPU does all the way to the pod, where an XDP program counts and
drops. What is counted is what that one CPU forwards. Established flows have had traffic both ways for more than two
seconds, as conntrack wants it to call them assured, and have an answer to one packet of 256 later on.

Limits beside it: the same frames to the pod's own address with no proxy, and dropped by XDP where they come in.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from .contenders import LIMIT, NODE_PORT, NONE, PROXIES, UDP, Field, Ground, turns
from .loads import Samples, rows
from .measure import TOOLS, Result, Row, machine, say, speed
from .proxies import IPTABLES, NFTABLES

KINDS = {"1 flow": 1, "10 000 flows": 10_000, "every packet a new flow": 0}
#: Of kube-proxy nftables, by kind, with XDP.
GOALS = dict(zip(KINDS, (4.2, 3.0, 1.5), strict=True))
NAMES = (*(name for name in PROXIES if name != "socket"), "xdp", LIMIT)
PAIRS = [("xdp", NFTABLES), ("fast", NFTABLES), ("direct", NFTABLES), ("netfilter", NFTABLES), (IPTABLES, NFTABLES)]
PAIRS += [("xdp", NONE), (NFTABLES, NONE), ("xdp", LIMIT), (NONE, LIMIT)]
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
        before = _napi_threads()
        threaded = "echo 1 >/sys/class/net/eth0/threaded"
        node.namespace.run("ip", "netns", "exec", node.namespace.name, "sh", "-c", threaded)
        for thread in _napi_threads() - before:
            subprocess.run(["taskset", "-pc", str(_cpus()[-1]), str(thread)], check=True, capture_output=True)
            subprocess.run(["chrt", "-f", "-p", "1", str(thread)], check=True)
        ground.lab.core.ip(f"route add blackhole {SOURCES}/15")
        self._to = _mac(ground)
        end = node.namespace if ground.contender.name == LIMIT else ground.server.namespace
        command = ["ip", "netns", "exec", end.name, str(TOOLS / "flood"), "sink", str(TOOLS / "flood.bpf.o"), "eth0"]
        self._sink = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(self._close)
        if self._read() != "listening":
            raise RuntimeError("the sink of the flood does not listen")

    def flood(self, flows: int, seconds: float, echo: int) -> float:
        """Packets a second that reach the end."""
        direct = self._ground.contender.past
        to = self._ground.server.address if direct else self._ground.node.address
        port = UDP if direct else NODE_PORT[UDP]
        arguments = ["node1", str(_cpus()[0]), self._to, SOURCES, to.v4, str(port), str(flows), str(seconds)]
        command = [str(TOOLS / "flood"), "make", str(TOOLS / "flood.bpf.o"), *arguments]
        for _ in range(TRIES):
            before = self._count(echo)
            made = json.loads(self._ground.lab.core.run(*command))
            if count := self._count(0) - before:
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
        return int(self._read())

    def _read(self) -> str:
        assert self._sink.stdout is not None
        return self._sink.stdout.readline().strip()

    def _close(self) -> None:
        self._sink.kill()
        self._sink.communicate()


def _mac(ground: Ground) -> str:
    words = ground.node.namespace.run("ip", "-o", "link", "show", "eth0").split()
    return words[words.index("link/ether") + 1]


def _cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _napi_threads() -> set[int]:
    found = subprocess.run(["pgrep", "-x", "napi/eth0-[0-9]+"], check=False, capture_output=True, text=True)
    return {int(pid) for pid in found.stdout.split()}


def run(quick: bool) -> Result:
    if len(_cpus()) < 2:
        raise RuntimeError("this figure needs two CPUs: one makes packets, the other forwards them")
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
    rate = way.flood(0, NEW_SECONDS, 0)
    way.check_room()
    return rate


def table(samples: Samples, pairs: Sequence[tuple[str, str]] = tuple(PAIRS)) -> Iterator[Row]:
    """Contenders beside each other; the goals are those of XDP."""
    for kind, of in samples.items():
        yield from rows({kind: of}, "UDP, 64 bytes", "packets/s", pairs, {("xdp", NFTABLES): GOALS[kind]})
