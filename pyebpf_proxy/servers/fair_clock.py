# SPDX-License-Identifier: Apache-2.0
"""Fair shares of CPU time, by the virtual time of generalized processor sharing."""

from __future__ import annotations

import heapq
from itertools import count


class Debtor:
    """A member of a clock. It uses CPU time first, and is charged afterwards."""

    __slots__ = ("due", "owes")

    def __init__(self) -> None:
        #: The virtual time at which nothing is owed any more, and whether the clock counts the member.
        self.due = 0.0
        self.owes = False


class FairClock:
    """Divides CPU time among those who owe some.

    All debtors get equal parts, until they owe nothing. So one that needs less than an equal part leaves the rest to
    the others, and one that is alone gets everything. The virtual time is what each debtor has been given: it passes
    the faster, the fewer there are.
    """

    def __init__(self, rate: float = 1.0, parent: FairClock | None = None) -> None:
        """``rate``: the CPUs to divide. With ``parent``, what one of its debtors is given is divided instead."""
        self._rate = rate
        self._parent = parent
        self._base: float | None = None
        self._time = 0.0
        #: The number of debtors.
        self.debtors = 0
        # By the ``due`` that each debtor had when it came; it may be later by now, or the debtor be removed.
        self._queue: list[tuple[float, int, Debtor]] = []
        self._numbers = count()

    def time(self, now: float) -> float:
        """The virtual time. ``now``: seconds."""
        base = now * self._rate if self._parent is None else self._parent.time(now)
        given = 0.0 if self._base is None else max(0.0, base - self._base)
        self._base = base
        while self._queue:
            due, number, debtor = self._queue[0]
            if not debtor.owes:
                heapq.heappop(self._queue)
            elif debtor.due > due:
                heapq.heapreplace(self._queue, (debtor.due, number, debtor))
            elif (needed := (due - self._time) * self.debtors) <= given:
                given -= needed
                self._time = due
                self.remove(debtor)
            else:
                break
        # Without debtors it passes as with one.
        self._time += given / max(1, self.debtors)
        return self._time

    def charge(self, debtor: Debtor, used: float, now: float) -> None:
        """Charge a member for CPU time."""
        debtor.due = max(debtor.due, self.time(now)) + used
        if not debtor.owes:
            debtor.owes = True
            self.debtors += 1
            heapq.heappush(self._queue, (debtor.due, next(self._numbers), debtor))

    def remove(self, debtor: Debtor) -> None:
        """Forget what a member owes."""
        if debtor.owes:
            debtor.owes = False
            self.debtors -= 1
            if len(self._queue) > 2 * self.debtors + 64:
                self._queue = [entry for entry in self._queue if entry[2].owes]
                heapq.heapify(self._queue)

    def debt(self, debtor: Debtor, now: float) -> float:
        """What a member owes: seconds of CPU time."""
        return max(0.0, debtor.due - self.time(now))

    def wait(self, debt: float) -> float:
        """In how many seconds a debtor is given so much, if the debtors stay the same."""
        parts = debt * max(1, self.debtors)
        return parts / self._rate if self._parent is None else self._parent.wait(parts)
