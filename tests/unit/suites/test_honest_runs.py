# SPDX-License-Identifier: Apache-2.0
"""What a passed run may claim: other inputs each time, no long pause, every kernel with both families."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests import ROOT
from tests.kernels import report
from tests.kernels.suites import SUITES, chosen
from tests.support import fast_lab


def test_t3_ci_searches_with_a_seed_of_its_own() -> None:
    """Each search has a random seed beside its fixed one (finding T3)."""
    text = (ROOT / ".ci" / "run").read_text()
    (seed,) = re.findall(r"^seed=(.*)$", text, re.MULTILINE)
    assert "$((RANDOM" in seed
    searches = "\n".join(re.findall(r"^(?:properties=|    fresh |        \").*$", text, re.MULTILINE))
    for name in ("--hypothesis-seed=", "FUZZ_SEED=", "--seed ", "CHANGES_SEED=", "FLOW_SEED=", "PARITY_SEED="):
        assert f"{name}$seed" in searches, name
    assert "PYEBPF_PROXY_FRESH=1" in searches


def test_t7_other_kernels_get_both_families_netem_bridges_and_xdp() -> None:
    """All suites together; a run without names says what it leaves out (finding T7)."""
    arguments = {suite.name: suite.arguments for suite in SUITES}
    assert "-k" not in arguments["packet"], "both families"
    assert {"tests/packet/test_xdp.py", "tests/packet/test_xdp_flows.py"} <= set(arguments["packet"])
    assert "tests/kernels/cases/test_guest_netem.py" in arguments["netem"]
    assert "tests/netns/test_lab_bridge.py" in arguments["bridge"]
    assert chosen("all") == SUITES
    run = {suite.name for suite in chosen("")}
    assert all(name in report.left_out() for name in arguments.keys() - run)
    assert "packet" in report.left_out()


@pytest.mark.parametrize(
    ("seconds", "times"),
    [
        ([0.01] * 5, 1.0),
        ([0.01, 0.01, 0.3, 0.01, 0.01], 1.0),  # one moment without CPU time
        ([0.02, 0.03, 0.03, 0.04, 0.3], 3.0),
        ([0.3] * 5, fast_lab.SLOWEST),
    ],
)
def test_t8_one_moment_without_cpu_time_allows_no_longer_pause(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], times: float
) -> None:
    """The worst of five measurements once allowed 30 s (finding T8)."""
    now = [0.0]
    for each in seconds:
        now += [now[-1], now[-1] + each]
    readings = iter(now[1:])
    monkeypatch.setattr(fast_lab, "time", SimpleNamespace(monotonic=lambda: next(readings)))
    assert fast_lab.slowness() == pytest.approx(times)


@pytest.mark.parametrize(("pause", "passes"), [(0.9, True), (4.9, True), (5.1, False), (29.0, False)])
def test_t8_no_machine_is_slow_enough_for_a_pause_of_five_seconds(
    monkeypatch: pytest.MonkeyPatch, pause: float, passes: bool
) -> None:
    """Such a pause is a fault of what is tested (finding T8)."""
    monkeypatch.setattr(fast_lab, "slowness", lambda: fast_lab.SLOWEST)
    talk: Any = SimpleNamespace(pause=pause, forget_pause=lambda: None, wait=lambda: None)
    if passes:
        with fast_lab.without_pause(talk):
            pass
        return
    with pytest.raises(AssertionError, match="paused for"), fast_lab.without_pause(talk):
        pass
