# SPDX-License-Identifier: Apache-2.0
"""Contenders beside each other: what is judged, and when a packet counts as dearer than at the base commit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import check, connect, fast, latency, loads, packet, services, udp
from bench.contenders import CONTENDERS, LIMIT, NODE_PORT, NONE, objects
from bench.loads import rows
from bench.measure import Row
from bench.proxies import NFTABLES
from bench.rows import absolute, more, ratio
from pyebpf_proxy.kube.decode import decode_object
from pyebpf_proxy.lab.addresses import pod_address


def judged(made: list[Row]) -> dict[str, bool]:
    return {row.what: row.met for row in made if row.met is not None}


def test_a_ratio_is_that_of_the_rounds_not_of_the_medians() -> None:
    # The machine was half as fast in the second round: both were.
    row = ratio("x", "/s", [100, 52, 99], "y", [100, 50, 100], least=1.0)
    assert row.judged.median == 1.0
    assert row.goal == "≥ 1.0 of it"
    assert row.met


@pytest.mark.parametrize(("value", "met"), [(1.02, True), (1.03, False)])
def test_an_upper_goal(value: float, met: bool) -> None:
    row = ratio("x", "µs", [value * 10], "y", [10], most=1.02)
    assert (row.met, row.goal) == (met, "≤ 1.02 of it")


def test_without_a_goal_nothing_is_judged() -> None:
    assert ratio("x", "/s", [1], "y", [2]).met is None
    assert absolute("x", "ns", [1], 1.0).met is None


def test_what_is_absolute_is_judged_at_normal_speed() -> None:
    row = more("x", "ns", [80.0, 82.0], "an empty program", [40.0, 40.0], 2.0, 25)
    assert row.judged.median == 41.0
    assert (row.at_normal_speed, row.met, row.goal) == (20.5, True, "≤ 25 ns more")


def test_who_did_not_take_part_has_no_row() -> None:
    samples = {"pod": {NONE: [100.0], "fast": [90.0]}}
    made = list(
        rows(samples, "load", "/s", [("fast", NONE), ("fast", NFTABLES), ("xdp", NONE)], {("fast", NONE): 0.97})
    )
    assert [(row.what, row.met) for row in made] == [("load, pod: ours, fast path", False)]


def test_goals_of_short_connections() -> None:
    rates = {NONE: 100.0, NFTABLES: 80.0, "direct": 97.0, "fast": 96.0, "socket": 99.0}
    made = [row for row in connect.table({"pod": {n: [r] for n, r in rates.items()}}) if row.met is not None]
    assert len(made) == 6
    assert [row.what for row in made if not row.met] == ["connect-request-reset, pod: ours, fast path"]


def test_goals_of_one_connection() -> None:
    of = {NONE: [100.0], "fast": [102.0], NFTABLES: [80.0]}
    made = judged(list(fast.table({fast.EXCHANGES: {"pod": of}, fast.STREAMS: {"pod": of}, fast.CPU: {"pod": of}})))
    assert list(made.values()) == [False, True, False]


def test_goals_of_latency_are_upper_ones() -> None:
    of = {NONE: [100.0], "fast": [103.0], "socket": [101.0]}
    made = judged(list(latency.table({name: {"pod": of} for name in latency.PERCENTILES})))
    assert sorted(made.values()) == [False, False, False, True, True, True]


def test_the_throttle_of_real_time_tasks_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    throttle = tmp_path / "sched_rt_runtime_us"
    throttle.write_text("950000\n")
    monkeypatch.setattr(loads, "THROTTLE", throttle)
    with pytest.raises(RuntimeError), loads.unthrottled():
        assert throttle.read_text() == "-1"
        raise RuntimeError("the load failed")
    assert throttle.read_text() == "950000\n"


def test_many_services_are_judged_beside_one() -> None:
    both = {"one": [100.0, 50.0], "many": [99.0, 48.0]}
    made = list(services.table({"10000": {"direct": both, NFTABLES: both}}))
    assert [row.met for row in made] == [False, None]  # 0.975: kube-proxy has no goal


def test_goals_of_udp_are_those_of_xdp() -> None:
    rates = {"xdp": 4.2, "fast": 9.0, NFTABLES: 1.0, NONE: 2.0, LIMIT: 10.0}
    samples = {kind: {name: [rate] for name, rate in rates.items()} for kind in udp.KINDS}
    made = [row for row in udp.table(samples) if row.met is not None]
    assert [(row.goal, row.met) for row in made] == [(f"≥ {each} of it", True) for each in udp.GOALS.values()]


def test_what_a_packet_costs_has_a_goal_if_it_is_of_no_service() -> None:
    made = packet.table({f"{kind}: TCP, IPv4": [26.0] for kind in packet.KINDS}, 1.0)
    assert [row.met for row in made] == [False] * 3 + [None] * 4


@pytest.mark.parametrize(
    ("base", "ours", "worse"),
    [
        ([100.0] * 5, [112.0] * 5, True),
        ([100.0] * 5, [109.0] * 5, False),
        ([10.0] * 5, [11.5] * 5, False),
        ([100.0, 100.0, 300.0, 100.0], [120.0, 90.0, 330.0, 90.0], False),
        ([100.0, 200.0, 300.0], [115.0, 230.0, 345.0], True),
        ([0.0] * 4, [3.0] * 4, True),
    ],
    ids=["dearer", "not much", "a clock's tick", "only now and then", "in moments of all kinds", "from nothing"],
)
def test_a_packet_is_dearer_than_at_the_base(base: list[float], ours: list[float], worse: bool) -> None:
    assert check.judge("row", base, ours).worse is worse


def test_rows_that_only_one_side_has_are_not_compared() -> None:
    assert [each.what for each in check.compare([{"a": 1.0, "b": 1.0}], [{"b": 1.0, "c": 1.0}])] == ["b"]


def test_the_contenders_services_are_valid() -> None:
    for each in objects(pod_address(1, 1)):
        assert decode_object(each["kind"], json.dumps(each).encode()).object is not None
    assert all(30000 <= port <= 32767 for port in NODE_PORT.values())


def test_every_pair_names_contenders() -> None:
    pairs = [*connect.PAIRS, *fast.PAIRS, *latency.PAIRS, *udp.PAIRS]
    assert {name for pair in pairs for name in pair} <= set(CONTENDERS)
