# SPDX-License-Identifier: Apache-2.0
"""Figure 3: a packet that belongs to no service, beside the same packet through an empty program.

Both programs run in the kernel by ``bpf_prog_test_run``, in turns; what counts is the difference of neighbours.
"""

from __future__ import annotations

from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from pyebpf_proxy.datapath.loader.libbpf import Object, Program

from . import workload
from .filled import fill
from .measure import NORMAL_SECONDS, TOOLS, Result, Row, machine, say, speed, summary, undisturbed

SERVICES = 10_000
REPEAT = 1_000_000
GOAL_NS = 40


def frames() -> dict[str, bytes]:
    """Packets from a pod to somewhere outside, to a port that no service has."""
    addresses: dict[str, Packet] = {
        "IPv4": IP(src="10.32.0.9", dst="198.51.100.7"),
        "IPv6": IPv6(src="fd00:10:244:1::9", dst="2001:db8:2::7"),
    }
    contents: dict[str, Packet] = {
        "TCP data": TCP(sport=40000, dport=443, flags="PA") / Raw(b"x" * 1000),
        "TCP SYN": TCP(sport=40000, dport=443, flags="S", options=[("MSS", 1460)]),
        "UDP": UDP(sport=40000, dport=4433) / Raw(b"x" * 1000),
    }
    link = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
    return {f"{content}, {family}": bytes(link / addresses[family] / contents[content])
            for content in contents for family in addresses}  # fmt: skip


def _nanoseconds(program: Program, frame: bytes) -> int:
    result = program.test_run(frame, repeat=REPEAT)
    if result.retval != -1 or result.data != frame:
        raise RuntimeError(f"{program.name} did not let the packet go on as it was: {result.retval}")
    return result.duration


def run(quick: bool) -> Result:
    filled = fill(workload.parsed(SERVICES))
    ours = filled.loaded.tc.programs["tc_ethernet"]
    rounds = 5 if quick else 41
    packets = frames()
    nothing: dict[str, list[float]] = {name: [] for name in packets}
    measured: dict[str, list[float]] = {name: [] for name in packets}
    speeds: list[float] = []
    with Object.open(TOOLS / "empty.bpf.o") as reference:
        empty = reference.load().programs["empty"]
        for number in range(rounds):
            if number % 10 == 0:
                speeds += speed(1)
            with undisturbed():
                for name, frame in packets.items():
                    # Whoever is first in odd rounds is second in even ones.
                    for first in (number % 2 == 0, number % 2 == 1):
                        program, into = (empty, nothing) if first else (ours, measured)
                        into[name].append(_nanoseconds(program, frame))
    speeds += speed(1)
    slow = summary(speeds).median / NORMAL_SECONDS
    rows = []
    for name in packets:
        difference = summary([a - b for a, b in zip(measured[name], nothing[name], strict=True)])
        say(f"packet: {name}: {difference.median:.0f} ns more than an empty program")
        rows.append(
            Row(
                what=f"{name}: a packet of no service",
                unit="ns",
                measured=summary(measured[name]),
                compared_with="an empty program",
                compared=summary(nothing[name]),
                judged=difference,
                judged_unit="ns more",
                at_normal_speed=difference.median / slow,
                goal=f"≤ {GOAL_NS} ns more",
                met=difference.median / slow <= GOAL_NS,
            )
        )
    return Result(
        figure="packet",
        title=f"A packet of no service, {SERVICES} services in the maps ({REPEAT} runs each)",
        quick=quick,
        machine=machine(speeds),
        rows=rows,
        samples={"empty_ns": nothing, "tc_ethernet_ns": measured, "speed_seconds": speeds},
    )
