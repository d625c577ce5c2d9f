# SPDX-License-Identifier: Apache-2.0
"""Ids that are allocated in rising order, so that a freed one is not reused soon."""

from __future__ import annotations

from collections.abc import Iterable

#: Ids that share one integer of bits.
_PAGE = 1024


class Ids:
    """The ids 1 … ``limit`` - 1. 0 means "none" in every map.

    ``used`` are taken from the start; allocation begins at ``start``, or above all of ``used``.
    One bit per id, in pages: a set of a hundred thousand numbers would take 10 MB.
    """

    def __init__(self, limit: int, used: Iterable[int] = (), start: int = 1) -> None:
        self._limit = limit
        pages: dict[int, int] = {}
        highest = start - 1
        # After a restart there may be a hundred thousand, so this loop calls no function for each.
        for number in used:
            page = number // _PAGE
            pages[page] = pages.get(page, 0) | 1 << number % _PAGE
            if number > highest:
                highest = number
        self._pages = pages
        self._count = sum(bits.bit_count() for bits in pages.values())
        self._next = highest + 1
        # Until the end is reached for the first time, all ids from _next on are free.
        self._wrapped = False

    def __contains__(self, number: int) -> bool:
        """Whether the id is in use."""
        page, bit = divmod(number, _PAGE)
        return bool(self._pages.get(page, 0) >> bit & 1)

    @property
    def available(self) -> int:
        return self._limit - 1 - self._count

    def take(self, count: int) -> list[int]:
        """``count`` free ids. The caller has checked ``available``."""
        if count > self.available:
            raise ValueError(f"{count} ids wanted, {self.available} are free")
        if not self._wrapped and self._next + count <= self._limit:
            taken = list(range(self._next, self._next + count))
            self._mark(self._next, count)
            self._next += count
            return taken
        taken = []
        while len(taken) < count:
            if self._next >= self._limit:
                self._next, self._wrapped = 1, True
            if self._next not in self:
                taken.append(self._next)
                self._mark(self._next, 1)
            self._next += 1
        return taken

    def free(self, ids: Iterable[int]) -> None:
        for number in ids:
            if number not in self:
                continue
            page, bit = divmod(number, _PAGE)
            left = self._pages[page] ^ 1 << bit
            if left:
                self._pages[page] = left
            else:
                del self._pages[page]
            self._count -= 1

    def _mark(self, first: int, count: int) -> None:
        """Mark ``count`` ids from ``first`` on, none of which is in use."""
        self._count += count
        while count:
            page, bit = divmod(first, _PAGE)
            part = min(count, _PAGE - bit)
            self._pages[page] = self._pages.get(page, 0) | ((1 << part) - 1) << bit
            first += part
            count -= part
