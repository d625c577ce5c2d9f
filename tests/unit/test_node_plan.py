# SPDX-License-Identifier: Apache-2.0
"""From links, addresses and configuration to what the maps of the node must hold."""

from __future__ import annotations

import ipaddress
import struct
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.datapath.node import plan as node
from pyebpf_proxy.datapath.node.links import MAPS, contents
from pyebpf_proxy.datapath.node.plan import (
    ARPHRD_ETHER,
    ARPHRD_LOOPBACK,
    IFA_F_DADFAILED,
    IFA_F_DEPRECATED,
    IFA_F_SECONDARY,
    IFA_F_TEMPORARY,
    IFA_F_TENTATIVE,
    Device,
    InterfaceAddress,
    Link,
    MasqueradeKey,
    NodeConfig,
    State,
    plan,
)

ARPHRD_NONE = 65534
ARPHRD_INFINIBAND = 32
ARPHRD_CAN = 280
SCOPE_LINK = 253
SCOPE_HOST = 254
BRIDGE_MAC = bytes.fromhex("02aabbccddee")

LO = Link(1, "lo", ARPHRD_LOOPBACK)
ETH0 = Link(2, "eth0", ARPHRD_ETHER)
ETH1 = Link(3, "eth1", ARPHRD_ETHER)


def packed(text: str) -> bytes:
    return ipaddress.ip_address(text).packed


def on(device: int, text: str, *, peer: str = "", scope: int = 0, flags: int = 0) -> InterfaceAddress:
    interface = ipaddress.ip_interface(text)
    return InterfaceAddress(
        device,
        interface.ip,
        ipaddress.ip_address(peer) if peer else interface.ip,
        interface.network.prefixlen,
        scope,
        flags,
    )


def state(*links: Link, addresses: tuple[InterfaceAddress, ...] = ()) -> State:
    return State(
        {link.ifindex: link for link in links},
        {(entry.device, entry.address, entry.prefix_length): entry for entry in addresses},
    )


def masquerade_lookup(found: dict[MasqueradeKey, bytes], device: int, address: str) -> str | None:
    """What the longest-prefix map of the kernel would return."""
    target = ipaddress.ip_address(address)
    best: tuple[int, bytes] | None = None
    for key, value in found.items():
        if key.device != device or len(key.address) != len(target.packed):
            continue
        network = ipaddress.ip_network((key.address, key.prefix_length))
        if target in network and (best is None or key.prefix_length > best[0]):
            best = key.prefix_length, value
    return str(ipaddress.ip_address(best[1])) if best else None


# ---- which devices carry which program ---------------------------------------


@pytest.mark.parametrize(
    ("link", "program"),
    [
        (Link(9, "eth0", ARPHRD_ETHER), "tc_ethernet"),
        (Link(9, "veth1", ARPHRD_ETHER, "veth"), "tc_ethernet"),
        (Link(9, "vxlan0", ARPHRD_ETHER, "vxlan"), "tc_ethernet"),
        (Link(9, "eth0.7", ARPHRD_ETHER, "vlan"), "tc_ethernet"),
        (Link(9, "br0.7", ARPHRD_ETHER, "vlan"), "tc_ethernet"),
        (Link(9, "tap0", ARPHRD_ETHER, "tun"), "tc_ethernet"),
        (Link(9, "macvlan0", ARPHRD_ETHER, "macvlan"), "tc_ethernet"),
        (Link(9, "bond0", ARPHRD_ETHER, "bond"), "tc_ethernet"),
        (Link(9, "tun0", ARPHRD_NONE, "tun"), "tc_l3"),
        (Link(9, "wg0", ARPHRD_NONE, "wireguard"), "tc_l3"),
        (Link(9, "tunl0", 768, "ipip"), "tc_l3"),
        (Link(9, "sit0", 776, "sit"), "tc_l3"),
        (Link(9, "gre0", 778, "gre"), "tc_l3"),
        (Link(9, "lo", ARPHRD_LOOPBACK), ""),
        (Link(9, "br0", ARPHRD_ETHER, "bridge"), ""),
        (Link(9, "vrf0", ARPHRD_ETHER, "vrf"), ""),
        (Link(9, "ifb0", ARPHRD_ETHER, "ifb"), ""),
        (Link(9, "kube-ipvs0", ARPHRD_ETHER, "dummy"), ""),
        (Link(9, "vcan0", ARPHRD_CAN, "vcan"), ""),
        (Link(9, "ib0", ARPHRD_INFINIBAND, "ipoib"), None),
    ],
    ids=lambda value: value.name if isinstance(value, Link) else None,
)
def test_program_of_a_device_without_master(link: Link, program: str | None) -> None:
    assert node.program_for(link, {9: link}) == program


