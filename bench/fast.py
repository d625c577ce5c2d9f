# SPDX-License-Identifier: Apache-2.0
"""Figure: one connection that stays: one byte there and one back, as often as it goes; and one stream (iperf3).

Every contender in turns. CPU per byte is that of both ends and of the kernel's softirq threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .contenders import NONE, PROXIES, Ground, field
from .loads import Samples, alternate, exchange, latest, rows, stream
from .measure import Result, Row, machine
from .proxies import NFTABLES

EXCHANGES, STREAMS, CPU = "exchanges", "streams", "cpu_ns_per_byte"
OURS = ("netfilter", "direct", "fast", "xdp", "socket")
#: Of no proxy, by what is measured; the contender that it is asked of is the one with the fast path.
GOALS = {EXCHANGES: 1.03, STREAMS: 1.0, CPU: 1.0}
WORDS = {
    EXCHANGES: ("request-response, one connection", "/s"),
    STREAMS: ("TCP stream", "Gbit/s"),
    CPU: ("TCP stream, CPU per byte", "ns"),
}
PAIRS = [
    *((ours, NONE) for ours in ("fast", "xdp", "socket", "direct", "netfilter")),
    (NFTABLES, NONE),
    ("iptables", NONE),
    ("fast", NFTABLES),
]


def run(quick: bool) -> Result:
    rounds, seconds, families = (5, 0.2, (4,)) if quick else (5, 1.0, (4, 6))

    def take(ground: Ground, way: str, family: int) -> dict[str, float]:
        if not takes_part(ground, way):
            return {}
        rate = exchange(ground, way, family, seconds)
        return {EXCHANGES: rate, **dict(zip((STREAMS, CPU), stream(ground, way, family, seconds), strict=True))}

    def tell(number: int, of: dict[str, Samples]) -> str:
        return "\n".join(f"fast {number}: {what}: {latest(of[what], '.4g')}" for what in (EXCHANGES, STREAMS))

    samples, speeds = alternate(rounds, field().grounds([*PROXIES, "xdp"]), families, take, tell)
    return Result(
        figure="fast",
        title="One connection: request-response and stream",
        quick=quick,
        machine=machine(speeds),
        rows=list(table(samples)),
        samples={**samples, "speed_seconds": speeds},
    )


def takes_part(ground: Ground, way: str) -> bool:
    """Outside are no sockets of ours, and on the way between two pods of one node is no device with XDP."""
    return ground.contender.name != ("socket" if way == "client" else "xdp")


def table(samples: dict[str, Samples], pairs: Sequence[tuple[str, str]] = PAIRS) -> Iterator[Row]:
    """Its rows; goals are those of the fast path, beside no proxy."""
    for what, (words, unit) in WORDS.items():
        goals = {(ours, NONE): GOALS[what] for ours in ("fast",)}
        yield from rows(samples[what], words, unit, pairs, goals, most=what == CPU)
