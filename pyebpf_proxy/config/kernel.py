# SPDX-License-Identifier: Apache-2.0
"""What the configuration asks of the kernel's own settings (spec/service-semantics §12), as typed values.

Which file gets which value is the data plane's business; here it is only decided what is asked for at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyebpf_proxy.config import addresses
from pyebpf_proxy.config.durations import SECOND
from pyebpf_proxy.config.model import KubeProxyConfiguration

_LOOPBACK = addresses.parse_cidr("127.0.0.0/8")


@dataclass(frozen=True, slots=True)
class Conntrack:
    """Section ``conntrack``. Timeouts in whole seconds, truncated as kube-proxy does it; None: left alone."""

    max_per_core: int = 0
    min: int = 0
    tcp_established: int | None = None
    tcp_close_wait: int | None = None
    tcp_be_liberal: bool = False
    udp: int | None = None
    udp_stream: int | None = None


@dataclass(frozen=True, slots=True)
class Ipvs:
    """Section ``ipvs``, in mode ipvs only. Timeouts in whole seconds; None: left alone."""

    strict_arp: bool = False
    tcp: int | None = None
    tcp_fin: int | None = None
    udp: int | None = None


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """Everything that is asked of the kernel's settings; the values without anything ask for nothing."""

    conntrack: Conntrack = Conntrack()
    route_localnet: bool = False
    #: None: another mode.
    ipvs: Ipvs | None = None
    #: None: left alone.
    oom_score_adj: int | None = None


def kernel_settings(config: KubeProxyConfiguration) -> KernelSettings:
    """What a completed and validated ``config`` asks for."""
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
        route_localnet=config.mode == "iptables" and localhost_node_ports(config),
        # A timeout of IPVS below a second is 0 seconds, and that is its word for "as it is".
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


def localhost_node_ports(config: KubeProxyConfiguration) -> bool:
    """Whether NodePorts answer on 127.0.0.0/8: never in mode nftables, and not if no such address is among
    ``nodePortAddresses`` (spec/service-semantics §8: the feature is then off)."""
    if config.mode == "nftables" or config.iptables.localhost_node_ports is False:
        return False
    names = config.node_port_addresses or []
    if names == ["primary"]:
        return False  # The Node's own address is no loopback address.
    networks = [network for network in map(addresses.parse_cidr, names) if network is not None and network.version == 4]
    assert _LOOPBACK is not None
    return not networks or any(network.overlaps(_LOOPBACK) for network in networks)


def _seconds(nanoseconds: int | None) -> int | None:
    """Whole seconds, truncated; None for "left alone", which is 0. Below a second it is 0 that is written."""
    return nanoseconds // SECOND if nanoseconds and nanoseconds > 0 else None
