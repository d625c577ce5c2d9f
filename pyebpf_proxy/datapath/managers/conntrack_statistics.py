# SPDX-License-Identifier: Apache-2.0
"""How many flows conntrack itself refuses."""

from __future__ import annotations

from typing import Any

from pyebpf_proxy.datapath.connections.ct_refusals import ConntrackRefusals
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.services.node_facts import NodeFacts


class ConntrackStatistics(Manager):
    """Follows the counters of conntrack."""

    def __init__(self) -> None:
        super().__init__()
        self._refusals = ConntrackRefusals()

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        self._run(self._refusals.run(), "conntrack's refusals")

    def refusals(self) -> dict[str, Any]:
        """The result of ``ConntrackRefusals.view``. Safe in any thread."""
        return self._refusals.view()
