# SPDX-License-Identifier: Apache-2.0
"""Figure: request-response on one persistent connection, one byte each way, at the maximum rate.

Each contender keeps one connection for all rounds. The first round, in which the connection is new, is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from .connect import PAIRS, takes_part
from .contenders import NONE, OURS, USUAL, WAYS, Ground, field
from .loads import Conversation, Options, Plan, Samples, alternate, cell, cells, latest, rows
from .measure import Result, Row, machine

#: Goals by way, as fractions of the rate without a proxy.
GOALS = {"pod": 1.06, "client": 1.0, "cluster": 1.0}
PLAN = Plan(rounds=11, most=25, seconds=1.0, cells=cells(tuple(WAYS)))
QUICK = Plan(rounds=7, most=7, seconds=0.5, cells=cells(("pod", "cluster"), (4,)))


def run(asked: Options) -> Result:
    """Measure it."""
    plan = (QUICK if asked.quick else PLAN).of(asked)
    grounds = field().grounds((*USUAL, *asked.also))
    with ExitStack() as stack:
        talks = {
            (ground.contender.name, way, family): Conversation(ground, way, family, stack)
            for ground in grounds
            for way, family in plan.cells
            if takes_part(ground, way)
        }
        for each in talks.values():
            each.rate(0.1)

        def take(ground: Ground, way: str, family: int) -> dict[str, float]:
            talk = talks.get((ground.contender.name, way, family))
            return {"rates": talk.rate(plan.seconds)} if talk is not None else {}

        samples, speeds = alternate(
            plan._replace(rounds=plan.rounds + 1, most=plan.most + 1),
            grounds,
            take,
            lambda number, of: f"exchange {number}: {latest(of['rates'], '.0f')}",
        )
    found = {key: {name: rates[1:] for name, rates in of.items()} for key, of in samples["rates"].items()}
    return Result(
        figure="exchange",
        title="Request-response, one connection that stays",
        quick=asked.quick,
        machine=machine(speeds),
        rows=list(table(found)),
        samples={**found, "speed_seconds": speeds},
    )


def table(samples: Samples) -> Iterator[Row]:
    """The rows, without contenders that did not take part."""
    for way in WAYS:
        of = {key: each for key, each in samples.items() if key in (cell(way, 4), cell(way, 6))}
        yield from rows(of, "request-response, one connection", "/s", PAIRS, {(OURS, NONE): GOALS[way]})
