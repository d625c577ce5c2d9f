# SPDX-License-Identifier: Apache-2.0
"""Sets of the nftables table: cluster IPs, their ports, ServiceCIDRs. nftables mode refuses the other ports."""

from __future__ import annotations

from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.managers.nft_table import NftTable
from pyebpf_proxy.datapath.netfilter.cluster_addresses import ClusterAddresses
from pyebpf_proxy.datapath.netfilter.nft_rules import Prefix
from pyebpf_proxy.services.node_facts import NodeFacts
from pyebpf_proxy.services.nodes import merged


class ClusterSets(Manager):
    """Fills the sets. Without nftables mode the table has none, and ignores them."""

    def __init__(self, effective: Effective, nft: NftTable) -> None:
        super().__init__()
        self._nft_mode = effective.nft_mode
        self._nft = nft
        self._addresses = ClusterAddresses()

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        self._addresses.apply(wanted)
        self._write_all()
        self.node_changed(facts)

    def apply(self, delta: Delta, complete: bool) -> None:
        if not self._nft_mode:
            return
        moved = self._addresses.apply(delta, complete)
        if complete:
            # The table may lack what an earlier change could not write.
            self._write_all()
            return
        # The ports come first: ports of defined services must not be refused.
        self._nft.table.change_ports("cluster_ports", moved.ports_added, moved.ports_removed)
        self._nft.table.change_addresses("cluster_ips", map(_prefix, moved.added), map(_prefix, moved.removed))

    def _write_all(self) -> None:
        self._nft.table.set_ports("cluster_ports", self._addresses.ports)
        self._nft.table.set_addresses("cluster_ips", map(_prefix, self._addresses.all))

    def node_changed(self, facts: NodeFacts) -> None:
        cidrs = {(network.network_address.packed, network.prefixlen) for network in merged(facts.service_cidrs)}
        self._nft.table.set_addresses("service_cidrs", cidrs)


def _prefix(address: bytes) -> Prefix:
    return address, 8 * len(address)
