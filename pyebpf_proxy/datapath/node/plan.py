# SPDX-License-Identifier: Apache-2.0
"""Plans the contents of the node's maps from links, addresses and configuration. Pure.

``follower.Follower`` keeps a :class:`State` up to date from netlink, :func:`plan` derives the wanted contents,
``devices.Node`` writes the differences.

A limitation, relevant only in unusual set-ups:

* addresses that are local without being on an interface (AnyIP: ``ip route add local 10.0.0.0/8 dev lo``, or
  a prefix shorter than /32 on the loopback device) are not treated as addresses of the node.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pyebpf_proxy.common.bpf_constants import REDIRECT_DEVICE, REDIRECT_NONE, REDIRECT_PEER
from pyebpf_proxy.config.addresses import parse_cidr

# include/uapi/linux/if_arp.h
ARPHRD_ETHER = 1
ARPHRD_LOOPBACK = 772
# Devices that carry bare IP packets: rawip, ppp, tunnel, tunnel6, sit, ipgre, ip6gre, none (tun, wireguard, xfrm).
ARPHRD_LAYER3 = frozenset({519, 512, 768, 769, 776, 778, 823, 65534})
# Packets do not enter the node through these, or they pass a program at another device.
NOT_ENTRANCES = frozenset({"bridge", "vrf", "ifb", "nlmon", "vsockmon", "can", "vcan", "vxcan", "dummy"})
# Masters that leave the packet with its port at tc ingress; others (bond, team, openvswitch) take it over.
PORT_MASTERS = frozenset({"bridge", "vrf"})

# include/uapi/linux/if_addr.h, rtnetlink.h
IFA_F_SECONDARY = 0x01
IFA_F_DADFAILED = 0x08
SCOPE_UNIVERSE = 0

# Ethernet devices that send packets unchanged; not tunnels that take the destination from the packet's route.
FAST_KINDS = frozenset({"", "veth", "netkit", "bond", "team", "vlan", "bridge", "macvlan", "vxlan", "geneve", "tun"})
# They have the link address of the device below, whose program their packets pass first.
SAME_ADDRESS_BELOW = frozenset({"ipvlan", "ipvtap"})
#: The redirect modes by number, for people and metrics; none: the slow path.
REDIRECTS: tuple[Literal["none", "device", "peer"], ...] = ("none", "device", "peer")

TC_ETHERNET = "tc_ethernet"
TC_LAYER3 = "tc_l3"
TC_BRIDGE_PORT = "tc_bridge_port"
TC_EGRESS = "tc_egress"
# Devices with these programs also have the observer on egress.
OBSERVED = frozenset({TC_ETHERNET, TC_BRIDGE_PORT})
PRIMARY = ("primary",)
_LOCALHOST = ipaddress.ip_address("127.0.0.1")

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
    #: Of a VLAN, macvlan or ipvlan: the device below it; of a veth: the ifindex of its other end in that end's network
    #: namespace.
    lower: int = 0
    #: Id of any XDP program on it.
    xdp: int = 0
    mtu: int = 0
    #: Of a veth whose other end is in another network namespace: that namespace's id here, assigned by the kernel.
    peer_netns: int | None = None
    #: Of a bridge.
    vlan_filtering: bool = False
    #: Of a tunnel: its other end is in the route of each packet.
    external: bool = False
    #: Of a VLAN: its packets keep their tag (``reorder_hdr off``), so the IP header has another place.
    keeps_tag: bool = False
    #: Of a macvlan: it has the link address of the device below, of which it gets all packets.
    passthru: bool = False
    #: Not switched off by an administrator (IFF_UP).
    up: bool = True
    #: Connected, as far as its driver knows (IFF_LOWER_UP).
    carrier: bool = True

    @property
    def usable_mtu(self) -> int:
        """The MTU in bytes; 0 while it sends nothing."""
        return self.mtu if self.up and self.carrier else 0


class Others(NamedTuple):
    """Other programs on a device, as text: those after the proxy's at ingress, any at egress, and the root qdisc.

    ``unobserved``: why the proxy's egress program is missing; "": it is there.
    """

    ingress: tuple[str, ...] = ()
    egress: tuple[str, ...] = ()
    qdisc: str = ""
    unobserved: str = ""


class InterfaceAddress(NamedTuple):
    """An address on a device; ``peer`` is IFA_ADDRESS (differs on point-to-point links), whose subnet is on-link."""

    device: int
    address: Address
    peer: Address
    prefix_length: int
    scope: int = SCOPE_UNIVERSE
    flags: int = 0

    @property
    def key(self) -> tuple[int, Address, int, Address]:
        """What tells it apart from the device's other addresses.

        A device may have an IPv4 address once for each peer. It has an IPv6 address once, and its peer may change.
        """
        peer = self.peer if self.address.version == 4 else self.address
        return self.device, self.address, self.prefix_length, peer


@dataclass
class State:
    """Links and other programs on them by ifindex; addresses by their keys.

    ``peers``: what prevents a redirect straight to a veth's other end, as text, by the veth's ifindex.
    """

    links: dict[int, Link] = field(default_factory=dict)
    addresses: dict[tuple[int, Address, int, Address], InterfaceAddress] = field(default_factory=dict)
    others: dict[int, Others] = field(default_factory=dict)
    peers: dict[int, str] = field(default_factory=dict)
    #: A rule for frames that cross a bridge, as text; "": there is none.
    bridge_rules: str = ""


@dataclass(frozen=True)
class NodeConfig:
    """``node_port_addresses``: CIDRs or ("primary",); ``node_ips`` are the addresses that "primary" means.

    ``bridge_interface`` and ``interface_name_prefix`` are set only for these modes of detectLocalMode, and only one of
    them. The empty prefix is that of every device.
    """

    node_port_addresses: tuple[str, ...] = ()
    node_ips: tuple[Address, ...] = ()
    bridge_interface: str = ""
    interface_name_prefix: str | None = None
    fast_path: bool = False
    fast_path_excluded_devices: tuple[str, ...] = ()


class Device(NamedTuple):
    """Value of the ``devices`` map."""

    bridge: int = 0
    #: Zeros if another device is the gateway of the bridge's ports.
    bridge_mac: bytes = bytes(6)
    pod_source: bool = False
    redirect: int = REDIRECT_NONE
    mtu: int = 0


@dataclass
class Wanted:
    """Contents of the node's maps, and the program of each device. Addresses are packed."""

    programs: dict[int, str] = field(default_factory=dict)
    devices: dict[int, Device] = field(default_factory=dict)
    node_addresses: dict[bytes, bool] = field(default_factory=dict)
    #: Why the fast path does not use a device, or uses its queue instead of the direct path into the pod, by ifindex.
    limits: dict[int, str] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()


