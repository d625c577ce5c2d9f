# SPDX-License-Identifier: Apache-2.0
"""Replies between two ports of one bridge must be sent to the IP layer, where netfilter can translate them."""

from __future__ import annotations

import sys

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrFragment
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from tests.packet.fast_node import fast_node, learned_flow, one_cpu
from tests.packet.program_node import GO_ON, ProgramNode, insert_entry

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]
BRIDGE_MAC = "02:00:00:00:00:be"


def make_bridge_port(world: ProgramNode, mac: str = BRIDGE_MAC) -> None:
    layout = world.object.btf.struct("node_device")
    world.object.maps["devices"].update(
        world.devices["pods"].to_bytes(4, "little"),
        layout.pack(bridge=world.devices["nic"], bridge_mac=bytes.fromhex(mac.replace(":", ""))),
    )


@pytest.fixture
def bridged(world: ProgramNode) -> ProgramNode:
    """A service whose endpoint is behind a bridge port, and a flow to it from a pod on the same bridge."""
    world.service(["local"])
    make_bridge_port(world)
    insert_entry(world, "tcp", "pod", "cluster_ip", 40000, 80, "--state", "ESTABLISHED", target="local")
    return world


def reply(world: ProgramNode, flags: str = "SA", sport: int = 8080, dport: int = 40000) -> Packet:
    return world.tcp("local", "pod", dport, sport=sport, flags=flags)


@pytest.mark.parametrize("flags", ["SA", "A", "PA", "FA", "R"])
def test_a_reply_of_a_service_flow_is_lifted(bridged: ProgramNode, flags: str) -> None:
    frame = reply(bridged, flags)
    result = bridged.run("tc_bridge_port", frame, device="pods")
    assert result.retval == GO_ON
    assert result.data[:6].hex(":") == BRIDGE_MAC
    assert result.data[6:] == bytes(frame)[6:]
    assert bridged.reasons() == {"BRIDGED_REPLY_REDIRECTED": 1}


def test_a_reply_is_switched_if_another_device_is_the_gateway(bridged: ProgramNode) -> None:
    make_bridge_port(bridged, "00:00:00:00:00:00")
    frame = reply(bridged)
    result = bridged.run("tc_bridge_port", frame, device="pods")
    assert (result.retval, result.data) == (GO_ON, bytes(frame))
    assert not bridged.reasons()


@pytest.mark.parametrize(("sport", "dport"), [(8080, 40001), (8081, 40000)], ids=["no such flow", "no endpoint's port"])
def test_other_traffic_of_the_endpoint_is_switched(bridged: ProgramNode, sport: int, dport: int) -> None:
    frame = reply(bridged, sport=sport, dport=dport)
    result = bridged.run("tc_bridge_port", frame, device="pods")
    assert result.data == bytes(frame)
    assert not bridged.reasons()


def test_a_direct_flow_to_the_endpoint_is_switched(bridged: ProgramNode) -> None:
    insert_entry(bridged, "tcp", "pod", "local", 41000, 8080, "--state", "ESTABLISHED")
    frame = reply(bridged, dport=41000)
    assert bridged.run("tc_bridge_port", frame, device="pods").data == bytes(frame)


@pytest.mark.parametrize(
    ("protocol", "state", "switched"),
    [("tcp", "TIME_WAIT", True), ("tcp", "CLOSE", True), ("tcp", "ESTABLISHED", False), ("udp", "", True)],
)
def test_a_port_that_was_used_for_a_service_before(
    world: ProgramNode, protocol: str, state: str, switched: bool
) -> None:
    """The replies belong to the flow that has begun last, but a connection that has not ended keeps its port."""
    world.service(["local", "remote"], protocol=protocol)
    make_bridge_port(world)
    options = ("--state", state) if state else ()
    insert_entry(world, protocol, "pod", "cluster_ip", 40000, 80, *options, target="local")
    send = getattr(world, protocol)
    flags = {"flags": "SA"} if protocol == "tcp" else {}
    reply = send("local", "pod", 40000, sport=8080, **flags)

    def is_switched() -> bool:
        return bool(world.run("tc_bridge_port", reply, device="pods").data == bytes(reply))

    assert not is_switched()
    # To the endpoint itself, but not over the bridge; from another port of the client; to another endpoint.
    routed = send("pod", "local", 8080, sport=40000)
    routed.dst = BRIDGE_MAC
    others = [(8080, 40001, "local"), (8081, 40000, "local"), (8080, 40000, "remote")]
    for other in (routed, *(send("pod", name, port, sport=sport) for port, sport, name in others)):
        world.run("tc_bridge_port", other, device="pods")
        assert not is_switched()
    world.run("tc_bridge_port", send("pod", "local", 8080, sport=40000), device="pods")
    assert is_switched() == switched
    world.run("tc_bridge_port", send("pod", "cluster_ip", 80, sport=40000), device="pods")
    assert not is_switched()


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_the_table_translates_no_replies_of_a_direct_flow(node: ProgramNode, protocol: str) -> None:
    with one_cpu():
        flow = learned_flow(fast_node(node), protocol)
        make_bridge_port(node)
        direct = getattr(node, protocol)("pod", "remote", 8080, sport=flow.sport)
        assert node.run("tc_bridge_port", direct, device="pods").retval == GO_ON
        assert [flow.entry(reply)["confirmed_until"] for reply in (False, True)] == [0, 0]  # type: ignore[index]


