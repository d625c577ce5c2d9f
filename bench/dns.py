# SPDX-License-Identifier: Apache-2.0
"""Figure: a datagram and its reply, each time from a new port, as in DNS lookups, at the maximum rate."""

from __future__ import annotations

from collections.abc import Iterator

from .connect import PAIRS, takes_part
from .contenders import NONE, OURS, USUAL, Ground, field
from .loads import Options, Plan, Samples, alternate, cells, latest, query, rows
from .measure import Result, Row, machine

GOAL = 1.0
PLAN = Plan(rounds=11, most=25, seconds=0.6, cells=cells(("pod", "client")))
QUICK = Plan(rounds=7, most=7, seconds=0.5, cells=cells(("pod",), (4,)))


def run(asked: Options) -> Result:
    """Measure it."""
    plan = (QUICK if asked.quick else PLAN).of(asked)

    def take(ground: Ground, way: str, family: int) -> dict[str, float]:
        return {"rates": query(ground, way, family, plan.seconds)} if takes_part(ground, way) else {}

    samples, speeds = alternate(
        plan,
        field().grounds((*USUAL, *asked.also)),
        take,
        lambda number, of: f"dns {number}: {latest(of['rates'], '.0f')}",
    )
    found = samples["rates"]
    return Result(
        figure="dns",
        title="A datagram and its answer, a new port each time",
        quick=asked.quick,
        machine=machine(speeds),
        rows=list(table(found)),
        samples={**found, "speed_seconds": speeds},
    )


def table(samples: Samples) -> Iterator[Row]:
    """The rows; the goal is for pods, which send most queries."""
    for key, of in samples.items():
        goals = {(OURS, NONE): GOAL} if key.startswith("pod") else {}
        yield from rows({key: of}, "a datagram and its answer", "/s", PAIRS, goals)