def plan(state: State, config: NodeConfig) -> Wanted:
    """Everything derived from the state of the node."""
    wanted = Wanted()
    unsupported = []
    no_gateways = _bridges_without_gateway(state)
    for link in state.links.values():
        program = program_for(link, state.links)
        if program:
            wanted.programs[link.ifindex] = program
            redirect, why = redirect_of(link, state, config)
            wanted.devices[link.ifindex] = _device(link, state.links, config, redirect, no_gateways)
            if why:
                wanted.limits[link.ifindex] = why
        elif program is None:
            unsupported.append(link.name)
        elif link.kind == "bridge" and (redirect := redirect_of(link, state, config)[0]):
            # A bridge is not an entrance, but packets leave by it, and packets of its ports come in by it.
            wanted.devices[link.ifindex] = Device(redirect=redirect, mtu=link.usable_mtu)
    wanted.unsupported = tuple(sorted(unsupported))
    wanted.node_addresses = _node_addresses(state.addresses.values(), config)
    return wanted


def program_for(link: Link, links: Mapping[int, Link]) -> str | None:
    """The program of a device: "" if it is not an entrance, None if its link layer is not supported."""
    if link.type == ARPHRD_LOOPBACK or link.kind in NOT_ENTRANCES:
        return ""
    master = links.get(link.master)
    if link.master and (master is None or master.kind not in PORT_MASTERS):
        return ""
    if link.type == ARPHRD_ETHER:
        if master is not None and master.kind == "bridge":
            return TC_BRIDGE_PORT
        return TC_LAYER3 if link.keeps_tag else TC_ETHERNET
    return TC_LAYER3 if link.type in ARPHRD_LAYER3 else None


