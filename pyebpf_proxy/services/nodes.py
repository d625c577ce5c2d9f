# SPDX-License-Identifier: Apache-2.0
"""Reads Nodes: zone and IPs of this Node, pod CIDRs and addresses of all Nodes (spec/configuration §5.3)."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network
from typing import TYPE_CHECKING, NamedTuple

from pyebpf_proxy.services.addresses import family_of, format_prefix, parse_address, parse_prefix
from pyebpf_proxy.services.model import IPFamily

if TYPE_CHECKING:
    from pyebpf_proxy.kube import objects

#: The cluster autoscaler sets this taint before it removes a Node.
TO_BE_DELETED_TAINT = "ToBeDeletedByClusterAutoscaler"
ZONE_LABEL = "topology.kubernetes.io/zone"

Network = IPv4Network | IPv6Network


class NodeView(NamedTuple):
    """The fields of one Node that are used.

    ``ips``: at most one address per family, InternalIP before ExternalIP; the first key is the primary family.
    ``addresses``: every InternalIP and ExternalIP. ``pod_cidrs``: in the Node's order. ``kubelet_port``: 0 if unknown.
    """

    zone: str
    ips: dict[IPFamily, bytes]
    addresses: frozenset[bytes]
    pod_cidrs: tuple[Network, ...]
    kubelet_port: int = 0


def view_node(node: objects.Node) -> NodeView:
    """Read a Node; malformed values are left out."""
    addresses = (node.status.addresses if node.status else None) or ()
    ips: dict[IPFamily, bytes] = {}
    all_addresses = set()
    for wanted in ("InternalIP", "ExternalIP"):
        for entry in addresses:
            if entry.type == wanted and (packed := parse_address(entry.address or "")) is not None:
                ips.setdefault(family_of(packed), packed)
                all_addresses.add(packed)
    daemons = node.status.daemon_endpoints if node.status else None
    kubelet = daemons.kubelet_endpoint if daemons is not None else None
    spec = node.spec
    texts: tuple[str, ...] = ()
    if spec is not None:
        texts = spec.pod_cidrs or ((spec.pod_cidr,) if spec.pod_cidr else ())
    return NodeView(
        zone=(node.metadata.labels or {}).get(ZONE_LABEL, ""),
        ips=ips,
        addresses=frozenset(all_addresses),
        pod_cidrs=networks_of(texts),
        kubelet_port=(kubelet.port or 0) if kubelet is not None else 0,
    )


def merged(networks: Iterable[Network]) -> list[Network]:
    """The same addresses in networks that do not overlap, as nftables needs them in a set; IPv4 first."""
    found: list[Network] = []
    for version in (4, 6):
        found += collapse_addresses(n for n in networks if n.version == version)  # type: ignore[type-var]
    return found


def networks_of(texts: Iterable[str]) -> tuple[Network, ...]:
    """Parse CIDRs of Kubernetes objects; malformed ones are left out."""
    return tuple(ip_network(format_prefix(prefix)) for text in texts if (prefix := parse_prefix(text)))


NO_NODE = NodeView("", {}, frozenset(), ())


def is_eligible(node: objects.Node | None) -> bool:
    """Whether load balancers may send traffic to a Node: it exists and is not being removed
    (spec/service-semantics §11.2)."""
    if node is None or node.metadata.deletion_timestamp is not None:
        return False
    taints = (node.spec.taints if node.spec is not None else None) or ()
    return all(taint.key != TO_BE_DELETED_TAINT for taint in taints)
