# SPDX-License-Identifier: Apache-2.0
"""A kube-proxy that was on this node, or still runs on it: its leftovers."""

from __future__ import annotations

from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.migration.monitor import KubeProxyMonitor
from pyebpf_proxy.services.node_facts import NodeFacts


class KubeProxy(Manager):
    """Removes the rules of kube-proxy, and warns if they come back."""

    def __init__(self, effective: Effective) -> None:
        super().__init__()
        self._monitor = KubeProxyMonitor(effective.ipvs_exclude_cidrs)

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        self._opened.callback(self._monitor.close)
        self._monitor.replaced()

    def refresh(self) -> None:
        self._monitor.look()
