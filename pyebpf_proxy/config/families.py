# SPDX-License-Identifier: Apache-2.0
"""Configuration that does not fit the Node: wrong IP families, NodePorts on all addresses (spec/configuration §5.4).

The functions are pure. The messages are those of kube-proxy v1.36.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pyebpf_proxy.config import addresses
from pyebpf_proxy.config.addresses import Network
from pyebpf_proxy.services.addresses import format_address
from pyebpf_proxy.services.model import IPFamily

INCOMPLETE = "Kube-proxy configuration may be incomplete or incorrect"
INCORRECT = "kube-proxy configuration is incorrect"
PRIMARY = "primary"


@dataclass(frozen=True, slots=True)
class FamilyValues:
    """The values of the configuration that depend on IP families, as validated texts."""

    cluster_cidrs: tuple[str, ...] = ()
    node_port_addresses: tuple[str, ...] = ()
    exclude_cidrs: tuple[str, ...] = ()
    source_vip: str = ""
    healthz_address: str = ""
    metrics_address: str = ""
    detect_local_mode: str = "ClusterCIDR"


class Finding(NamedTuple):
    """Messages that are logged together. ``fatal``: the agent does not start."""

    texts: list[str]
    fatal: bool = False

    def __str__(self) -> str:
        return self.texts[0] if len(self.texts) == 1 else f"[{', '.join(self.texts)}]"


def primary_family(node_ips: Mapping[IPFamily, bytes]) -> IPFamily:
    """The family of the Node's first address; IPv4 if no address is known."""
    return next(iter(node_ips), IPFamily.IPV4)


def node_port_cidrs(words: tuple[str, ...], node_ips: Mapping[IPFamily, bytes]) -> list[str]:
    """``nodePortAddresses``, with ``primary`` replaced by the Node's addresses."""
    if words != (PRIMARY,):
        return list(words)
    found = []
    for family, length in ((IPFamily.IPV4, 32), (IPFamily.IPV6, 128)):
        packed = node_ips.get(family)
        address = addresses.parse_ip(format_address(packed)) if packed is not None else None
        if address is not None and not address.is_loopback:
            found.append(f"{address}/{length}")
    return found


def node_ports(values: FamilyValues, node_ips: Mapping[IPFamily, bytes], pod_cidrs: Iterable[Network]) -> Finding:
    """Warnings about NodePorts on more addresses than probably intended. Never fatal."""
    primary = primary_family(node_ips)
    here, other = _name(primary), _name(_other(primary))
    cidrs = node_port_cidrs(values.node_port_addresses, node_ips)
    of_primary = [cidr for cidr in cidrs if _family(cidr) == primary]
    pods = [str(cidr) for cidr in pod_cidrs]
    lists = (values.cluster_cidrs, cidrs, values.exclude_cidrs, pods)
    dual_stack = any({_family(text) for text in texts} == {IPFamily.IPV4, IPFamily.IPV6} for texts in lists)
    if not cidrs:
        return Finding(
            [
                "nodePortAddresses is unset; NodePort connections will be accepted on all local IPs."
                " Consider using `--nodeport-addresses primary`"
            ]
        )
    if dual_stack and len(of_primary) == len(cidrs):
        return Finding(
            [
                f"cluster appears to be dual-stack but nodePortAddresses contains only {here} addresses;"
                f" NodePort connections will be accepted on all local {other} IPs"
            ]
        )
    if not of_primary:
        return Finding(
            [
                f"cluster appears to be {here}-primary but nodePortAddresses contains only {other} addresses;"
                f" NodePort connections will be accepted on all local {here} IPs"
            ]
        )
    return Finding([])


def wrong_families(
    values: FamilyValues, primary: IPFamily, *, dual_stack: bool, pod_cidrs: Collection[Network]
) -> Finding:
    """Findings about values that only have the wrong IP family.

    ``dual_stack``: the kernel has both families. ``pod_cidrs``: those of this Node.
    """
    wrong = _other(primary)
    cluster = f"cluster is {_name(primary)}-{'primary' if dual_stack else 'only'} but"
    only = f"contains only {_name(wrong)} addresses"
    texts = []
    fatal = False
    if _all(values.cluster_cidrs, wrong):
        texts.append(f"{cluster} clusterCIDRs {only}")
        fatal |= values.detect_local_mode == "ClusterCIDR" and not dual_stack
    if _all([str(cidr) for cidr in pod_cidrs], wrong):
        texts.append(f"{cluster} node.spec.podCIDRs {only}")
        fatal |= values.detect_local_mode == "NodeCIDR"
    vip = addresses.parse_ip(values.source_vip)
    if vip is not None and IPFamily(vip.version) == wrong:
        texts.append(f"{cluster} winkernel.sourceVip is {_name(wrong)}")
    if not dual_stack:
        if _all(values.exclude_cidrs, wrong):
            texts.append(f"{cluster} ipvs.excludeCIDRs {only}")
        for field, text in (("healthz", values.healthz_address), ("metrics", values.metrics_address)):
            parts = addresses.split_host_port(text)
            ip = addresses.parse_ip(parts[0]) if parts else None
            if ip is not None and IPFamily(ip.version) == wrong and not ip.is_unspecified:
                texts.append(f"{cluster} {field}BindAddress is {_name(wrong)}")
    return Finding(texts, fatal)


def _all(cidrs: Collection[str], family: IPFamily) -> bool:
    return bool(cidrs) and all(_family(cidr) == family for cidr in cidrs)


def _family(cidr: str) -> IPFamily | None:
    network = addresses.parse_cidr(cidr)
    return None if network is None else IPFamily(network.version)


def _other(family: IPFamily) -> IPFamily:
    return IPFamily.IPV6 if family == IPFamily.IPV4 else IPFamily.IPV4


def _name(family: IPFamily) -> str:
    return "IPv4" if family == IPFamily.IPV4 else "IPv6"
