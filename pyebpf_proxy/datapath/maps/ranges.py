# SPDX-License-Identifier: Apache-2.0
"""Ranges of an array: best fit by length, neighbours merge when freed. The cost of a call does not grow with use."""

from __future__ import annotations

from bisect import bisect_left, insort


class Ranges:
    """The free ranges of 0 … ``size`` - 1. A range of length 0 is (0, 0) and takes nothing."""

    def __init__(self, size: int) -> None:
        self._ends: dict[int, int] = {}  # start -> end, of free ranges
        self._starts: dict[int, int] = {}  # end -> start
        self._by_length: dict[int, set[int]] = {}
        self._lengths: list[int] = []  # sorted; few distinct ones
        self.available = size
        if size:
            self._add(0, size)

    def take(self, length: int) -> int | None:
        """The start of a range, which is then taken; None if no free range is long enough."""
        if length == 0:
            return 0
        at = bisect_left(self._lengths, length)
        if at == len(self._lengths):
            return None
        start = next(iter(self._by_length[self._lengths[at]]))
        end = self._ends[start]
        self._remove(start)
        if end - start > length:
            self._add(start + length, end)
        self.available -= length
        return start

    def free(self, start: int, length: int) -> None:
        """Free a range exactly as it was taken."""
        if length == 0:
            return
        end = start + length
        self.available += length
        if end in self._ends:
            following_end = self._ends[end]
            self._remove(end)
            end = following_end
        if start in self._starts:
            before = self._starts[start]
            self._remove(before)
            start = before
        self._add(start, end)

    @property
    def longest(self) -> int:
        """The length of the longest free range."""
        return self._lengths[-1] if self._lengths else 0

    def all_free(self) -> list[tuple[int, int]]:
        """Every free range: start and end."""
        return list(self._ends.items())

    def take_at(self, start: int) -> int:
        """Take the free range that begins there, as a whole. Returns its length."""
        length = self._ends[start] - start
        self._remove(start)
        self.available -= length
        return length

    @classmethod
    def without(cls, size: int, taken: list[tuple[int, int]]) -> tuple[Ranges, list[bool]]:
        """An allocator in which these ranges (start, length) are taken, and which of them were accepted.

        A range that is out of bounds, or overlaps an earlier one in the list, is refused.
        """
        fresh = cls(0)
        accepted: list[tuple[int, int]] = []
        result = []
        for start, length in taken:
            at = bisect_left(accepted, (start, 0))
            fits = (
                start + length <= size
                and (at == 0 or accepted[at - 1][1] <= start)
                and (at == len(accepted) or start + length <= accepted[at][0])
            )
            result.append(fits or length == 0)
            if fits and length:
                accepted.insert(at, (start, start + length))
        position = 0
        for start, end in [*accepted, (size, size)]:
            if start > position:
                fresh._add(position, start)
                fresh.available += start - position
            position = end
        return fresh, result

    def _add(self, start: int, end: int) -> None:
        length = end - start
        self._ends[start] = end
        self._starts[end] = start
        if length not in self._by_length:
            self._by_length[length] = set()
            insort(self._lengths, length)
        self._by_length[length].add(start)

    def _remove(self, start: int) -> None:
        end = self._ends.pop(start)
        del self._starts[end]
        length = end - start
        starts = self._by_length[length]
        starts.remove(start)
        if not starts:
            del self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
