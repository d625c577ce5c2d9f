# SPDX-License-Identifier: Apache-2.0
"""All Nodes and ServiceCIDRs of the cluster, and the facts about this node (spec/configuration §5.3)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pyebpf_proxy.services.addresses import family_of
from pyebpf_proxy.services.endpoints import Topology
from pyebpf_proxy.services.model import IPFamily
from pyebpf_proxy.services.node_facts import NodeFacts
from pyebpf_proxy.services.nodes import NO_NODE, Network, NodeView, networks_of, view_node

if TYPE_CHECKING:
    from pyebpf_proxy.kube import objects


class NodeChange(NamedTuple):
    """What has changed. ``for_all``: something that affects every service port. ``owners``: Nodes' addresses."""

    for_all: bool
    owners: bool


class ClusterNodes:
    """The Nodes and ServiceCIDRs, and the facts about them.

    ``facts``, ``topology`` and ``owners`` (Node names by address) are replaced when they change, never modified.
    ``node_ip`` replaces this Node's address of the same family.
    """

    def __init__(self, node_name: str, node_ip: bytes | None) -> None:
        self._node_name = node_name
        self._node_ip = node_ip
        self._nodes: dict[str, NodeView] = {}
        self._service_cidrs: dict[str, tuple[Network, ...]] = {}
        self.topology = Topology(node_name, "")
        self.facts = NodeFacts()
        self.owners: dict[bytes, str] = {}

    @property
    def count(self) -> int:
        """The number of Nodes."""
        return len(self._nodes)

    @property
    def kubelets(self) -> frozenset[tuple[bytes, int]]:
        """Addresses and ports of all kubelets."""
        known = [node for node in self._nodes.values() if node.kubelet_port]
        return frozenset((address, node.kubelet_port) for node in known for address in node.addresses)

    def take(self, name: str, node: objects.Node | None) -> bool:
        """Set a Node; None if it is deleted. True: ``read`` must be called."""
        view = view_node(node) if node is not None else None
        if self._nodes.get(name) == view:
            return False
        if view is None:
            del self._nodes[name]
        else:
            self._nodes[name] = view
        return True

    def take_service_cidr(self, name: str, value: objects.ServiceCIDR | None) -> bool:
        """Set a ServiceCIDR; None if it is deleted. True: ``facts`` have changed."""
        spec = value.spec if value is not None else None
        cidrs = networks_of((spec.cidrs if spec is not None else None) or ())
        if self._service_cidrs.get(name, ()) == cidrs:
            return False
        self._service_cidrs[name] = cidrs
        every = frozenset(cidr for cidrs in self._service_cidrs.values() for cidr in cidrs)
        self.facts = replace(self.facts, service_cidrs=every)
        return True

    def read(self) -> NodeChange:
        """Update the attributes from the Nodes."""
        own, facts = self._nodes.get(self._node_name, NO_NODE), self.facts
        node_ips = self._node_ips(own)
        topology = Topology(self._node_name, own.zone)
        # Compared as lists: the order of the families matters.
        for_all = topology != self.topology or list(node_ips.items()) != list(facts.node_ips.items())
        if for_all:
            self.topology = topology
            facts = replace(facts, node_ips=node_ips)
        node_cidrs: dict[IPFamily, Network] = {}
        for cidr in own.pod_cidrs:
            node_cidrs.setdefault(IPFamily(cidr.version), cidr)
        if node_cidrs != facts.node_cidrs:
            facts = replace(facts, node_cidrs=node_cidrs)
        # If several Nodes have the same address, the first Node by name counts.
        owners = {
            address: name for name in sorted(self._nodes, reverse=True) for address in self._nodes[name].addresses
        }
        others, self.owners, self.facts = owners != self.owners, owners, facts
        return NodeChange(for_all, others)

    def _node_ips(self, own: NodeView) -> dict[IPFamily, bytes]:
        if self._node_ip is None:
            return dict(own.ips)
        family = family_of(self._node_ip)
        return {family: self._node_ip, **{other: ip for other, ip in own.ips.items() if other is not family}}
