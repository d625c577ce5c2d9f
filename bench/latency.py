# SPDX-License-Identifier: Apache-2.0
"""Figure: how long a request of one byte takes, while there are 70 % of what goes through without any proxy.

CONNECTIONS connections that stay, requests by the clock (``paced``): what waits counts from when it was due. The rate
is the same for all: 70 % of what no proxy carries on these connections, the median of five tries before.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from .contenders import NONE, PROXIES, WAYS, Ground, field
from .fast import takes_part
from .loads import Samples, alternate, latest, paced, rows
from .measure import Result, Row, machine
from .proxies import NFTABLES

CONNECTIONS = 16
LOAD = 0.7
GOAL = 1.02
PERCENTILES = {"p50_us": "p50", "p99_us": "p99", "p999_us": "p99.9"}
OURS = ("fast", "xdp", "socket", "direct", "netfilter")
PAIRS = [*((each, NONE) for each in OURS), (NFTABLES, NONE), ("iptables", NONE), ("fast", NFTABLES)]


def run(quick: bool) -> Result:
    rounds, seconds = (5, 0.3) if quick else (5, 1.5)
    grounds = field().grounds([*PROXIES, "xdp"])
    rates = {way: LOAD * statistics.median(_most(way, seconds / 2) for _ in range(5)) for way in WAYS}

    def take(ground: Ground, way: str, family: int) -> dict[str, float]:
        if not takes_part(ground, way):
            return {}
        found = paced(ground, way, family, CONNECTIONS, rates[way], seconds)
        return {name: found[name] for name in PERCENTILES}

    def tell(number: int, of: dict[str, Samples]) -> str:
        return f"latency {number}: {rates['pod']:.0f} requests a second, p99 µs: {latest(of['p99_us'], '.0f')}"

    samples, speeds = alternate(rounds, grounds, (4,), take, tell)
    return Result(
        figure="latency",
        title=f"Latency of request-response under {LOAD:.0%} load",
        quick=quick,
        machine=machine(speeds),
        rows=list(table(samples)),
        samples={**samples, "rates": rates, "speed_seconds": speeds},
    )


def _most(way: str, seconds: float) -> float:
    """What no proxy carries, requests a second."""
    return paced(field().grounds([NONE])[0], way, 4, CONNECTIONS, 0, seconds)["per_second"]


def table(samples: dict[str, Samples]) -> Iterator[Row]:
    """Its rows; goals are those of the fast path and of the socket path, beside no proxy."""
    goals = {(ours, NONE): GOAL for ours in ("fast", "socket")}
    for name, words in PERCENTILES.items():
        yield from rows(samples[name], f"latency, {words}", "µs", PAIRS, goals, most=True)
