# SPDX-License-Identifier: Apache-2.0
"""Figure: one TCP stream (iperf3): its throughput and CPU time per byte, of both ends and of the softirq threads.

Each load is a new connection. If it lasts longer than two seconds, it begins as a young flow and is then promoted.
"""

from __future__ import annotations

from collections.abc import Iterator

from .connect import PAIRS, takes_part
from .contenders import NONE, OURS, USUAL, Ground, field
from .loads import Options, Plan, Samples, alternate, cells, latest, rows, stream
from .measure import Result, Row, machine

STREAMS, CPU = "streams", "cpu_ns_per_byte"
GOAL = 1.0
WORDS = {STREAMS: ("TCP stream", "Gbit/s"), CPU: ("TCP stream, CPU per byte", "ns")}
PLAN = Plan(rounds=9, most=21, seconds=4.0, cells=cells(("pod", "cluster")))
QUICK = Plan(rounds=5, most=9, seconds=1.0, cells=PLAN.cells)


def run(asked: Options) -> Result:
    """Measure it."""
    plan = (QUICK if asked.quick else PLAN).of(asked)

    def take(ground: Ground, way: str, family: int) -> dict[str, float]:
        if not takes_part(ground, way):
            return {}
        return dict(zip((STREAMS, CPU), stream(ground, way, family, plan.seconds), strict=True))

    samples, speeds = alternate(
        plan,
        field().grounds((*USUAL, *asked.also)),
        take,
        lambda number, of: f"stream {number}: Gbit/s: {latest(of[STREAMS], '.4g')}",
    )
    return Result(
        figure="stream",
        title="One TCP stream",
        quick=asked.quick,
        machine=machine(speeds),
        rows=list(table(samples)),
        samples={**samples, "speed_seconds": speeds},
    )


def table(samples: dict[str, Samples]) -> Iterator[Row]:
    """The rows: throughput, then CPU time per byte, whose goal is an upper limit."""
    for what, (words, unit) in WORDS.items():
        yield from rows(samples[what], words, unit, PAIRS, {(OURS, NONE): GOAL}, most=what == CPU)
