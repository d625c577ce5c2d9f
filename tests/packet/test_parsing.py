# SPDX-License-Identifier: Apache-2.0
"""Packets of every form. Unusual ones are left to the kernel, unchanged."""

from __future__ import annotations

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP, IPOption_NOP
from scapy.layers.inet6 import (
    ICMPv6EchoRequest,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.l2 import ARP, Dot1Q, Ether
from scapy.packet import Packet, Raw

from tests.packet.program_node import GO_ON, NODE_MAC, ProgramNode

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


def only(family: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("node", [family], indirect=True, ids=[f"IPv{family}"])


def is_untouched(world: ProgramNode, frame: Packet | bytes, program: str = "tc_ethernet") -> bool:
    result = world.run(program, frame)
    assert result.skb is not None
    assert result.data == bytes(frame)
    return (result.retval, result.skb.priority, result.skb.mark) == (GO_ON, 0, 0) and not world.reasons()


def is_served(world: ProgramNode, frame: Packet | bytes, program: str = "tc_ethernet") -> bool:
    result = world.run(program, frame)
    assert result.data == bytes(frame), "netfilter translates, not the program"
    return world.reasons() == {"NEW_FLOW_NETFILTER": 1}


def test_arp_and_icmp_are_not_changed(world: ProgramNode) -> None:
    world.service(["remote"])
    echo = ICMP() if world.family == 4 else ICMPv6EchoRequest()
    assert is_untouched(world, world.frame("pod", "cluster_ip", echo, Raw(b"x" * 40)))
    assert is_untouched(world, Ether(dst="ff:ff:ff:ff:ff:ff") / ARP() / Raw(b"\0" * 20))


@pytest.mark.parametrize("rest", [*range(18), 19, 20, 25])
def test_truncated_frames(world: ProgramNode, rest: int) -> None:
    """From only the IP header (the kernel's test run accepts no less) to a whole TCP header; the window is not read."""
    world.service(["remote"])
    whole = bytes(world.tcp("pod", "cluster_ip", 80))
    length = 14 + (20 if world.family == 4 else 40) + rest
    if rest < 16:
        assert is_untouched(world, whole[:length])
    else:
        assert is_served(world, whole[:length])


def test_a_vlan_tagged_frame_belongs_to_the_vlan_device(world: ProgramNode) -> None:
    world.service(["remote"])
    whole = world.tcp("pod", "cluster_ip", 80)
    tagged = Ether(src=whole.src, dst=whole.dst) / Dot1Q(vlan=5) / whole.payload
    assert is_untouched(world, tagged)


def test_a_device_without_ethernet_header(world: ProgramNode) -> None:
    """A packet from an IPsec tunnel still has the header of the frame around it, as every packet of a test run.

    The kernel knows where its IP header is. Bytes elsewhere that look like one must not be misread.
    """
    world.service(["remote"])
    frame = bytes(world.tcp("pod", "cluster_ip", 80))
    # Its own Ethernet header; the IP header that follows is the content of the frame.
    assert is_untouched(world, frame[:14] + frame, program="tc_l3")
    # A link address that begins like an IP header.
    assert is_served(world, bytes([0x45 if world.family == 4 else 0x60]) + frame[1:], program="tc_l3")


def test_only_the_first_fragment_gets_an_endpoint(world: ProgramNode) -> None:
    world.service(["remote"], protocol="udp")
    if world.family == 4:
        base = IP(src=world.address("pod"), dst=world.address("cluster_ip"), id=7)
        first = Ether(dst=NODE_MAC) / base.copy() / UDP(sport=4000, dport=80) / Raw(b"x" * 32)
        first[IP].flags = "MF"
        later = Ether(dst=NODE_MAC) / base.copy() / Raw(UDP(sport=4000, dport=80).build() + b"x" * 40)
        later[IP].frag, later[IP].proto = 5, 17
    else:
        ip = world.ip("pod", "cluster_ip")
        first = Ether(dst=NODE_MAC) / ip / IPv6ExtHdrFragment(m=1, id=7) / UDP(sport=4000, dport=80) / Raw(b"x" * 32)
        later = (
            Ether(dst=NODE_MAC) / ip / IPv6ExtHdrFragment(offset=5, id=7, nh=17) / Raw(b"\x0f\xa0\0\x50" + b"x" * 40)
        )
    assert is_untouched(world, later)
    assert is_served(world, first)


@only(4)
def test_ipv4_options(node: ProgramNode) -> None:
    node.forget_flows()
    node.load()
    node.service(["remote"])
    ip = IP(src=node.address("pod"), dst=node.address("cluster_ip"), options=[IPOption_NOP()] * 8)
    assert is_served(node, Ether(dst=NODE_MAC) / ip / TCP(sport=4000, dport=80, flags="S") / Raw(b"x" * 20))


HEADERS = {
    "hop by hop": [IPv6ExtHdrHopByHop()],
    "destination options": [IPv6ExtHdrDestOpt()],
    "routing": [IPv6ExtHdrRouting(type=4)],
    "three of them": [IPv6ExtHdrHopByHop(), IPv6ExtHdrRouting(type=4), IPv6ExtHdrDestOpt()],
    "a whole packet in a fragment header": [IPv6ExtHdrFragment()],
}


@only(6)
@pytest.mark.parametrize("name", HEADERS)
def test_ipv6_extension_headers(node: ProgramNode, name: str) -> None:
    node.forget_flows()
    node.load()
    node.service(["remote"])
    frame = node.frame("pod", "cluster_ip", *HEADERS[name], TCP(sport=4000, dport=80, flags="S"), Raw(b"x" * 20))
    assert is_served(node, frame)


@only(6)
def test_ipv6_headers_without_end(node: ProgramNode) -> None:
    node.forget_flows()
    node.load()
    node.service(["remote"])
    many = [IPv6ExtHdrDestOpt() for _ in range(20)]
    assert is_untouched(node, node.frame("pod", "cluster_ip", *many, TCP(dport=80, flags="S"), Raw(b"x" * 20)))


@pytest.mark.parametrize("version", [0, 4, 5, 6, 15])
@pytest.mark.parametrize("header_length", [0, 1, 4, 15])
def test_invalid_first_bytes_of_the_ip_header(world: ProgramNode, version: int, header_length: int) -> None:
    world.service(["remote"])
    frame = bytearray(bytes(world.tcp("pod", "cluster_ip", 80)))
    frame[14] = version << 4 | header_length
    sane = version == 6 if world.family == 6 else version == 4 and header_length >= 5
    if sane and world.family == 6:
        assert is_served(world, bytes(frame))
    else:
        world.run("tc_ethernet", bytes(frame))
        # A header of 15 words: the ports are read after it, and no service has them.
        assert not world.reasons()
