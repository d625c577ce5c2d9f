# SPDX-License-Identifier: Apache-2.0
"""Our agent on the node of a world, fed by a folder of manifests."""

from __future__ import annotations

from typing import Any

from tests.flows.objects import service_cidr
from tests.flows.scenarios import Scenario
from tests.flows.world import World


class Ours:
    """Same interface as ``KubeProxy``, as far as a scenario needs it."""

    def __init__(
        self,
        world: World,
        lane: str = "auto",
        more: dict[str, Any] | None = None,
        own: dict[str, Any] | None = None,
    ) -> None:
        """``more``: fields of the KubeProxyConfiguration; ``own``: of our own document."""
        self._world = world
        self._lane = lane
        self._more = more or {}
        self._own = own

    def start(self, mode: str, scenario: Scenario) -> None:
        """Start the agent with the scenario's objects and wait until they are programmed."""
        self._world.lab.write("objects.yaml", [service_cidr(), *scenario.objects()])
        config = {"mode": mode, "clusterCIDR": "", **self._more, **scenario.config}
        config[mode] = {"minSyncPeriod": "10ms"} | config.get(mode, {})
        agent = self._world.node.agent
        agent.start(config, self._lane, self._own)
        agent.wait_synced()

    def write(self, scenario: Scenario) -> None:
        """Other objects, and wait until they are programmed."""
        lab = self._world.lab
        written = lab.write("objects.yaml", [service_cidr(), *scenario.objects()])
        if written:
            self._world.node.agent.wait_synced(written)

    def stop(self) -> None:
        """End it and take everything away."""
        agent = self._world.node.agent
        if agent.process is not None:
            agent.stop()
        agent.cleanup()
        self._world.node.namespace.run("conntrack", "-F", check=False)
