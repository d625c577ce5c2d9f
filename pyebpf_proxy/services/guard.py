# SPDX-License-Identifier: Apache-2.0
"""Refuses external IPs that belong to the cluster itself or to another tenant. A tenant is a namespace.

A user who may create Services can set any externalIP, and kube-proxy then translates traffic to it (CVE-2020-8554).
docs/objects.md lists the refused addresses and the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Literal

from pyebpf_proxy.services.addresses import UNSPECIFIED
from pyebpf_proxy.services.claims import Claim
from pyebpf_proxy.services.model import Frontend, FrontendKind, IPFamily, Protocol, ServicePortName
from pyebpf_proxy.services.nodes import Network

#: checked: refuse addresses known to be in use; strict: also any address of a Node; unchecked: refuse nothing.
Check = Literal["checked", "strict", "unchecked"]
#: The Service whose endpoints are the API servers.
API_SERVER = ("default", "kubernetes")

#: A listening address, port and protocol.
Place = tuple[bytes, int, Protocol]
#: Namespace and name of a Service.
Key = tuple[str, str]

_GUARDED = (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER)


class Guard:
    """Knows the cluster's own addresses, and checks frontends against them.

    :param node_port: returns the service port that holds the claim of a NodePort.
    :param health_port: the port of the agents' health server, which load balancers ask; 0: none.
    """

    def __init__(
        self, check: Check, node_port: Callable[[Claim], ServicePortName | None], health_port: int = 0
    ) -> None:
        self._check = check
        self._node_port = node_port
        self._health_port = health_port
        self._nodes: Mapping[bytes, str] = {}
        self._kubelets: frozenset[tuple[bytes, int]] = frozenset()
        self._api_servers: frozenset[Place] = frozenset()
        self._ranges: dict[IPFamily, list[tuple[int, int, Network]]] = {family: [] for family in IPFamily}
        #: Health check node ports, as claims of NodePorts: the Services that have them, and had them at the last call.
        self._health_checks: dict[Claim, set[Key]] = {}
        self._health_checks_before: dict[Claim, frozenset[Key]] = {}
        #: Services with a health check node port that others have got since this was emptied.
        self.holders: set[Key] = set()
        #: The cluster's addresses have changed: every frontend must be checked again.
        self.changed = False

    def set_nodes(self, nodes: Mapping[bytes, str]) -> None:
        """Set the names of Nodes, by address."""
        self._nodes = nodes
        self.changed = True

    def set_kubelets(self, places: frozenset[tuple[bytes, int]]) -> None:
        """Set the addresses and ports of kubelets."""
        self.changed |= places != self._kubelets
        self._kubelets = places

    def set_api_servers(self, places: frozenset[Place]) -> None:
        """Set the listening addresses of API servers."""
        self.changed |= places != self._api_servers
        self._api_servers = places

    def set_service_cidrs(self, networks: Iterable[Network]) -> None:
        """Set the ServiceCIDRs."""
        self.changed = True
        self._ranges = {family: [] for family in IPFamily}
        for network in sorted(networks, key=str):
            shift = network.max_prefixlen - network.prefixlen
            self._ranges[IPFamily(network.version)].append((shift, int(network.network_address) >> shift, network))

    def set_health_checks(self, key: Key, before: Set[Claim], now: Set[Claim]) -> None:
        """Set the health check node ports of a Service, one in each of its families. ``before``: what they were."""
        for claim in before ^ now:
            holders = self._health_checks.setdefault(claim, set())
            self._health_checks_before.setdefault(claim, frozenset(holders))
            if claim in now:
                self.holders |= holders
                holders.add(key)
            else:
                holders.discard(key)
            if not holders:
                del self._health_checks[claim]

    def changed_health_checks(self) -> list[Claim]:
        """The health check node ports that other Services have than at the last call."""
        before, self._health_checks_before = self._health_checks_before, {}
        return [claim for claim, keys in before.items() if self._health_checks.get(claim, frozenset()) != keys]

    def why_not(self, name: ServicePortName, frontend: Frontend) -> str:
        """Why a frontend is refused: what its address is, as a noun phrase. Empty: it is accepted.

        ClusterIPs and NodePorts need no check, because the cluster allocates them. It also allocates the addresses of
        load balancers, but not their ports: on a Node's address, such a port may be that of another Service's NodePort
        or health check, or of a program of Kubernetes.
        """
        if frontend.kind not in _GUARDED or self._check == "unchecked":
            return ""
        external = frontend.kind is FrontendKind.EXTERNAL_IP
        node = self._nodes.get(frontend.address)
        if node is not None:
            if why := self._why_not_on_node(name, frontend):
                return f"{why} Node {node}"
            if external and self._check == "strict":
                return f"an address of Node {node}"
        if not external and node is None:
            return ""
        if (frontend.address, frontend.port, name.protocol) in self._api_servers:
            return "" if name.namespace == API_SERVER[0] else "an API server"
        ranges = self._ranges[name.family] if external else ()
        number = int.from_bytes(frontend.address, "big") if ranges else 0
        inside = next((network for shift, prefix, network in ranges if number >> shift == prefix), None)
        return "" if inside is None else f"in the ServiceCIDR {inside}"

    def _why_not_on_node(self, name: ServicePortName, frontend: Frontend) -> str:
        """What else a port of a Node's address is; a phrase that the Node follows."""
        place = Claim(UNSPECIFIED[name.family], frontend.port, name.protocol)
        holder = self._node_port(place)
        if holder is not None and holder.namespace != name.namespace:
            return f"{place} of Service {holder.namespace}/{holder.name} on"
        checks = [key for key in self._health_checks.get(place, ()) if key[0] != name.namespace]
        if checks:
            return f"the health check node port of Service {'/'.join(min(checks))} on"
        if name.protocol is not Protocol.TCP:
            return ""
        if frontend.port == self._health_port:
            return "the port of /healthz on"
        return "the kubelet of" if (frontend.address, frontend.port) in self._kubelets else ""
