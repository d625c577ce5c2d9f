# SPDX-License-Identifier: Apache-2.0
"""Made-up objects and configurations: every flow ends with our agent as it does with the real kube-proxy beside it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from tests.cluster.apiserver import ApiServer
from tests.flows.beside import Beside
from tests.flows.generated import scenarios
from tests.flows.reduce import as_code, reduce
from tests.flows.scenarios import MODES
from tests.flows.world import new_world

#: Set these to see a failure again, or to look longer (make parity). An object set is one step of a seed, in one mode.
SEED = int(os.environ.get("FLOW_SEED", secrets.randbelow(1_000_000)))
SEEDS = int(os.environ.get("FLOW_SEEDS", "1"))
STEPS = int(os.environ.get("FLOW_STEPS", "5"))
WAY = os.environ.get("FLOW_WAY", "direct lane")
#: Seconds for making a failure small.
REDUCE = float(os.environ.get("FLOW_REDUCE", "120"))


@pytest.fixture(scope="module")
def beside() -> Iterator[Beside]:
    with ApiServer() as server, new_world() as theirs, new_world() as ours:
        pair = Beside(theirs, ours, server, WAY)
        yield pair
        pair.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(SEEDS))
def test_made_up_objects(mode: str, number: int, beside: Beside) -> None:
    seed = SEED + number
    for step in scenarios(seed, mode, STEPS):
        wrong = beside.differences(mode, step)
        if wrong:
            told = f"FLOW_SEED={seed}, FLOW_WAY={WAY}, mode {mode}, {step.name}: {len(wrong)} flows\n"
            told += "\n".join(wrong[:20])
            if beside.differ_in(mode, step):
                small = reduce(step, lambda scenario: beside.differ_in(mode, scenario), REDUCE)
                told += f"\nas small as it gets, for scenarios.py: {as_code(small)}"
            else:
                told += "\nnot from a fresh start: it takes the steps before"
            pytest.fail(told)
