# SPDX-License-Identifier: Apache-2.0
"""Repeats in a loop what the kernel refuses for a while, and reports no event for when it would succeed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Retry:
    """Calls ``work`` after a failure: ``first`` seconds later, then after twice as long each time, at most ``longest``.

    ``work`` reports its outcome by :meth:`failed` or :meth:`succeeded`. Nothing is called before :meth:`follow`.
    """

    def __init__(self, work: Callable[[], object], first: float, longest: float) -> None:
        self._work = work
        self._first, self._longest = first, longest
        self._seconds = first
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: It failed and was not called again since.
        self.due = False

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call it in this loop from now on, until ``close``."""
        self._loop = loop
        if self.due:
            self.failed()

    def failed(self) -> None:
        """Call it later."""
        self._cancel()
        self.due = True
        if self._loop is not None:
            self._timer = self._loop.call_later(self._seconds, self._call)
            self._seconds = min(2 * self._seconds, self._longest)

    def succeeded(self) -> None:
        """Call it no more. The next failure is the first one again."""
        self._cancel()
        self._seconds = self._first

    def close(self) -> None:
        """Call it no more, whatever fails."""
        self._cancel()
        self._loop = None

    def _call(self) -> None:
        self._cancel()
        self._work()

    def _cancel(self) -> None:
        self.due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
