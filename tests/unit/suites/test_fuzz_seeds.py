# SPDX-License-Identifier: Apache-2.0
"""The inputs that a search of parsers begins with, which include what former searches found (tests/fuzz)."""

from __future__ import annotations

import pytest

from tests.fuzz.seeds import SEEDS
from tests.fuzz.targets import TARGETS


def test_every_target_has_seeds() -> None:
    assert SEEDS.keys() == TARGETS.keys()
    assert all(SEEDS.values())


@pytest.mark.parametrize("name", TARGETS)
def test_the_parser_survives(name: str) -> None:
    """Whole, and cut anywhere."""
    for seed in SEEDS[name]:
        for length in {0, 1, len(seed) // 3, len(seed) // 2, len(seed) - 1, len(seed)}:
            TARGETS[name](seed[:length])
