# SPDX-License-Identifier: Apache-2.0
"""docs/reliability.md matches its results; and the evaluation of connections' records under a fault."""

from __future__ import annotations

import types

import pytest

from tests.changes.checker import ANSWERED, Record
from tests.faults import faults, floods, measure, of_process, page
from tests.faults.measure import Fault, Moments, Outcome

MOMENTS = Moments(start=0.0, asked=10.0, there=11.0, ending=21.0, over=22.0)


def record(begun: float, end: str = ANSWERED) -> Record:
    return Record(begun, begun + 0.01, 0, end)


def outcome(**fields: object) -> Outcome:
    usual = {
        "proxy": "ours",
        "tried": 100,
        "failed": 0,
        "lost": 0,
        "rate": 100.0,
        "before": 10.0,
        "how": {},
        "traffic_right": 0.0,
        "change_right": 0.0,
        "healed": 0.0,
        "change_after": 0.0,
        "status": [],
        "metrics": {},
        "log": [],
    }
    return Outcome(**(usual | fields))  # type: ignore[arg-type]


def fault(**fields: object) -> Fault:
    return Fault("name", "words", of_process.stopped, **fields)  # type: ignore[arg-type]


def test_the_page_matches_the_results() -> None:
    assert page.PAGE.read_text() == page.page(page.read()), "run python -m tests.faults --page"


def test_every_result_is_of_a_fault_in_their_order() -> None:
    measured = list(page.read().faults)
    assert measured == [name for name in faults.FAULTS if name in measured]
    assert measured


def test_rates_and_failures_are_counted_from_the_records() -> None:
    before = [record(n / 10) for n in range(100)]
    during = [record(11 + n / 10, ANSWERED if n % 2 else "silent") for n in range(100)]
    found = measure.judge([*before, *during, record(10.5, "refused"), record(21.5), record(23.0)], MOMENTS)
    assert (found["tried"], found["failed"]) == (103, 51)
    assert found["how"] == {"silent": 50, "refused": 1}
    assert (found["before"], found["rate"]) == (10.0, 50.0)
    assert found["traffic_right"] == 0.0


def test_recovery_is_when_the_last_failing_connection_begins() -> None:
    found = measure.judge([record(1.0), record(12.0), record(23.5, "refused"), record(24.0)], MOMENTS)
    assert found["traffic_right"] == 1.5


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({"rate": 89.9}, "others kept 90 % of their rate"),
        ({"lost": 1}, "1 established connections were lost"),
        ({"change_right": 1.1}, "right again after 1.1 s, not 1"),
        ({"healed": 2.0}, "right again after 2.0 s, not 1"),
        ({"failed": 1, "status": ["full"]}, "refusals are not counted"),
        ({"failed": 1, "metrics": {"slow_no_port": 1}, "log": ["error"]}, "`status` does not name it"),
    ],
)
def test_each_broken_promise_is_named(fields: dict[str, object], output: str) -> None:
    assert measure.problems(fault(), outcome(), None) == []
    assert measure.problems(fault(), outcome(**fields), None) == [output]


def test_refusals_of_a_fault_are_counted_and_named_by_status() -> None:
    refusing, counted, named = fault(refuses=True), {"slow_no_port": 1}, ["conntrack: full"]
    nowhere, nameless = "refusals are not counted", "`status` does not name it"
    by_chance = {"flow_changed": 3}
    for fields, said in (
        ({"metrics": by_chance}, [nowhere, nameless]),
        ({"metrics": counted}, [nameless]),
        ({"status": named}, [nowhere]),
        ({"log": ["error"]}, [nowhere, nameless]),
        ({"metrics": counted, "status": named}, []),
    ):
        assert measure.problems(refusing, outcome(**fields), None) == said
    assert measure.problems(fault(named=True), outcome(metrics=counted, log=["error"]), None) == [nameless]
    assert measure.problems(fault(named=True), outcome(status=named), None) == []


def test_failed_connections_that_are_counted_and_named_are_no_broken_promise() -> None:
    found = outcome(failed=1, status=["once in the last minute"], metrics={"repairs: tc_program": 1})
    assert measure.problems(fault(), found, None) == []


def test_a_fault_that_took_long_to_end_says_so() -> None:
    for ending, words in ((0.4, "stops |"), (1.24, "stops (its end took 1.2 s) |")):
        assert words in page._row("stops", "pyebpf-proxy", outcome(ending=ending), "met")
    assert "stops (three; its end took 1.2 s) |" in page._row("stops", "x", outcome(ending=1.2, notes="three"), "met")


