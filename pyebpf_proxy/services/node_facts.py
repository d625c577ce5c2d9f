# SPDX-License-Identifier: Apache-2.0
"""Values of the Node objects that the data plane needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyebpf_proxy.config.addresses import Network
from pyebpf_proxy.services.model import IPFamily


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Addresses are packed, in network order."""

    #: Addresses of this Node, at most one of each family (spec/configuration §5.3).
    node_ips: dict[IPFamily, bytes] = field(default_factory=dict)
    #: The first pod CIDR of each family of this Node: the local pods in mode NodeCIDR (spec/service-semantics §6).
    node_cidrs: dict[IPFamily, Network] = field(default_factory=dict)
    #: The CIDRs of the ServiceCIDR objects, for unallocated ClusterIPs in nftables mode (§9).
    service_cidrs: frozenset[Network] = frozenset()
