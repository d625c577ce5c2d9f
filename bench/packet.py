# SPDX-License-Identifier: Apache-2.0
"""Figure: nanoseconds a packet, by ``bpf_prog_test_run``: of no service, of a flow that is known, the first of a flow.

Each beside an empty program that takes turns with ours; what counts is the difference. What leaves the packet as it is
runs REPEAT times in a row. What rewrites it, or makes a flow known, runs once with each packet, and the empty program
does, too.
``python -m bench.packet`` answers each line of its standard input with a round, as JSON: for ``make bench-check``.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence

from pyebpf_proxy.datapath.loader.libbpf import Object, Program, SkBuff

from .measure import NORMAL_SECONDS, TOOLS, Result, Row, machine, say, speed, summary, undisturbed
from .packet_world import GO_ON, REDIRECT, Flow, filled, node
from .rows import absolute

SERVICES = 10_000
REPEAT = 200_000
#: Single packets of each kind in a round.
SINGLE = 200
GOAL_NS = 25
NO_SERVICE, NO_SERVICE_FAST = "no service", "no service, fast path on"
HIT, FIRST = "a flow that the cache knows", "the first packet of a flow"
KINDS = (NO_SERVICE, NO_SERVICE_FAST, HIT, FIRST)
EMPTY = "an empty program"
FAMILIES = (4, 6)
#: Protocol and flags of what is of no service.
OTHERS = (("TCP data", "TCP", "A"), ("TCP SYN", "TCP", "S"), ("UDP", "UDP", ""))


class Costs:
    """Programs, maps and flows, ready to be measured. In the namespace of ``packet_world.node``."""

    def __init__(self, devices: dict[str, int], empty: Program) -> None:
        self._devices = devices
        self._empty = empty
        self._plain = filled(SERVICES, False, devices)
        self._fast = filled(SERVICES, True, devices)
        for each in (self._plain, self._fast):
            if each.loaded.lane != "direct" or each.loaded.why_not_fast:
                raise RuntimeError(f"not all can be measured: {each.loaded.why}{each.loaded.why_not_fast}")
        self._known = [Flow(protocol, family, 40000) for protocol in ("TCP", "UDP") for family in FAMILIES]
        self._fresh = 0

    def round(self, repeat: int = REPEAT, single: int = SINGLE) -> dict[str, float]:
        """Nanoseconds by row, an empty program's taken off."""
        subprocess.run(["conntrack", "-F"], check=True, capture_output=True)
        with undisturbed():
            return {**self._repeated(repeat), **self._singly(single)}

    def _repeated(self, repeat: int) -> dict[str, float]:
        """Packets that go on as they came, many times in a row, less the neighbouring runs of the empty program."""
        found = {}
        context = SkBuff(ifindex=self._devices["pods"])
        for kind, of in ((NO_SERVICE, self._plain), (NO_SERVICE_FAST, self._fast)):
            program = of.loaded.tc.programs["tc_ethernet"]
            for words, protocol, flags in OTHERS:
                for family in FAMILIES:
                    frame = Flow(protocol, family, 40001, served=False).frame(self._devices, flags, size=1000)
                    took: dict[Program, list[int]] = {self._empty: [], program: []}
                    for each in (self._empty, program, program, self._empty):
                        result = each.test_run(frame, context, repeat=repeat)
                        if result.retval != GO_ON or result.data != frame:
                            raise RuntimeError(f"{each.name} did not let the packet go on: {result.retval}")
                        took[each].append(result.duration)
                    found[f"{kind}: {words}, IPv{family}"] = (sum(took[program]) - sum(took[self._empty])) / 2
        return found

    def _singly(self, single: int) -> dict[str, float]:
        """One packet after the other, all kinds in turns; the median of each, less the empty program's."""
        fast, plain = (each.loaded.tc.programs["tc_ethernet"] for each in (self._fast, self._plain))
        context = SkBuff(ifindex=self._devices["pods"])
        taken: dict[str, list[int]] = {EMPTY: []}
        for flow in self._known:
            flow.track()
            flow.learn(fast, self._devices)
        order: list[tuple[str, Flow]] = [(HIT, flow) for flow in self._known]
        order += [(FIRST, flow) for flow in self._known]
        for _ in range(single):
            self._fresh += 1
            random.shuffle(order)
            for kind, flow in order:
                if kind == FIRST:
                    flow = flow._replace(sport=1024 + self._fresh % 32000)
                flags = "S" if kind == FIRST and flow.protocol == "TCP" else "A"
                program, wanted = (fast, REDIRECT) if kind == HIT else (plain, GO_ON)
                result = program.test_run(flow.frame(self._devices, flags), context)
                if result.retval != wanted:
                    raise RuntimeError(f"{kind}: {flow}: {result.retval} instead of {wanted}")
                taken.setdefault(f"{kind}: {flow.protocol}, IPv{flow.family}", []).append(result.duration)
            taken[EMPTY].append(self._empty.test_run(self._known[0].frame(self._devices), context).duration)
        medians = {what: statistics.median(of) for what, of in taken.items()}
        return {what: medians[what] - medians[EMPTY] for what in sorted(medians) if what != EMPTY}


def run(quick: bool) -> Result:
    rounds = 5 if quick else 21
    samples: dict[str, list[float]] = {}
    speeds: list[float] = []
    with node("packet") as devices, Object.open(TOOLS / "empty.bpf.o") as reference:
        costs = Costs(devices, reference.load().programs["empty"])
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
    """A row for each kind, protocol and family; the goal is that of what belongs to no service."""
    return [
        absolute(
            what,
            "ns more than an empty program",
            of,
            statistics.median(of) / slow,
            GOAL_NS if what.startswith(NO_SERVICE) else None,
            f"≤ {GOAL_NS} ns more" if what.startswith(NO_SERVICE) else "",
        )
        for what, of in samples.items()
    ]


def answer() -> None:
    """A round for each line of standard input."""
    with node("check") as devices, Object.open(TOOLS / "empty.bpf.o") as reference:
        costs = Costs(devices, reference.load().programs["empty"])
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps(costs.round()), flush=True)


if __name__ == "__main__":
    answer()
