# SPDX-License-Identifier: Apache-2.0
"""Figure: nanoseconds per packet, by ``bpf_prog_test_run``.

The packets belong to no service, in both directions, or are the first of a flow on the slow path. The programs take
turns with an empty program, and the difference is the result. A program that does not change the packet runs REPEAT
times in a row. The first packet of a flow runs once, and so does the empty program. ``python -m bench.packet`` answers
each line of its standard input with a round, as JSON; ``make bench-check`` uses this. Only there, packets of a known
flow are also measured: the figures with real packets show what the fast path costs.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pyebpf_proxy.datapath.loader.libbpf import Object, Program, RunResult, SkBuff

from .measure import NORMAL_SECONDS, TOOLS, Result, Row, machine, say, speed, summary, undisturbed
from .packet_world import GO_ON, REDIRECT, XDP_PASS, XDP_REDIRECT, Flow, filled, node
from .rows import absolute

SERVICES = 10_000
REPEAT = 200_000
#: How many single packets of each kind are in a round.
SINGLE = 200
GOAL_NS = 25
IN, OUT, NO_SERVICE_XDP = "no service, as it comes in", "no service, as it leaves", "no service, XDP"
#: Both programs: the cost of a packet that only passes.
NO_SERVICE = "no service, both"
JUDGED = (NO_SERVICE, NO_SERVICE_XDP)
FIRST, FIRST_XDP = "the first packet of a flow", "the first packet of a flow, XDP"
KINDS = (IN, OUT, NO_SERVICE, NO_SERVICE_XDP, FIRST, FIRST_XDP)
#: Only in ``make bench-check``: a packet of a flow in the flow table.
KNOWN, KNOWN_XDP = "a known flow", "a known flow, XDP"
#: A packet may be sent this often before its hops are used up, and how often that is done in a round.
HOPS, SENDINGS = 50, 100
#: A flow that is new to one variant must also be unknown to the other.
FIRST_PORTS = {FIRST: 1024, FIRST_XDP: 42000}
FAMILIES = (4, 6)
#: Protocol and flags of packets that belong to no service.
OTHERS = (("TCP data", "TCP", "A"), ("TCP SYN", "TCP", "S"), ("UDP", "UDP", ""))


class Runs(NamedTuple):
    """A program, or the empty program of its hook, that runs on packets from the pods."""

    program: Program
    device: int

    def __call__(self, frame: bytes, repeat: int = 1) -> RunResult:
        if "xdp" in self.program.name:
            return self.program.run_frame(frame, self.device, repeat)
        return self.program.test_run(frame, SkBuff(ifindex=self.device), repeat=repeat)


class Kind(NamedTuple):
    """A kind of packets: which program's time is subtracted, and the expected verdict for each packet."""

    real: Runs
    empty: Runs
    wanted: int


