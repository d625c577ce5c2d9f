# SPDX-License-Identifier: Apache-2.0
"""Comparison of contenders: which rows are judged, and when a packet costs more than at the base commit."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import (
    check,
    connect,
    dns,
    exchange,
    latency,
    loads,
    overview,
    packet,
    passing,
    report,
    services,
    stream,
    udp,
)
from bench.__main__ import FIGURES, ROWS
from bench.contenders import CONTENDERS, LOCAL_NODE_PORT, NODE_PORT, NONE, OURS, WAYS, XDP, objects
from bench.loads import Options, Plan, cell, cells, rows, steady
from bench.measure import TOOLS, Result, Row
from bench.proxies import IPTABLES, NFTABLES
from bench.rows import absolute, more, ratio
from pyebpf_proxy.kube.decode import decode_object
from pyebpf_proxy.lab.addresses import pod_address


def judged(made: list[Row]) -> dict[str, bool]:
    return {row.what: row.met for row in made if row.met is not None}


def test_a_ratio_is_computed_per_round_not_from_medians() -> None:
    # The machine was half as fast in the second round, for both.
    row = ratio("x", "/s", [100, 52, 99], "y", [100, 50, 100], least=1.0)
    assert row.judged.median == 1.0
    assert row.goal == "≥ 1.0 ×"
    assert row.met


@pytest.mark.parametrize(("value", "met"), [(1.02, True), (1.03, False)])
def test_an_upper_goal(value: float, met: bool) -> None:
    row = ratio("x", "µs", [value * 10], "y", [10], most=1.02)
    assert (row.met, row.goal) == (met, "≤ 1.02 ×")


def test_without_a_goal_nothing_is_judged() -> None:
    assert ratio("x", "/s", [1], "y", [2]).met is None
    assert absolute("x", "ns", [1], 1.0).met is None


def test_absolute_goals_are_judged_at_normal_speed() -> None:
    row = more("x", "ns", [80.0, 82.0], "an empty program", [40.0, 40.0], 2.0, 25)
    assert row.judged.median == 41.0
    assert (row.at_normal_speed, row.met, row.goal) == (20.5, True, "≤ 25 ns more")


def test_a_missing_contender_has_no_row() -> None:
    samples = {"pod": {NONE: [100.0], OURS: [90.0]}}
    made = list(rows(samples, "load", "/s", [(OURS, NONE), (OURS, NFTABLES), (XDP, NONE)], {(OURS, NONE): 1.0}))
    assert [(row.what, row.met) for row in made] == [("load, pod: pyebpf-proxy (defaults)", False)]


def test_goals_of_short_connections_depend_on_the_path() -> None:
    rates = {NONE: [100.0], NFTABLES: [80.0], OURS: [96.0]}
    made = judged(list(connect.table({cell(way, 4): rates for way in WAYS})))
    assert list(made.values()) == [False, False, True]  # 1.0, 1.0, and 0.95 with masquerading


def test_goals_of_one_connection_depend_on_the_path() -> None:
    rates = {NONE: [100.0], OURS: [103.0]}
    assert list(judged(list(exchange.table({cell(way, 6): rates for way in WAYS}))).values()) == [False, True, True]


def test_goals_of_a_stream() -> None:
    of = {cell("pod", 4): {NONE: [100.0], OURS: [101.0]}}
    assert list(judged(list(stream.table({stream.STREAMS: of, stream.CPU: of}))).values()) == [True, False]


def test_the_goal_of_queries_is_that_of_pods() -> None:
    of = {NONE: [100.0], OURS: [99.0]}
    assert list(judged(list(dns.table({cell("pod", 4): of, cell("client", 4): of}))).values()) == [False]


def test_goals_of_latency_are_upper_ones() -> None:
    of = {NONE: [100.0], OURS: [101.0]}
    made = judged(list(latency.table({name: {"pod": of} for name in latency.PERCENTILES})))
    assert list(made.values()) == [False, False]


def test_the_throttle_of_real_time_tasks_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    throttle = tmp_path / "sched_rt_runtime_us"
    throttle.write_text("950000\n")
    monkeypatch.setattr(loads, "THROTTLE", throttle)
    with pytest.raises(RuntimeError), loads.unthrottled():
        assert throttle.read_text() == "-1"
        raise RuntimeError("the load failed")
    assert throttle.read_text() == "950000\n"


def test_a_throttle_that_another_load_has_lifted_is_not_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    throttle = tmp_path / "sched_rt_runtime_us"
    throttle.write_text("-1\n")
    monkeypatch.setattr(loads, "THROTTLE", throttle)
    with loads.unthrottled():
        pass
    assert throttle.read_text() == "950000\n"


def test_the_throttle_is_restored_when_the_bench_is_killed(tmp_path: Path) -> None:
    throttle = tmp_path / "sched_rt_runtime_us"
    throttle.write_text("950000\n")
    program = (
        "import os, signal; from pathlib import Path; from bench import loads\n"
        f"loads.THROTTLE = Path({str(throttle)!r})\n"
        "with loads.unthrottled():\n    assert loads.THROTTLE.read_text() == '-1'; os.kill(0, signal.SIGKILL)"
    )
    ran = subprocess.run([sys.executable, "-c", program], check=False, start_new_session=True)
    assert ran.returncode == -signal.SIGKILL
    end = time.monotonic() + 10
    while throttle.read_text() != "950000\n" and time.monotonic() < end:
        time.sleep(0.01)
    assert throttle.read_text() == "950000\n"


@pytest.mark.needs_root
def test_the_server_of_short_connections_closes_what_its_client_has_ended(bpf_objects: Path) -> None:
    """It has real-time priority: if it were woken for a connection and did not close it, it would use the whole CPU
    (finding D18).
    """
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
        port = free.getsockname()[1]
    command = [str(TOOLS / "connections"), "serve", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
            with socket.create_connection(("::1", port), timeout=5) as asking:
                asking.shutdown(socket.SHUT_WR)
                assert asking.recv(1) == b""
        finally:
            server.kill()


def test_rounds_continue_until_they_are_steady() -> None:
    key = cell("pod", 4)
    near = {"rates": {key: {NONE: [100.0] * 5, OURS: [98.0, 99.0, 100.0, 101.0, 102.0]}}}
    far = {"rates": {key: {NONE: [100.0] * 5, OURS: [90.0, 95.0, 100.0, 105.0, 110.0]}}}
    assert steady(near, key)
    assert not steady(far, key)
    assert steady(far, cell("pod", 6))


def test_the_command_line_changes_a_plan() -> None:
    plan = Plan(5, 9, 1.0, cells(("pod", "cluster")))
    assert plan.of(Options()) == plan
    asked = Options(rounds=3, seconds=0.2, ways=("cluster",), families=(6,))
    assert plan.of(asked) == Plan(3, 3, 0.2, (("cluster", 6),))


def test_every_row_has_its_figures() -> None:
    assert {figure for figures in ROWS.values() for figure in figures} <= set(FIGURES)


def test_many_services_are_judged_against_one() -> None:
    both = {"one": [100.0, 50.0], "many": [99.0, 48.0]}
    made = list(services.table({"10000": {OURS: both, NFTABLES: both}}))
    assert [row.met for row in made] == [False, None]  # 0.975: kube-proxy has no goal


def test_goals_of_udp_are_those_of_tc_and_of_xdp() -> None:
    ends = ("", udp.BY_XDP)
    rates = {OURS: [2.1], XDP: [4.6], NFTABLES: [1.0], NONE: [2.0]}
    samples = {kind + end: rates for end in ends for kind in udp.KINDS}
    made = [(row.goal, row.met) for row in udp.table(samples) if row.met is not None]
    tc, xdp = (("2.2", False), ("2.0", True), ("2.0", True)), (("5.0", False), ("4.5", True), ("3.0", True))
    assert made == [(f"≥ {goal} ×", met) for goal, met in (*tc, *xdp)]


def test_the_cost_of_a_packet_of_no_service_has_a_goal() -> None:
    made = packet.table({f"{kind}: TCP, IPv4": [26.0] for kind in packet.KINDS}, 1.0)
    assert [row.met for row in made] == [None, None, False, False, None, None]  # each side, both, XDP, first packets


def test_real_packets_of_no_service_are_judged_by_their_extra_time() -> None:
    assert [row.met for row in passing.table([520.0, 525.0], [500.0, 505.0], 1.0)] == [True]
    assert [row.met for row in passing.table([530.0, 535.0], [500.0, 505.0], 1.0)] == [False]


def result(figure: str, samples: dict[str, Any]) -> Result:
    machine = {"kernel": "Linux", "processor": "p", "cpus": 2, "commit": "c", "date": "2026-11-22T00:00:00"}
    return Result(figure=figure, title="", quick=False, machine=machine, rows=[], samples=samples)


def test_the_overview_has_ten_lines_of_four_contenders() -> None:
    rates = {NONE: [100.0, 50.0], IPTABLES: [80.0, 40.0], NFTABLES: [80.0, 40.0], OURS: [104.0, 52.0]}
    both = {"one": [100.0], "many": [99.0]}
    made = [
        result("connect", {cell("pod", 4): rates}),
        result("latency", {"p99_us": {cell("pod", 4): rates}}),
        result("services", {"found": {"30000": {OURS: both}}}),
    ]
    lines = overview.table(overview.overview(made))
    assert len(lines) == 12
    assert lines[2] == (
        "| Short connections, pod → ClusterIP | 75.0 /s | 60.0 /s (0.80) | 60.0 /s (0.80) | **78.0 /s (1.04)** |"
    )
    assert lines[3].endswith("| – | – | – | – |")
    assert lines[11].endswith("| – | – | – | **99.0 /s (0.99)** |")


def test_text_around_the_marks_stays() -> None:
    page = f"before\n<!-- goals: {report._NOTE}\nold\n{report._END}\nafter\n"
    made = report.between(page, report.GOALS, "new")
    assert made == page.replace("old", "\nnew")
    with pytest.raises(ValueError, match="marks of figures are missing"):
        report.between(page, report.FIGURES, "new")


def test_the_page_has_all_marks() -> None:
    text = report.PAGE.read_text()
    for part in (report.OVERVIEW, report.GOALS, report.FIGURES):
        assert report.between(text, part, "made").count("made\n") == 1


@pytest.mark.parametrize(
    ("base", "changed", "worse"),
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
def test_a_packet_costs_more_than_at_the_base(base: list[float], changed: list[float], worse: bool) -> None:
    assert check.judge("row", base, changed).worse is worse


def test_rows_that_only_one_side_has_are_not_compared() -> None:
    assert [each.what for each in check.compare([{"a": 1.0, "b": 1.0}], [{"b": 1.0, "c": 1.0}])] == ["b"]


def test_the_contenders_services_are_valid() -> None:
    for each in objects(pod_address(1, 1)):
        assert decode_object(each["kind"], json.dumps(each).encode()).object is not None
    ports = [*NODE_PORT.values(), *LOCAL_NODE_PORT.values()]
    assert all(30000 <= port <= 32767 for port in ports)
    assert len(set(ports)) == len(ports)


def test_every_pair_names_contenders() -> None:
    pairs = [*connect.PAIRS, *udp.PAIRS]
    assert {name for pair in pairs for name in pair} <= set(CONTENDERS)
