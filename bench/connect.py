# SPDX-License-Identifier: Apache-2.0
"""Figure: short connections at the maximum rate, with one service: connect, one byte each way, reset.

The contenders take turns. Connections are from pod to pod of one node, and from an external client, whose address is
preserved (policy Local) or masqueraded (policy Cluster).
"""

from __future__ import annotations

from collections.abc import Iterator

from .contenders import IPTABLES, NFTABLES, NONE, OURS, SLOW, SOCKET, TRACKED, USUAL, WAYS, XDP, Ground, field
from .loads import Options, Plan, Samples, alternate, cells, connect, latest, rows
from .measure import Result, Row, machine

#: Goals by way, as fractions of the rate without a proxy.
GOALS = {"pod": 1.0, "client": 1.0, "cluster": 0.95}
PAIRS = [
    (OURS, NONE),
    (OURS, NFTABLES),
    *((each, NONE) for each in (NFTABLES, IPTABLES, XDP, SLOW, SOCKET, TRACKED)),
]
PLAN = Plan(rounds=11, most=25, seconds=1.0, cells=cells(tuple(WAYS)))
QUICK = Plan(rounds=7, most=7, seconds=0.5, cells=(("pod", 4), ("pod", 6), ("client", 4), ("cluster", 4)))


def run(asked: Options) -> Result:
    """Measure it."""
    plan = (QUICK if asked.quick else PLAN).of(asked)
    grounds = field().grounds((*USUAL, *asked.also))

    def take(ground: Ground, way: str, family: int) -> dict[str, float]:
        return {"rates": connect(ground, way, family, plan.seconds)} if takes_part(ground, way) else {}

    samples, speeds = alternate(
        plan, grounds, take, lambda number, of: f"connect {number}: {latest(of['rates'], '.0f')}"
    )
    found = samples["rates"]
    return Result(
        figure="connect",
        title="Connect, request, reset, one service",
        quick=asked.quick,
        machine=machine(speeds),
        rows=list(table(found)),
        samples={**found, "speed_seconds": speeds},
    )


def takes_part(ground: Ground, way: str) -> bool:
    """Whether the contender can differ: external clients have no translated sockets, pods of a node no XDP device."""
    return ground.contender.name != (XDP if way == "pod" else SOCKET)


def table(samples: Samples) -> Iterator[Row]:
    """The rows, without contenders that did not take part."""
    for way, words in WAYS.items():
        of = {key: each for key, each in samples.items() if key.startswith(words)}
        yield from rows(of, "connect-request-reset", "/s", PAIRS, {(OURS, NONE): GOALS[way]})