def test_goals_that_the_numbers_alone_do_not_meet_have_a_reason() -> None:
    whole_node = fault(affects_all=True)
    assert page._goals(whole_node, outcome(rate=23.0), outcome(rate=3.0)) == (
        "met: it concerns every new connection, and kube-proxy keeps 3 % of the rate"
    )
    assert page._goals(whole_node, outcome(rate=23.0), outcome(rate=30.0)).startswith("**missed**: ")
    assert page._goals(fault(), outcome(lost=1), outcome(lost=2)) == "met: kube-proxy loses 2"
    assert page._goals(fault(api=True), outcome(change_right=2.0), None) == "met: 30 s for faults of the API server"
    assert page._goals(fault(), outcome(), outcome()) == "met"


def test_each_row_has_the_commit_that_it_was_measured_at() -> None:
    old, new = page.Entry(outcome(commit="1" * 12), "reads none"), page.Entry(outcome(commit="2" * 12), "reads none")
    made = page.page(page.Results(faults={"quota": old, "disk-full": new}))
    (first,) = (line for line in made.splitlines() if "1" * 12 in line)
    (second,) = (line for line in made.splitlines() if "2" * 12 in line)
    assert faults.FAULTS["quota"].words in first
    assert faults.FAULTS["disk-full"].words in second


class Page:
    """A proxy that only has metrics."""

    def metrics(self) -> str:
        return """pyebpf_proxy_reasons_total{reason="slow_quota"} 7.0
pyebpf_proxy_conntrack_refusals_total{reason="insert_failed"} 20.0
pyebpf_proxy_netlink_overruns_total{protocol="route"} 3.0
pyebpf_proxy_repairs_total{object="tc_program"} 2.0
pyebpf_proxy_service_port_problems 176.0
pyebpf_proxy_service_over_limit{namespace="a",service="b"} 1.0
pyebpf_proxy_service_over_limit{namespace="a",service="c"} 2.0
pyebpf_proxy_run_directory_writable 0.0
"""


def test_counters_of_every_kind_are_read() -> None:
    ground = types.SimpleNamespace(proxy=Page())
    assert measure.reasons(ground) == {  # type: ignore[arg-type]
        "slow_quota": 7,
        "conntrack_refusals: insert_failed": 20,
        "netlink_overruns: route": 3,
        "repairs: tc_program": 2,
        "service_port_problems": 176,
        "service_over_limit": 3,
        "run_directory_writable is 0": 1,
    }


def test_losses_that_kube_proxy_has_too_are_no_broken_promise() -> None:
    assert measure.problems(fault(), outcome(lost=2), outcome(lost=2)) == []
    assert measure.problems(fault(api=True), outcome(change_right=29.0), None) == []
    whole_node = fault(affects_all=True)
    assert measure.problems(whole_node, outcome(rate=50.0), outcome(rate=40.0)) == []
    assert measure.problems(whole_node, outcome(rate=50.0), outcome(rate=60.0)) != []


def test_failures_that_the_kernel_causes_are_compared_with_those_of_kube_proxy() -> None:
    kernels = fault(kernels_own=True)
    few, many = outcome(failed=4, how={"unreachable": 4}), outcome(failed=14, how={"unreachable": 14})
    assert page._goals(kernels, few, few) == "met: the kernel refuses them, and 4 of kube-proxy's"
    for missed in (
        page._goals(kernels, many, few),
        page._goals(kernels, few, outcome()),
        page._goals(kernels, few, outcome(failed=4, how={"silent": 4})),
        page._goals(kernels, few, None),
        page._goals(fault(), few, few),
    ):
        assert missed == "**missed**: refusals are not counted; `status` does not name it"


def test_forged_packets_are_valid() -> None:
    scapy = pytest.importorskip("scapy.layers.inet")
    for made in (floods.syns, floods.datagrams):
        raw, target = made("198.18.0.0/15", ["203.0.113.12"], [80])[7]
        packet = scapy.IP(raw)
        rebuilt = scapy.IP(raw)
        if made is floods.syns:
            del rebuilt["TCP"].chksum
            assert scapy.IP(bytes(rebuilt))["TCP"].chksum == packet["TCP"].chksum
            assert packet["TCP"].flags == "S"
        assert (packet.dst, target, len(raw), packet.len) == (target, "203.0.113.12", packet.len, len(raw))
        assert packet.payload.dport == 80
        assert packet.src.startswith(("198.18.", "198.19."))