def _device(
    link: Link, links: Mapping[int, Link], config: NodeConfig, redirect: int, no_gateways: Container[int]
) -> Device:
    bridge = _bridge(link, links)
    # The input interface of spec/service-semantics §6 is that of the IP layer: for a port, its bridge.
    seen_as = (bridge or link).name
    prefix = config.interface_name_prefix
    pod_source = seen_as == config.bridge_interface if prefix is None else seen_as.startswith(prefix)
    if bridge is None:
        return Device(pod_source=pod_source, redirect=redirect, mtu=link.usable_mtu)
    mac = bytes(6) if bridge.ifindex in no_gateways else bridge.mac
    return Device(bridge.ifindex, mac, pod_source, redirect, link.usable_mtu)


def _bridges_without_gateway(state: State) -> set[int]:
    """Bridges whose ports have another device of this node as gateway, by ifindex.

    It is on top of the bridge, or a veth whose other end is a port, and has another link address. The bridge itself has
    no address, or filters VLANs: then it may not be in the VLAN of a port.
    """
    links = state.links
    numbered = {entry.device for entry in state.addresses.values() if may_be_source(entry.address.packed)}
    found = set()
    for link in links.values():
        if link.kind == "veth":
            port = links.get(link.lower) if link.peer_netns is None else None
            below = port.master if port is not None and port.lower == link.ifindex else 0
        else:
            below = link.lower
        bridge = links.get(below)
        if bridge is None or bridge.kind != "bridge" or link.ifindex not in numbered or link.mac == bridge.mac:
            continue
        if below not in numbered or bridge.vlan_filtering:
            found.add(below)
    return found


def _bridge(link: Link, links: Mapping[int, Link]) -> Link | None:
    master = links.get(link.master)
    return master if master is not None and master.kind == "bridge" else None


def redirect_of(link: Link, state: State, config: NodeConfig) -> tuple[int, str]:
    """How the fast path sends and receives by a device, and the reason if it is not the best way, else "".

    Programs after the proxy's at ingress would not see packets of the fast path, so the device is closed. Only
    REDIRECT_PEER skips egress programs, the qdisc and XDP at the other end. Packets of a port would skip its bridge.
    """
    if not config.fast_path:
        return REDIRECT_NONE, ""
    others = state.others.get(link.ifindex, Others())
    bridge = _bridge(link, state.links)
    if closed := _closed(link, state.links, config) or _in_the_way(others) or _bridge_in_the_way(bridge, state):
        return REDIRECT_NONE, closed
    if link.kind != "veth":
        return REDIRECT_DEVICE, ""
    if link.peer_netns is None:
        return REDIRECT_DEVICE, "the peer of the veth is in this network namespace"
    if others.egress:
        return REDIRECT_DEVICE, f"behind the fast path: {', '.join(others.egress)}"
    if others.qdisc not in ("", "noqueue"):
        return REDIRECT_DEVICE, f"qdisc {others.qdisc}"
    if peer := state.peers.get(link.ifindex):
        return REDIRECT_DEVICE, peer
    return REDIRECT_PEER, ""


