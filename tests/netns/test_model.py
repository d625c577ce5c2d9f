# SPDX-License-Identifier: Apache-2.0
"""Two hundred streams of random events against the slow model (tests/model). ``make test-model`` runs more."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.cluster import Lab
from tests import ROOT
from tests.model.stream import Model, run, shrink

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]
STEPS = 50
#: Streams in which the agent is not killed cost a third, because each start of an agent takes half a second. They are
#: so fast that programs are not detached there, either: after ten times in a minute the agent waits for a minute.
GROUPS, STREAMS, WITHOUT = 8, 23, "kill,restart,detach"


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Lab(nodes=1) as lab:
        yield Model(lab)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 17))
def test_the_kernel_agrees_with_the_model_after_every_step(model: Model, seed: int) -> None:
    run(model, seed, range(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_the_kernel_agrees_with_the_model_in_streams_without_kills(group: int) -> None:
    options = {"streams": STREAMS, "seed": 1000 + STREAMS * group, "jobs": 4, "without": WITHOUT, "shrink": 60}
    command = [sys.executable, "-m", "tests.model", *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, cwd=ROOT, check=False, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{STREAMS} streams of {STEPS} steps from seed {options['seed']}: 0 failed" in done.stdout


def test_a_stream_is_reduced_to_the_relevant_steps() -> None:
    tried: list[list[int]] = []

    def fails(numbers: object) -> bool:
        tried.append(list(numbers))  # type: ignore[call-overload]
        return {7, 31} <= set(tried[-1])

    assert shrink(fails, range(50)) == [7, 31]
    assert len(tried) <= 60
