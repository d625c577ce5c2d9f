# SPDX-License-Identifier: Apache-2.0
"""A data plane that only prepares (``--init-only``): the first sync creates mounts and tables; nothing is served."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pyebpf_proxy.datapath.datapath import Datapath
from pyebpf_proxy.services.model import ServicePort, ServicePortName
from pyebpf_proxy.services.node_facts import NodeFacts


class Preparation:
    """``done`` is set by the first sync."""

    def __init__(self, datapath: Datapath) -> None:
        self._datapath = datapath
        self.done = False

    def start(self, facts: NodeFacts, wanted: Mapping[ServicePortName, ServicePort | None]) -> Collection[str]:
        """Prepare; DatapathError as ``Datapath.start``."""
        self._datapath.prepare(facts)
        self.done = True
        return ()

    def apply(self, delta: Mapping[ServicePortName, ServicePort | None], complete: bool = False) -> Collection[str]:
        """Does nothing: the agent handles services."""
        return ()

    def node_changed(self, facts: NodeFacts) -> None:
        """Does nothing."""

    def refresh(self) -> bool:
        """Does nothing."""
        return False

    async def collect(self) -> None:
        """Does nothing."""
