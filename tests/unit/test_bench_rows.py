# SPDX-License-Identifier: Apache-2.0
"""The table of the cluster figure: what is judged, against what."""

from __future__ import annotations

from typing import Any

import pytest

from bench.cluster_node import IPTABLES, NFTABLES, OURS
from bench.cluster_rows import percentile, rows
from bench.measure import Row


def run_of(kind: str, start: float, change: float, memory: float, late: float = 1.0) -> dict[str, Any]:
    changes = [{"since_sent_ms": change, "since_answer_ms": change - 1}] * 10
    found: dict[str, Any] = {"kind": kind, "services": 100, "start_seconds": start, "changes": changes}
    found |= {"memory_mib": memory, "idle_percent": 0.1, "idle_seconds": 5}
    if kind != IPTABLES:
        found["many"] = [
            {"sent": i / 100, "answered": i / 100, "in_force": i / 100 + 0.01 * (late if i > 300 else 1.0)}
            for i in range(600)
        ]
    return found


def judged(made: list[Row]) -> dict[str, bool]:
    return {f"{row.what}; {row.goal}": row.met for row in made if row.met is not None}


def test_goals_are_judged_beside_kube_proxy() -> None:
    runs = [run_of(OURS, 1, 10, 100), run_of(NFTABLES, 4, 1000, 200), run_of(IPTABLES, 4, 1000, 200)]
    assert all(judged(rows(runs, 1.0)).values())


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        (run_of(OURS, 2, 10, 100), "start of the process"),
        (run_of(OURS, 1, 30, 100), "p99"),
        (run_of(OURS, 1, 10, 170), "resident memory"),
        (run_of(OURS, 1, 10, 100, late=5), "changes a second"),
    ],
    ids=["slow start", "slow change", "much memory", "a queue that grows"],
)
def test_what_is_missed_is_told(ours: dict[str, Any], missed: str) -> None:
    runs = [ours, run_of(NFTABLES, 4, 1000, 200), run_of(IPTABLES, 4, 1000, 200)]
    failed = [what for what, met in judged(rows(runs, 1.0)).items() if not met]
    assert failed
    assert all(missed in what for what in failed)


def test_a_change_that_never_came_is_missed() -> None:
    ours = run_of(OURS, 1, 10, 100)
    ours["many"][5]["in_force"] = None
    runs = [ours, run_of(NFTABLES, 4, 1000, 200), run_of(IPTABLES, 4, 1000, 200)]
    failed = [what for what, met in judged(rows(runs, 1.0)).items() if not met]
    assert len(failed) == 1
    assert "1 of 600 never seen" in failed[0]


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([5, 1, 4, 2, 3], 50) == 3
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile([7], 99) == 7
