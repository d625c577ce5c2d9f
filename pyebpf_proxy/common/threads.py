# SPDX-License-Identifier: Apache-2.0
"""Work in another thread, where the lack of threads or memory is an error of the kernel."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """:func:`asyncio.to_thread`. OSError (EAGAIN) if no thread can be started: a limit of processes or of memory."""
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
        raise OSError(errno.EAGAIN, f"no thread could be started: {error}") from error
