# SPDX-License-Identifier: Apache-2.0
"""When the samples of a soak count as flat."""

from __future__ import annotations

import pytest

from tests.soak.samples import SLACK, Sample, Soak, growth, problems


def samples(**leak: float) -> list[Sample]:
    """An hour with a sample per minute; ``leak``: how much a field grows per sample."""
    usual = {"rss_kib": 60000, "fds": 130, "map_kib": 80000, "flows": 900, "map_entries": 60}
    usual |= {"kernel_kib": 60000, "conntrack_kib": 66000}
    return [
        Sample(
            seconds=60.0 * minute,
            conntrack=260000,
            made=300 * 60 * minute,
            rounds=minute,
            # The start is not judged: memory is still being allocated then.
            **{
                name: int(value * (0.8 if minute < 5 else 1) + leak.get(name, 0) * minute)
                for name, value in usual.items()
            },
        )
        for minute in range(61)
    ]


def soak(found: list[Sample], **fields: object) -> Soak:
    usual = {"failed": 0, "how": {}, "lost": 0, "tried": 1000}
    return Soak(machine={}, minutes=60, rate=300, changes=7200, conntrack_max=262144, samples=found, **(usual | fields))  # type: ignore[arg-type]


def test_a_run_without_a_leak_is_flat() -> None:
    assert problems(soak(samples())) == []


@pytest.mark.parametrize("name", SLACK)
def test_a_leak_is_named(name: str) -> None:
    leak = {"rss_kib": 200, "fds": 1, "map_kib": 100, "flows": 200, "map_entries": 1}
    leak |= {"kernel_kib": 100, "conntrack_kib": 150}
    (output,) = problems(soak(samples(**{name: leak[name]})))
    first, last = growth(samples(**{name: leak[name]}), name)
    assert output == f"{name} grew from {first:.0f} to {last:.0f}"


def test_failed_and_lost_connections_are_named() -> None:
    found = problems(soak(samples(), failed=2, how={"refused": 1, "silent": 1}, lost=1))
    assert found == ["2 of 1000 connections failed (1 refused, 1 silent)", "1 long connections were lost"]
