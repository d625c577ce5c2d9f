# SPDX-License-Identifier: Apache-2.0
"""The agent compared with the real kube-proxy: random objects and configurations, and the choice of endpoints."""

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
from tests.flows.world import LOST_OF_TWO, new_world
from tests.support.apiserver import ApiServer

#: Set these to repeat a failure, or to search longer (make parity). An object set is one step of a seed, in one mode.
SEED = int(os.environ.get("FLOW_SEED", secrets.randbelow(1_000_000)))
SEEDS = int(os.environ.get("FLOW_SEEDS", "1"))
STEPS = int(os.environ.get("FLOW_STEPS", "5"))
WAY = os.environ.get("FLOW_WAY", "defaults")
#: Seconds for reducing a failure.
REDUCE = float(os.environ.get("FLOW_REDUCE", "120"))


@pytest.fixture(scope="module")
def pair() -> Iterator[SideBySide]:
    with ApiServer() as server, new_world() as reference, new_world() as subject:
        pair = SideBySide(reference, subject, server, WAY)
        yield pair
        pair.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(SEEDS))
def test_random_objects(mode: str, number: int, pair: SideBySide) -> None:
    seed = SEED + number
    print(f"FLOW_SEED={seed}, FLOW_STEPS={STEPS}, FLOW_WAY={WAY}, mode {mode}", flush=True)
    for step in scenarios(seed, mode, STEPS):
        wrong = pair.differences(mode, step)
        if wrong:
            report = f"FLOW_SEED={seed}, FLOW_WAY={WAY}, mode {mode}, {step.name}: {len(wrong)} flows\n"
            report += "\n".join(wrong[:20])
            if pair.differ_in(mode, step):
                small = reduce(step, lambda scenario: pair.differ_in(mode, scenario), REDUCE)
                report += f"\nas small as it gets, for scenarios.py: {as_code(small)}"
            else:
                report += "\nnot from a fresh start: it takes the steps before"
            print(report, flush=True)
            pytest.fail(report)


#: Connections of each service, and the chi-square value that is exceeded once in a million draws (three degrees of
#: freedom).
DRAWS = 3000
RARE = 30.66
EVEN = Svc("even", 10, [[End(pod) for pod in PODS]])


@pytest.mark.parametrize("mode", MODES)
def test_endpoints_are_chosen_evenly(mode: str, pair: SideBySide) -> None:
    """A connection from outside, a datagram of a pod, a connection of the node itself: each 3 000 times."""
    scenario = Scenario("even", [EVEN], {"clusterCIDR": "10.244.0.0/16,fd00:10:244::/48"})
    assert not pair.differences(mode, scenario)
    wanted = [("client", "VIP:80", "tcp4"), ("toolbox", "ClusterIP:53", "udp6"), ("node1", "ClusterIP:80", "tcp4")]
    for flow in scenario.flows():
        if (flow.source, flow.what.partition(" by ")[2], flow.key[2]) not in wanted:
            continue
        found = {}
        for proxy, counts in zip(("kube-proxy", "pyebpf-proxy"), pair.answers(flow, DRAWS), strict=True):
            assert (counts.total(), len(counts)) == (DRAWS, len(PODS)), (proxy, counts)
            found[proxy] = _chi_square(counts)
        print(f"{flow}: chi-square {found['pyebpf-proxy']:.1f}, kube-proxy {found['kube-proxy']:.1f}")
        assert found["pyebpf-proxy"] < RARE, f"{flow}: {found}"
        wanted.remove((flow.source, flow.what.partition(" by ")[2], flow.key[2]))
    assert not wanted


def test_t2_repeated_requests_after_no_answer_are_counted(pair: SideBySide, capsys: pytest.CaptureFixture[str]) -> None:
    """In all flows before: a busy machine sometimes loses an answer; but so could a proxy."""
    found = pair.silence()
    text = "\n".join(f"  {name}: {silence}" for name, silence in found.items())
    with capsys.disabled():
        print(f"\n{text}")
    assert not any(silence.too_much(LOST_OF_TWO) for silence in found.values()), text
    assert not found["pyebpf-proxy"].is_more_than(found["kube-proxy"]), text


def _chi_square(counts: Counter[str]) -> float:
    even = counts.total() / len(counts)
    return sum((count - even) ** 2 / even for count in counts.values())
