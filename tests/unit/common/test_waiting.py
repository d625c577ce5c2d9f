# SPDX-License-Identifier: Apache-2.0
"""Waiting with a time limit ends for an event, at the limit, and always with a cancellation."""

from __future__ import annotations

import asyncio
import time

import pytest

from pyebpf_proxy.common.waiting import wait_briefly


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_counts_also_when_the_event_is_set_at_the_same_time(turns: int) -> None:
    async def main() -> None:
        event = asyncio.Event()

        async def forever() -> None:
            while True:
                await wait_briefly(event, 60)
                event.clear()

        task = asyncio.create_task(forever())
        await asyncio.sleep(0.01)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=5)
        assert done
        assert task.cancelled()

    asyncio.run(main())


def test_it_ends_with_the_event_and_at_the_limit() -> None:
    async def main() -> None:
        event = asyncio.Event()
        begin = time.monotonic()
        await wait_briefly(event, 0.05)
        await wait_briefly(event, -1)
        assert 0.05 <= time.monotonic() - begin < 10
        asyncio.get_running_loop().call_later(0.05, event.set)
        await wait_briefly(event, 60)
        assert event.is_set()
        assert time.monotonic() - begin < 10

    asyncio.run(main())
