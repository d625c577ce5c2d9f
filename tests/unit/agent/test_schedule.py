# SPDX-License-Identifier: Apache-2.0
"""When a sync may start (spec/service-semantics §1.5). The clock is a number."""

from __future__ import annotations

from pyebpf_proxy.agent.schedule import Schedule


def sync(schedule: Schedule, start: float, end: float, ok: bool = True) -> bool:
    assert schedule.delay(start) == 0
    wanted = schedule.started(start)
    schedule.finished(end, ok)
    return wanted


def test_no_sync_is_planned_before_the_first_change() -> None:
    assert Schedule(1, 30).delay(100) is None


def test_the_first_sync_is_immediate() -> None:
    schedule = Schedule(1, 30)
    schedule.request(100)
    assert schedule.delay(100) == 0


def test_the_gap_counts_from_the_end_of_the_last_sync() -> None:
    schedule = Schedule(1, 30)
    schedule.request(100)
    sync(schedule, 100, 100.5)
    schedule.request(100.6)
    assert abs(schedule.delay(100.6) - 0.9) < 1e-9
    assert schedule.delay(101.5) == 0


def test_a_change_after_the_gap_is_synced_at_once() -> None:
    schedule = Schedule(1, 30)
    schedule.request(100)
    sync(schedule, 100, 100.1)
    schedule.request(105)
    assert schedule.delay(105) == 0


def test_many_changes_are_one_sync() -> None:
    schedule = Schedule(1, 30, full=3600)
    schedule.request(100)
    sync(schedule, 100, 100)
    for moment in (100.1, 100.2, 100.9):
        schedule.request(moment)
    assert sync(schedule, 101, 101)
    assert schedule.delay(101) == 3600


def test_a_change_during_a_sync_is_not_lost() -> None:
    schedule = Schedule(1, 30)
    schedule.request(100)
    schedule.started(100)
    schedule.request(100.2)
    schedule.finished(100.5, ok=True)
    assert schedule.delay(100.5) == 1


def test_a_failed_sync_is_repeated_after_the_sync_period() -> None:
    schedule = Schedule(1, 30)
    schedule.request(100)
    sync(schedule, 100, 100, ok=False)
    assert schedule.delay(100) == 30
    assert sync(schedule, 130, 130)


def test_a_change_hastens_the_repetition() -> None:
    schedule = Schedule(1, 30)
    schedule.request(100)
    sync(schedule, 100, 100, ok=False)
    schedule.request(105)
    assert schedule.delay(105) == 0


def test_without_changes_there_is_a_full_sync_every_hour() -> None:
    schedule = Schedule(1, 30)
    schedule.request(100)
    sync(schedule, 100, 100)
    assert schedule.delay(100) == 3600
    assert sync(schedule, 3700, 3700) is False
    assert schedule.delay(3700) == 3600


def test_with_changes_all_the_time_there_is_a_full_sync_every_hour() -> None:
    schedule = Schedule(1, 30)
    full = []
    for moment in range(0, 3 * 3600, 600):
        schedule.request(moment)
        if not sync(schedule, moment, moment + 1):
            full.append(moment)
    assert full == [3600, 7200]


def test_without_a_minimum_every_change_is_synced_at_once() -> None:
    schedule = Schedule(0, 30)
    schedule.request(100)
    sync(schedule, 100, 101)
    schedule.request(101)
    assert schedule.delay(101) == 0
