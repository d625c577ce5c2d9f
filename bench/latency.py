# SPDX-License-Identifier: Apache-2.0
"""Figure: latency of a request of one byte, at 70 % of the maximum rate without any proxy.

``paced`` sends requests at a fixed rate over CONNECTIONS persistent connections; latency counts from the time at which
a request was due. The rate is the same for all contenders: 70 % of the maximum without a proxy, which is the median of
five measurements at the beginning.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from .connect import PAIRS, takes_part
from .contenders import NONE, OURS, USUAL, Ground, field
from .loads import Options, Plan, Samples, alternate, cells, latest, paced, rows
from .measure import Result, Row, machine

CONNECTIONS = 16
LOAD = 0.7
GOAL = 1.0
PERCENTILES = {"p50_us": "p50", "p99_us": "p99", "p999_us": "p99.9"}
#: The last percentile has no goal, because it depends on few requests.
JUDGED = ("p50_us", "p99_us")
PLAN = Plan(rounds=11, most=11, seconds=4.0, cells=cells(("pod", "cluster"), (4,)))
QUICK = PLAN._replace(rounds=7, most=7, seconds=0.6)


def run(asked: Options) -> Result:
    """Measure it."""
    plan = (QUICK if asked.quick else PLAN).of(asked)
    seconds = plan.seconds
    grounds = field().grounds((*USUAL, *asked.also))
    ways = dict.fromkeys(way for way, _ in plan.cells)
    rates = {way: LOAD * statistics.median(_most(way, min(seconds, 0.5)) for _ in range(5)) for way in ways}

    def take(ground: Ground, way: str, family: int) -> dict[str, float]:
        if not takes_part(ground, way):
            return {}
        found = paced(ground, way, family, CONNECTIONS, rates[way], seconds)
        return {name: found[name] for name in PERCENTILES}

    def tell(number: int, of: dict[str, Samples]) -> str:
        return f"latency {number}: {max(rates.values()):.0f} requests a second, p99 µs: {latest(of['p99_us'], '.0f')}"

    samples, speeds = alternate(plan, grounds, take, tell)
    return Result(
        figure="latency",
        title=f"Latency of request-response under {LOAD:.0%} load",
        quick=asked.quick,
        machine=machine(speeds),
        rows=list(table(samples)),
        samples={**samples, "rates": rates, "speed_seconds": speeds},
    )


def _most(way: str, seconds: float) -> float:
    """The maximum rate without a proxy, in requests per second."""
    return paced(field().grounds([NONE])[0], way, 4, CONNECTIONS, 0, seconds)["per_second"]


def table(samples: dict[str, Samples]) -> Iterator[Row]:
    """The rows. Goals are upper limits, compared with no proxy."""
    for name, words in PERCENTILES.items():
        goals = {(OURS, NONE): GOAL} if name in JUDGED else {}
        yield from rows(samples[name], f"latency, {words}", "µs", PAIRS, goals, most=True)
