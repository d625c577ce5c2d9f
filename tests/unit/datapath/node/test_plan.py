# SPDX-License-Identifier: Apache-2.0
"""From links, addresses and configuration to the contents of the node's maps."""

from __future__ import annotations

import ipaddress
import struct
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.datapath.node import plan as node
from pyebpf_proxy.datapath.node.devices import MAPS, contents
from pyebpf_proxy.datapath.node.plan import (
    ARPHRD_ETHER,
    ARPHRD_LOOPBACK,
    IFA_F_DADFAILED,
    REDIRECT_DEVICE,
    REDIRECT_NONE,
    REDIRECT_PEER,
    Device,
    InterfaceAddress,
    Link,
    NodeConfig,
    Others,
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
        {entry.key: entry for entry in addresses},
    )


def test_addresses_that_flows_may_be_masqueraded_to() -> None:
    """Addresses of devices that are up, except the link-local one that every device has (finding D7)."""
    down = ETH1._replace(up=False)
    found = state(
        ETH0,
        down,
        addresses=(
            on(2, "192.0.2.1/24"),
            on(2, "2001:db8::1/64"),
            on(2, "fe80::1/64", scope=SCOPE_LINK),
            on(2, "169.254.20.10/32"),
            on(3, "192.0.2.2/24"),
            on(3, "192.0.2.1/32"),
            on(9, "192.0.2.9/24"),
        ),
    )
    assert node.source_addresses(found) == {packed("192.0.2.1"), packed("2001:db8::1"), packed("169.254.20.10")}


# ---- which devices carry which program ---------------------------------------


