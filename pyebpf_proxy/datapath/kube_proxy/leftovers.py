# SPDX-License-Identifier: Apache-2.0
"""Everything that kube-proxy's modes have left, removed; and which of them runs beside us."""

from __future__ import annotations

from collections.abc import Sequence

from pyebpf_proxy.config.addresses import Network
from pyebpf_proxy.datapath.kube_proxy import iptables, ipvs, nftables
from pyebpf_proxy.datapath.report import Report


def remove(exclude_cidrs: Sequence[Network], *, at_start: bool = False) -> Report:
    """What ``kube-proxy --cleanup`` removes (spec/configuration §6). Every part is tried, problems are one line each.

    ``at_start``: nobody has asked for it, so virtual servers and ipsets go only where a device or a rule shows that
    kube-proxy's mode ipvs was here; else they are somebody else's, who has nothing to do with Kubernetes. And the
    chain KUBE-FORWARD stays where connections would end without it (``rules.plan``).
    """
    report = Report()
    device = ipvs.device_exists()
    by_ipvs = iptables.remove(report, keep_forward=at_start)
    if device or by_ipvs or not at_start:
        if ipvs.ipvs_loaded():
            ipvs.step(report, "IPVS", lambda: ipvs.remove_servers(exclude_cidrs, report))
        ipvs.step(report, f"device {ipvs.DEVICE}", lambda: ipvs.remove_device(exclude_cidrs, report))
        if ipvs.ipset_loaded():
            ipvs.step(report, "ipset", lambda: ipvs.remove_sets(report))
    nftables.remove(report)
    return report


def running() -> set[str]:
    """The modes of which something exists that a running kube-proxy makes again when it is taken away."""
    modes = set()
    if iptables.running():
        modes.add("iptables")
    if ipvs.device_exists():
        modes.add("ipvs")
    if nftables.present():
        modes.add("nftables")
    return modes
