# SPDX-License-Identifier: Apache-2.0
"""Validation of objects, field by field, and the defaults that the API server would have filled in.

There are two kinds of findings. *Refused*: the whole object is rejected, and its last valid state stays. *Noted*: one
entry is left out, as in kube-proxy (spec/service-semantics §1.2, §1.4), and the rest of the object is used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from pyebpf_proxy.common.printable import printable_json
from pyebpf_proxy.kube.objects import EndpointSlice, Node, Service, ServiceCIDR
from pyebpf_proxy.services import pods
from pyebpf_proxy.services.addresses import family_of, parse_address, parse_prefix, unusable_reason
from pyebpf_proxy.services.model import IPFamily

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAMES = re.compile(rf"(?:(?:{_SUBDOMAIN.pattern})?/)*(?:{_SUBDOMAIN.pattern})?")
_PROTOCOLS = ("TCP", "UDP", "SCTP")
_POLICIES = (None, "", "Cluster", "Local")
_FAMILY_NAMES = {"IPv4": IPFamily.IPV4, "IPv6": IPFamily.IPV6}


#: How many entries of each list of a Service are read at most; for addresses and ranges, in each family. The limits of
#: a Service are lower (services/frontends.py). This one bounds the cost of checking them.
MOST_ENTRIES = 16_384


class Finding(NamedTuple):
    """``text`` is ``field.path: what is wrong``."""

    text: str
    refused: bool


def quote(value: object) -> str:
    """An invalid value for a message: strings are quoted, on one line, and shortened."""
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    text = printable_json(msgspec.json.encode(value, enc_hook=repr).decode(errors="replace"))
    return text if len(text) <= 80 else f"{text[:77]}…"


def check_name(name: str | None, *, label: bool) -> str | None:
    """The error in a name (a DNS label of at most 63, or a DNS subdomain of at most 253 characters), if any."""
    if not name:
        return "missing"
    if label:
        if len(name) > 63 or _LABEL.fullmatch(name) is None:
            return f"{quote(name)} is not a DNS label (a-z, 0-9 and -, at most 63 characters)"
    elif len(name) > 253 or _SUBDOMAIN.fullmatch(name) is None:
        return f"{quote(name)} is not a DNS subdomain (a-z, 0-9, - and ., at most 253 characters)"
    return None


def bound_service(service: Service) -> Iterator[Finding]:
    """Leave out entries beyond :data:`MOST_ENTRIES`, before any entry is read."""
    spec = service.spec
    balancer = service.status.load_balancer if service.status else None
    ingress = (balancer.ingress if balancer else None) or ()
    for path, number in (
        ("spec.externalIPs", len(spec.external_ips or ())),
        ("spec.loadBalancerSourceRanges", len(spec.load_balancer_source_ranges or ())),
        ("spec.ports", len(spec.ports or ())),
        ("status.loadBalancer.ingress", len(ingress)),
    ):
        if number > MOST_ENTRIES:
            yield Finding(f"{path}: {number} are more than {MOST_ENTRIES}: the others are left out", False)
    spec.external_ips = _first(spec.external_ips)
    spec.load_balancer_source_ranges = _first(spec.load_balancer_source_ranges)
    if spec.ports is not None:
        spec.ports = spec.ports[:MOST_ENTRIES]
    if balancer is not None and len(ingress) > MOST_ENTRIES:
        balancer.ingress = ingress[:MOST_ENTRIES]


def _first(texts: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The first texts of each family, so that a family with source ranges does not lose all of them."""
    if texts is None or len(texts) <= MOST_ENTRIES:
        return texts
    of_family = ((text for text in texts if (":" in text) == six) for six in (False, True))
    return tuple(text for each in of_family for text in islice(each, MOST_ENTRIES))


def check_service(service: Service) -> Iterator[Finding]:
    """Findings of a Service. A Service that is never served (ExternalName) has none."""
    spec = service.spec
    if spec.type == "ExternalName":
        return
    yield from _check_choices(service)
    yield from _check_cluster_ips(service)
    yield from _check_service_ports(service)
    yield from _check_service_addresses(service)


