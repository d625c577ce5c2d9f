# SPDX-License-Identifier: Apache-2.0
"""Objects as changes, and service ports as texts, for the tests of the planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pyebpf_proxy.kube.objects import EndpointSlice, Node, Service, ServiceCIDR
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.services import endpoints
from pyebpf_proxy.services.addresses import format_address_port
from pyebpf_proxy.services.model import IPFamily, Protocol, ServicePort, ServicePortName

NODE = "node-1"


def service(name: str, cluster_ip: str = "10.96.0.1", /, created: str = "", status: Any = None, **spec: Any) -> Change:
    document = {
        "metadata": {"name": name, "creationTimestamp": created or None},
        "spec": {"clusterIP": cluster_ip, "ports": [{"port": 80}], **spec},
        "status": status,
    }
    return Change("Service", "default", name, msgspec.convert(document, Service))


def endpoint_slice(name: str, of: str | None, /, *addresses: str, port: int = 8080, **fields: Any) -> Change:
    document = {
        "metadata": {"name": name, "labels": {endpoints.SERVICE_NAME_LABEL: of} if of else {}},
        "addressType": "IPv4",
        "ports": [{"name": "", "port": port}],
        "endpoints": [{"addresses": [address]} for address in addresses],
        **fields,
    }
    return Change("EndpointSlice", "default", name, msgspec.convert(document, EndpointSlice))


def node(name: str, zone: str = "", internal_ip: str = "", pod_cidrs: Sequence[str] = ()) -> Change:
    document = {
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone} if zone else None},
        "spec": {"podCIDRs": list(pod_cidrs)},
        "status": {"addresses": [{"type": "InternalIP", "address": internal_ip}] if internal_ip else None},
    }
    return Change("Node", "", name, msgspec.convert(document, Node))


def service_cidr(*cidrs: str) -> Change:
    document = {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": list(cidrs)}}
    return Change("ServiceCIDR", "", "kubernetes", msgspec.convert(document, ServiceCIDR))


def gone(change: Change) -> Change:
    return change._replace(object=None)


def name_of(name: str, port: str = "", protocol: Protocol = Protocol.TCP) -> ServicePortName:
    return ServicePortName("default", name, port, protocol, IPFamily.IPV4)


def cluster(port: ServicePort | None) -> list[str]:
    assert port is not None
    return [format_address_port(endpoint.address, endpoint.port) for endpoint in port.cluster]


def frontends(port: ServicePort | None) -> list[str]:
    assert port is not None
    return [format_address_port(frontend.address, frontend.port) for frontend in port.frontends]
