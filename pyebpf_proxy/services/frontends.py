# SPDX-License-Identifier: Apache-2.0
"""Computes the service ports of a Service, without endpoints (spec/service-semantics §§1, 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from sys import intern
from typing import TYPE_CHECKING

import msgspec

from pyebpf_proxy.services.addresses import (
    UNSPECIFIED,
    contains,
    family_of,
    parse_address,
    parse_prefix,
    unusable_reason,
)
from pyebpf_proxy.services.model import (
    Frontend,
    FrontendKind,
    IPFamily,
    Protocol,
    ServicePort,
    ServicePortName,
    SourceRange,
)
from pyebpf_proxy.services.shares import Denied, Need

if TYPE_CHECKING:
    from pyebpf_proxy.kube import objects

SERVICE_PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"

DEFAULT_AFFINITY_SECONDS = 10800

# Limits of one Service in a family, so that none fills the maps (docs/objects.md, "What one Service may take").
MOST_PORTS = 1024
#: Maximum of addresses besides the ClusterIP, times ports.
MOST_EXTERNAL = 2048
MOST_RANGES = 1024

_FAMILIES = {"IPv4": IPFamily.IPV4, "IPv6": IPFamily.IPV6}


def is_served(service: objects.Service) -> bool:
    """Whether the proxy handles the Service (spec/service-semantics §1.1)."""
    if service.spec.cluster_ip in (None, "", "None") or service.spec.type == "ExternalName":
        return False
    return SERVICE_PROXY_NAME_LABEL not in (service.metadata.labels or ())


def service_ports(
    namespace: str,
    name: str,
    service: objects.Service,
    node_ips: Mapping[IPFamily, bytes],
    *,
    external_ips: bool = True,
    denied: Denied = Denied.NOTHING,
) -> tuple[ServicePort, ...]:
    """Every service port of a Service in each of its families, with empty endpoint lists.

    ``external_ips``: whether external IPs are served (feature gate AllowServiceExternalIPs). ``denied``: the parts that
    are not served.

    Addresses are in the order ClusterIP, load balancer VIPs, external IPs, NodePort. If one address is of several
    kinds, the first of these counts.
    """
    if not is_served(service) or denied & Denied.PORTS:
        return ()
    # If two ports have the same identity, the last one wins.
    found: dict[ServicePortName, ServicePort] = {}
    for family in IPFamily:
        cluster_ip = _cluster_ip(service.spec, family)
        if cluster_ip is not None:
            node_ip, externals = node_ips.get(family), (service.spec.external_ips or ()) if external_ips else ()
            for port in _ports_of_family(namespace, name, service, family, cluster_ip, node_ip, externals, denied):
                found[port.name] = port
    return tuple(found.values())


def _ports_of_family(
    namespace: str,
    name: str,
    service: objects.Service,
    family: IPFamily,
    cluster_ip: bytes,
    node_ip: bytes | None,
    external_ips: Iterable[str],
    denied: Denied,
) -> Iterator[ServicePort]:
    spec = service.spec
    bare = denied.external(family)
    vips = [] if bare else _usable(family, _vip_texts(service))
    externals = [] if bare else _usable(family, external_ips)
    addresses: dict[bytes, FrontendKind] = {cluster_ip: FrontendKind.CLUSTER_IP}
    most = _most_addresses(spec)
    for kind, found in ((FrontendKind.LOAD_BALANCER, vips), (FrontendKind.EXTERNAL_IP, externals)):
        for address in found:
            if len(addresses) > most:
                break
            addresses.setdefault(address, kind)
    if denied.ranges(family):
        # Also those that are external IPs, too: nothing would restrict their sources.
        addresses = {address: kind for address, kind in addresses.items() if kind is not FrontendKind.LOAD_BALANCER}
        vips = []
    may_be_external = spec.type in ("LoadBalancer", "NodePort") or bool(spec.external_ips)
    ranges = _source_ranges(spec, family) if vips else ()
    for port in (spec.ports or ())[:MOST_PORTS]:
        protocol = Protocol.__members__.get(port.protocol or "TCP")
        if protocol is None or not port.port:
            continue
        frontends = [Frontend(kind, address, port.port) for address, kind in addresses.items()]
        if port.node_port and not bare:
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


def _most_addresses(spec: objects.ServiceSpec) -> int:
    """How many addresses besides its ClusterIP a Service may have in a family; each has all its ports."""
    return MOST_EXTERNAL // max(1, min(len(spec.ports or ()), MOST_PORTS))


def need(service: objects.Service, *, external_ips: bool = True) -> Need:
    """An upper bound of what a Service uses of its namespace's limits, without building its ports."""
    spec = service.spec
    number = min(len(spec.ports or ()), MOST_PORTS)
    node_ports = sum(1 for port in (spec.ports or ())[:MOST_PORTS] if port.node_port)
    most = _most_addresses(spec)
    vips = list(_vip_texts(service))
    texts = [*vips, *((spec.external_ips or ()) if external_ips else ())]
    # Not by their colons: ::ffff:192.0.2.1 is an IPv4 address.
    addresses = Counter(family_of(packed) for text in texts if (packed := parse_address(text)) is not None)
    range_texts = (spec.load_balancer_source_ranges or ()) if vips else ()
    prefixes = Counter(family_of(prefix.address) for text in range_texts if (prefix := parse_prefix(text)) is not None)
    ports, external, ranges = [], [], []
    for family in IPFamily:
        there = _cluster_ip(spec, family) is not None
        ports.append(number if there else 0)
        external.append(min(addresses[family], most) * number + node_ports if there else 0)
        ranges.append(min(prefixes[family], MOST_RANGES) * number if there else 0)
    return Need((ports[0], ports[1]), (external[0], external[1]), (ranges[0], ranges[1]))


