# SPDX-License-Identifier: Apache-2.0
"""Work in another thread. OSError (EAGAIN) if no thread can be started: a limit of processes or of memory."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """:func:`asyncio.to_thread`: the end of the loop waits for the thread."""
    started = False

    def work() -> R:
        nonlocal started
        started = True
        return function(*args, **kwargs)

    try:
        return await asyncio.to_thread(work)
    except (RuntimeError, MemoryError) as error:
        if started:
            raise
        raise _not_started(error) from error


async def in_daemon_thread(name: str, work: Callable[[], R]) -> R:
    """The same in a thread of its own, for which neither the loop nor the process waits when it ends."""
    outcome: concurrent.futures.Future[R] = concurrent.futures.Future()

    def run() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result(work())
        except Exception as error:
            outcome.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except (RuntimeError, MemoryError) as error:
        raise _not_started(error) from error
    return await asyncio.wrap_future(outcome)


def _not_started(error: Exception) -> OSError:
    return OSError(errno.EAGAIN, f"no thread could be started: {error}")
