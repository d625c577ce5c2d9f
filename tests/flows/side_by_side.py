# SPDX-License-Identifier: Apache-2.0
"""The real kube-proxy and our agent, each in a world of its own, with the same objects at the same time."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.flows.differences import difference
from tests.flows.flow import Flow
from tests.flows.kube_proxy import KubeProxy
from tests.flows.ours import Ours
from tests.flows.scenarios import Scenario
from tests.flows.world import BRIEF, LONG, LOOKS, FlowWorld, briefly, unlisted, with_evidence
from tests.support.apiserver import ApiError, ApiServer


class SideBySide:
    """Both are started by the first ``differences`` of a configuration, and again when it is another.

    ``way``: which of ``WAYS`` ours goes.
    """

    def __init__(self, theirs: FlowWorld, ours: FlowWorld, server: ApiServer, way: str) -> None:
        self._worlds = theirs, ours
        self._theirs = KubeProxy(theirs, server)
        self._ours = Ours(ours, way)
        self._running: tuple[str, dict[str, Any]] | None = None
        #: Listed differences that some flow has shown.
        self.shown: set[str] = set()

    def close(self) -> None:
        self.stop()
        self._theirs.close()

    def stop(self) -> None:
        """End both, with what they programmed."""
        self._running = None
        self._theirs.stop()
        self._ours.stop()

    def differences(self, mode: str, scenario: Scenario) -> list[str]:
        """Give both the scenario, send its flows through both; what differs and is not listed, in words."""
        if self._running != (mode, scenario.config):
            self.stop()
            self._ours.start(mode, scenario)
            self._theirs.start(mode, scenario)
            self._running = mode, scenario.config
        self._ours.write(scenario)
        self._theirs.change(scenario.objects())
        for world in self._worlds:
            world.forget_flows()
        flows = list(scenario.flows())
        short = briefly(flows)
        theirs, ours = [finish() for finish in [world.start_asking(short, BRIEF) for world in self._worlds]]
        for longer in LOOKS:
            doubtful = [
                number for number, flow in enumerate(flows) if difference(flow, theirs[number], ours[number]) is None
            ]
            if not doubtful:
                break
            again = [flows[number] for number in doubtful]
            for seen, found in zip((theirs, ours), [world.ask(again, longer) for world in self._worlds], strict=True):
                for number, one in zip(doubtful, found, strict=True):
                    seen[number] = with_evidence(seen[number], one)
        return unlisted(flows, theirs, ours, self.shown)

    def differ_in(self, mode: str, scenario: Scenario) -> bool:
        """Whether a scenario comes to different ends, from a fresh start of both. What nobody takes does not."""
        self.stop()
        try:
            return bool(self.differences(mode, scenario))
        except ApiError:
            return False

    def answers(self, flow: Flow, count: int) -> tuple[Counter[str], Counter[str]]:
        """Who answers ``count`` requests, each from a new port: with kube-proxy, with ours."""
        flows = [flow._replace(count=0)] * count
        found = [world.start_asking(flows, LONG) for world in self._worlds]
        theirs, ours = (Counter(outcome for seen in finish() for outcome in seen.outcomes) for finish in found)
        return theirs, ours