def reduced(port: ServicePort, denied: Denied) -> ServicePort | None:
    """A service port without the denied parts; None if nothing remains."""
    family = port.name.family
    if denied & Denied.PORTS:
        return None
    kept = port.frontends
    if denied.external(family):
        kept = tuple(frontend for frontend in kept if frontend.kind is FrontendKind.CLUSTER_IP)
    elif denied.ranges(family):
        kept = tuple(frontend for frontend in kept if frontend.kind is not FrontendKind.LOAD_BALANCER)
    else:
        return port
    return msgspec.structs.replace(port, frontends=kept, source_ranges=(), vip_source_allowed=False)


def over_limits(service: objects.Service, *, external_ips: bool = True) -> tuple[str, ...]:
    """What is not served of a Service that is over a limit, each as ``field: what``, without building its ports."""
    spec = service.spec
    found = []
    if (ports := len(spec.ports or ())) > MOST_PORTS:
        found.append(f"spec.ports: {ports} are more than {MOST_PORTS}: the first {MOST_PORTS} are served")
    most = _most_addresses(spec)
    externals = (spec.external_ips or ()) if external_ips else ()
    texts = sum(1 for _ in _vip_texts(service)) + len(externals)
    if texts <= most and len(spec.load_balancer_source_ranges or ()) <= MOST_RANGES:
        return tuple(found)
    for family in IPFamily:
        named = {*_usable(family, _vip_texts(service)), *_usable(family, externals)}
        if len(named) > most:
            what = f"{len(named)} IPv{family.value} addresses for {min(ports, MOST_PORTS)} ports are more than {most}"
            found.append(f"spec.externalIPs: {what}: load balancers' first, then the first {most} are served")
        ranges = sum(1 for _ in _ranges_of(spec, family, None))
        if ranges > MOST_RANGES:
            what = f"{ranges} IPv{family.value} ranges are more than {MOST_RANGES}"
            found.append(f"spec.loadBalancerSourceRanges: {what}: sources in the others are not accepted")
    return tuple(found)


def with_node_ip(port: ServicePort, node_ip: bytes | None) -> ServicePort:
    """The same service port on a node with other addresses."""
    return msgspec.structs.replace(port, vip_source_allowed=_is_within(node_ip, port.source_ranges))


def _is_within(address: bytes | None, ranges: Iterable[SourceRange]) -> bool:
    return address is not None and any(contains(prefix, address) for prefix in ranges)


def _cluster_ip(spec: objects.ServiceSpec, family: IPFamily) -> bytes | None:
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


def _usable(family: IPFamily, texts: Iterable[str]) -> list[bytes]:
    return [
        address
        for text in texts
        if (address := parse_address(text)) is not None
        and family_of(address) is family
        and unusable_reason(address, link_local=True) is None
    ]


def _source_ranges(spec: objects.ServiceSpec, family: IPFamily) -> tuple[SourceRange, ...]:
    ranges = set(_ranges_of(spec, family, MOST_RANGES))
    # A range that contains every address removes the restriction.
    return () if any(prefix.prefix_length == 0 for prefix in ranges) else tuple(sorted(ranges))


def _ranges_of(spec: objects.ServiceSpec, family: IPFamily, most: int | None) -> Iterator[SourceRange]:
    """The first ranges of a family, at most ``most``; None: all."""
    size = len(UNSPECIFIED[family])
    found = (
        prefix
        for text in spec.load_balancer_source_ranges or ()
        if (prefix := parse_prefix(text)) is not None and len(prefix.address) == size
    )
    return islice(found, most)


def _affinity_seconds(spec: objects.ServiceSpec) -> int:
    if spec.session_affinity != "ClientIP":
        return 0
    config = spec.session_affinity_config
    seconds = config.client_ip.timeout_seconds if config and config.client_ip else None
    return DEFAULT_AFFINITY_SECONDS if seconds is None else seconds


def uses_cluster_list(port: ServicePort) -> bool:
    """Whether the service port uses endpoints on all nodes (spec/service-semantics §1.3)."""
    return not port.internal_local or is_externally_accessible(port)


def uses_local_list(port: ServicePort) -> bool:
    """Whether the service port uses a list of local endpoints (spec/service-semantics §1.3)."""
    return port.internal_local or (port.external_local and is_externally_accessible(port))


def is_externally_accessible(port: ServicePort) -> bool:
    """Whether the service port has an address besides its ClusterIP."""
    return any(frontend.kind is not FrontendKind.CLUSTER_IP for frontend in port.frontends)
