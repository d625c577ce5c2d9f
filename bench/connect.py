# SPDX-License-Identifier: Apache-2.0
"""Figure: connect, one byte there, one back, reset; as often as it goes, one service loaded.

Every contender in turns, from pod to pod of one node and from a client outside. Beside those of ``contenders``:
``tracked``, no proxy, but connection tracking, as every node of Kubernetes has; ``dnat``, one rule, which is less than
any kube-proxy does; ``beside``, with our agent to the pod itself: what flows pay that are none of its business.
"""

from __future__ import annotations

from collections.abc import Iterator

from .contenders import CONTENDERS, LIMITS, NONE, Ground, field
from .loads import Samples, alternate, connect, latest, rows
from .measure import Result, Row, machine
from .proxies import NFTABLES

GOALS = {
    ("direct", NONE): 0.97,
    ("fast", NONE): 0.97,
    ("xdp", NONE): 0.97,
    ("socket", NONE): 0.99,
    ("direct", NFTABLES): 1.0,
    ("fast", NFTABLES): 1.0,
    ("socket", NFTABLES): 1.0,
}
PAIRS = [
    *GOALS,
    ("direct", "tracked"),
    ("socket", "beside"),
    *((each, NONE) for each in ("netfilter", "beside", "tracked", "dnat", NFTABLES, "iptables")),
]


def run(quick: bool) -> Result:
    rounds, seconds, families = (5, 0.2, (4,)) if quick else (7, 0.6, (4, 6))
    grounds = field().grounds([name for name in CONTENDERS if name not in LIMITS])

    def take(ground: Ground, way: str, family: int) -> dict[str, float]:
        if way == "client" and ground.contender.name in ("dnat", "socket"):
            return {}  # the rule is for the ClusterIP; outside are no sockets of ours
        return {"rates": connect(ground, way, family, seconds)}

    samples, speeds = alternate(
        rounds, grounds, families, take, lambda number, of: f"connect {number}: {latest(of['rates'], '.0f')}"
    )
    found = samples["rates"]
    return Result(
        figure="connect",
        title="Connect, request, reset, one service",
        quick=quick,
        machine=machine(speeds),
        rows=list(table(found)),
        samples={**found, "speed_seconds": speeds},
    )


def table(samples: Samples) -> Iterator[Row]:
    """Its rows, and nothing of a contender that did not take part."""
    yield from rows(samples, "connect-request-reset", "/s", PAIRS, GOALS)
