# SPDX-License-Identifier: Apache-2.0
"""Packets to 127.0.0.0/8 from outside (spec/service-semantics §8): route_localnet admits them, the programs drop
them.
"""

from __future__ import annotations

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Packet, Raw

from tests.packet.program_node import GO_ON, SHOT, ProgramNode

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

IPV4 = pytest.mark.parametrize("node", [4], indirect=True, ids=["IPv4"])
LINK = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
PORT = 30080


def verdict(world: ProgramNode, frame: Packet, program: str = "tc_ethernet") -> tuple[int, dict[str, int]]:
    return world.run(program, frame).retval, world.reasons()


@IPV4
@pytest.mark.parametrize("source", ["192.0.2.1", "10.244.1.2", "127.0.0.1"])
@pytest.mark.parametrize("destination", ["127.0.0.0", "127.0.0.1", "127.1.2.3", "127.255.255.255"])
def test_loopback_destinations_are_dropped_and_counted(world: ProgramNode, source: str, destination: str) -> None:
    world.load(localhost_node_ports=1)
    world.service(["remote"])
    frame = LINK / IP(src=source, dst=destination) / TCP(dport=PORT, flags="S")
    assert verdict(world, frame) == (SHOT, {"DROP_LOOPBACK_DESTINATION": 1})


@IPV4
@pytest.mark.parametrize(
    "rest",
    [
        TCP(dport=PORT, flags="A"),
        UDP(dport=PORT) / Raw(b"x"),
        UDP(dport=9) / Raw(b"x"),
        ICMP() / Raw(b"x" * 40),
        Raw(b"x" * 40),
    ],
    ids=["an established TCP segment", "UDP", "UDP to no NodePort", "ICMP", "no transport header"],
)
def test_any_protocol_to_loopback_is_dropped(world: ProgramNode, rest: Packet) -> None:
    world.load(localhost_node_ports=1)
    world.service(["remote"], protocol="udp")
    assert verdict(world, LINK / IP(src="192.0.2.1", dst="127.0.0.1") / rest) == (
        SHOT,
        {"DROP_LOOPBACK_DESTINATION": 1},
    )


@IPV4
def test_later_fragments_to_loopback_are_dropped(world: ProgramNode) -> None:
    world.load(localhost_node_ports=1)
    fragment = LINK / IP(src="192.0.2.1", dst="127.0.0.1", proto=17, frag=100) / Raw(b"x" * 40)
    assert verdict(world, fragment) == (SHOT, {"DROP_LOOPBACK_DESTINATION": 1})


@IPV4
def test_frames_to_loopback_on_a_bridge_port_are_dropped(world: ProgramNode) -> None:
    world.load(localhost_node_ports=1)
    packet = IP(src="192.0.2.1", dst="127.0.0.1") / TCP(dport=PORT, flags="S")
    assert verdict(world, LINK / packet, "tc_bridge_port") == (SHOT, {"DROP_LOOPBACK_DESTINATION": 1})


@IPV4
def test_a_tagged_frame_to_loopback_is_left_to_the_vlan_device(world: ProgramNode) -> None:
    world.load(localhost_node_ports=1)
    packet = IP(src="192.0.2.1", dst="127.0.0.1") / TCP(dport=PORT, flags="S")
    assert verdict(world, LINK / Dot1Q(vlan=5) / packet) == (GO_ON, {})


@IPV4
@pytest.mark.parametrize("destination", ["126.255.255.255", "128.0.0.1", "10.0.0.127"])
def test_other_addresses_pass(world: ProgramNode, destination: str) -> None:
    world.load(localhost_node_ports=1)
    frame = LINK / IP(src="192.0.2.1", dst=destination) / TCP(dport=9, flags="S")
    assert verdict(world, frame) == (GO_ON, {})


@IPV4
def test_a_loopback_source_alone_is_left_to_the_kernel(world: ProgramNode) -> None:
    world.load(localhost_node_ports=1)
    frame = LINK / IP(src="127.0.0.1", dst=world.address("node")) / TCP(dport=9, flags="S")
    assert verdict(world, frame) == (GO_ON, {})


@IPV4
def test_without_localhost_node_ports_loopback_is_left_to_the_kernel(world: ProgramNode) -> None:
    """The kernel drops such packets, unless other software has set route_localnet; then they must not be changed."""
    world.service(["remote"])
    frame = LINK / IP(src="192.0.2.1", dst="127.0.0.1") / TCP(dport=PORT, flags="S")
    assert verdict(world, frame) == (GO_ON, {})


def test_services_are_served_at_the_same_time(world: ProgramNode) -> None:
    world.load(localhost_node_ports=1)
    world.service(["remote"])
    assert verdict(world, world.tcp("client", "node", PORT)) == (GO_ON, {"NEW_FLOW_NETFILTER": 1})
