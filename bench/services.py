# SPDX-License-Identifier: Apache-2.0
"""Figure: short connections to one service while thousands of others are loaded, compared with one service only.

Each contender has two nodes at the same time, one with one service and one with all of them, which take turns.
kube-proxy reads the services from a real API server.
"""

from __future__ import annotations

from collections.abc import Iterator

from .contenders import CONTENDERS, IPTABLES, NFTABLES, OURS, Field, field, turns
from .loads import Options, connect
from .measure import Result, Row, machine, say, speed
from .rows import ratio

SIZES = (10_000, 30_000)
#: A quick run leaves out kube-proxy, which takes minutes to program so many services.
NAMES = (OURS, NFTABLES, IPTABLES)
GOAL = 0.98
#: By size (as text), then by contender: rates with one service, and rates with that many.
Found = dict[str, dict[str, dict[str, list[float]]]]


def run(asked: Options) -> Result:
    """Measure it."""
    rounds, seconds = asked.rounds or (7 if asked.quick else 11), asked.seconds or (0.5 if asked.quick else 1.0)
    names = [*dict.fromkeys(((OURS,) if asked.quick else NAMES) + asked.also)]
    speeds = speed(1)
    found: Found = {}
    few = field()
    for size in SIZES:
        many = Field(size)
        try:
            full = {ground.contender.name: ground for ground in many.grounds(names)}
            of = found.setdefault(str(size), {name: {"one": [], "many": []} for name in full})
            for number, order in turns(rounds, few.grounds(list(full))):
                for ground in order:
                    name = ground.contender.name
                    pair = [("one", ground), ("many", full[name])]
                    for which, each in pair[:: -1 if number % 2 else 1]:
                        of[name][which].append(connect(each, "pod", 4, seconds))
            for name, both in of.items():
                last = f"{both['many'][-1]:.0f}, with one {both['one'][-1]:.0f}"
                say(f"services: {size}: {CONTENDERS[name].words}: {last}")
        finally:
            many.close()
        speeds += speed(1)
    return Result(
        figure="services",
        title="Connect, request, reset, many services loaded",
        quick=asked.quick,
        machine=machine(speeds),
        rows=list(table(found)),
        samples={"found": found, "speed_seconds": speeds},
    )


def table(found: Found) -> Iterator[Row]:
    """Each contender compared with itself with one service, by size; the goals are for pyebpf-proxy."""
    for size, of in found.items():
        for name, both in of.items():
            yield ratio(
                f"connect-request-reset, {size} services: {CONTENDERS[name].words}",
                "/s",
                both["many"],
                "one service",
                both["one"],
                least=GOAL if name == OURS else None,
            )
