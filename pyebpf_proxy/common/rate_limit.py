# SPDX-License-Identifier: Apache-2.0
"""Limits how often a loop does what others can trigger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pyebpf_proxy.common.limiter import Limiter


class RateLimit:
    """Does ``work`` at once, ``burst`` times in quick succession; from then on ``per_second`` times per second.

    What is called in between is done once, when the limit allows it: the last call counts, too. Before :meth:`follow`
    there is no limit.
    """

    def __init__(self, work: Callable[[], object], burst: int, per_second: float) -> None:
        self._work = work
        self._limiter = Limiter(per_second, burst)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use this loop for what must wait, until ``close``."""
        self._loop = loop

    def call(self) -> None:
        """Do it, now or as soon as the limit allows it."""
        if self._loop is None:
            self._work()
        elif self._timer is None:
            if wait := self._limiter.take():
                self._timer = self._loop.call_later(wait, self._call)
            else:
                self._work()

    def close(self) -> None:
        """Drop what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._loop = None

    def _call(self) -> None:
        self._timer = None
        self._work()
