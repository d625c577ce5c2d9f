# SPDX-License-Identifier: Apache-2.0
"""Derives the settings of the programs from the configuration and the Nodes, before the programs are loaded."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pyebpf_proxy.common.bpf_constants import (
    DETECT_CIDR,
    DETECT_DEVICE,
    DETECT_NOTHING,
    NOT_ON_LOOPBACK,
    ON_OTHER_LOOPBACK,
)
from pyebpf_proxy.common.kernel_files import kernel_number
from pyebpf_proxy.config.addresses import Network
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.config.kernel import KernelSettings
from pyebpf_proxy.datapath.loader import ordering
from pyebpf_proxy.datapath.loader.programs import SCHEDULERS, Settings
from pyebpf_proxy.datapath.netfilter.host_rules import HostTraffic
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour
from pyebpf_proxy.datapath.node.plan import PRIMARY, NodeConfig, accepted_networks
from pyebpf_proxy.datapath.node.xdp import XdpConfig
from pyebpf_proxy.datapath.preflight import SO_NETNS_COOKIE
from pyebpf_proxy.services.model import IPFamily, Protocol
from pyebpf_proxy.services.node_facts import NodeFacts

# Share of the memory (1/512); bytes of an entry with the kernel's overhead; bounds.
_FLOW_SHARE, _FLOW_BYTES = 512, 256
_FLOWS_LEAST, _FLOWS_MOST = 4096, 1 << 17
_BE_LIBERAL = Path("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")
# Of this network namespace; also used for IPv6.
_LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_UDP_TIMEOUT = Path("/proc/sys/net/netfilter/nf_conntrack_udp_timeout")
_UDP_STREAM_TIMEOUT = Path("/proc/sys/net/netfilter/nf_conntrack_udp_timeout_stream")
# Neither the programs nor the nft table use source ports below 1024. Fewer than _FEWEST would soon be used up.
_FIRST_PORT, _KERNELS_FIRST, _LAST_PORT, _FEWEST = 1024, 32768, 65535, 4096


class SnatPorts(NamedTuple):
    """Source ports for masquerading: those of the programs, for flows of the fast path, and those of the nft table."""

    fast: range
    netfilter: range


def settings(effective: Effective, facts: NodeFacts) -> Settings:
    """``struct settings`` of this network namespace."""
    ports = snat_ports(local_ports())
    by_device = effective.detect_local_mode in ("BridgeInterface", "InterfaceNamePrefix")
    cidrs = detector_cidrs(effective, facts)
    cidr4, mask4 = _packed(cidrs, IPFamily.IPV4)
    cidr6, mask6 = _packed(cidrs, IPFamily.IPV6)
    return Settings(
        netns_cookie=netns_cookie(),
        permit_seed=secrets.randbits(64) | 1,
        permit_seed6=secrets.randbits(64) | 1,
        masquerade_mark=effective.masquerade_mark,
        masquerade_all=effective.masquerade_all,
        fast_path=bool(effective.fast_path),
        udp_seconds=_seconds(_UDP_TIMEOUT, 30),
        udp_stream_seconds=_seconds(_UDP_STREAM_TIMEOUT, 120),
        load=secrets.randbelow(0xFFFFFFFF) + 1,
        snat_port_min=ports.fast.start if ports is not None else 0,
        snat_port_max=ports.fast.stop - 1 if ports is not None else 0,
        # A flow has two entries, and one device may use half of the table.
        flow_quota=flow_entries(effective) // 4,
        weak_memory=ordering.is_weak(),
        pod_cidr4=cidr4,
        pod_mask4=mask4,
        pod_cidr6=cidr6,
        pod_mask6=mask6,
        node_address4=facts.node_ips.get(IPFamily.IPV4, bytes(4)),
        node_address6=facts.node_ips.get(IPFamily.IPV6, bytes(16)),
        detector4=_detector(by_device, cidrs, IPFamily.IPV4),
        detector6=_detector(by_device, cidrs, IPFamily.IPV6),
        nft_mode=effective.nft_mode,
        localhost_node_ports=(_tables_loopback if effective.socket_lb == "off" else _loopback)(effective, facts),
        scheduler=SCHEDULERS[effective.scheduler] if effective.scheduler else 0,
        pod_sockets=effective.socket_lb == "all",
        xdp=bool(effective.xdp_devices),
        # Without devices the programs' map of them does not exist.
        xdp_generic=bool(effective.xdp_devices) and effective.xdp_mode == "generic",
    )


def detector_cidrs(effective: Effective, facts: NodeFacts) -> Mapping[IPFamily, Network]:
    """Sources that count as local pods' (spec/service-semantics §6); a family without one has no detector."""
    if effective.detect_local_mode == "NodeCIDR":
        return facts.node_cidrs
    return effective.pod_cidrs if effective.detect_local_mode == "ClusterCIDR" else {}


