# SPDX-License-Identifier: Apache-2.0
"""What this node is to the data plane: pure, from links, addresses and configuration to wanted map contents.

``links.Follower`` keeps a :class:`State` up to date from netlink, :func:`plan` says what follows from it,
``links.Node`` writes the differences.

Simplifications, all visible only in unusual set-ups:

* addresses that are local without being on an interface (AnyIP: ``ip route add local 10.0.0.0/8 dev lo``, or
  a prefix shorter than /32 on the loopback device) are not known as addresses of the node;
* IPv6 masquerading takes, instead of the full ordering of RFC 6724, an address of the outgoing device in the
  destination's own subnet, else a unique local address for a unique local destination, else the device's
  first global address that is not unique local; deprecated and temporary addresses only if there is nothing
  else, tentative ones never.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

# include/uapi/linux/if_arp.h
ARPHRD_ETHER = 1
ARPHRD_LOOPBACK = 772
# Devices that carry bare IP packets: rawip, ppp, tunnel, tunnel6, sit, ipgre, ip6gre, none (tun, wireguard, xfrm).
ARPHRD_LAYER3 = frozenset({519, 512, 768, 769, 776, 778, 823, 65534})
# A packet never enters the node here, or it enters it elsewhere, seen by a program there.
NOT_ENTRANCES = frozenset({"bridge", "vrf", "ifb", "nlmon", "vsockmon", "can", "vcan", "vxcan", "dummy"})
# Masters that leave the packet with its port at tc ingress; others (bond, team, openvswitch) take it over.
PORT_MASTERS = frozenset({"bridge", "vrf"})

# include/uapi/linux/if_addr.h, rtnetlink.h
IFA_F_SECONDARY = 0x01  # the same bit is IFA_F_TEMPORARY for IPv6
IFA_F_TEMPORARY = 0x01
IFA_F_DADFAILED = 0x08
IFA_F_DEPRECATED = 0x20
IFA_F_TENTATIVE = 0x40
SCOPE_UNIVERSE = 0

# Ethernet devices that send on what they are given; tunnels that ask the packet's route where to are not among them.
FAST_KINDS = frozenset(
    {"", "veth", "netkit", "bond", "team", "vlan", "bridge", "macvlan", "ipvlan", "vxlan", "geneve", "tun"}
)
# enum passage of bpf/node_maps.h
TO_STACK, TO_NEIGHBOUR = 0, 1

TC_ETHERNET = "tc_ethernet"
TC_LAYER3 = "tc_l3"
TC_BRIDGE_PORT = "tc_bridge_port"
PRIMARY = ("primary",)
ULA = ipaddress.IPv6Network("fc00::/7")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Link(NamedTuple):
    """A network device. ``kind`` is the rtnl_link kind ("veth", "" for hardware), ``type`` the ARPHRD number."""

    ifindex: int
    name: str
    type: int
    kind: str = ""
    master: int = 0
    mac: bytes = bytes(6)
    #: Of a VLAN: the device below it.
    lower: int = 0
    #: Id of an XDP program that is on it, anybody's.
    xdp: int = 0


class InterfaceAddress(NamedTuple):
    """An address on a device; ``peer`` is IFA_ADDRESS (differs on point-to-point links), whose subnet is on-link."""

    device: int
    address: Address
    peer: Address
    prefix_length: int
    scope: int = SCOPE_UNIVERSE
    flags: int = 0

    @property
    def subnet(self) -> Network:
        return ipaddress.ip_network((self.peer, self.prefix_length), strict=False)


@dataclass
class State:
    """Links by ifindex; addresses by (device, address, prefix length), in the kernel's order per device."""

    links: dict[int, Link] = field(default_factory=dict)
    addresses: dict[tuple[int, Address, int], InterfaceAddress] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeConfig:
    """``node_port_addresses``: CIDRs or ("primary",); ``node_ips`` are what "primary" stands for.

    ``bridge_interface`` and ``interface_name_prefix`` are set for these modes of detectLocalMode only.
    """

    node_port_addresses: tuple[str, ...] = ()
    node_ips: tuple[Address, ...] = ()
    bridge_interface: str = ""
    interface_name_prefix: str = ""
    fast_path: bool = False
    fast_path_excluded_devices: tuple[str, ...] = ()