def _closed(link: Link, links: Mapping[int, Link], config: NodeConfig) -> str:
    """Why a device cannot carry the fast path, independent of other programs; "": it can."""
    if link.name in config.fast_path_excluded_devices:
        return "fastPathExcludedDevices names it"
    if link.type != ARPHRD_ETHER:
        return "its packets have no Ethernet header"
    if link.keeps_tag:
        return "its packets keep their VLAN tag"
    lower = links.get(link.lower)
    if link.passthru or link.kind in SAME_ADDRESS_BELOW:
        return f"its packets pass {lower.name if lower else 'the device below'} first, with the same link address"
    if link.kind == "vlan" and lower is not None and lower.kind == "bridge" and lower.vlan_filtering:
        return f"its packets may come in untagged by a port of bridge {lower.name}, which filters VLANs"
    if link.kind not in FAST_KINDS:
        return f"devices of kind {link.kind} may send a packet elsewhere than to the address in its frame"
    if link.external:
        return f"the other end of this {link.kind} tunnel is in the route of each packet"
    return "it is in a VRF" if _vrf(link.ifindex, links) else ""


def _in_the_way(others: Others) -> str:
    if others.ingress:
        return f"after the agent's program: {', '.join(others.ingress)}"
    return f"the agent's program is not at its egress: {others.unobserved}" if others.unobserved else ""


def _bridge_in_the_way(bridge: Link | None, state: State) -> str:
    """What a port's packets would skip if they did not pass the bridge."""
    if bridge is None:
        return ""
    if bridge.vlan_filtering:
        return f"bridge {bridge.name} filters VLANs"
    if state.bridge_rules:
        return state.bridge_rules
    others = state.others.get(bridge.ifindex, Others())
    programs = [*others.ingress, *others.egress]
    if others.qdisc not in ("", "noqueue"):
        programs.append(f"qdisc {others.qdisc}")
    return f"on bridge {bridge.name}: {', '.join(programs)}" if programs else ""


def _node_addresses(addresses: Iterable[InterfaceAddress], config: NodeConfig) -> dict[bytes, bool]:
    """Whether each address serves NodePorts to everybody (spec/service-semantics §8).

    Listed loopback addresses serve only sockets of the node, and only in some modes: the programs know which.
    """
    accepts = {version: accepted_networks(version, config) for version in (4, 6)}
    found: dict[bytes, bool] = {}
    for entry in addresses:
        address = entry.address
        networks = accepts[address.version]
        listed = networks is not None and any(address in network for network in networks)
        if address.version == 4 and address.is_loopback:
            # The programs know 127.0.0.0/8 without a map, but not which other addresses are on a device.
            if listed and address != _LOCALHOST:
                found[address.packed] = False
            continue
        if address.version == 6 and entry.flags & IFA_F_DADFAILED:
            continue  # the address is used by another host
        found[address.packed] = not address.is_loopback and (networks is None or listed)
    return found


def source_addresses(state: State) -> set[bytes]:
    """Packed addresses that the kernel may masquerade to: those of devices that are up."""
    return {
        entry.address.packed
        for entry in state.addresses.values()
        if may_be_source(entry.address.packed) and entry.device in state.links and state.links[entry.device].up
    }


def may_be_source(packed: bytes) -> bool:
    """False for a link-local IPv6 address: no forwarded packet has it, and every veth has one of its own."""
    return len(packed) == 4 or not (packed[0] == 0xFE and packed[1] & 0xC0 == 0x80)


def accepted_networks(version: int, config: NodeConfig) -> tuple[Network, ...] | None:
    """Networks of one family whose addresses serve NodePorts, None for all addresses (spec/service-semantics §8)."""
    if config.node_port_addresses == PRIMARY:
        cidrs = [f"{ip}/{ip.max_prefixlen}" for ip in config.node_ips if not (ip.is_unspecified or ip.is_loopback)]
    else:
        cidrs = list(config.node_port_addresses)
    # Not ipaddress.ip_network(), which refuses leading zeros; kube-proxy reads them as decimal.
    networks = [network for text in cidrs if (network := parse_cidr(text)) is not None]
    return tuple(network for network in networks if network.version == version) or None


def _vrf(index: int, links: Mapping[int, Link]) -> int:
    """The VRF that a device is or is a port of (l3mdev_master_ifindex); 0: none."""
    link = links[index]
    if link.kind == "vrf":
        return index
    master = links.get(link.master)
    return master.ifindex if master is not None and master.kind == "vrf" else 0
