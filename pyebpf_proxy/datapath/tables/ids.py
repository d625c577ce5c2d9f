# SPDX-License-Identifier: Apache-2.0
"""Numbers that are given out in rising order, so that a freed one does not come back soon."""

from __future__ import annotations

from collections.abc import Iterable


class Ids:
    """The numbers 1 … ``limit`` - 1. 0 means "none" in every map.

    ``used`` are taken from the start; ``start`` is where giving out begins (it is raised above all of ``used``).
    """

    def __init__(self, limit: int, used: Iterable[int] = (), start: int = 1) -> None:
        self._limit = limit
        self._used = set(used)
        self._next = max(start, max(self._used, default=0) + 1)
        # Until the end is reached for the first time, everything from _next on is free.
        self._wrapped = False

    def __contains__(self, number: int) -> bool:
        """Whether it is in use."""
        return number in self._used

    @property
    def available(self) -> int:
        return self._limit - 1 - len(self._used)

    def take(self, count: int) -> list[int]:
        """``count`` numbers that are not in use. The caller has looked at ``available``."""
        if count > self.available:
            raise ValueError(f"{count} ids wanted, {self.available} are free")
        if not self._wrapped and self._next + count <= self._limit:
            taken = list(range(self._next, self._next + count))
            self._used.update(taken)
            self._next += count
            return taken
        taken = []
        while len(taken) < count:
            if self._next >= self._limit:
                self._next, self._wrapped = 1, True
            if self._next not in self._used:
                taken.append(self._next)
                self._used.add(self._next)
            self._next += 1
        return taken

    def free(self, ids: Iterable[int]) -> None:
        self._used.difference_update(ids)
