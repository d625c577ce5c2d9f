# SPDX-License-Identifier: Apache-2.0
"""The filter of conntrack's clients: connections are noted again before their notes expire."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pyebpf_proxy.datapath.connections import tracked_clients
from pyebpf_proxy.datapath.managers import fast_path
from pyebpf_proxy.datapath.managers.fast_path import FastPathManager


def manager() -> FastPathManager:
    tc = SimpleNamespace(btf=None, programs={"note_tracked_flow": None})
    programs: Any = SimpleNamespace(loaded=SimpleNamespace(tc=tc, maps={"tracked_clients": None}))
    others: list[Any] = [None] * 4
    effective: Any = SimpleNamespace(fast_path="auto")
    return FastPathManager(effective, others[0], programs, *others[1:])


def test_connections_are_noted_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    often = asyncio.Event()

    def note_connections(*_: object) -> int:
        noted.append("connections")
        if len(noted) > 2:
            loop.call_soon_threadsafe(often.set)
        raise OSError("conntrack refused once")

    def note(*_: object) -> int:
        noted.append("all")
        return 0

    monkeypatch.setattr(tracked_clients, "note", note)
    monkeypatch.setattr(tracked_clients, "note_connections", note_connections)
    monkeypatch.setattr(fast_path, "NOTE_SECONDS", 0.001)

    async def run() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(manager()._note_tracked())
        await asyncio.wait_for(often.wait(), 10)
        task.cancel()

    loop: asyncio.AbstractEventLoop
    asyncio.run(run())
    assert noted[:3] == ["all", "connections", "connections"]


def test_two_passes_fit_into_the_time_of_a_note() -> None:
    """One of them may fail."""
    assert 2 * fast_path.NOTE_SECONDS < tracked_clients.NOTED_SECONDS
