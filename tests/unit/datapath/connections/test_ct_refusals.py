# SPDX-License-Identifier: Apache-2.0
"""Conntrack's refusals within the last minute, from counters that only increase."""

from __future__ import annotations

import asyncio
import errno

import pytest

from pyebpf_proxy.datapath.connections import ct_refusals
from pyebpf_proxy.datapath.connections.ct_refusals import ConntrackRefusals
from pyebpf_proxy.see import status


def test_only_the_last_minute_counts_as_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 100
    monkeypatch.setattr(ct_refusals, "read", lambda: {"insert_failed": count, "drop": count})
    refusals = ConntrackRefusals()
    assert refusals.view() == {}
    refusals.sample(0.0)
    assert refusals.view(0.0)["lastMinute"] == {"insert_failed": 0, "drop": 0}
    count = 107
    refusals.sample(5.0)
    assert refusals.view(5.0) == {
        "total": {"insert_failed": 107, "drop": 107},
        "lastMinute": {"insert_failed": 7, "drop": 7},
    }
    for at in range(10, 60, 5):
        refusals.sample(float(at))
    assert refusals.view(55.0)["lastMinute"]["drop"] == 7
    refusals.sample(64.9)
    refusals.sample(65.1)
    assert refusals.view(65.1)["lastMinute"]["drop"] == 0


def test_a_failed_read_does_not_end_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may have had no file descriptor left for a moment."""
    reads = 0

    def read() -> dict[str, int]:
        nonlocal reads
        reads += 1
        if reads == 2:
            raise OSError(errno.EMFILE, "too many open files")
        return {"drop": reads}

    async def three_reads() -> None:
        task = asyncio.create_task(refusals.run())
        while reads < 3:
            assert not task.done()
            await asyncio.sleep(0)
        task.cancel()

    monkeypatch.setattr(ct_refusals, "read", read)
    monkeypatch.setattr(ct_refusals, "SAMPLE_SECONDS", 0.0)
    refusals = ConntrackRefusals()
    asyncio.run(three_reads())


def test_without_a_sample_of_the_last_minute_nothing_is_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 100
    monkeypatch.setattr(ct_refusals, "read", lambda: {"drop": count})
    refusals = ConntrackRefusals()
    refusals.sample(0.0)
    count = 200
    assert refusals.view(1000.0) == {"total": {"drop": 200}, "lastMinute": {"drop": 0}}


def test_status_distinguishes_ports_in_use_from_a_full_table() -> None:
    agent_state = {"conntrackRefusals": {"lastMinute": {"insert_failed": 3, "drop": 3}}}
    (warning,) = status._about_conntrack(agent_state)
    assert warning.what.startswith("3 times in the last minute: conntrack refused a new flow whose ports are in use")
    agent_state = {"conntrackRefusals": {"lastMinute": {"insert_failed": 0, "drop": 5}}}
    (warning,) = status._about_conntrack(agent_state)
    assert "its table is full" in warning.what
    assert not list(status._about_conntrack({}))
