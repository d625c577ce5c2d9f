# SPDX-License-Identifier: Apache-2.0
"""Services and EndpointSlices of the flows' lab, valid for the API server, and the flows to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyebpf_proxy.lab.addresses import (
    SERVICE_CIDR,
    Dual,
    cluster_ip,
    node_address,
    pod_address,
    pod_cidr,
    pod_gateway,
    vip,
)
from pyebpf_proxy.lab.manifests import Object
from pyebpf_proxy.lab.manifests import node as node_object
from tests.flows.flow import Flow

#: Where the lab's pods are: node, index on it.
PODS = {"local-1": (1, 0), "local-2": (1, 1), "remote-1": (2, 0), "remote-2": (2, 1)}
ZONES = {1: "zone-a", 2: "zone-b"}
FAMILIES = (4, 6)


def address_of(pod: str) -> Dual:
    """A pod's addresses; ``host``: the node's own, as a pod with hostNetwork has them."""
    if pod == "host":
        return node_address(1)
    return pod_address(*PODS[pod])


def nodes() -> list[Object]:
    """The two Nodes, with zones."""
    return [node_object(f"node{n}", node_address(n), pod_cidr(n), ZONES[n]) for n in (1, 2)]


def service_cidr() -> Object:
    """An object that API servers create at their first start: the ranges of cluster IPs."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": {"name": "kubernetes"},
        "spec": {"cidrs": list(SERVICE_CIDR)},
    }


@dataclass
class End:
    """One endpoint of a slice."""

    pod: str
    ready: bool | None = True
    serving: bool | None = None
    terminating: bool | None = None
    zones: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    #: Without a nodeName it counts as remote.
    placed: bool = True

    def to_object(self, family: int) -> Object:
        states = {"ready": self.ready, "serving": self.serving, "terminating": self.terminating}
        found: Object = {
            "addresses": [address_of(self.pod).of(family)],
            "conditions": {name: value for name, value in states.items() if value is not None},
        }
        if self.placed:
            found["nodeName"] = f"node{1 if self.pod == 'host' else PODS[self.pod][0]}"
        hints: Object = {}
        if self.zones:
            hints["forZones"] = [{"name": name} for name in self.zones]
        if self.nodes:
            hints["forNodes"] = [{"name": name} for name in self.nodes]
        return found | ({"hints": hints} if hints else {})


@dataclass
class Port:
    """A service port and the port of its endpoints."""

    number: int
    protocol: str = "TCP"
    target: int = 8080
    name: str = ""
    node_port: int = 0