class Device(NamedTuple):
    """Value of the ``devices`` map."""

    bridge: int = 0
    bridge_mac: bytes = bytes(6)
    pod_source: bool = False
    passage: int = TO_STACK


class MasqueradeKey(NamedTuple):
    """Device and prefix (packed, host bits zero; prefix length without the device's 32 bits)."""

    device: int
    prefix_length: int
    address: bytes


@dataclass
class Wanted:
    """Contents of the maps of the node, and which device carries which program. Addresses are packed."""

    programs: dict[int, str] = field(default_factory=dict)
    devices: dict[int, Device] = field(default_factory=dict)
    node_addresses: dict[bytes, bool] = field(default_factory=dict)
    masquerade: dict[MasqueradeKey, bytes] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()


def plan(state: State, config: NodeConfig) -> Wanted:
    """Everything that follows from the state of the node."""
    wanted = Wanted()
    unsupported = []
    for link in state.links.values():
        program = program_for(link, state.links)
        if program:
            wanted.programs[link.ifindex] = program
            wanted.devices[link.ifindex] = _device(link, state.links, config)
        elif program is None:
            unsupported.append(link.name)
        elif link.kind == "bridge" and (passage := _passage(link, state.links, config)):
            # No entrance, but packets leave by it, and those of its ports come in by it.
            wanted.devices[link.ifindex] = Device(passage=passage)
    wanted.unsupported = tuple(sorted(unsupported))
    wanted.node_addresses = _node_addresses(state.addresses.values(), config)
    wanted.masquerade = {
        **_masquerade4(state.links, state.addresses.values()),
        **_masquerade6(state.links, state.addresses.values()),
    }
    return wanted


def program_for(link: Link, links: Mapping[int, Link]) -> str | None:
    """The program that a device carries: "" if it is no entrance, None if its link layer is not supported."""
    if link.type == ARPHRD_LOOPBACK or link.kind in NOT_ENTRANCES:
        return ""
    master = links.get(link.master)
    if link.master and (master is None or master.kind not in PORT_MASTERS):
        return ""
    if link.type == ARPHRD_ETHER:
        return TC_BRIDGE_PORT if master is not None and master.kind == "bridge" else TC_ETHERNET
    return TC_LAYER3 if link.type in ARPHRD_LAYER3 else None


def _device(link: Link, links: Mapping[int, Link], config: NodeConfig) -> Device:
    master = links.get(link.master)
    bridge = master if master is not None and master.kind == "bridge" else None
    # The input interface of spec/service-semantics §6 is the one the IP layer sees: a port's bridge.
    seen_as = (bridge or link).name
    if config.bridge_interface:
        pod_source = seen_as == config.bridge_interface
    else:
        pod_source = bool(config.interface_name_prefix) and seen_as.startswith(config.interface_name_prefix)
    passage = _passage(link, links, config)
    if bridge is None:
        return Device(pod_source=pod_source, passage=passage)
    return Device(bridge.ifindex, bridge.mac, pod_source, passage)


def _passage(link: Link, links: Mapping[int, Link], config: NodeConfig) -> int:
    """How the fast path sends by a device (enum passage), and whether it takes packets from there."""
    if not config.fast_path or link.name in config.fast_path_excluded_devices:
        return TO_STACK
    if link.type != ARPHRD_ETHER or link.kind not in FAST_KINDS or _vrf(link.ifindex, links):
        return TO_STACK
    return TO_NEIGHBOUR


def _node_addresses(addresses: Iterable[InterfaceAddress], config: NodeConfig) -> dict[bytes, bool]:
    accepts = {version: accepted_networks(version, config) for version in (4, 6)}
    found: dict[bytes, bool] = {}
    for entry in addresses:
        address = entry.address
        if address.version == 4 and address.is_loopback:
            continue  # known to the programs without a map
        if address.version == 6 and entry.flags & IFA_F_DADFAILED:
            continue  # somebody else's
        networks = accepts[address.version]
        accepted = not address.is_loopback and (networks is None or any(address in n for n in networks))
        found[address.packed] = accepted
    return found