class Costs:
    """Programs, maps and flows, ready to be measured in the namespace of ``packet_world.node``."""

    def __init__(self, devices: dict[str, int], empty: Object) -> None:
        self._devices = devices
        tc, xdp = (filled(SERVICES, True, devices, frames) for frames in (False, True))
        for each in (tc, xdp):
            if why := each.loaded.why_not_fast or each.loaded.why_not_xdp:
                raise RuntimeError(f"not all can be measured: {why}")
        assert xdp.loaded.xdp is not None
        self._all = (tc, xdp)

        def kind(program: Program, device: str, wanted: int) -> Kind:
            nothing = empty.programs["empty_xdp" if "xdp" in program.name else "empty"]
            return Kind(Runs(program, devices[device]), Runs(nothing, devices[device]), wanted)

        programs = tc.loaded.tc.programs
        frames = xdp.loaded.xdp.programs["xdp_ethernet"]
        self._same = {IN: kind(programs["tc_ethernet"], "pods", GO_ON), NO_SERVICE_XDP: kind(frames, "pods", XDP_PASS)}
        # Commits before the fast path had an observer lack this.
        if "tc_egress" in programs:
            self._same[OUT] = kind(programs["tc_egress"], "nic", GO_ON)
        self._once = {
            FIRST: kind(programs["tc_ethernet"], "pods", GO_ON),
            FIRST_XDP: kind(frames, "pods", XDP_PASS),
        }
        self._in_table = {
            KNOWN: kind(programs["tc_ethernet"], "pods", REDIRECT),
            KNOWN_XDP: kind(frames, "pods", XDP_REDIRECT),
        }
        self._known = [Flow(protocol, family, 40000) for protocol in ("TCP", "UDP") for family in FAMILIES]
        self._fresh = 0

    def round(self, repeat: int = REPEAT, single: int = SINGLE) -> dict[str, float]:
        """Nanoseconds by row; those of an empty program are subtracted."""
        subprocess.run(["conntrack", "-F"], check=True, capture_output=True)
        with undisturbed():
            return {**self._repeated(repeat), **self._singly(single)}

    def _repeated(self, repeat: int) -> dict[str, float]:
        """Packets that pass unchanged, many times in a row, minus the adjacent runs of the empty program."""
        found: dict[str, float] = {}
        for words, protocol, flags in OTHERS:
            for family in FAMILIES:
                frame = Flow(protocol, family, 40001, served=False).frame(self._devices, flags, size=1000)
                of = f"{words}, IPv{family}"
                for name, kind in self._same.items():
                    found[f"{name}: {of}"] = self._more(kind, frame, repeat)
                found[f"{NO_SERVICE}: {of}"] = found[f"{IN}: {of}"] + found.get(f"{OUT}: {of}", 0.0)
        return found

    def _more(self, kind: Kind, frame: bytes, repeat: int) -> float:
        took: dict[Runs, list[int]] = {kind.empty: [], kind.real: []}
        for each in (kind.empty, kind.real, kind.real, kind.empty):
            result = each(frame, repeat)
            if result.retval != kind.wanted or result.data != frame:
                raise RuntimeError(f"{each.program.name} did not let the packet continue: {result.retval}")
            took[each].append(result.duration)
        return (sum(took[kind.real]) - sum(took[kind.empty])) / 2

    def known(self) -> dict[str, float]:
        """Nanoseconds for a packet of a flow in the flow table, by row; those of an empty program are subtracted."""
        found: dict[str, float] = {}
        for flow in self._known:
            for each in self._all:
                flow.know(each, self._devices)
            frame = flow.frame(self._devices, size=18)
            for name, kind in self._in_table.items():
                taken = []
                for _ in range(SENDINGS):
                    result = kind.real(frame, HOPS)
                    if result.retval != kind.wanted:
                        raise RuntimeError(f"{name}: {flow}: {result.retval} instead of {kind.wanted}")
                    taken.append(result.duration - kind.empty(frame, HOPS).duration)
                found[f"{name}: {flow.protocol}, IPv{flow.family}"] = statistics.median(taken)
        return found

    def _singly(self, single: int) -> dict[str, float]:
        """Single packets, all kinds in turns: the median of each kind, minus that of the empty program."""
        taken: dict[str, list[int]] = {}
        nothing: dict[str, list[int]] = {}
        order = [(name, flow) for name in self._once for flow in self._known]
        for _ in range(single):
            self._fresh += 1
            random.shuffle(order)
            for name, known in order:
                kind = self._once[name]
                flow = known._replace(sport=FIRST_PORTS[name] + self._fresh % 20000)
                result = kind.real(flow.frame(self._devices, "S" if flow.protocol == "TCP" else "A"))
                if result.retval != kind.wanted:
                    raise RuntimeError(f"{name}: {flow}: {result.retval} instead of {kind.wanted}")
                taken.setdefault(f"{name}: {flow.protocol}, IPv{flow.family}", []).append(result.duration)
            for name, kind in self._once.items():
                nothing.setdefault(name, []).append(kind.empty(self._known[0].frame(self._devices)).duration)
        empty = {name: statistics.median(of) for name, of in nothing.items()}
        return {what: statistics.median(of) - empty[what.partition(":")[0]] for what, of in sorted(taken.items())}


def run(quick: bool) -> Result:
    """Measure it."""
    rounds = 5 if quick else 21
    samples: dict[str, list[float]] = {}
    speeds: list[float] = []
    with node("packet") as devices, Object.open(TOOLS / "empty.bpf.o") as reference:
        costs = Costs(devices, reference.load())
        for number in range(rounds):
            if number % 5 == 0:
                speeds += speed(1)
            for what, value in costs.round().items():
                samples.setdefault(what, []).append(value)
    speeds += speed(1)
    slow = summary(speeds).median / NORMAL_SECONDS
    made = table(samples, slow)
    for row in made:
        say(f"packet: {row.what}: {row.judged.median:.0f} ns")
    return Result(
        figure="packet",
        title=f"Nanoseconds a packet, {SERVICES} services in the maps",
        quick=quick,
        machine=machine(speeds),
        rows=made,
        samples={"ns": samples, "speed_seconds": speeds},
    )


def table(samples: Mapping[str, Sequence[float]], slow: float) -> list[Row]:
    """A row for each kind, protocol and family. Only packets that belong to no service have a goal."""
    return [
        absolute(
            what,
            "ns more than an empty program",
            of,
            statistics.median(of) / slow,
            GOAL_NS if what.startswith(JUDGED) else None,
            f"≤ {GOAL_NS} ns more" if what.startswith(JUDGED) else "",
        )
        for what, of in samples.items()
    ]


def answer() -> None:
    """Answer each line of standard input with a round."""
    with node("check") as devices, Object.open(TOOLS / "empty.bpf.o") as reference:
        costs = Costs(devices, reference.load())
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps({**costs.round(), **costs.known()}), flush=True)


if __name__ == "__main__":
    answer()
