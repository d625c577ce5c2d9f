# SPDX-License-Identifier: Apache-2.0
"""Every recorded flow has the same result as with the real kube-proxy."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator

import pytest

from pyebpf_proxy import KUBERNETES_VERSION
from tests import ROOT
from tests.flows import recordings
from tests.flows.differences import DIFFERENCES
from tests.flows.flow import Flow, Ground
from tests.flows.pyebpf_proxy import WAYS, PyebpfProxy
from tests.flows.scenarios import MODES, Scenario, all_scenarios
from tests.flows.world import LOST_OF, FlowWorld, new_world

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

DOCUMENT = ROOT / "docs" / "differences.md"
#: On the ways after the first, one destination in so many is asked, and only in every second scenario with many
#: services. The next way asks the others.
SHARE = 1 if os.environ.get("FLOW_WHOLE") else 6
MANY = 10
FIRST, *OTHERS = WAYS
CASES = [(FIRST, mode, scenario) for mode in MODES for scenario in all_scenarios(mode)]
CASES += [
    (way, mode, scenario)
    for turn, way in enumerate(OTHERS)
    for number, mode in enumerate(MODES)
    for place, scenario in enumerate(all_scenarios(mode))
    if SHARE == 1 or (len(scenario.services) >= MANY and place % 2 == turn % 2 and place // 2 % len(MODES) == number)
]
#: Listed differences that some flow has shown; complete after the last case.
_shown: set[str] = set()


@pytest.fixture(scope="module")
def world() -> Iterator[FlowWorld]:
    with new_world() as made:
        yield made


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict[str, recordings.Answers]]:
    found = {}
    for mode in MODES:
        release, found[mode] = recordings.read(mode)
        assert release == f"Kubernetes {KUBERNETES_VERSION}"
    return found


def is_asked(flow: Flow, way: str) -> bool:
    """Every flow on the first way; on the others a share, the same in every run and another one for each way."""
    return way == FIRST or zlib.crc32(f"{way} {flow.what}".encode()) % SHARE == 0


@pytest.mark.parametrize(
    ("way", "mode", "scenario"), CASES, ids=[f"{way}, {mode}: {scenario.name}" for way, mode, scenario in CASES]
)
def test_flows_end_as_with_kube_proxy(
    way: str, mode: str, scenario: Scenario, world: FlowWorld, recorded: dict[str, dict[str, recordings.Answers]]
) -> None:
    answers = recorded[mode][scenario.name]
    flows = list(scenario.flows())
    assert {flow.key for flow in flows} == set(answers), "make record has not been run since the scenario was changed"
    proxy = PyebpfProxy(world, way)
    flows = [flow for flow in flows if is_asked(flow, way)]
    assert flows
    try:
        proxy.start(mode, scenario)
        ground = Ground(mode, scenario.config)
        wrong = world.compare(flows, ground, [answers[flow.key] for flow in flows], _shown)
    finally:
        proxy.stop()
    assert not wrong, f"{len(wrong)} of {len(flows)} flows:\n" + "\n".join(wrong[:40])


def test_t2_repeated_requests_after_no_answer_are_counted(world: FlowWorld, capsys: pytest.CaptureFixture[str]) -> None:
    """A busy machine sometimes loses an answer; but so could a proxy."""
    with capsys.disabled():
        print(f"\n  {world.silence}")
    assert not world.silence.too_much(LOST_OF), str(world.silence)


def test_every_listed_difference_is_shown_by_a_flow_and_has_its_reason() -> None:
    """Needs a run of all cases before it."""
    assert set(DIFFERENCES) == _shown
    section = DOCUMENT.read_text().partition("\n## In packet handling\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (.+)$", section, re.MULTILINE) == list(DIFFERENCES)