def _check_choices(service: Service) -> Iterator[Finding]:
    spec = service.spec
    if spec.type not in (None, "", "ClusterIP", "NodePort", "LoadBalancer"):
        yield Finding(f"spec.type: {quote(spec.type)} is not ClusterIP, NodePort, LoadBalancer or ExternalName", True)
    for path, policy in (
        ("externalTrafficPolicy", spec.external_traffic_policy),
        ("internalTrafficPolicy", spec.internal_traffic_policy),
    ):
        if policy not in _POLICIES:
            yield Finding(f"spec.{path}: {quote(policy)} is not Cluster or Local", True)
    if spec.session_affinity not in (None, "", "None", "ClientIP"):
        yield Finding(f"spec.sessionAffinity: {quote(spec.session_affinity)} is not None or ClientIP", True)
    local = spec.type == "LoadBalancer" and spec.external_traffic_policy == "Local"
    if local and not spec.health_check_node_port and spec.cluster_ip not in (None, "", "None"):
        what = "missing, and a folder of manifests allocates none: load balancers cannot check for endpoints"
        yield Finding(f"spec.healthCheckNodePort: {what}", False)
    number = spec.health_check_node_port or 0
    if local and not 0 <= number <= 65535:
        yield Finding(f"spec.healthCheckNodePort: {number} is not a port (1–65535): left out", False)
    config = spec.session_affinity_config
    if config is not None and config.client_ip is not None:
        seconds = config.client_ip.timeout_seconds
        if seconds is not None and not 0 < seconds <= 86400:
            yield Finding(f"spec.sessionAffinityConfig.clientIP.timeoutSeconds: {seconds} is not 1–86400 seconds", True)


def _check_cluster_ips(service: Service) -> Iterator[Finding]:
    spec = service.spec
    if not spec.cluster_ip and not spec.cluster_ips:
        what = "missing, and a folder of manifests allocates none: the service is not served"
        yield Finding(f"spec.clusterIP: {what}", False)
        return
    texts = [("spec.clusterIP", spec.cluster_ip)]
    texts += [(f"spec.clusterIPs[{i}]", text) for i, text in enumerate(spec.cluster_ips or ())]
    for path, text in texts:
        if not text or text == "None" or (path == "spec.clusterIPs[0]" and text == spec.cluster_ip):
            continue
        packed = parse_address(text)
        if packed is None:
            yield Finding(f"{path}: {quote(text)} is not an IP address", True)
        elif reason := unusable_reason(packed, link_local=True):  # a ServiceCIDR may be link-local
            yield Finding(f"{path}: {quote(text)} is {reason}", True)
    for i, name in enumerate(spec.ip_families or ()):
        if name not in _FAMILY_NAMES:
            yield Finding(f"spec.ipFamilies[{i}]: {quote(name)} is not IPv4 or IPv6", True)
            continue
        for address in (spec.cluster_ips or ())[i : i + 1]:
            packed = parse_address(address)
            if packed is not None and family_of(packed) != _FAMILY_NAMES[name]:
                what = f"{quote(address)} is not an {name} address, as spec.ipFamilies requires"
                yield Finding(f"spec.clusterIPs[{i}]: {what}", True)


def _check_service_ports(service: Service) -> Iterator[Finding]:
    seen: set[tuple[str, object, str]] = set()
    for i, port in enumerate(service.spec.ports or ()):
        path = f"spec.ports[{i}]"
        protocol = port.protocol or "TCP"
        if protocol not in _PROTOCOLS:
            yield Finding(f"{path}.protocol: {quote(protocol)} is not TCP, UDP or SCTP", True)
        if port.port is None:
            yield Finding(f"{path}.port: missing", True)
        elif not 0 < port.port <= 65535:
            yield Finding(f"{path}.port: {port.port} is not a port (1–65535)", True)
        if port.node_port is not None and not 0 <= port.node_port <= 65535:
            yield Finding(f"{path}.nodePort: {port.node_port} is not a port (1–65535)", True)
        if port.name and (problem := check_name(port.name, label=True)):
            yield Finding(f"{path}.name: {problem}", True)
        # Two ports may share a name or a number if the protocol differs (spec/service-semantics §1.1).
        for field, value in (("name", port.name or ""), ("port", port.port), ("nodePort", port.node_port or None)):
            if value is None:
                continue
            if (field, value, protocol) in seen:
                yield Finding(f"{path}.{field}: {quote(value)} is used by two {protocol} ports", True)
            seen.add((field, value, protocol))


