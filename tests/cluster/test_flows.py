# SPDX-License-Identifier: Apache-2.0
"""Our agent beside the real kube-proxy: made-up objects and configurations, and how evenly endpoints are chosen."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.flows.generated import scenarios
from tests.flows.objects import PODS, End, Svc
from tests.flows.reduce import as_code, reduce
from tests.flows.scenarios import MODES, Scenario
from tests.flows.side_by_side import SideBySide
from tests.flows.world import new_world
from tests.support.apiserver import ApiServer

#: Set these to see a failure again, or to look longer (make parity). An object set is one step of a seed, in one mode.
SEED = int(os.environ.get("FLOW_SEED", secrets.randbelow(1_000_000)))
SEEDS = int(os.environ.get("FLOW_SEEDS", "1"))
STEPS = int(os.environ.get("FLOW_STEPS", "5"))
WAY = os.environ.get("FLOW_WAY", "defaults")
#: Seconds for making a failure small.
REDUCE = float(os.environ.get("FLOW_REDUCE", "120"))


@pytest.fixture(scope="module")
def beside() -> Iterator[SideBySide]:
    with ApiServer() as server, new_world() as theirs, new_world() as ours:
        pair = SideBySide(theirs, ours, server, WAY)
        yield pair
        pair.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(SEEDS))
def test_made_up_objects(mode: str, number: int, beside: SideBySide) -> None:
    seed = SEED + number
    print(f"FLOW_SEED={seed}, FLOW_STEPS={STEPS}, FLOW_WAY={WAY}, mode {mode}", flush=True)
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
            print(told, flush=True)
            pytest.fail(told)


#: Connections of each service, and what chi-square exceeds once in a million draws (three degrees of freedom).
DRAWS = 3000
RARE = 30.66
EVEN = Svc("even", 10, [[End(pod) for pod in PODS]])


@pytest.mark.parametrize("mode", MODES)
def test_endpoints_are_chosen_evenly(mode: str, beside: SideBySide) -> None:
    """A connection from outside, a datagram of a pod, a connection of the node itself: each 3 000 times."""
    scenario = Scenario("even", [EVEN], {"clusterCIDR": "10.244.0.0/16,fd00:10:244::/48"})
    assert not beside.differences(mode, scenario)
    wanted = [("client", "VIP:80", "tcp4"), ("toolbox", "ClusterIP:53", "udp6"), ("node1", "ClusterIP:80", "tcp4")]
    for flow in scenario.flows():
        if (flow.source, flow.what.partition(" by ")[2], flow.key[2]) not in wanted:
            continue
        found = {}
        for who, counts in zip(("kube-proxy", "ours"), beside.answers(flow, DRAWS), strict=True):
            assert (counts.total(), len(counts)) == (DRAWS, len(PODS)), (who, counts)
            found[who] = _chi_square(counts)
        print(f"{flow}: chi-square {found['ours']:.1f}, kube-proxy {found['kube-proxy']:.1f}")
        assert found["ours"] < RARE, f"{flow}: {found}"
        wanted.remove((flow.source, flow.what.partition(" by ")[2], flow.key[2]))
    assert not wanted


def _chi_square(counts: Counter[str]) -> float:
    even = counts.total() / len(counts)
    return sum((count - even) ** 2 / even for count in counts.values())