@pytest.mark.parametrize(
    ("kind", "program"),
    [("bridge", "tc_bridge_port"), ("vrf", "tc_ethernet"), ("bond", ""), ("team", ""), ("openvswitch", "")],
)
def test_a_port_carries_a_program_unless_its_master_takes_the_packet(kind: str, program: str) -> None:
    port = Link(9, "port", ARPHRD_ETHER, "veth", master=8)
    assert node.program_for(port, {8: Link(8, "master", ARPHRD_ETHER, kind), 9: port}) == program


def test_a_port_waits_until_its_master_is_known() -> None:
    port = Link(9, "port", ARPHRD_ETHER, "veth", master=8)
    assert node.program_for(port, {9: port}) == ""


def test_unsupported_link_layers_are_named() -> None:
    wanted = plan(state(LO, ETH0, Link(9, "ib0", ARPHRD_INFINIBAND, "ipoib")), NodeConfig())
    assert wanted.unsupported == ("ib0",)
    assert wanted.programs == {2: "tc_ethernet"}


# ---- devices ------------------------------------------------------------------


def bridge_state() -> State:
    bridge = Link(5, "cni0", ARPHRD_ETHER, "bridge", mac=BRIDGE_MAC)
    return state(LO, ETH0, bridge, Link(6, "veth6", ARPHRD_ETHER, "veth", master=5))


def test_a_bridge_port_knows_its_bridge() -> None:
    assert plan(bridge_state(), NodeConfig()).devices == {2: Device(), 6: Device(5, BRIDGE_MAC, False)}


def test_bridge_interface_detects_packets_of_the_bridge_s_ports() -> None:
    devices = plan(bridge_state(), NodeConfig(bridge_interface="cni0")).devices
    assert {index: device.pod_source for index, device in devices.items()} == {2: False, 6: True}


def test_a_device_named_as_bridge_interface_detects_by_itself() -> None:
    devices = plan(bridge_state(), NodeConfig(bridge_interface="eth0")).devices
    assert {index: device.pod_source for index, device in devices.items()} == {2: True, 6: False}


def test_interface_name_prefix_sees_the_bridge_not_its_port() -> None:
    def sources(prefix: str) -> set[int]:
        devices = plan(bridge_state(), NodeConfig(interface_name_prefix=prefix)).devices
        return {index for index, device in devices.items() if device.pod_source}

    assert sources("veth") == set()
    assert sources("cni") == {6}
    assert sources("eth") == {2}


# ---- node addresses and nodePortAddresses ---------------------------------------

DUAL = (
    on(1, "127.0.0.1/8", scope=SCOPE_HOST),
    on(1, "::1/128", scope=SCOPE_HOST),
    on(1, "192.0.2.99/32"),
    on(2, "192.0.2.10/24"),
    on(2, "2001:db8::10/64"),
    on(2, "fe80::1/64", scope=SCOPE_LINK),
    on(3, "10.9.0.1/24", scope=SCOPE_LINK),
)


def served(*cidrs: str, ips: tuple[str, ...] = ()) -> set[str]:
    config = NodeConfig(cidrs, tuple(ipaddress.ip_address(ip) for ip in ips))
    found = plan(state(LO, ETH0, ETH1, addresses=DUAL), config).node_addresses
    return {str(ipaddress.ip_address(address)) for address, node_ports in found.items() if node_ports}


ALL4 = {"192.0.2.99", "192.0.2.10", "10.9.0.1"}
ALL6 = {"2001:db8::10", "fe80::1"}


def test_every_address_of_any_scope_is_the_node_s_but_127_is_left_to_the_programs() -> None:
    found = plan(state(LO, ETH0, ETH1, addresses=DUAL), NodeConfig()).node_addresses
    assert {str(ipaddress.ip_address(a)) for a in found} == {*ALL4, *ALL6, "::1"}


def test_an_address_that_failed_duplicate_detection_is_not_the_node_s() -> None:
    entry = on(2, "2001:db8::66/64", flags=IFA_F_DADFAILED)
    assert plan(state(ETH0, addresses=(entry,)), NodeConfig()).node_addresses == {}


