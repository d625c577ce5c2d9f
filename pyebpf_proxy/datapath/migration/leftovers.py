# SPDX-License-Identifier: Apache-2.0
"""Removes the leftovers of all kube-proxy modes, and finds modes that are still running."""

from __future__ import annotations

from collections.abc import Sequence

from pyebpf_proxy.config.addresses import Network
from pyebpf_proxy.datapath.migration import iptables, ipvs, nftables
from pyebpf_proxy.datapath.report import Report


def remove(exclude_cidrs: Sequence[Network], *, at_start: bool = False) -> Report:
    """Remove what ``kube-proxy --cleanup`` removes (spec/configuration §6). Every part is tried; one line per problem.

    ``at_start``: not requested by an operator, so virtual servers and ipsets are removed only if a device or a rule
    shows that kube-proxy's mode ipvs was here; otherwise they may belong to software unrelated to Kubernetes. The chain
    KUBE-FORWARD stays where connections would end without it (``rules.plan``).
    """
    report = Report()
    device = ipvs.device_exists()
    # First the device's addresses, those of all Services. While the node has one, its sockets are not translated, and
    # need the virtual server and the rules that masquerade. The device itself is last: if the agent is killed before,
    # it shows the next start that there is more to remove.
    what = f"device {ipvs.DEVICE}"
    if device:
        ipvs.step(report, what, lambda: ipvs.remove_addresses(exclude_cidrs, report))
    by_ipvs = iptables.remove(report, keep_forward=at_start)
    if device or by_ipvs or not at_start:
        if ipvs.ipvs_loaded():
            ipvs.step(report, "IPVS", lambda: ipvs.remove_servers(exclude_cidrs, report))
        if ipvs.ipset_loaded():
            ipvs.step(report, "ipset", lambda: ipvs.remove_sets(report))
        ipvs.step(report, what, lambda: ipvs.remove_device(exclude_cidrs, report))
    nftables.remove(report)
    return report


def running() -> set[str]:
    """The modes with something in the kernel that a running kube-proxy creates again after it is removed."""
    modes = set()
    if iptables.running():
        modes.add("iptables")
    if ipvs.device_exists():
        modes.add("ipvs")
    if nftables.present():
        modes.add("nftables")
    return modes


def serving() -> set[str]:
    """The families, IPv4 and IPv6, in which kube-proxy's rules serve Services, as far as this can be read. OSError."""
    if ipvs.device_exists():
        return {f"IPv{family}" for family in nftables.FAMILIES}
    tables = nftables.present()
    return {f"IPv{family}" for family, name in nftables.FAMILIES.items() if name in tables or iptables.serves(family)}


def needs_route_localnet() -> bool:
    """Whether a kube-proxy in mode iptables may run: it needs route_localnet, and guards the loopback. OSError."""
    try:
        return iptables.running()
    except iptables.ToolError:
        return True


def relies_on_liberal_conntrack() -> bool:
    """Whether a kube-proxy in mode iptables runs that found conntrack liberal at its start. OSError."""
    return not ipvs.device_exists() and not nftables.present() and iptables.passes_invalid()
