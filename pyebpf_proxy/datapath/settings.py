# SPDX-License-Identifier: Apache-2.0
"""From the settings in force and the Nodes to what the programs are told before they are loaded."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from pyebpf_proxy.config.addresses import Network
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.loader.programs import SCHEDULERS, Settings
from pyebpf_proxy.datapath.netfilter.own_sctp import OwnTraffic
from pyebpf_proxy.datapath.node.plan import NodeConfig, accepted_networks
from pyebpf_proxy.datapath.node.xdp import XdpConfig
from pyebpf_proxy.datapath.preflight import SO_NETNS_COOKIE
from pyebpf_proxy.node_facts import NodeFacts
from pyebpf_proxy.services.model import Family

# enum detector of bpf/settings.h
DETECT_NOTHING, DETECT_CIDR, DETECT_DEVICE = range(3)

# Of the memory; bytes of an entry with what the kernel puts around it; bounds.
_FLOW_SHARE, _FLOW_BYTES = 512, 200
_FLOWS_LEAST, _FLOWS_MOST = 4096, 1 << 20
_TIMEOUTS = Path("/proc/sys/net/netfilter")


def settings(effective: Effective, facts: NodeFacts) -> Settings:
    """``struct settings`` of this network namespace. conntrack must be loaded: its timeouts are read."""
    by_device = effective.detect_local_mode in ("BridgeInterface", "InterfaceNamePrefix")
    cidrs = detector_cidrs(effective, facts)
    cidr4, mask4 = _packed(cidrs, Family.IPV4)
    cidr6, mask6 = _packed(cidrs, Family.IPV6)
    return Settings(
        netns_cookie=netns_cookie(),
        masquerade_mark=effective.masquerade_mark,
        masquerade_all=effective.masquerade_all,
        fast_path=effective.fast_path,
        tcp_established_ms=_timeout("nf_conntrack_tcp_timeout_established", 432_000),
        udp_stream_ms=_timeout("nf_conntrack_udp_timeout_stream", 120),
        tcp_timeout_ms=_timeout("nf_conntrack_tcp_timeout_syn_sent", 120),
        udp_timeout_ms=_timeout("nf_conntrack_udp_timeout", 30),
        pod_cidr4=cidr4,
        pod_mask4=mask4,
        pod_cidr6=cidr6,
        pod_mask6=mask6,
        node_address4=facts.node_ips.get(Family.IPV4, bytes(4)),
        node_address6=facts.node_ips.get(Family.IPV6, bytes(16)),
        detector4=_detector(by_device, cidrs, Family.IPV4),
        detector6=_detector(by_device, cidrs, Family.IPV6),
        nft_mode=effective.nft_mode,
        localhost_node_ports=effective.localhost_node_ports,
        scheduler=SCHEDULERS[effective.scheduler] if effective.scheduler else 0,
        pod_sockets=effective.socket_lb == "all",
        xdp=bool(effective.xdp_devices),
        xdp_generic=effective.xdp_mode == "generic",
    )


def detector_cidrs(effective: Effective, facts: NodeFacts) -> Mapping[Family, Network]:
    """Sources that count as local pods' (spec/service-semantics §6); a family without one has no detector."""
    if effective.detect_local_mode == "NodeCIDR":
        return facts.node_cidrs
    return effective.pod_cidrs if effective.detect_local_mode == "ClusterCIDR" else {}


def node_config(effective: Effective, facts: NodeFacts) -> NodeConfig:
    """What decides which addresses serve NodePorts and which devices are pods'."""
    mode = effective.detect_local_mode
    return NodeConfig(
        node_port_addresses=effective.node_port_addresses,
        node_ips=tuple(ipaddress.ip_address(packed) for packed in facts.node_ips.values()),
        bridge_interface=effective.bridge_interface if mode == "BridgeInterface" else "",
        interface_name_prefix=effective.interface_name_prefix if mode == "InterfaceNamePrefix" else "",
        fast_path=effective.fast_path,
        fast_path_excluded_devices=effective.fast_path_excluded_devices,
    )


def own_traffic(effective: Effective, facts: NodeFacts) -> OwnTraffic:
    """What decides on packets that the node itself sends, where our nft table decides."""
    cidrs = detector_cidrs(effective, facts)
    by_device = effective.detect_local_mode in ("BridgeInterface", "InterfaceNamePrefix")
    config = node_config(effective, facts)
    accepted = {family: accepted_networks(family, config) for family in Family}
    return OwnTraffic(
        masquerade_mark=effective.masquerade_mark,
        nft_mode=effective.nft_mode,
        masquerade_all=effective.masquerade_all,
        detectors=dict.fromkeys(Family) if by_device else dict(cidrs),
        node_ports={family: networks for family, networks in accepted.items() if networks is not None},
        localhost_node_ports=effective.localhost_node_ports,
    )


def xdp_config(effective: Effective) -> XdpConfig:
    """Which devices carry XDP, and how."""
    return XdpConfig(effective.xdp_devices, effective.xdp_mode, effective.socket_lb == "all")


def map_sizes(effective: Effective) -> dict[str, int]:
    """Entries by map. That of the flow cache is by the memory where nobody gives it: a 512th, in powers of two."""
    entries = effective.fast_path_entries
    if entries is None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        wanted = memory // _FLOW_SHARE // _FLOW_BYTES
        entries = 1 << (min(max(wanted, _FLOWS_LEAST), _FLOWS_MOST)).bit_length() - 1
    return {**effective.map_sizes, "flows": entries}


def conntrack_is_liberal() -> bool:
    """Whether conntrack lets TCP segments outside of their window pass as valid; it does not when it starts."""
    try:
        return int((_TIMEOUTS / "nf_conntrack_tcp_be_liberal").read_text()) != 0
    except (OSError, ValueError):
        return False


def netns_cookie() -> int:
    """The kernel's number of the network namespace this process is in."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        cookie: int = struct.unpack("=Q", probe.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8))[0]
    return cookie


def _packed(cidrs: Mapping[Family, Network], family: Family) -> tuple[bytes, bytes]:
    network = cidrs.get(family)
    if network is None:
        size = 4 if family is Family.IPV4 else 16
        return bytes(size), bytes(size)
    return network.network_address.packed, network.netmask.packed


def _detector(by_device: bool, cidrs: Mapping[Family, Network], family: Family) -> int:
    if by_device:
        return DETECT_DEVICE
    return DETECT_CIDR if family in cidrs else DETECT_NOTHING


def _timeout(name: str, default: int) -> int:
    """Milliseconds of a conntrack timeout; the kernel's default where /proc/sys is not readable."""
    try:
        return min(int((_TIMEOUTS / name).read_text()) * 1000, 0xFFFFFFFF)
    except (OSError, ValueError):
        return default * 1000