@pytest.mark.parametrize(
    ("cidrs", "expected"),
    [
        ((), ALL4 | ALL6),
        (("0.0.0.0/0",), ALL4 | ALL6),
        (("192.0.2.0/24",), {"192.0.2.99", "192.0.2.10"} | ALL6),
        (("192.0.2.10/24",), {"192.0.2.99", "192.0.2.10"} | ALL6),
        (("192.0.2.0/24", "0.0.0.0/0"), ALL4 | ALL6),
        (("2001:db8::/32",), ALL4 | {"2001:db8::10"}),
        (("10.9.0.1/32", "::/0"), {"10.9.0.1"} | ALL6),
        (("203.0.113.0/24", "2001:db8:1::/64"), set()),
        (("::1/128",), ALL4),
        (("127.0.0.0/8",), ALL6),
    ],
)
def test_node_port_addresses(cidrs: tuple[str, ...], expected: set[str]) -> None:
    assert served(*cidrs) == expected


def test_primary_means_the_node_s_ips_and_leaves_a_family_without_one_open() -> None:
    assert served("primary", ips=("192.0.2.10", "2001:db8::10")) == {"192.0.2.10", "2001:db8::10"}
    assert served("primary", ips=("192.0.2.10",)) == {"192.0.2.10"} | ALL6
    assert served("primary", ips=("127.0.0.1",)) == ALL4 | ALL6
    assert served("primary") == ALL4 | ALL6


# ---- masquerading, IPv4: inet_select_addr() ---------------------------------------


def masquerade(*links: Link, addresses: tuple[InterfaceAddress, ...]) -> dict[MasqueradeKey, bytes]:
    return plan(state(*links, addresses=addresses), NodeConfig()).masquerade


def test_the_next_hop_s_subnet_chooses_the_address() -> None:
    found = masquerade(LO, ETH0, addresses=(on(2, "192.0.2.10/24"), on(2, "10.0.0.5/16")))
    assert masquerade_lookup(found, 2, "192.0.2.1") == "192.0.2.10"
    assert masquerade_lookup(found, 2, "10.0.3.1") == "10.0.0.5"
    assert masquerade_lookup(found, 2, "8.8.8.8") == "192.0.2.10"


def test_secondary_addresses_and_narrower_scopes_are_not_taken() -> None:
    found = masquerade(
        LO,
        ETH0,
        addresses=(
            on(2, "169.254.0.1/16", scope=SCOPE_LINK),
            on(2, "192.0.2.11/24", flags=IFA_F_SECONDARY),
            on(2, "192.0.2.10/24"),
        ),
    )
    assert masquerade_lookup(found, 2, "169.254.3.3") == "192.0.2.10"
    assert masquerade_lookup(found, 2, "192.0.2.77") == "192.0.2.10"


def test_a_subnet_inside_an_earlier_one_is_never_reached() -> None:
    found = masquerade(LO, ETH0, addresses=(on(2, "10.0.0.5/8"), on(2, "10.1.0.5/16")))
    assert masquerade_lookup(found, 2, "10.1.0.9") == "10.0.0.5"
    found = masquerade(LO, ETH0, addresses=(on(2, "10.1.0.5/16"), on(2, "10.0.0.5/8")))
    assert masquerade_lookup(found, 2, "10.1.0.9") == "10.1.0.5"
    assert masquerade_lookup(found, 2, "10.2.0.9") == "10.0.0.5"


def test_a_point_to_point_address_matches_its_peer_s_subnet() -> None:
    found = masquerade(LO, ETH0, addresses=(on(2, "192.0.2.10/24"), on(2, "10.2.0.1/30", peer="10.3.0.1")))
    assert masquerade_lookup(found, 2, "10.3.0.2") == "10.2.0.1"
    assert masquerade_lookup(found, 2, "10.2.0.2") == "192.0.2.10"


def test_a_device_without_an_address_borrows_the_first_device_s() -> None:
    addresses = (on(3, "10.9.0.1/24"), on(2, "192.0.2.10/24"))
    found = masquerade(LO, ETH1, Link(4, "veth4", ARPHRD_ETHER, "veth"), ETH0, addresses=addresses)
    assert masquerade_lookup(found, 4, "10.244.0.5") == "192.0.2.10"
    found = masquerade(LO, ETH0, ETH1, addresses=(on(1, "192.0.2.99/32"), *addresses[:1]))
    assert masquerade_lookup(found, 2, "8.8.8.8") == "192.0.2.99", (
        "a global address on lo comes first, as in the kernel"
    )


