# SPDX-License-Identifier: Apache-2.0
"""Made-up objects and configurations: every flow ends with our agent as it does with the real kube-proxy beside it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from tests.cluster.apiserver import ApiServer
from tests.flows.flow import Seen
from tests.flows.generated import scenarios
from tests.flows.kube_proxy import KubeProxy
from tests.flows.ours import Ours
from tests.flows.scenarios import MODES
from tests.flows.world import World, new_world

#: Set these to see a failure again, or to look longer: 300 object sets and more are SEEDS=30.
SEED = int(os.environ.get("FLOW_SEED", secrets.randbelow(1_000_000)))
SEEDS = int(os.environ.get("FLOW_SEEDS", "1"))
STEPS = int(os.environ.get("FLOW_STEPS", "6"))
LANE = os.environ.get("FLOW_LANE", "auto")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with new_world() as made:
        yield made


@pytest.fixture(scope="module")
def kube_proxy(world: World) -> Iterator[KubeProxy]:
    with ApiServer() as server:
        proxy = KubeProxy(world, server)
        yield proxy
        proxy.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(SEEDS))
def test_made_up_objects(mode: str, number: int, world: World, kube_proxy: KubeProxy) -> None:
    seed = SEED + number
    print(f"FLOW_SEED={seed}, mode {mode}")
    steps = list(scenarios(seed, mode, STEPS))
    theirs: list[list[Seen]] = []
    kube_proxy.start(mode, steps[0])
    try:
        for step in steps:
            kube_proxy.change(step.objects())
            world.forget_flows()
            theirs.append(world.ask(list(step.flows())))
    finally:
        kube_proxy.stop()
    proxy = Ours(world, LANE)
    wrong: list[str] = []
    try:
        proxy.start(mode, steps[0])
        for step, seen in zip(steps, theirs, strict=True):
            proxy.write(step)
            world.forget_flows()
            found = world.compare(list(step.flows()), seen, set())
            wrong += [f"{step.name} {step.config}: {text}" for text in found]
    finally:
        proxy.stop()
    assert not wrong, f"FLOW_SEED={seed}, mode {mode}: {len(wrong)} flows\n" + "\n".join(wrong[:30])