@dataclass
class Svc:
    """A short description of a Service. ``ends``: its slices, each a list of endpoints; every slice exists in each
    family.
    """

    name: str
    number: int
    ends: Sequence[Sequence[End]] = ()
    ports: Sequence[Port] = ()
    families: tuple[int, ...] = FAMILIES
    external: bool = True
    load_balancer: bool = True
    spec: dict[str, Any] = field(default_factory=dict)
    #: Replaces the addresses derived from ``number``.
    external_ips: Dual | None = None
    vips: Dual | None = None
    ip_mode: str = ""
    #: Ports of the slices, if they differ from those of the service.
    slice_ports: Sequence[Port] | None = None
    #: The same by the number of the slice; it has priority over ``slice_ports``.
    ports_of_slice: dict[int, Sequence[Port]] = field(default_factory=dict)
    slice_families: tuple[int, ...] = FAMILIES
    labels: dict[str, str] = field(default_factory=dict)
    slice_labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    #: One more VIP, with that ipMode (empty: unset).
    second_vip: str | None = None

    def __post_init__(self) -> None:
        if not self.ports:
            self.ports = [
                Port(80, "TCP", 8080, "web", 30000 + self.number),
                Port(53, "UDP", 5353, "dns", 31000 + self.number),
            ]

    @property
    def external_ip(self) -> Dual:
        return self.external_ips or vip(100 + self.number)

    @property
    def vip(self) -> Dual:
        return self.vips or vip(self.number)

    @property
    def _vip2(self) -> Dual:
        return vip(200 + self.number)

    def objects(self) -> list[Object]:
        """The Service and its slices."""
        kind = (
            "LoadBalancer"
            if self.load_balancer
            else "NodePort"
            if any(p.node_port for p in self.ports)
            else "ClusterIP"
        )
        ips = [cluster_ip(self.number).of(family) for family in self.families]
        body: Object = {
            "type": kind,
            "clusterIP": ips[0],
            "clusterIPs": ips,
            "ipFamilies": [f"IPv{family}" for family in self.families],
            "ipFamilyPolicy": "RequireDualStack" if len(ips) == 2 else "SingleStack",
            "ports": [
                {"name": p.name, "port": p.number, "protocol": p.protocol, "targetPort": p.target}
                | ({"nodePort": p.node_port} if p.node_port else {})
                for p in self.ports
            ],
        }
        if self.external:
            body["externalIPs"] = [self.external_ip.of(family) for family in self.families]
        found: Object = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self.name, "namespace": "default"},
            "spec": body | self.spec,
        }
        if self.labels:
            found["metadata"]["labels"] = self.labels
        if self.annotations:
            found["metadata"]["annotations"] = self.annotations
        if self.load_balancer:
            vips = [(self.vip, self.ip_mode)]
            if self.second_vip is not None:
                vips.append((self._vip2, self.second_vip))
            ingress = [
                {"ip": address.of(family)} | ({"ipMode": mode} if mode else {})
                for address, mode in vips
                for family in self.families
            ]
            found["status"] = {"loadBalancer": {"ingress": ingress}}
        return [found, *self._slices()]

    def _slices(self) -> Iterator[Object]:
        for number, ends in enumerate(self.ends):
            ports = self.ports_of_slice.get(number, self.ports if self.slice_ports is None else self.slice_ports)
            for family in self.slice_families:
                yield {
                    "apiVersion": "discovery.k8s.io/v1",
                    "kind": "EndpointSlice",
                    "metadata": {
                        "name": f"{self.name}-{number}-v{family}",
                        "namespace": "default",
                        "labels": {"kubernetes.io/service-name": self.name} | self.slice_labels,
                    },
                    "addressType": f"IPv{family}",
                    "ports": [{"name": p.name, "port": p.target, "protocol": p.protocol} for p in ports],
                    "endpoints": [end.to_object(family) for end in ends],
                }

    # ---- flows ------------------------------------------------------------------------------------------------

    def flows(self, sources: Sequence[str], count: int, undefined: bool = True) -> Iterator[Flow]:
        """From every source to every address of every port."""
        sticky = self.spec.get("sessionAffinity") == "ClientIP"
        local = self.spec.get("externalTrafficPolicy") == "Local"
        for port in self.ports:
            protocol = port.protocol.lower()
            for what, address, number in self._targets(port):
                for source in sources:
                    if address in ("127.0.0.1", "::1") and source != "node1":
                        continue
                    yield Flow(source, f"{self.name} by {what}", address, number, protocol, count, sticky, local=local)
        if undefined:
            for family in FAMILIES:
                for source in sources:
                    where = f"{self.name} at a port it does not have"
                    yield Flow(source, where, cluster_ip(self.number).of(family), 4242, "tcp")

    def _targets(self, port: Port) -> Iterator[tuple[str, str, int]]:
        for family in FAMILIES:
            yield f"ClusterIP:{port.number}", cluster_ip(self.number).of(family), port.number
            if self.external:
                yield f"externalIP:{port.number}", self.external_ip.of(family), port.number
            if self.load_balancer:
                yield f"VIP:{port.number}", self.vip.of(family), port.number
                if self.second_vip is not None:
                    yield f"second VIP:{port.number}", self._vip2.of(family), port.number
            if port.node_port:
                yield f"NodePort:{port.number}", node_address(1).of(family), port.node_port
                yield f"NodePort towards pods:{port.number}", pod_gateway(1).of(family), port.node_port
                yield f"NodePort on loopback:{port.number}", ("127.0.0.1", "::1")[family == 6], port.node_port


#: The marker's cluster IP, and the pod that is its endpoint.
MARKER, MARKER_POD = 250, "remote-2"


def marker_port(step: int) -> int:
    """The port of the marker in this step, both of its Service and of its endpoint."""
    return 1000 + step % 1000


def marker(step: int) -> list[Object]:
    """A Service and its slices, with other ports in every step.

    Both families must be programmed again. When both ports are, so is all that was written before them: the events of
    Services arrive in their order, and so do those of slices.
    """
    port = marker_port(step)
    ends, ports = [[End(MARKER_POD)]], [Port(port, "TCP", port, "marker")]
    return Svc("marker", MARKER, ends, ports, external=False, load_balancer=False).objects()
