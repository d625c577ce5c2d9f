# SPDX-License-Identifier: Apache-2.0
"""The real kube-proxy and the agent, each in its own world, with the same objects at the same time."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.flows.flow import Flow, Ground
from tests.flows.kube_proxy import KubeProxy
from tests.flows.pyebpf_proxy import PyebpfProxy
from tests.flows.scenarios import Scenario
from tests.flows.world import BRIEF, LONG, LOOKS, FlowWorld, Silence, briefly, doubts, unlisted, with_evidence
from tests.support.apiserver import ApiError, ApiServer


class SideBySide:
    """The first ``differences`` of a configuration starts both; another configuration restarts them.

    ``way``: the one of ``WAYS`` that pyebpf-proxy uses.
    """

    def __init__(self, expected: FlowWorld, actual: FlowWorld, server: ApiServer, way: str) -> None:
        self._worlds = expected, actual
        self._kube_proxy = KubeProxy(expected, server)
        self._proxy = PyebpfProxy(actual, way)
        self._running: tuple[str, dict[str, Any]] | None = None
        #: Listed differences that some flow has shown.
        self.shown: set[str] = set()

    def close(self) -> None:
        self.stop()
        self._kube_proxy.close()

    def stop(self) -> None:
        """End both, and remove what they have programmed."""
        self._running = None
        self._kube_proxy.stop()
        self._proxy.stop()

    def differences(self, mode: str, scenario: Scenario) -> list[str]:
        """Give both the scenario and send its flows through both; returns the unlisted differences, in words."""
        if self._running != (mode, scenario.config):
            self.stop()
            self._proxy.start(mode, scenario)
            self._kube_proxy.start(mode, scenario)
            self._running = mode, scenario.config
        self._proxy.write(scenario)
        self._kube_proxy.change(scenario.objects())
        flows, ground = list(scenario.flows()), Ground(mode, scenario.config)
        short = briefly(flows)
        expected, actual = [finish() for finish in [world.start_asking(short, BRIEF) for world in self._worlds]]
        for longer in LOOKS:
            doubtful = doubts(flows, ground, expected, actual)
            if not doubtful:
                break
            again = [flows[number] for number in doubtful]
            for seen, found in zip(
                (expected, actual), [world.ask(again, longer) for world in self._worlds], strict=True
            ):
                for number, one in zip(doubtful, found, strict=True):
                    seen[number] = with_evidence(seen[number], one)
        return unlisted(flows, ground, expected, actual, self.shown)

    def silence(self) -> dict[str, Silence]:
        """How many requests each has lost so far in flows that were answered in the end, by its name."""
        return dict(zip(("kube-proxy", "pyebpf-proxy"), (world.silence for world in self._worlds), strict=True))

    def differ_in(self, mode: str, scenario: Scenario) -> bool:
        """Whether a scenario has different results after a new start of both."""
        self.stop()
        try:
            return bool(self.differences(mode, scenario))
        except ApiError:
            return False

    def answers(self, flow: Flow, count: int) -> tuple[Counter[str], Counter[str]]:
        """The servers that answer ``count`` requests, each from a new port: with kube-proxy, with pyebpf-proxy."""
        flows = [flow._replace(count=0)] * count
        found = [world.start_asking(flows, LONG) for world in self._worlds]
        expected, actual = (Counter(outcome for seen in finish() for outcome in seen.outcomes) for finish in found)
        return expected, actual
