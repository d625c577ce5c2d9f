# SPDX-License-Identifier: Apache-2.0
"""Computes the service ports of a Service, without endpoints (spec/service-semantics §§1, 7)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from sys import intern
from typing import TYPE_CHECKING, NamedTuple

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
#: How many addresses, and how many ranges, of a family are read and counted. A Service with more is far over the limits
#: above, and each of its changes would take a tenth of a second.
MOST_READ = 2 * MOST_EXTERNAL

#: How a text begins that may be an IPv4-mapped IPv6 address: a group ffff after zeros only.
_MAYBE_MAPPED = re.compile(r"\s*[0:]*ffff:", re.IGNORECASE)

_FAMILIES = {"IPv4": IPFamily.IPV4, "IPv6": IPFamily.IPV6}


class Listed(NamedTuple):
    """What a Service lists for each family besides its ClusterIP, at most :data:`MOST_READ` of each.

    ``addresses``: the usable ones by their kind, in the order in which they are served: load balancers', then external
    IPs. If one is both, it counts as the load balancer's. ``ranges``: the source ranges, in the Service's order.
    ``unserved``: the families with external IPs that the feature gate does not allow.
    """

    addresses: Mapping[IPFamily, Mapping[bytes, FrontendKind]]
    ranges: Mapping[IPFamily, Sequence[SourceRange]]
    unserved: frozenset[IPFamily] = frozenset()


def is_served(service: objects.Service) -> bool:
    """Whether the proxy handles the Service (spec/service-semantics §1.1)."""
    return not why_unserved(service)


def why_unserved(service: objects.Service) -> str:
    """Why the proxy does not handle the Service, in words for the user; "" if it does."""
    if service.spec.type == "ExternalName":
        return "its type is ExternalName, so it has no address: DNS answers with another name"
    if service.spec.cluster_ip == "None":
        return "it is headless (clusterIP: None), so it has no address: DNS answers with those of its pods"
    if not service.spec.cluster_ip:
        return "it has no ClusterIP"
    other = (service.metadata.labels or {}).get(SERVICE_PROXY_NAME_LABEL)
    return "" if other is None else f'its label {SERVICE_PROXY_NAME_LABEL} leaves it to another proxy, "{other}"'


def service_ports(
    namespace: str,
    name: str,
    service: objects.Service,
    listed: Listed,
    node_ips: Mapping[IPFamily, bytes],
    denied: Denied = Denied.NOTHING,
) -> tuple[ServicePort, ...]:
    """Every service port of a Service in each of its families, with empty endpoint lists.

    ``listed``: what :func:`read_listed` returns for it. ``denied``: the parts that are not served.

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
            node_ip = node_ips.get(family)
            for port in _ports_of_family(namespace, name, service, family, cluster_ip, node_ip, listed, denied):
                found[port.name] = port
    return tuple(found.values())


def read_listed(service: objects.Service, *, external_ips: bool = True) -> Listed:
    """Read the addresses and ranges of a Service. If they are far too many, the rest is skipped.

    ``external_ips``: whether external IPs are served (feature gate AllowServiceExternalIPs).
    """
    spec = service.spec
    addresses: dict[IPFamily, dict[bytes, FrontendKind]] = {family: {} for family in IPFamily}
    full: set[IPFamily] = set()
    for kind, texts in (
        (FrontendKind.LOAD_BALANCER, _vip_texts(service)),
        (FrontendKind.EXTERNAL_IP, (spec.external_ips or ()) if external_ips else ()),
    ):
        for text in _worth_reading(texts, full):
            address = parse_address(text)
            if address is None or unusable_reason(address, link_local=True) is not None:
                continue
            known = addresses[family_of(address)]
            if len(known) < MOST_READ:
                known.setdefault(address, kind)
            else:
                full.add(family_of(address))
    ranges: dict[IPFamily, list[SourceRange]] = {family: [] for family in IPFamily}
    full = set()
    for text in _worth_reading(spec.load_balancer_source_ranges or (), full):
        prefix = parse_prefix(text)
        if prefix is None:
            continue
        found = ranges[family_of(prefix.address)]
        if len(found) < MOST_READ:
            found.append(prefix)
        else:
            full.add(family_of(prefix.address))
    unserved: set[IPFamily] = set()
    for text in () if external_ips else _worth_reading(spec.external_ips or (), unserved):
        address = parse_address(text)
        if address is not None and unusable_reason(address, link_local=True) is None:
            unserved.add(family_of(address))
    return Listed(addresses, ranges, frozenset(unserved))


def _worth_reading(texts: Iterable[str], full: Collection[IPFamily]) -> Iterator[str]:
    """The texts that may be of a family which is not ``full``, and perhaps a few others.

    The caller adds families to ``full``, while it reads.
    """
    rest = iter(texts)
    for text in rest:
        yield text
        if full:
            break
    # Not by the colon alone: ::ffff:192.0.2.1 is an IPv4 address.
    if IPFamily.IPV6 not in full:
        rest = (text for text in rest if ":" in text)
    elif IPFamily.IPV4 not in full:
        rest = (text for text in rest if ":" not in text or _MAYBE_MAPPED.match(text))
    for text in rest:
        yield text
        if len(full) == len(IPFamily):
            return