def _check_service_addresses(service: Service) -> Iterator[Finding]:
    """Leave out malformed external addresses and source ranges."""
    for i, text in enumerate(service.spec.external_ips or ()):
        yield from _check_entry(f"spec.externalIPs[{i}]", text)
    balancer = service.status.load_balancer if service.status else None
    for i, ingress in enumerate((balancer.ingress if balancer else None) or ()):
        path = f"status.loadBalancer.ingress[{i}]"
        if ingress.ip:
            yield from _check_entry(f"{path}.ip", ingress.ip)
        if ingress.ip_mode not in (None, "", "VIP", "Proxy"):
            yield Finding(f"{path}.ipMode: {quote(ingress.ip_mode)} is not VIP or Proxy: left out", False)
    guarded: set[IPFamily] = set()
    for i, text in enumerate(service.spec.load_balancer_source_ranges or ()):
        prefix = parse_prefix(text)
        if prefix is None:
            yield Finding(f"spec.loadBalancerSourceRanges[{i}]: {quote(text)} is not a CIDR: left out", False)
        else:
            guarded.add(family_of(prefix.address))
    yield from _check_open_to_everyone(service, guarded)


def _check_open_to_everyone(service: Service, guarded: Collection[IPFamily]) -> Iterator[Finding]:
    """Note VIPs that are open to everyone: source ranges apply per family (spec/service-semantics §7).

    ``guarded``: the families with source ranges.
    """
    balancer = service.status.load_balancer if service.status else None
    if not service.spec.load_balancer_source_ranges or balancer is None:
        return
    for i, ingress in enumerate(balancer.ingress or ()):
        packed = parse_address(ingress.ip or "")
        if packed is None or ingress.ip_mode not in (None, "", "VIP") or family_of(packed) in guarded:
            continue
        what = f"no range of spec.loadBalancerSourceRanges is IPv{family_of(packed).value}"
        yield Finding(f"status.loadBalancer.ingress[{i}].ip: {quote(ingress.ip)} accepts every source: {what}", False)


def _check_entry(path: str, text: str) -> Iterator[Finding]:
    packed = parse_address(text)
    if packed is None:
        yield Finding(f"{path}: {quote(text)} is not an IP address: left out", False)
    elif reason := unusable_reason(packed, link_local=True):
        yield Finding(f"{path}: {quote(text)} is {reason}: left out", False)


def check_endpoint_slice(endpoint_slice: EndpointSlice) -> Iterator[Finding]:
    """Findings of an EndpointSlice."""
    address_type = endpoint_slice.address_type
    if address_type == "FQDN":
        return  # never used
    if address_type not in _FAMILY_NAMES:
        what = quote(address_type) + " is not IPv4, IPv6 or FQDN" if address_type else "missing"
        yield Finding(f"addressType: {what}", True)
        return
    size = 4 if address_type == "IPv4" else 16
    for i, endpoint in enumerate(endpoint_slice.endpoints or ()):
        if endpoint.target_ref is not None:
            problem = check_name(endpoint.target_ref.name, label=False)
            yield Finding(f"endpoints[{i}].targetRef.name: {problem}: left out", False)
        if not endpoint.addresses:
            continue
        text = endpoint.addresses[0]
        packed = parse_address(text)
        if packed is None or len(packed) != size:
            yield Finding(f"endpoints[{i}].addresses[0]: {quote(text)} is not an {address_type} address", True)
        elif reason := unusable_reason(packed):
            yield Finding(f"endpoints[{i}].addresses[0]: {quote(text)} is {reason}: left out", False)
    for i, port in enumerate(endpoint_slice.ports or ()):
        if (port.protocol or "TCP") not in _PROTOCOLS:
            yield Finding(f"ports[{i}].protocol: {quote(port.protocol)} is not TCP, UDP or SCTP", True)
        if port.port is None:
            continue
        if port.port == 0:
            yield Finding(f"ports[{i}].port: 0 is not a port (1–65535): left out", False)
        elif not 0 < port.port <= 65535:
            yield Finding(f"ports[{i}].port: {port.port} is not a port (1–65535)", True)


