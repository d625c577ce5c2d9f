# SPDX-License-Identifier: Apache-2.0
"""A Service to its service ports, still without endpoints (spec/service-semantics §§1, 7)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from sys import intern
from typing import TYPE_CHECKING

import msgspec

from .addresses import UNSPECIFIED, contains, family_of, parse_address, parse_prefix, unusable_reason
from .model import Family, Frontend, FrontendKind, Protocol, ServicePort, ServicePortName, SourceRange

if TYPE_CHECKING:
    from ..kube import objects

SERVICE_PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"

DEFAULT_AFFINITY_SECONDS = 10800

_FAMILIES = {"IPv4": Family.IPV4, "IPv6": Family.IPV6}


def is_served(service: objects.Service) -> bool:
    """Whether the Service is any of our business (spec/service-semantics §1.1)."""
    if service.spec.cluster_ip in (None, "", "None") or service.spec.type == "ExternalName":
        return False
    return SERVICE_PROXY_NAME_LABEL not in (service.metadata.labels or ())


def service_ports(
    namespace: str, name: str, service: objects.Service, node_ips: Mapping[Family, bytes], *, external_ips: bool = True
) -> tuple[ServicePort, ...]:
    """Every service port of a Service in every family it has, endpoint lists still empty.

    ``external_ips``: whether they are served (feature gate AllowServiceExternalIPs).

    Addresses are in the order ClusterIP, LoadBalancer VIPs, external IPs, NodePort; one that is listed twice counts
    as the first of these.
    """
    if not is_served(service):
        return ()
    # The last of two ports of one identity wins.
    found: dict[ServicePortName, ServicePort] = {}
    for family in Family:
        cluster_ip = _cluster_ip(service.spec, family)
        if cluster_ip is not None:
            node_ip, externals = node_ips.get(family), (service.spec.external_ips or ()) if external_ips else ()
            for port in _ports_of_family(namespace, name, service, family, cluster_ip, node_ip, externals):
                found[port.name] = port
    return tuple(found.values())


def _ports_of_family(
    namespace: str,
    name: str,
    service: objects.Service,
    family: Family,
    cluster_ip: bytes,
    node_ip: bytes | None,
    external_ips: Iterable[str],
) -> Iterator[ServicePort]:
    spec = service.spec
    vips = _usable(family, _vip_texts(service))
    externals = _usable(family, external_ips)
    addresses: dict[bytes, FrontendKind] = {cluster_ip: FrontendKind.CLUSTER_IP}
    for address in vips:
        addresses.setdefault(address, FrontendKind.LOAD_BALANCER)
    for address in externals:
        addresses.setdefault(address, FrontendKind.EXTERNAL_IP)
    may_be_external = spec.type in ("LoadBalancer", "NodePort") or bool(spec.external_ips)
    ranges = _source_ranges(spec, family) if vips else ()
    for port in spec.ports or ():
        protocol = Protocol.__members__.get(port.protocol or "TCP")
        if protocol is None or not port.port:
            continue
        frontends = [Frontend(kind, address, port.port) for address, kind in addresses.items()]
        if port.node_port:
            frontends.append(Frontend(FrontendKind.NODE_PORT, UNSPECIFIED[family], port.node_port))
        yield ServicePort(
            name=ServicePortName(namespace, name, intern(port.name or ""), protocol, family),
            frontends=tuple(frontends),
            internal_local=spec.internal_traffic_policy == "Local",
            external_local=may_be_external and spec.external_traffic_policy == "Local",
            affinity_seconds=_affinity_seconds(spec),
            source_ranges=ranges,
            vip_source_allowed=_is_within(node_ip, ranges),
        )


def with_node_ip(port: ServicePort, node_ip: bytes | None) -> ServicePort:
    """The same service port on a node of another address."""
    return msgspec.structs.replace(port, vip_source_allowed=_is_within(node_ip, port.source_ranges))


def _is_within(address: bytes | None, ranges: Iterable[SourceRange]) -> bool:
    return address is not None and any(contains(prefix, address) for prefix in ranges)


def _cluster_ip(spec: objects.ServiceSpec, family: Family) -> bytes | None:
    texts: Iterable[str]
    if not spec.ip_families:
        texts = (spec.cluster_ip or "",)
    else:
        pairs = zip(spec.ip_families, spec.cluster_ips or (), strict=False)
        texts = (text for family_name, text in pairs if _FAMILIES.get(family_name) is family)
    for text in texts:
        address = parse_address(text)
        if address is not None and family_of(address) is family and unusable_reason(address) is None:
            return address
    return None


def _vip_texts(service: objects.Service) -> Iterator[str]:
    balancer = service.status.load_balancer if service.status else None
    for ingress in (balancer.ingress if balancer else None) or ():
        if ingress.ip and ingress.ip_mode in (None, "", "VIP"):
            yield ingress.ip


def _usable(family: Family, texts: Iterable[str]) -> list[bytes]:
    return [
        address
        for text in texts
        if (address := parse_address(text)) is not None
        and family_of(address) is family
        and unusable_reason(address, link_local=True) is None
    ]


def _source_ranges(spec: objects.ServiceSpec, family: Family) -> tuple[SourceRange, ...]:
    size = len(UNSPECIFIED[family])
    ranges = {
        prefix
        for text in spec.load_balancer_source_ranges or ()
        if (prefix := parse_prefix(text)) is not None and len(prefix.address) == size
    }
    # One that holds every address is no restriction.
    return () if any(prefix.prefix_length == 0 for prefix in ranges) else tuple(sorted(ranges))


def _affinity_seconds(spec: objects.ServiceSpec) -> int:
    if spec.session_affinity != "ClientIP":
        return 0
    config = spec.session_affinity_config
    seconds = config.client_ip.timeout_seconds if config and config.client_ip else None
    return DEFAULT_AFFINITY_SECONDS if seconds is None else seconds


def uses_cluster_list(port: ServicePort) -> bool:
    """Whether anything may be sent to endpoints anywhere (spec/service-semantics §1.3)."""
    return not port.internal_local or is_externally_accessible(port)


def uses_local_list(port: ServicePort) -> bool:
    """Whether anything is sent to this node's endpoints only (spec/service-semantics §1.3)."""
    return port.internal_local or (port.external_local and is_externally_accessible(port))


def is_externally_accessible(port: ServicePort) -> bool:
    """Whether the service port has an address besides its ClusterIP."""
    return any(frontend.kind is not FrontendKind.CLUSTER_IP for frontend in port.frontends)
