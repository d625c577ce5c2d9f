# SPDX-License-Identifier: Apache-2.0
"""The agent on the node of a world, with a folder of manifests."""

from __future__ import annotations

from typing import Any

from tests.flows.objects import marker, service_cidr
from tests.flows.scenarios import Scenario
from tests.flows.world import FlowWorld

#: Configurations that must have the same result: fields of the DatapathConfiguration.
WAYS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no fast path": {"fastPath": False},
    "sockets of pods too": {"socketLB": "all"},
    "no socket programs": {"socketLB": "off"},
    "XDP": {"xdpDevices": ["eth0"]},
}


class PyebpfProxy:
    """Same interface as ``KubeProxy``, as far as a scenario needs it. ``way``: one of ``WAYS``."""

    def __init__(self, world: FlowWorld, way: str) -> None:
        self._world = world
        self._own = WAYS[way]
        self._step = 0

    def start(self, mode: str, scenario: Scenario) -> None:
        """Start the agent with the scenario's objects and wait until they are programmed."""
        self._world.give(scenario.node_addresses())
        self._world.lab.write("objects.yaml", [service_cidr(), *scenario.objects()])
        config = {"mode": mode, "clusterCIDR": "", **scenario.config}
        config[mode] = {"minSyncPeriod": "10ms"} | config.get(mode, {})
        agent = self._world.node.agent
        agent.start(config, own=self._own or None)
        agent.wait_synced()

    def write(self, scenario: Scenario) -> None:
        """Write other objects, and wait until they are programmed.

        Objects that change no service bring no sync: the marker does, as with ``KubeProxy``.
        """
        self._step += 1
        written = self._world.lab.write("objects.yaml", [service_cidr(), *marker(self._step), *scenario.objects()])
        self._world.node.agent.wait_synced(written)

    def stop(self) -> None:
        """End the agent and clean up."""
        agent = self._world.node.agent
        if agent.process is None:
            return
        agent.stop()
        agent.cleanup()
        self._world.give([])
        self._world.node.namespace.run("conntrack", "-F", check=False)