def test_the_loopback_address_is_not_borrowed() -> None:
    assert masquerade(LO, ETH0, addresses=(on(1, "127.0.0.1/8", scope=SCOPE_HOST),)) == {}


def test_a_vrf_port_borrows_inside_its_vrf() -> None:
    vrf = Link(10, "vrf10", ARPHRD_ETHER, "vrf")
    port = Link(8, "eth8", ARPHRD_ETHER, master=10)
    other = Link(9, "eth9", ARPHRD_ETHER, master=10)
    addresses = (on(2, "192.0.2.10/24"), on(9, "10.7.0.9/24"))
    assert masquerade_lookup(masquerade(ETH0, vrf, port, other, addresses=addresses), 8, "8.8.8.8") == "10.7.0.9"
    addresses += (on(10, "10.7.0.1/32"),)
    assert masquerade_lookup(masquerade(ETH0, vrf, port, other, addresses=addresses), 8, "8.8.8.8") == "10.7.0.1"
    assert masquerade_lookup(masquerade(ETH0, vrf, port, other, addresses=addresses[1:]), 2, "8.8.8.8") is None


# ---- masquerading, IPv6 -------------------------------------------------------------


def test_ipv6_prefers_the_destination_s_subnet_then_the_kind_of_address() -> None:
    addresses = (on(2, "fd00:1::10/64"), on(2, "2001:db8:1::10/64"), on(2, "2001:db8:2::10/64"))
    found = masquerade(ETH0, addresses=addresses)
    assert masquerade_lookup(found, 2, "2001:db8:2::1") == "2001:db8:2::10"
    assert masquerade_lookup(found, 2, "fd99::1") == "fd00:1::10"
    assert masquerade_lookup(found, 2, "2a00::1") == "2001:db8:1::10"


def test_ipv6_takes_a_unique_local_address_where_there_is_no_other() -> None:
    found = masquerade(ETH0, ETH1, addresses=(on(2, "fd00:1::10/64"),))
    assert masquerade_lookup(found, 2, "2a00::1") == "fd00:1::10"
    assert masquerade_lookup(found, 3, "2a00::1") == "fd00:1::10"


def test_ipv6_lasting_addresses_come_first_and_tentative_ones_never() -> None:
    found = masquerade(
        ETH0,
        ETH1,
        addresses=(
            on(2, "2001:db8::1/64", flags=IFA_F_TENTATIVE),
            on(2, "2001:db8::2/64", flags=IFA_F_DEPRECATED),
            on(2, "2001:db8::3/64", flags=IFA_F_TEMPORARY),
            on(2, "2001:db8::4/64"),
            on(2, "fe80::1/64", scope=SCOPE_LINK),
            on(3, "2001:db8:3::3/64", flags=IFA_F_TEMPORARY),
        ),
    )
    assert masquerade_lookup(found, 2, "2001:db8::9") == "2001:db8::4"
    assert masquerade_lookup(found, 2, "2a00::1") == "2001:db8::4"
    assert masquerade_lookup(found, 3, "2a00::1") == "2001:db8:3::3"


# ---- bytes -------------------------------------------------------------------------


def test_contents_follow_the_layout_of_the_object(bpf_objects: Path) -> None:
    wanted = node.Wanted(
        devices={6: Device(5, BRIDGE_MAC, True)},
        node_addresses={packed("192.0.2.10"): True, packed("::1"): False},
        masquerade={
            MasqueradeKey(2, 24, packed("192.0.2.0")): packed("192.0.2.10"),
            MasqueradeKey(2, 0, packed("::")): packed("fd00::1"),
        },
    )
    with Object.open(bpf_objects / "tc.bpf.o") as opened:
        maps = contents(wanted, opened.btf)
    assert set(maps) == set(MAPS)
    one = struct.pack("=I", 1)
    assert maps["node_addresses4"] == {packed("192.0.2.10"): one}
    assert maps["node_addresses6"] == {packed("::1"): bytes(4)}
    assert maps["masquerade4"] == {struct.pack("=II", 56, 2) + packed("192.0.2.0"): packed("192.0.2.10")}
    assert maps["masquerade6"] == {struct.pack("=II", 32, 2) + bytes(16): packed("fd00::1")}
    assert maps["devices"] == {struct.pack("=I", 6): struct.pack("=I6sBx", 5, BRIDGE_MAC, 1)}