def test_a_reply_that_is_for_the_bridge_already(bridged: ProgramNode) -> None:
    frame = reply(bridged)
    frame.dst = BRIDGE_MAC
    assert bridged.run("tc_bridge_port", frame, device="pods").data == bytes(frame)
    assert not bridged.reasons()


def test_only_on_ports(bridged: ProgramNode) -> None:
    frame = reply(bridged)
    assert bridged.run("tc_ethernet", frame, device="pods").data == bytes(frame)


def fragmented(world: ProgramNode, ports: tuple[int, int], number: int = 7) -> tuple[Packet, Packet]:
    """A reply in two fragments: only the first has the ports."""
    whole = UDP(sport=ports[0], dport=ports[1]) / Raw(b"x" * 72)
    body = bytes(whole.build())
    ether = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
    if world.family == 4:
        ip = {"src": world.address("local"), "dst": world.address("pod"), "id": number, "proto": 17}
        return ether / IP(flags="MF", **ip) / Raw(body[:40]), ether / IP(frag=5, **ip) / Raw(body[40:])
    ip6 = IPv6(src=world.address("local"), dst=world.address("pod"))
    head = {"id": number, "nh": 17}
    return (
        ether / ip6 / IPv6ExtHdrFragment(m=1, **head) / Raw(body[:40]),
        ether / ip6 / IPv6ExtHdrFragment(offset=5, **head) / Raw(body[40:]),
    )


@pytest.fixture
def bridged_udp(world: ProgramNode) -> ProgramNode:
    world.service(["local"], protocol="udp")
    make_bridge_port(world)
    insert_entry(world, "udp", "pod", "cluster_ip", 40000, 80, target="local")
    return world


def test_later_fragments_follow_the_first(bridged_udp: ProgramNode) -> None:
    first, later = fragmented(bridged_udp, (8080, 40000))
    assert bridged_udp.run("tc_bridge_port", later, device="pods").data == bytes(later), (
        "the first fragment has not come yet"
    )
    assert bridged_udp.run("tc_bridge_port", first, device="pods").data[:6].hex(":") == BRIDGE_MAC
    assert bridged_udp.run("tc_bridge_port", later, device="pods").data[:6].hex(":") == BRIDGE_MAC
    _, another = fragmented(bridged_udp, (8080, 40000), number=8)
    assert bridged_udp.run("tc_bridge_port", another, device="pods").data == bytes(another)


def test_a_later_fragment_of_another_time_is_switched(bridged_udp: ProgramNode) -> None:
    """The 16-bit id has come round: a first fragment that is switched takes the later ones along, or it is too late."""
    first, later = fragmented(bridged_udp, (8080, 40000))
    other, _ = fragmented(bridged_udp, (8080, 40001))
    redirected = bridged_udp.object.maps["bridged_fragments"]
    assert bridged_udp.run("tc_bridge_port", first, device="pods").data[:6].hex(":") == BRIDGE_MAC
    assert bridged_udp.run("tc_bridge_port", other, device="pods").data == bytes(other)
    assert bridged_udp.run("tc_bridge_port", later, device="pods").data == bytes(later)
    assert bridged_udp.run("tc_bridge_port", first, device="pods").data[:6].hex(":") == BRIDGE_MAC
    ((key, value),) = redirected.items()
    when = int.from_bytes(value, sys.byteorder)
    redirected.update(key, ((when - 9) % 65536).to_bytes(4, sys.byteorder))
    assert bridged_udp.run("tc_bridge_port", later, device="pods").data == bytes(later)


def test_fragments_of_other_traffic_are_switched(bridged_udp: ProgramNode) -> None:
    for frame in fragmented(bridged_udp, (8081, 40000)):
        assert bridged_udp.run("tc_bridge_port", frame, device="pods").data == bytes(frame)
