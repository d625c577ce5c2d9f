# SPDX-License-Identifier: Apache-2.0
"""Rules of the nftables table for packets that the node itself sends."""

from __future__ import annotations

from collections.abc import Collection

from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.managers.nft_table import NftTable
from pyebpf_proxy.datapath.netfilter.host_rules import MOST_CHAINS, HostRules
from pyebpf_proxy.datapath.netfilter.nft import NftError
from pyebpf_proxy.datapath.settings import host_traffic
from pyebpf_proxy.services.node_facts import NodeFacts

#: Service ports over the limit that are named.
_SHOWN = 8
#: After a failure, the rules are written again at the next refresh, then after twice as many, up to this many.
_MOST_REFRESHES = 64


class HostPackets(Manager):
    """Rules for protocols that no socket program serves. If the kernel lacks an expression, everything else works."""

    def __init__(self, effective: Effective, nft: NftTable) -> None:
        super().__init__()
        self._effective = effective
        self._nft = nft
        self._problem = ""
        #: How many refreshes pass from one attempt to the next, and how many are left.
        self._pause = self._left = 1

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        #: The wanted rules; the table knows which of them it has.
        self._rules = HostRules(host_traffic(self._effective, facts))
        self._put(self._rules.after(wanted) or self._rules)

    def apply(self, delta: Delta, complete: bool) -> None:
        self._put(self._rules.after(delta, complete))

    def node_changed(self, facts: NodeFacts) -> None:
        self._put(self._rules.with_traffic(host_traffic(self._effective, facts)))

    def refresh(self) -> None:
        """Write the rules again if the kernel refused them: it may have lacked memory only for a moment."""
        if not self._problem:
            return
        self._left -= 1
        if self._left > 0:
            return
        self._pause = self._left = min(2 * self._pause, _MOST_REFRESHES)
        self._put(self._rules)

    def _put(self, changed: HostRules | None) -> None:
        if changed is None:
            return
        self._rules = changed
        try:
            self._nft.table.set_host_rules(changed)
        except NftError as error:
            self._problem = f"packets of the node itself are not served as configured: {error}"
        else:
            self._problem = ""
            self._pause = self._left = 1

    @property
    def problems(self) -> Collection[str]:
        found = [self._problem] if self._problem else []
        crowded = sorted(self._rules.crowded)
        found += [
            f"service port {name}: connections of the node itself have no session affinity, and none to itself is"
            f" masqueraded: its namespace has more than {MOST_CHAINS} endpoints that need a chain in nftables"
            for name in crowded[:_SHOWN]
        ]
        if len(crowded) > _SHOWN:
            found.append(f"{len(crowded) - _SHOWN} more service ports: the node's connections have no session affinity")
        return found