@pytest.mark.parametrize(
    ("link", "program"),
    [
        (Link(9, "eth0", ARPHRD_ETHER), "tc_ethernet"),
        (Link(9, "veth1", ARPHRD_ETHER, "veth"), "tc_ethernet"),
        (Link(9, "vxlan0", ARPHRD_ETHER, "vxlan"), "tc_ethernet"),
        (Link(9, "eth0.7", ARPHRD_ETHER, "vlan"), "tc_ethernet"),
        (Link(9, "br0.7", ARPHRD_ETHER, "vlan"), "tc_ethernet"),
        (Link(9, "eth0.8", ARPHRD_ETHER, "vlan", keeps_tag=True), "tc_l3"),
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
def test_the_program_of_a_device_without_master(link: Link, program: str | None) -> None:
    assert node.program_for(link, {9: link}) == program


@pytest.mark.parametrize(
    ("kind", "program"),
    [("bridge", "tc_bridge_port"), ("vrf", "tc_ethernet"), ("bond", ""), ("team", ""), ("openvswitch", "")],
)
def test_a_port_carries_a_program_unless_its_master_takes_the_packet(kind: str, program: str) -> None:
    port = Link(9, "port", ARPHRD_ETHER, "veth", master=8)
    assert node.program_for(port, {8: Link(8, "master", ARPHRD_ETHER, kind), 9: port}) == program


def test_the_kernel_removes_the_tag_of_a_bridge_s_port() -> None:
    port = Link(9, "eth0.8", ARPHRD_ETHER, "vlan", master=8, keeps_tag=True)
    assert node.program_for(port, {8: Link(8, "br0", ARPHRD_ETHER, "bridge"), 9: port}) == "tc_bridge_port"


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


GATEWAYS = {
    "macvlan": (Link(7, "gw0", ARPHRD_ETHER, "macvlan", mac=b"\2" * 6, lower=5),),
    # As the plugin bridge makes it with vlan and isGateway.
    "veth": (
        Link(7, "vlan10", ARPHRD_ETHER, "veth", mac=b"\2" * 6, lower=8),
        Link(8, "veth8", ARPHRD_ETHER, "veth", master=5, lower=7),
    ),
}


@pytest.mark.parametrize("bridge", ["without address", "with address", "with address, filters VLANs"])
@pytest.mark.parametrize("kind", GATEWAYS)
def test_another_device_is_the_gateway_of_a_bridge_s_ports(kind: str, bridge: str) -> None:
    """What comes for it does not reach the IP layer by the bridge, or not by the device that the routes name."""
    found = bridge_state()
    found.links |= {link.ifindex: link for link in GATEWAYS[kind]}
    found.links[5] = found.links[5]._replace(vlan_filtering="filters" in bridge)
    addresses = [on(5, "fe80::5/64", scope=SCOPE_LINK), on(7, "10.244.1.1/24")]
    addresses += [on(5, "192.0.2.1/24")] if "with address" in bridge else []
    assert plan(found, NodeConfig()).devices[6] == Device(5, BRIDGE_MAC)
    found.addresses = {entry.key: entry for entry in addresses}
    is_gateway = bridge == "with address"
    assert plan(found, NodeConfig()).devices[6] == Device(5, BRIDGE_MAC if is_gateway else bytes(6))
    found.links[7] = found.links[7]._replace(mac=BRIDGE_MAC)
    assert plan(found, NodeConfig()).devices[6] == Device(5, BRIDGE_MAC), "the bridge has its link address"


def test_another_node_s_veth_is_no_gateway() -> None:
    """Its number is that of another device here."""
    found = bridge_state()
    found.links[7] = Link(7, "veth7", ARPHRD_ETHER, "veth", mac=b"\2" * 6, lower=6, peer_netns=0)
    found.addresses = {entry.key: entry for entry in (on(7, "10.244.1.1/32"),)}
    assert plan(found, NodeConfig()).devices[6] == Device(5, BRIDGE_MAC)


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


@pytest.mark.parametrize(
    ("cidrs", "expected"),
    [
        (("127.0.0.0/8",), {"127.0.0.2", "127.9.9.9"}),
        (("127.0.0.2/32", "192.0.2.0/24"), {"127.0.0.2"}),
        (("127.0.0.1/32",), set()),
        (("192.0.2.0/24",), set()),
        ((), set()),
        (("primary",), set()),
    ],
)
def test_listed_loopback_addresses_are_found_but_serve_no_packets(cidrs: tuple[str, ...], expected: set[str]) -> None:
    """A packet to 127.0.0.0/8 that comes in by a device must not be served; sockets of the node are."""
    loopback = (on(1, "127.0.0.2/8"), on(2, "127.9.9.9/32"))
    found = plan(state(LO, ETH0, ETH1, addresses=(*DUAL, *loopback)), NodeConfig(cidrs)).node_addresses
    here = {str(ipaddress.ip_address(address)): serves for address, serves in found.items() if address[0] == 127}
    assert here == dict.fromkeys(expected, False)


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
        # Leading zeros are decimal, and an IPv4-mapped range is one of IPv4, as kube-proxy reads them.
        (("192.000.002.000/024",), {"192.0.2.99", "192.0.2.10"} | ALL6),
        (("::ffff:192.0.2.0/120",), {"192.0.2.99", "192.0.2.10"} | ALL6),
    ],
)
def test_node_port_addresses(cidrs: tuple[str, ...], expected: set[str]) -> None:
    assert served(*cidrs) == expected


def test_primary_means_the_node_s_ips_and_leaves_a_family_without_one_open() -> None:
    assert served("primary", ips=("192.0.2.10", "2001:db8::10")) == {"192.0.2.10", "2001:db8::10"}
    assert served("primary", ips=("192.0.2.10",)) == {"192.0.2.10"} | ALL6
    assert served("primary", ips=("127.0.0.1",)) == ALL4 | ALL6
    assert served("primary") == ALL4 | ALL6


# ---- how the fast path sends by a device -------------------------------------------

FAST = NodeConfig(fast_path=True, fast_path_excluded_devices=("eth9",))
POD = Link(7, "veth7", ARPHRD_ETHER, "veth", peer_netns=0, mtu=1450)
BRIDGE = Link(5, "cni0", ARPHRD_ETHER, "bridge", mac=BRIDGE_MAC)
PORT = POD._replace(ifindex=6, name="veth6", master=5)


def redirects(
    *links: Link, config: NodeConfig = FAST, bridge_rules: str = "", **others: Others
) -> dict[str, tuple[int, str]]:
    """Mode and reason of each device; ``others`` by the device's name."""
    found = state(*links)
    found.others = {link.ifindex: others[link.name] for link in links if link.name in others}
    found.bridge_rules = bridge_rules
    wanted = plan(found, config)
    return {
        found.links[index].name: (device.redirect, wanted.limits.get(index, ""))
        for index, device in wanted.devices.items()
    }


