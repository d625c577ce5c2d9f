# SPDX-License-Identifier: Apache-2.0
"""A data plane that only prepares (``--init-only``): the loop's first sync makes the places, nothing is served."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pyebpf_proxy.datapath.datapath import Datapath
from pyebpf_proxy.node_facts import NodeFacts
from pyebpf_proxy.services.model import ServicePort, ServicePortName


class Preparation:
    """``done`` once the first sync has been."""

    def __init__(self, datapath: Datapath) -> None:
        self._datapath = datapath
        self.done = False

    def start(self, facts: NodeFacts, wanted: Mapping[ServicePortName, ServicePort | None]) -> Collection[str]:
        """Prepare; DatapathError as ``Datapath.start``."""
        self._datapath.prepare()
        self.done = True
        return ()

    def apply(self, delta: Mapping[ServicePortName, ServicePort | None], complete: bool = False) -> Collection[str]:
        """Nothing: services are for the agent."""
        return ()

    def node_changed(self, facts: NodeFacts) -> None:
        """Nothing."""

    def refresh(self) -> None:
        """Nothing."""

    async def collect(self) -> None:
        """Nothing."""
