# SPDX-License-Identifier: Apache-2.0
"""Addresses that a Service may name, and that are somebody else's all the same.

Whoever may write a Service may name any externalIP, and with kube-proxy gets what is sent there (CVE-2020-8554). What
is the cluster's own is refused: docs/objects.md says what, and why no more than that. A tenant is a namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from .addresses import UNSPECIFIED
from .claims import Claim
from .model import Frontend, FrontendKind, IPFamily, Protocol, ServicePortName
from .nodes import Network

#: checked: what is known to be another's is refused; strict: any address of a Node too; unchecked: nothing.
Check = Literal["checked", "strict", "unchecked"]
#: The Service whose endpoints are the API servers.
API_SERVER = ("default", "kubernetes")

#: An address, port and protocol where somebody listens.
Place = tuple[bytes, int, Protocol]

_GUARDED = (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER)


class Guard:
    """What is known of the cluster's own addresses, and what it says of a frontend.

    :param node_port: who has a NodePort, by its claim.
    """

    def __init__(self, check: Check, node_port: Callable[[Claim], ServicePortName | None]) -> None:
        self._check = check
        self._node_port = node_port
        self._nodes: Mapping[bytes, str] = {}
        self._kubelets: frozenset[tuple[bytes, int]] = frozenset()
        self._api_servers: frozenset[Place] = frozenset()
        self._ranges: dict[IPFamily, list[tuple[int, int, Network]]] = {family: [] for family in IPFamily}
        #: Something is other than before: every address may have another answer.
        self.changed = False

    def set_nodes(self, nodes: Mapping[bytes, str]) -> None:
        """Nodes by their addresses."""
        self._nodes = nodes
        self.changed = True

    def set_kubelets(self, places: frozenset[tuple[bytes, int]]) -> None:
        """Where kubelets listen."""
        self.changed |= places != self._kubelets
        self._kubelets = places

    def set_api_servers(self, places: frozenset[Place]) -> None:
        """Where API servers listen."""
        self.changed |= places != self._api_servers
        self._api_servers = places

    def set_service_cidrs(self, networks: Iterable[Network]) -> None:
        """What ClusterIPs are taken from."""
        self.changed = True
        self._ranges = {family: [] for family in IPFamily}
        for network in sorted(networks, key=str):
            shift = network.max_prefixlen - network.prefixlen
            self._ranges[IPFamily(network.version)].append((shift, int(network.network_address) >> shift, network))

    def why_not(self, name: ServicePortName, frontend: Frontend) -> str:
        """What an address of a Service is that it shall not have, as a noun phrase; empty: it may have it.

        ClusterIPs and NodePorts are given out by the cluster. So are addresses of load balancers, but not their ports:
        on a Node they may be NodePorts of others.
        """
        if frontend.kind not in _GUARDED or self._check == "unchecked":
            return ""
        node = self._nodes.get(frontend.address)
        if node is not None:
            node_port = Claim(UNSPECIFIED[name.family], frontend.port, name.protocol)
            holder = self._node_port(node_port)
            if holder is not None and holder.namespace != name.namespace:
                return f"{node_port} of Service {holder.namespace}/{holder.name} on Node {node}"
        if frontend.kind is not FrontendKind.EXTERNAL_IP:
            return ""
        if node is not None:
            if self._check == "strict":
                return f"an address of Node {node}"
            if name.protocol is Protocol.TCP and (frontend.address, frontend.port) in self._kubelets:
                return f"the kubelet of Node {node}"
        if (frontend.address, frontend.port, name.protocol) in self._api_servers:
            return "" if name.namespace == API_SERVER[0] else "an API server"
        ranges = self._ranges[name.family]
        number = int.from_bytes(frontend.address, "big") if ranges else 0
        inside = next((network for shift, prefix, network in ranges if number >> shift == prefix), None)
        return "" if inside is None else f"in the ServiceCIDR {inside}"
