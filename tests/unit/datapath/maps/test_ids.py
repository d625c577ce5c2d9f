# SPDX-License-Identifier: Apache-2.0
"""Allocation of numbers and ranges: never twice, freed ones not soon again, none lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyebpf_proxy.datapath.maps.ids import Ids
from pyebpf_proxy.datapath.maps.ranges import Ranges


def test_ids_increase_and_a_freed_one_is_not_reused_soon() -> None:
    ids = Ids(100)
    assert ids.take(3) == [1, 2, 3]
    ids.free([2, 3])
    assert ids.take(2) == [4, 5]


def test_ids_start_above_those_in_use_and_remembered() -> None:
    assert Ids(100, {7, 3}).take(1) == [8]
    assert Ids(100, {7, 3}, start=50).take(1) == [50]


def test_ids_wrap_around_and_skip_those_in_use() -> None:
    ids = Ids(6, {2, 4})
    assert ids.take(2) == [5, 1]
    assert ids.available == 1
    assert ids.take(1) == [3]
    assert ids.available == 0
    with pytest.raises(ValueError, match="1 ids wanted, 0 are free"):
        ids.take(1)
    ids.free([4])
    assert ids.take(1) == [4]


def test_ids_that_start_at_the_end_wrap_at_once() -> None:
    assert Ids(4, start=9).take(3) == [1, 2, 3]


@given(st.lists(st.integers(0, 6)), st.integers(1, 12))
def test_ids_are_never_given_twice(steps: list[int], limit: int) -> None:
    ids = Ids(limit)
    used: list[int] = []
    for step in steps:
        if step > ids.available:
            ids.free(used[:2])
            del used[:2]
            continue
        taken = ids.take(step)
        assert not set(taken) & set(used)
        assert all(0 < i < limit for i in taken)
        used += taken
        assert ids.available == limit - 1 - len(used)


def test_an_empty_range_takes_no_room() -> None:
    ranges = Ranges(0)
    assert ranges.take(0) == 0
    ranges.free(0, 0)
    assert ranges.take(1) is None


def test_the_smallest_fitting_range_is_used() -> None:
    ranges = Ranges(100)
    starts = [ranges.take(n) for n in (5, 1, 2, 1, 80)]
    assert starts == [0, 5, 6, 8, 9]
    ranges.free(0, 5)
    ranges.free(6, 2)
    assert ranges.take(2) == 6
    assert ranges.take(3) == 0


def test_neighbours_are_joined() -> None:
    ranges = Ranges(9)
    assert [ranges.take(3) for _ in range(3)] == [0, 3, 6]
    for start in (0, 6, 3):
        ranges.free(start, 3)
    assert ranges.take(9) == 0
    assert ranges.take(1) is None
    assert ranges.available == 0


def test_ranges_that_are_in_use_at_the_start() -> None:
    ranges, fits = Ranges.without(20, [(4, 4), (0, 2), (6, 4), (19, 2), (5, 0), (10, 1)])
    assert fits == [True, True, False, False, True, True]
    assert ranges.available == 20 - 4 - 2 - 1
    assert sorted(filter(None, [ranges.take(2), ranges.take(2), ranges.take(9)])) == [2, 8, 11]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9))))
def test_ranges_never_overlap_and_nothing_is_lost(steps: list[tuple[bool, int]]) -> None:
    ranges = Ranges(40)
    held: list[tuple[int, int]] = []
    for take, n in steps:
        if take:
            start = ranges.take(n)
            if start is not None:
                held.append((start, n))
        elif held:
            ranges.free(*held.pop(n % len(held)))
        cells = [cell for start, length in held for cell in range(start, start + length)]
        assert len(cells) == len(set(cells))
        assert all(0 <= cell < 40 for cell in cells)
        assert ranges.available == 40 - len(cells)
        # An allocator that is created from the allocated ranges has the same free ranges.
        again, fits = Ranges.without(40, held)
        assert all(fits)
        assert again._ends == ranges._ends