def check_node(node: Node) -> Iterator[Finding]:
    """Findings of a Node."""
    spec = node.spec
    if spec is not None:
        texts = [("spec.podCIDR", spec.pod_cidr)] if spec.pod_cidr else []
        texts += [(f"spec.podCIDRs[{i}]", text) for i, text in enumerate(spec.pod_cidrs or ())]
        for path, text in texts:
            if parse_prefix(text or "") is None:
                yield Finding(f"{path}: {quote(text)} is not a CIDR", True)
    for i, address in enumerate((node.status.addresses if node.status else None) or ()):
        if address.type in ("InternalIP", "ExternalIP") and parse_address(address.address or "") is None:
            # The API server accepts any text, and kube-proxy ignores it.
            what = f"{quote(address.address)} is not an IP address: left out"
            yield Finding(f"status.addresses[{i}].address: {what}", False)


def check_service_cidr(service_cidr: ServiceCIDR) -> Iterator[Finding]:
    """Findings of a ServiceCIDR."""
    for i, text in enumerate((service_cidr.spec.cidrs if service_cidr.spec else None) or ()):
        if parse_prefix(text) is None:
            yield Finding(f"spec.cidrs[{i}]: {quote(text)} is not a CIDR", True)


def default_service(service: Service) -> None:
    """Set the API server's defaults in place: clusterIP, clusterIPs and ipFamilies from each other."""
    spec = service.spec
    if spec.cluster_ip and not spec.cluster_ips:
        spec.cluster_ips = (spec.cluster_ip,)
    elif spec.cluster_ips and not spec.cluster_ip:
        spec.cluster_ip = spec.cluster_ips[0]
    if not spec.ip_families and spec.cluster_ips:
        packed = [parse_address(text) for text in spec.cluster_ips]
        if all(packed):
            spec.ip_families = tuple("IPv4" if len(address or b"") == 4 else "IPv6" for address in packed)


def default_endpoint_slice(endpoint_slice: EndpointSlice) -> None:
    """Set the API server's defaults in place: an absent port name is the empty name.

    Names of pods are packed: a hundred thousand objects just for them would take 17 MB. A target with an invalid name
    remains unchanged, for :func:`check_endpoint_slice`.
    """
    for port in endpoint_slice.ports or ():
        if port.name is None:
            port.name = ""
    endpoints = endpoint_slice.endpoints or ()
    targets = (endpoint.target_ref for endpoint in endpoints)
    names = [target.name or "" if target is not None and target.kind == "Pod" else "" for target in targets]
    # All names are checked with one regular expression: there may be a hundred thousand. None contains the separator.
    bad = set()
    # The lengths come first: the expression would take half a second for a name of a megabyte.
    usual = max(map(len, names), default=0) <= 253
    if usual:
        together = "/".join(names)
        usual = _NAMES.fullmatch(together) is not None and together.count("/") == max(0, len(names) - 1)
    if not usual:
        bad = {i for i, name in enumerate(names) if name and check_name(name, label=False)}
    endpoint_slice.pods = pods.packed(["" if i in bad else name for i, name in enumerate(names)] if bad else names)
    for i, endpoint in enumerate(endpoints):
        if i not in bad:
            endpoint.target_ref = None