def test_packets_go_straight_into_a_pod_behind_a_veth() -> None:
    """The plan requests what the programs support (finding D14)."""
    assert redirects(ETH0, POD) == {"eth0": (REDIRECT_DEVICE, ""), "veth7": (REDIRECT_PEER, "")}
    assert plan(state(POD), FAST).devices[7].mtu == 1450


@pytest.mark.parametrize("what", [{"up": False}, {"carrier": False}])
def test_a_device_that_sends_nothing_is_known_as_down(what: dict[str, bool]) -> None:
    """Its programs stay: packets may come in before the agent knows that it is up."""
    ports = (Link(4, "br0", ARPHRD_ETHER, "bridge", mtu=1450), POD._replace(ifindex=8, master=4))
    found = plan(state(*(link._replace(**what) for link in (POD, *ports))), FAST)
    assert {device.mtu for device in found.devices.values()} == {0}
    assert found.programs.keys() == {7, 8}


def test_no_device_has_a_redirect_without_the_fast_path() -> None:
    assert redirects(ETH0, POD, config=NodeConfig()) == {"eth0": (REDIRECT_NONE, ""), "veth7": (REDIRECT_NONE, "")}


def test_a_veth_within_this_network_namespace_uses_its_queue() -> None:
    mode, why = redirects(POD._replace(peer_netns=None))["veth7"]
    assert (mode, why) == (REDIRECT_DEVICE, "the peer of the veth is in this network namespace")


@pytest.mark.parametrize(
    ("others", "mode", "why"),
    [
        (Others(qdisc="noqueue"), REDIRECT_PEER, ""),
        (Others(qdisc="tbf"), REDIRECT_DEVICE, "qdisc tbf"),
        (Others(qdisc="fq_codel"), REDIRECT_DEVICE, "qdisc fq_codel"),
        (Others(egress=("tcx program foo",)), REDIRECT_DEVICE, "behind the fast path: tcx program foo"),
        (Others(ingress=("tcx program foo",)), REDIRECT_NONE, "after the agent's program: tcx program foo"),
        (
            Others(ingress=("ingress filter pref 1 u32",), qdisc="tbf"),
            REDIRECT_NONE,
            "after the agent's program: ingress filter pref 1 u32",
        ),
        (Others(unobserved="no egress"), REDIRECT_NONE, "the agent's program is not at its egress: no egress"),
    ],
)
def test_foreign_programs_on_a_pods_device(others: Others, mode: int, why: str) -> None:
    assert redirects(POD, veth7=others)["veth7"] == (mode, why)


def test_with_a_program_at_the_other_end_packets_use_the_queue() -> None:
    other = POD._replace(ifindex=9, name="veth9")
    found = state(POD, other)
    found.peers = {POD.ifindex: "an XDP program is at the peer of the veth", other.ifindex: ""}
    wanted = plan(found, FAST)
    assert wanted.devices[POD.ifindex].redirect == REDIRECT_DEVICE
    assert wanted.devices[other.ifindex].redirect == REDIRECT_PEER
    assert wanted.limits == {POD.ifindex: "an XDP program is at the peer of the veth"}


@pytest.mark.parametrize("others", [Others(qdisc="mq"), Others(qdisc="htb"), Others(egress=("tcx program foo",))])
def test_fast_path_packets_pass_an_uplinks_queue_and_egress(others: Others) -> None:
    assert redirects(ETH0, eth0=others)["eth0"] == (REDIRECT_DEVICE, "")


def test_a_program_after_the_agents_closes_an_uplink() -> None:
    others = Others(ingress=("clsact filter pref 1 bpf policy",))
    assert redirects(ETH0, eth0=others)["eth0"] == (
        REDIRECT_NONE,
        "after the agent's program: clsact filter pref 1 bpf policy",
    )


