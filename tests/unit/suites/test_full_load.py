# SPDX-License-Identifier: Apache-2.0
"""The result of a full load: lost, moved and repeated connections are found, and no others."""

from __future__ import annotations

import pytest

from tests.changes.checker import ANSWERED, BROKEN, MOVED, Record, Stall
from tests.changes.load import LONG, Flow, Outcome
from tests.changes.model import REFUSED, SILENT

NAMES = frozenset({"one:1", "two:1"})


def flow(begun: float = 1.0, end: str = ANSWERED, name: str = "one:1", count: int = 0, udp: bool = False) -> Flow:
    return Flow(Record(begun, begun + 0.5, 0, end, name, count), "from pod to [10.96.0.1]:80", udp, NAMES)


HELD = (flow(0.0, count=30),) * LONG


def outcome(*new: Flow, long: tuple[Flow, ...] = HELD, stalls: tuple[Stall, ...] = ()) -> Outcome:
    return Outcome(list(new), list(long), list(stalls), 2.0, 0.0, 10.0)


def found(made: Outcome, until: float = float("inf")) -> dict[str, int]:
    return {what: len(flows) for what, flows in made.problems(until).items()}


@pytest.mark.parametrize(
    ("each", "problem"),
    [
        (flow(), {}),
        (flow(udp=True), {}),
        (flow(end=SILENT, name=""), {"lost": 1}),
        (flow(end=REFUSED, name=""), {"lost": 1}),
        (flow(end=BROKEN), {"lost": 1}),
        (flow(end=MOVED, udp=True), {"moved": 1}),
        (flow(name="another:1"), {"moved": 1}),
        (flow(count=1), {"repeated": 1}),
    ],
)
def test_a_new_connection(each: Flow, problem: dict[str, int]) -> None:
    assert found(outcome(each)) == problem


def test_long_ones_count_rounds_and_not_repeated_packets() -> None:
    assert found(outcome(long=(flow(count=30),))) == {}
    assert found(outcome(long=(flow(end=SILENT, count=30), flow(end=MOVED)))) == {"lost": 1, "moved": 1}


def test_retransmissions_during_a_pause_of_the_machine_do_not_count() -> None:
    assert found(outcome(flow(1.0, count=1), stalls=(Stall(1.1, 1.4),))) == {}
    assert found(outcome(flow(1.0, count=1), stalls=(Stall(1.6, 3.0), Stall(1.1, 1.2)))) == {"repeated": 1}


def test_after_the_end_of_the_service_only_answered_connections_count() -> None:
    silent, broken = flow(5.0, SILENT, ""), flow(5.0, BROKEN, "one:1")
    assert found(outcome(silent, broken), until=4.0) == {"lost": 1}
    assert found(outcome(silent, broken), until=6.0) == {"lost": 2}


def test_the_report_describes_the_problems() -> None:
    many = [flow(number / 4) for number in range(40)]
    outcome(*many).report()
    with pytest.raises(AssertionError, match=r"1 lost: 1 UDP from pod to \[10\.96\.0\.1\]:80: timed out"):
        outcome(*many, flow(2.0, SILENT, "", udp=True)).report()
    with pytest.raises(AssertionError, match="5 new connections, 0 of them UDP, 0 a second of 2 wanted"):
        outcome(*many[:5]).report()
    with pytest.raises(AssertionError):
        outcome(*many, long=(flow(),)).report()


def test_the_rate_counts_until_the_end_of_the_service() -> None:
    made = outcome(*[flow(number / 4) for number in range(40)])
    assert made.rate() == 4.0
    assert outcome(*[flow(number / 4) for number in range(8)]).rate(until=2.0) == 4.0
