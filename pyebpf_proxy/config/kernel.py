# SPDX-License-Identifier: Apache-2.0
"""The kernel settings that the configuration requests, as typed values (spec/service-semantics §12).

The data plane maps them to sysctls.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from pyebpf_proxy.common.bpf_constants import NOT_ON_LOOPBACK, ON_ALL_LOOPBACK, ON_LOCALHOST, ON_OTHER_LOOPBACK
from pyebpf_proxy.config import addresses
from pyebpf_proxy.config.durations import SECOND
from pyebpf_proxy.config.model import KubeProxyConfiguration

_LOOPBACK = ipaddress.ip_network("127.0.0.0/8")
_LOCALHOST = ipaddress.ip_address("127.0.0.1")


@dataclass(frozen=True, slots=True)
class Conntrack:
    """Section ``conntrack``. Timeouts in whole seconds, truncated as in kube-proxy; None: unchanged."""

    max_per_core: int = 0
    min: int = 0
    tcp_established: int | None = None
    tcp_close_wait: int | None = None
    tcp_be_liberal: bool = False
    udp: int | None = None
    udp_stream: int | None = None


@dataclass(frozen=True, slots=True)
class Ipvs:
    """Section ``ipvs``, in mode ipvs only. Timeouts in whole seconds; None: unchanged."""

    strict_arp: bool = False
    tcp: int | None = None
    tcp_fin: int | None = None
    udp: int | None = None


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """All requested kernel settings; the default values request nothing."""

    conntrack: Conntrack = Conntrack()
    #: For ``primary`` as :func:`localhost_node_ports`.
    route_localnet: bool = False
    #: None in other modes.
    ipvs: Ipvs | None = None
    #: None: unchanged.
    oom_score_adj: int | None = None


def kernel_settings(config: KubeProxyConfiguration) -> KernelSettings:
    """The kernel settings that a completed and validated ``config`` requests."""
    section, ipvs = config.conntrack, config.ipvs
    return KernelSettings(
        conntrack=Conntrack(
            max_per_core=section.max_per_core or 0,
            min=section.min or 0,
            tcp_established=_seconds(section.tcp_established_timeout),
            tcp_close_wait=_seconds(section.tcp_close_wait_timeout),
            tcp_be_liberal=section.tcp_be_liberal,
            udp=_seconds(section.udp_timeout),
            udp_stream=_seconds(section.udp_stream_timeout),
        ),
        route_localnet=config.mode == "iptables" and bool(localhost_node_ports(config)),
        # An IPVS timeout below a second is truncated to 0, which means unchanged.
        ipvs=Ipvs(
            strict_arp=ipvs.strict_arp,
            tcp=_seconds(ipvs.tcp_timeout) or None,
            tcp_fin=_seconds(ipvs.tcp_fin_timeout) or None,
            udp=_seconds(ipvs.udp_timeout) or None,
        )
        if config.mode == "ipvs"
        else None,
        oom_score_adj=config.oom_score_adj,
    )


def localhost_node_ports(config: KubeProxyConfiguration) -> int:
    """Where NodePorts are served on 127.0.0.0/8 (spec/service-semantics §8), as ``enum loopback_node_ports``.

    Nowhere in mode nftables, or if ``nodePortAddresses`` has no loopback address. If it lists networks, only at
    127.0.0.1, and at other listed loopback addresses that are on a device (``datapath.node.plan``).

    For ``primary`` this is the value on a Node without an IPv4 address; ``datapath.settings`` knows the Node.
    """
    if config.mode == "nftables" or config.iptables.localhost_node_ports is False:
        return NOT_ON_LOOPBACK
    names = config.node_port_addresses or []
    networks = [network for network in map(addresses.parse_cidr, names) if network is not None and network.version == 4]
    if not networks or any(not network.prefixlen for network in networks):
        return ON_ALL_LOOPBACK
    if any(_LOCALHOST in network for network in networks):
        return ON_LOCALHOST
    overlaps = any(network.overlaps(_LOOPBACK) for network in networks)
    return ON_OTHER_LOOPBACK if overlaps else NOT_ON_LOOPBACK


def _seconds(nanoseconds: int | None) -> int | None:
    """Whole seconds, truncated; None (unchanged) for 0. A duration below a second is written as 0."""
    return nanoseconds // SECOND if nanoseconds and nanoseconds > 0 else None
