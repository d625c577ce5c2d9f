# SPDX-License-Identifier: Apache-2.0
"""Everything changes while thousands connect: each connection's result is one that the rules of its moment allow.

``CHANGES_ROUNDS`` repeats every course, ``CHANGES_SEED`` and ``CHANGES_STEPS`` choose the random one, ``CHANGES_FAST``
turns the fast path on. docs/changes-under-load.md describes what is guaranteed and how it is tested.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.cluster import Lab
from tests.changes.courses import courses
from tests.changes.world import ChangesWorld

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf, pytest.mark.alone]

ROUNDS = int(os.environ.get("CHANGES_ROUNDS", "0"))
COURSES = courses(int(os.environ.get("CHANGES_SEED", "1")), int(os.environ.get("CHANGES_STEPS", "6")))


@pytest.fixture(scope="module")
def world() -> Iterator[ChangesWorld]:
    with Lab() as lab, ChangesWorld(lab, fast=bool(os.environ.get("CHANGES_FAST"))) as made:
        yield made


@pytest.mark.parametrize("course", COURSES)
def test_no_connection_notices_a_change(world: ChangesWorld, course: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(max(1, ROUNDS)):
        outcome = world.run(COURSES[course])
        with capsys.disabled():
            print(f"\n  {course}: {outcome} ({world.plain:.0f} a second without services)")
        text = "\n".join(map(str, outcome.violations[:20]))
        assert not outcome.violations, f"{len(outcome.violations)} of {outcome.connections}:\n{text}"
