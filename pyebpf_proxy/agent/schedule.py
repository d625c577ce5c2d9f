# SPDX-License-Identifier: Apache-2.0
"""When the next sync may start: kube-proxy's batching as a pure state machine (spec/service-semantics §1.5).

The gap from the end of one sync to the start of the next is at least ``minimum``; the first is immediate. A failed
sync is repeated after ``retry``, unless a new change comes earlier. Without any change there is a full sync every
``full`` seconds; with changes, the first sync after this time is full. The caller passes the current time to every
method.
"""

from __future__ import annotations

FULL_SYNC_SECONDS = 3600.0


class Schedule:
    """All times are seconds of one monotonic clock."""

    def __init__(self, minimum: float, retry: float, full: float = FULL_SYNC_SECONDS) -> None:
        self._minimum = minimum
        self._retry = retry
        self._full = full
        self._wanted = False
        self._last_end: float | None = None
        self._next: float | None = None
        #: When the last full sync has started; the first sync is full.
        self._last_full: float | None = None

    def request(self, now: float) -> None:
        """Request a sync as soon as permitted, because something has changed."""
        self._wanted = True
        earliest = now if self._last_end is None else max(now, self._last_end + self._minimum)
        self._next = earliest if self._next is None else min(self._next, earliest)

    def resume(self, when: float) -> None:
        """Request a sync at this time, whatever the minimum: the last one has not planned everything."""
        self._wanted = True
        self._next = when

    def delay(self, now: float) -> float | None:
        """Seconds until the next sync; 0 means now, None that no sync is scheduled."""
        return None if self._next is None else max(0.0, self._next - now)

    def started(self, now: float) -> bool:
        """A sync starts, with all requested changes. True if it is for these only; False: it is a full sync."""
        wanted, self._wanted = self._wanted, False
        self._next = None
        if self._last_full is None:
            self._last_full = now
        if wanted and now - self._last_full < self._full:
            return True
        self._last_full = now
        return False

    def finished(self, now: float, ok: bool) -> None:
        """The sync has ended. A change that was requested meanwhile waits until ``minimum`` has passed."""
        self._last_end = now
        if self._wanted:
            self._next = now + self._minimum
        elif ok:
            self._next = now + self._full
        else:
            self._wanted = True
            self._next = now + max(self._minimum, self._retry)