def node_config(effective: Effective, facts: NodeFacts) -> NodeConfig:
    """The configuration of NodePort addresses and of pods' devices."""
    bridge_interface, interface_name_prefix = _pods_devices(effective)
    return NodeConfig(
        node_port_addresses=effective.node_port_addresses,
        node_ips=tuple(ipaddress.ip_address(packed) for packed in facts.node_ips.values()),
        bridge_interface=bridge_interface,
        interface_name_prefix=interface_name_prefix,
        fast_path=bool(effective.fast_path),
        fast_path_excluded_devices=effective.fast_path_excluded_devices,
    )


def _pods_devices(effective: Effective) -> tuple[str, str | None]:
    """The name of the device of local pods, or else the prefix of the names of such devices.

    kube-proxy copies ``bridgeInterface`` into a rule (``-i``, ``iifname``; pkg/proxy/util/localdetector.go). iptables
    takes a ``+`` at its end for a wildcard, nftables a ``*``. A prefix is literal: kube-proxy appends the wildcard.
    """
    name = effective.bridge_interface
    if effective.detect_local_mode == "InterfaceNamePrefix":
        return "", effective.interface_name_prefix
    if effective.detect_local_mode != "BridgeInterface":
        return "", None
    wildcard = "*" if effective.nft_mode else "+"
    return ("", name[:-1]) if name.endswith(wildcard) else (name, None)


def kernel_settings(effective: Effective, facts: NodeFacts) -> KernelSettings:
    """The kernel settings that the configuration requests on this Node."""
    route_localnet = effective.kernel.route_localnet and bool(_loopback(effective, facts))
    return replace(effective.kernel, route_localnet=route_localnet)


def _loopback(effective: Effective, facts: NodeFacts) -> int:
    """Where the node's sockets reach NodePorts on loopback.

    ``primary`` on a Node without an IPv4 address, or whose address is on loopback, selects no IPv4 address. kube-proxy
    then serves all of them (cmd/kube-proxy/app/server.go, pkg/proxy/iptables/proxier.go).
    """
    if effective.node_port_addresses == PRIMARY and accepted_networks(4, node_config(effective, facts)) is not None:
        return NOT_ON_LOOPBACK  # the Node's address is not a loopback address
    return effective.localhost_node_ports


def _tables_loopback(effective: Effective, facts: NodeFacts) -> int:
    """Where the nft table serves NodePorts on loopback.

    Mode ipvs does not set route_localnet. Without it the kernel cannot route a packet from 127.0.0.1 that nftables has
    translated. Sockets do not need it.
    """
    found = _loopback(effective, facts)
    # Even on other addresses, packets from a device to loopback are dropped.
    return ON_OTHER_LOOPBACK if found and not effective.kernel.route_localnet else found


