# SPDX-License-Identifier: Apache-2.0
"""Some streams of random events against the slow model (tests/model). ``make test-model`` runs more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.cluster import Lab
from tests.model.stream import Model, run, shrink

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]
STEPS = 50


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Lab(nodes=1) as lab:
        yield Model(lab)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 17))
def test_the_kernel_agrees_with_the_model_after_every_step(model: Model, seed: int) -> None:
    run(model, seed, range(STEPS))


def test_a_stream_is_reduced_to_the_relevant_steps() -> None:
    tried: list[list[int]] = []

    def fails(numbers: object) -> bool:
        tried.append(list(numbers))  # type: ignore[call-overload]
        return {7, 31} <= set(tried[-1])

    assert shrink(fails, range(50)) == [7, 31]
    assert len(tried) <= 60
