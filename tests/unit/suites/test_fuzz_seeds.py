# SPDX-License-Identifier: Apache-2.0
"""The first inputs of a search of parsers, including the findings of earlier searches (tests/fuzz)."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import reached
from tests.fuzz.seeds import CORPUS, SEEDS, corpus
from tests.fuzz.targets import TARGETS


def test_every_target_has_seeds_and_a_corpus() -> None:
    assert SEEDS.keys() == TARGETS.keys()
    assert all(SEEDS.values())
    assert {path.stem for path in CORPUS.iterdir()} == TARGETS.keys()
    assert sum(path.stat().st_size for path in CORPUS.iterdir()) < 300_000


@pytest.mark.parametrize("name", TARGETS)
def test_the_parser_survives(name: str) -> None:
    """Complete, and cut anywhere."""
    for seed in SEEDS[name]:
        for length in {0, 1, len(seed) // 3, len(seed) // 2, len(seed) - 1, len(seed)}:
            TARGETS[name](seed[:length])


@pytest.mark.parametrize("name", TARGETS)
def test_the_parser_survives_the_kept_corpus(name: str) -> None:
    kept = corpus(name)
    assert kept
    for data in kept:
        TARGETS[name](data)


def test_the_kept_corpus_reaches_more_than_the_seeds() -> None:
    """For one small parser: a corpus must reach more lines than the seeds."""
    name = "rtnetlink"
    known = set().union(*(reached(TARGETS[name], seed) for seed in SEEDS[name]))
    assert known
    for data in corpus(name):
        assert reached(TARGETS[name], data) - known, data
        known |= reached(TARGETS[name], data)
