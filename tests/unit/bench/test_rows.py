# SPDX-License-Identifier: Apache-2.0
"""The table of the cluster figure: which results are judged against what, and the results in words."""

from __future__ import annotations

from typing import Any

import pytest

from bench import cluster, first, report
from bench.cluster_rows import percentile, rows
from bench.measure import Result, Row
from bench.proxies import IPTABLES, NFTABLES, OURS
from bench.rows import absolute, more, ratio


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


def test_goals_are_judged_against_kube_proxy() -> None:
    runs = [run_of(OURS, 1, 10, 100), run_of(NFTABLES, 4, 1000, 200), run_of(IPTABLES, 4, 1000, 200)]
    assert all(judged(rows(runs, 1.0)).values())


@pytest.mark.parametrize(
    ("run", "missed"),
    [
        (run_of(OURS, 2, 10, 100), "start of the process"),
        (run_of(OURS, 1, 30, 100), "p99"),
        (run_of(OURS, 1, 10, 170), "resident memory"),
        (run_of(OURS, 1, 10, 100, late=5), "changes a second"),
    ],
    ids=["slow start", "slow change", "much memory", "a queue that grows"],
)
def test_missed_goals_are_reported(run: dict[str, Any], missed: str) -> None:
    runs = [run, run_of(NFTABLES, 4, 1000, 200), run_of(IPTABLES, 4, 1000, 200)]
    failed = [what for what, met in judged(rows(runs, 1.0)).items() if not met]
    assert failed
    assert all(missed in what for what in failed)


def test_a_change_that_never_came_is_a_missed_goal() -> None:
    run = run_of(OURS, 1, 10, 100)
    run["many"][5]["in_force"] = None
    runs = [run, run_of(NFTABLES, 4, 1000, 200), run_of(IPTABLES, 4, 1000, 200)]
    failed = [what for what, met in judged(rows(runs, 1.0)).items() if not met]
    assert len(failed) == 1
    assert "1 of 600 never seen" in failed[0]


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([5, 1, 4, 2, 3], 50) == 3
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile([7], 99) == 7


def test_a_first_packet_is_judged_without_the_empty_program() -> None:
    samples = {variant.what: [1000.0] * 5 for variant in first.VARIANTS} | {first.EMPTY: [100.0] * 5}
    assert all(judged(first.rows(samples)).values())
    dear = first.VARIANTS[2].what
    samples[dear] = [1460.0] * 5  # 1.46 times, and 1.51 without the time of the empty program
    assert [what for what, met in judged(first.rows(samples)).items() if not met] == [f"{dear}; ≤ 1.5 times"]


def test_every_variant_is_a_service_of_its_own() -> None:
    found = [change.object for made in first.objects() for change in first.workload.read(made)]
    assert len(found) == 2 * len(first.VARIANTS)
    assert len({first.frame(variant, i, 7) for i, variant in enumerate(first.VARIANTS)}) == len(first.VARIANTS)


def test_the_command_line_sets_how_much_is_measured() -> None:
    assert [size.services for size in cluster.planned(False).sizes] == [100, 1_000, 10_000, 30_000]
    plan = cluster.planned(False, (30_000, 100), rest_seconds=300, many_seconds=60)
    assert [(size.services, size.endpoints) for size in plan.sizes] == [(100, 10), (30_000, 3)]
    assert (plan.idle_seconds[OURS], plan.idle_seconds[NFTABLES], plan.rate_seconds) == (300, 10, 60)
    assert [(size.services, size.rounds) for size in cluster.planned(True, (100,)).sizes] == [(100, 1)]
    with pytest.raises(ValueError, match="no such size: 500; there are 100, 1000, 10000, 30000"):
        cluster.planned(False, (100, 500))


@pytest.mark.parametrize(("commit", "left"), [("this", {100}), ("another", set())])
def test_runs_of_other_sizes_are_kept_from_the_same_commit(commit: str, left: set[int]) -> None:
    here = {"commit": "this", "kernel": "k", "processor": "p", "cpus": 2}
    runs = [run_of(OURS, 1, 10, 100), run_of(OURS, 1, 10, 100) | {"services": 30_000}]
    samples = {"runs": runs, "speed_seconds": [0.2]}
    machine = here | {"commit": commit}
    kept = Result(figure="cluster", title="", quick=False, machine=machine, rows=[], samples=samples)
    found, speeds = cluster.other_runs(kept, cluster.planned(False, (30_000,)), here)
    assert {run["services"] for run in found} == left
    assert len(speeds) == len(left)


def test_results_name_their_reference() -> None:
    row = ratio("load: pyebpf-proxy (defaults)", "/s", [10.3], "no proxy", [10.0], least=1.0)
    assert report.judged(row) == "1.03 (1.03 – 1.03) × no proxy"
    assert row.goal == "≥ 1.0 ×"
    assert report.judged(absolute("maps", "MB", [58.0], 58.0, compared_with="one service", compared=[37.0])) == (
        "58.0 (58.0 – 58.0) MB (one service: 37.0 MB)"
    )
    assert report.judged(more("packet", "ns", [115.0], "an empty program", [100.0], 1.0, 25.0)) == (
        "15.0 (15.0 – 15.0) ns more than an empty program"
    )
