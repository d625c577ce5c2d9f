# SPDX-License-Identifier: Apache-2.0
"""Waiting with a time limit."""

from __future__ import annotations

import asyncio
from contextlib import suppress


async def wait_briefly(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, at most so long.

    ``asyncio.wait_for`` of Python 3.11 is not suitable: if the event is set at the moment of a cancellation, the task
    is not cancelled, and a task that waits in a loop never ends.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