def host_traffic(effective: Effective, facts: NodeFacts) -> HostTraffic:
    """The decisions for the node's own packets, where the nft table makes them."""
    cidrs = detector_cidrs(effective, facts)
    by_device = effective.detect_local_mode in ("BridgeInterface", "InterfaceNamePrefix")
    config = node_config(effective, facts)
    accepted = {family: accepted_networks(family, config) for family in IPFamily}
    return HostTraffic(
        masquerade_mark=effective.masquerade_mark,
        nft_mode=effective.nft_mode,
        masquerade_all=effective.masquerade_all,
        detectors=dict.fromkeys(IPFamily) if by_device else dict(cidrs),
        node_ports={family: networks for family, networks in accepted.items() if networks is not None},
        localhost_node_ports=_tables_loopback(effective, facts),
        protocols=frozenset(Protocol) if effective.socket_lb == "off" else frozenset({Protocol.SCTP}),
    )


def xdp_config(effective: Effective) -> XdpConfig:
    """Which devices carry XDP, and how."""
    return XdpConfig(effective.xdp_devices, effective.xdp_mode, effective.socket_lb == "all")


def flow_entries(effective: Effective) -> int:
    """Entries of the flow table, two per flow: as configured, else a 512th of the memory, at most 131072."""
    if effective.fast_path_entries is not None:
        return effective.fast_path_entries
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = memory // _FLOW_SHARE // _FLOW_BYTES
    return int(1 << (min(max(wanted, _FLOWS_LEAST), _FLOWS_MOST)).bit_length() - 1)


def map_sizes(effective: Effective) -> dict[str, int]:
    """Entries by map."""
    return {**effective.map_sizes, "flows": flow_entries(effective)}


def snat_ports(local: tuple[int, int]) -> SnatPorts | None:
    """Divides the source ports, given the ports of the node's own sockets (``net.ipv4.ip_local_port_range``).

    The programs cannot check whether a port is free, so they use none that a socket may use. None: too few are left.
    """
    end = min(_KERNELS_FIRST, local[0])
    if end - _FIRST_PORT < _FEWEST:
        return None
    return SnatPorts(range(_FIRST_PORT, end), range(end, _LAST_PORT + 1))


def with_fast_path_support(behaviour: Behaviour, enabled: bool) -> Behaviour:
    """Support for the fast path in the nft table: it marks first packets and avoids the fast path's source ports."""
    ports = snat_ports(local_ports()) if enabled else None
    kernels = None if ports is None else (ports.netfilter.start, ports.netfilter.stop - 1)
    return behaviour._replace(prove_new=enabled, conntrack_ports=kernels)


def ports_of_both(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    """The ports that conntrack may choose under two behaviours, first and last; None: all.

    There always are some: each range begins at 32768 or below, and ends with the last port.
    """
    if one is None or other is None:
        return one or other
    return max(one[0], other[0]), min(one[1], other[1])


def local_ports() -> tuple[int, int]:
    """First and last port of the node's own sockets; the kernel's default where /proc/sys is not readable."""
    try:
        first, last = map(int, _LOCAL_PORTS.read_text().split())
    except (OSError, ValueError):
        return 32768, 60999
    return first, last


def conntrack_is_liberal() -> bool:
    """Whether conntrack accepts TCP segments outside of their window as valid; off when conntrack is loaded."""
    return bool(kernel_number(_BE_LIBERAL))


def netns_cookie() -> int:
    """The cookie of this process's network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        cookie: int = struct.unpack("=Q", probe.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8))[0]
    return cookie


def _seconds(setting: Path, default: int) -> int:
    """A timeout of conntrack; ``default``, the kernel's, where it cannot be read."""
    found = kernel_number(setting)
    return default if found is None else found


def _packed(cidrs: Mapping[IPFamily, Network], family: IPFamily) -> tuple[bytes, bytes]:
    network = cidrs.get(family)
    if network is None:
        size = 4 if family is IPFamily.IPV4 else 16
        return bytes(size), bytes(size)
    return network.network_address.packed, network.netmask.packed


def _detector(by_device: bool, cidrs: Mapping[IPFamily, Network], family: IPFamily) -> int:
    if by_device:
        return DETECT_DEVICE
    return DETECT_CIDR if family in cidrs else DETECT_NOTHING