@pytest.mark.parametrize(
    ("link", "why"),
    [
        (Link(9, "eth9", ARPHRD_ETHER), "fastPathExcludedDevices names it"),
        (Link(9, "tun0", ARPHRD_NONE, "tun"), "its packets have no Ethernet header"),
        (Link(9, "eth0.8", ARPHRD_ETHER, "vlan", keeps_tag=True), "its packets keep their VLAN tag"),
        (Link(9, "gretap", ARPHRD_ETHER, "gretap"), "devices of kind gretap may send"),
        (Link(9, "eth1", ARPHRD_ETHER, master=8), "it is in a VRF"),
        (Link(9, "any", ARPHRD_ETHER, "vxlan", external=True), "the other end of this vxlan tunnel is in the route"),
        (Link(9, "ipvl0", ARPHRD_ETHER, "ipvlan", lower=2), "its packets pass eth0 first, with the same link address"),
        (Link(9, "mv0", ARPHRD_ETHER, "macvlan", lower=2, passthru=True), "its packets pass eth0 first"),
        (Link(9, "br4.10", ARPHRD_ETHER, "vlan", lower=4), "its packets may come in untagged by a port of bridge br4"),
    ],
)
def test_devices_that_never_carry_the_fast_path(link: Link, why: str) -> None:
    below = ETH0, Link(4, "br4", ARPHRD_ETHER, "bridge", vlan_filtering=True), Link(8, "vrf8", ARPHRD_ETHER, "vrf")
    mode, output = redirects(*below, link)[link.name]
    assert mode == REDIRECT_NONE
    assert output.startswith(why)


@pytest.mark.parametrize(
    "link",
    [
        Link(9, "mv0", ARPHRD_ETHER, "macvlan", lower=2),
        Link(9, "eth0.10", ARPHRD_ETHER, "vlan", lower=2),
        Link(9, "cni0.10", ARPHRD_ETHER, "vlan", lower=5),
    ],
    ids=lambda link: link.name,
)
def test_the_device_below_leaves_these_their_packets(link: Link) -> None:
    """They have another link address, or their packets a VLAN tag."""
    assert redirects(ETH0, BRIDGE, link)[link.name] == (REDIRECT_DEVICE, "")


def test_packets_go_straight_into_a_pod_behind_a_bridge_s_port() -> None:
    assert redirects(BRIDGE, PORT) == {"cni0": (REDIRECT_DEVICE, ""), "veth6": (REDIRECT_PEER, "")}


@pytest.mark.parametrize(
    ("bridge", "rules", "others", "why"),
    [
        (BRIDGE._replace(vlan_filtering=True), "", Others(), "bridge cni0 filters VLANs"),
        (BRIDGE, "nftables rule", Others(), "nftables rule"),
        (BRIDGE, "", Others(qdisc="tbf"), "on bridge cni0: qdisc tbf"),
        (BRIDGE, "", Others(egress=("tcx program foo",)), "on bridge cni0: tcx program foo"),
        (BRIDGE, "", Others(ingress=("tcx program foo",)), "on bridge cni0: tcx program foo"),
    ],
)
def test_features_of_a_bridge_close_its_ports(bridge: Link, rules: str, others: Others, why: str) -> None:
    assert redirects(bridge, PORT, bridge_rules=rules, cni0=others)["veth6"] == (REDIRECT_NONE, why)
    assert redirects(bridge, POD, bridge_rules=rules, cni0=others)["veth7"] == (REDIRECT_PEER, "")


# ---- bytes -------------------------------------------------------------------------


def test_contents_follow_the_layout_of_the_object(bpf_objects: Path) -> None:
    wanted = node.Wanted(
        devices={6: Device(5, BRIDGE_MAC, True, REDIRECT_PEER, 1500)},
        node_addresses={packed("192.0.2.10"): True, packed("::1"): False},
    )
    with Object.open(bpf_objects / "tc.bpf.o") as opened:
        maps = contents(wanted, opened.btf)
    assert set(maps) == set(MAPS)
    one = struct.pack("=I", 1)
    assert maps["node_addresses4"] == {packed("192.0.2.10"): one}
    assert maps["node_addresses6"] == {packed("::1"): bytes(4)}
    assert maps["devices"] == {struct.pack("=I", 6): struct.pack("=I6sBBI", 5, BRIDGE_MAC, 1, 2, 1500)}
