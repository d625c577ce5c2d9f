# SPDX-License-Identifier: Apache-2.0
"""The cost of one change must not grow with the table: counted, not timed, from an object's text to the maps."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from bench.profile import Phases, Shape, changes, everything

FEW, MANY = 20, 600
TURNS = 20


def cost(shape: Shape) -> tuple[Counter[str], int]:
    """Map entries that a change writes, and Python lines that are executed for it, including collection."""
    phases = Phases()
    try:
        phases.run(everything(shape))
        warm_up, *rest = changes(shape, 1, TURNS + 1)
        phases.run([warm_up])
        phases.collect()
        phases.touched.clear()
        lines = 0

        def count(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal lines
            lines += event == "line"
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            for text in rest:
                phases.run([text])
            phases.collect()
        finally:
            sys.settrace(before)
        return phases.touched.copy(), lines
    finally:
        phases.close()


@pytest.fixture(scope="module")
def few() -> tuple[Counter[str], int]:
    return cost(Shape(FEW, 10))


def test_a_change_affects_its_own_service_only(few: tuple[Counter[str], int]) -> None:
    touched, _ = few
    assert touched["objects decoded"] == touched["service ports planned"] == touched["services flipped"] == TURNS
    assert touched["slots written"] == 10 * TURNS
    # One endpoint comes and one goes, in two or three maps (UDP), and the table.
    assert 3 * TURNS <= touched["map entries written"] <= 4 * TURNS
    assert 3 * TURNS <= touched["map entries removed"] <= 4 * TURNS


def test_the_work_for_a_change_does_not_grow_with_the_table(few: tuple[Counter[str], int]) -> None:
    touched, lines = cost(Shape(MANY, 10))
    assert touched == few[0]
    # A loop over all services would execute at least one line per service and change.
    assert lines < few[1] + TURNS * MANY / 10


def test_a_change_in_one_of_many_slices_reads_that_slice_only() -> None:
    """The list is written as a whole, so that it can be flipped. The texts of endpoints are not rebuilt."""
    few_slices, many_slices = Shape(1, 100, 2), Shape(1, 1000, 20)
    touched, lines = cost(few_slices)
    more_touched, more_lines = cost(many_slices)
    assert more_touched["objects decoded"] == touched["objects decoded"]
    assert more_touched["map entries written"] == touched["map entries written"]
    # A few lines per endpoint of the service: comprehensions over its lists, and no call for each endpoint.
    assert more_lines - lines < TURNS * 900 * 14, (lines, more_lines)