def accepted_networks(version: int, config: NodeConfig) -> tuple[Network, ...] | None:
    """Networks of one family whose addresses serve NodePorts, None for all addresses (spec/service-semantics §8)."""
    if config.node_port_addresses == PRIMARY:
        cidrs = [str(ip) for ip in config.node_ips if not (ip.is_unspecified or ip.is_loopback)]
    else:
        cidrs = list(config.node_port_addresses)
    networks = [ipaddress.ip_network(text, strict=False) for text in cidrs]
    return tuple(network for network in networks if network.version == version) or None


def _masquerade4(links: Mapping[int, Link], addresses: Iterable[InterfaceAddress]) -> dict[MasqueradeKey, bytes]:
    """What inet_select_addr(device, next hop, universe) returns, as a longest-prefix table."""
    by_device: dict[int, list[InterfaceAddress]] = {}
    for entry in addresses:
        if entry.address.version == 4 and entry.scope == SCOPE_UNIVERSE and not entry.flags & IFA_F_SECONDARY:
            by_device.setdefault(entry.device, []).append(entry)
    found: dict[MasqueradeKey, bytes] = {}
    for index in links:
        own = by_device.get(index, [])
        _subnet_entries(found, index, own)
        default = own[0].address if own else _borrowed(index, links, by_device)
        if default is not None:
            found[MasqueradeKey(index, 0, bytes(4))] = default.packed
    return found


def _masquerade6(links: Mapping[int, Link], addresses: Iterable[InterfaceAddress]) -> dict[MasqueradeKey, bytes]:
    by_device: dict[int, list[InterfaceAddress]] = {}
    for entry in addresses:
        usable = entry.scope == SCOPE_UNIVERSE and not entry.flags & (IFA_F_TENTATIVE | IFA_F_DADFAILED)
        if entry.address.version == 6 and usable:
            by_device.setdefault(entry.device, []).append(entry)
    for own in by_device.values():
        # Stable: lasting addresses first, each group in the kernel's order.
        own.sort(key=lambda entry: (bool(entry.flags & IFA_F_DEPRECATED), bool(entry.flags & IFA_F_TEMPORARY)))
    found: dict[MasqueradeKey, bytes] = {}
    for index in links:
        own = by_device.get(index, [])
        _subnet_entries(found, index, own)
        local = next((entry.address for entry in own if entry.address in ULA), None)
        other = next((entry.address for entry in own if entry.address not in ULA), None)
        default = other or local or _borrowed(index, links, by_device)
        if local is not None and other is not None:
            found.setdefault(MasqueradeKey(index, ULA.prefixlen, ULA.network_address.packed), local.packed)
        if default is not None:
            found.setdefault(MasqueradeKey(index, 0, bytes(16)), default.packed)
    return found


def _subnet_entries(found: dict[MasqueradeKey, bytes], index: int, own: list[InterfaceAddress]) -> None:
    """One entry per subnet. The kernel takes the first match, so a subnet inside an earlier one has no entry."""
    earlier: list[Network] = []
    for entry in own:
        subnet = entry.subnet
        if any(_contains(network, subnet) for network in earlier):
            continue
        earlier.append(subnet)
        key = MasqueradeKey(index, subnet.prefixlen, subnet.network_address.packed)
        found[key] = entry.address.packed


def _contains(outer: Network, inner: Network) -> bool:
    return outer.prefixlen <= inner.prefixlen and inner.network_address in outer


def _borrowed(index: int, links: Mapping[int, Link], by_device: Mapping[int, list[InterfaceAddress]]) -> Address | None:
    """For a device without an address of its own: its VRF's, else the first device's of the same VRF (or of none)."""
    return next((by_device[other][0].address for other in _lenders(index, links) if by_device.get(other)), None)


def _lenders(index: int, links: Mapping[int, Link]) -> Iterator[int]:
    vrf = _vrf(index, links)
    if vrf:
        yield vrf
    yield from (other for other in sorted(links) if _vrf(other, links) == vrf)


def _vrf(index: int, links: Mapping[int, Link]) -> int:
    """The VRF that a device is, or is a port of (l3mdev_master_ifindex); 0 without."""
    link = links[index]
    if link.kind == "vrf":
        return index
    master = links.get(link.master)
    return master.ifindex if master is not None and master.kind == "vrf" else 0