def _ports_of_family(
    namespace: str,
    name: str,
    service: objects.Service,
    family: IPFamily,
    cluster_ip: bytes,
    node_ip: bytes | None,
    listed: Listed,
    denied: Denied,
) -> Iterator[ServicePort]:
    spec = service.spec
    bare = denied.external(family)
    addresses: dict[bytes, FrontendKind] = {cluster_ip: FrontendKind.CLUSTER_IP}
    most = _most_addresses(spec)
    for address, kind in () if bare else listed.addresses[family].items():
        if len(addresses) > most:
            break
        addresses.setdefault(address, kind)
    has_vips = not bare and _has_vips(listed, family)
    if denied.ranges(family):
        # Also those that are external IPs, too: nothing would restrict their sources.
        addresses = {address: kind for address, kind in addresses.items() if kind is not FrontendKind.LOAD_BALANCER}
        has_vips = False
    may_be_external = spec.type in ("LoadBalancer", "NodePort") or bool(spec.external_ips)
    ranges = _source_ranges(listed.ranges[family]) if has_vips else ()
    # Once for all ports: with 1024 of each, the comparisons take a second.
    vip_source_allowed = _is_within(node_ip, ranges)
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
            vip_source_allowed=vip_source_allowed,
        )


def _has_vips(listed: Listed, family: IPFamily) -> bool:
    return FrontendKind.LOAD_BALANCER in listed.addresses[family].values()


def _most_addresses(spec: objects.ServiceSpec) -> int:
    """How many addresses besides its ClusterIP a Service may have in a family; each has all its ports."""
    return MOST_EXTERNAL // max(1, min(len(spec.ports or ()), MOST_PORTS))


def need(service: objects.Service, listed: Listed) -> Need:
    """An upper bound of what a Service uses of its namespace's limits, without building its ports."""
    spec = service.spec
    number = min(len(spec.ports or ()), MOST_PORTS)
    node_ports = sum(1 for port in (spec.ports or ())[:MOST_PORTS] if port.node_port)
    most = _most_addresses(spec)
    ports, external, ranges = [], [], []
    for family in IPFamily:
        there = _cluster_ip(spec, family) is not None
        ports.append(number if there else 0)
        external.append(min(len(listed.addresses[family]), most) * number + node_ports if there else 0)
        restricted = there and _has_vips(listed, family)
        ranges.append(min(len(listed.ranges[family]), MOST_RANGES) * number if restricted else 0)
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


def over_limits(service: objects.Service, listed: Listed) -> tuple[str, ...]:
    """What is not served of a Service that is over a limit, each as ``field: what``, without building its ports."""
    spec = service.spec
    found = []
    if (ports := len(spec.ports or ())) > MOST_PORTS:
        found.append(f"spec.ports: {ports} are more than {MOST_PORTS}: the first {MOST_PORTS} are served")
    most = _most_addresses(spec)
    for family in IPFamily:
        addresses, ranges = len(listed.addresses[family]), len(listed.ranges[family])
        if addresses > most:
            number = f"{_at_least(addresses)} IPv{family.value} addresses for {min(ports, MOST_PORTS)} ports"
            what = f"{number} are more than {most}"
            found.append(f"spec.externalIPs: {what}: load balancers' first, then the first {most} are served")
        if ranges > MOST_RANGES:
            what = f"{_at_least(ranges)} IPv{family.value} ranges are more than {MOST_RANGES}"
            found.append(f"spec.loadBalancerSourceRanges: {what}: sources in the others are not accepted")
    return tuple(found)


def _at_least(number: int) -> str:
    """The number of addresses or ranges that were read, for messages; there may be more than :data:`MOST_READ`."""
    return str(number) if number < MOST_READ else f"at least {MOST_READ}"


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
        if address is None or family_of(address) is not family:
            continue
        if unusable_reason(address, link_local=True) is None:
            return address
    return None


def _vip_texts(service: objects.Service) -> Iterator[str]:
    balancer = service.status.load_balancer if service.status else None
    for ingress in (balancer.ingress if balancer else None) or ():
        if ingress.ip and ingress.ip_mode in (None, "", "VIP"):
            yield ingress.ip


def _source_ranges(listed: Sequence[SourceRange]) -> tuple[SourceRange, ...]:
    ranges = set(listed[:MOST_RANGES])
    # A range that contains every address removes the restriction.
    return () if any(prefix.prefix_length == 0 for prefix in ranges) else tuple(sorted(ranges))


def _affinity_seconds(spec: objects.ServiceSpec) -> int:
    if spec.session_affinity != "ClientIP":
        return 0
    config = spec.session_affinity_config
    seconds = config.client_ip.timeout_seconds if config and config.client_ip else None
    return DEFAULT_AFFINITY_SECONDS if seconds is None else seconds


def uses_cluster_list(port: ServicePort, unserved: Collection[IPFamily] = ()) -> bool:
    """Whether the service port uses endpoints on all nodes (spec/service-semantics §1.3).

    ``unserved``: as in :class:`Listed`, for its Service.
    """
    return not port.internal_local or is_externally_accessible(port, unserved)


def uses_local_list(port: ServicePort, unserved: Collection[IPFamily] = ()) -> bool:
    """Whether the service port uses a list of local endpoints (spec/service-semantics §1.3)."""
    return port.internal_local or (port.external_local and is_externally_accessible(port, unserved))


def is_externally_accessible(port: ServicePort, unserved: Collection[IPFamily] = ()) -> bool:
    """Whether the service port has an address besides its ClusterIP.

    As in kube-proxy (pkg/proxy/serviceport.go), external IPs count even if the feature gate does not allow them: the
    metric of service ports without local endpoints depends on it.
    """
    external = any(frontend.kind is not FrontendKind.CLUSTER_IP for frontend in port.frontends)
    return external or port.name.family in unserved
