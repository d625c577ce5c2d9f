# SPDX-License-Identifier: Apache-2.0
"""XDP and flows that the cache knows: what is sent on, as what, and what is left to tc."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fast_world import FAR, REDIRECT, Flow, ip, mac_of, neighbour, open_fast_path, say
from scapy.layers.inet import TCP, UDP
from scapy.layers.l2 import Ether
from scapy.packet import Packet
from world import XDP_PASS, XDP_REDIRECT, XDP_TX, World

from pyebpf_proxy.datapath.loader.libbpf import RunResult

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


@pytest.fixture
def fast(node: World) -> Iterator[World]:
    node.forget_flows()
    node.settings = {}
    open_fast_path(node, xdp=1)
    node.service(["remote", "local"])
    node.service(["remote", "local"], protocol="udp", service=2)
    for device in ("nic", "pods"):
        mac = mac_of(device, node.devices[device], id(node))
        node.xdp_device(device, mac=bytes.fromhex(mac.replace(":", "")))
    yield node
    ip("link", "set", "nic", "mtu", "1500")
    ip("link", "set", "pods", "mtu", "1500")


def known(world: World, protocol: str = "tcp", **changes: str) -> Flow:
    """A flow that tc has learned."""
    flow = Flow(world, protocol, **changes)  # type: ignore[arg-type]
    flow.track()
    flow.learn()
    return flow


def in_and_out_by(device: str) -> dict[str, str]:
    return {"client": "client", "frontend": "vip", "masquerade": "node", "entrance": device, "exit": device}


def through(flow: Flow, reply: bool = False, frame: Packet | None = None) -> RunResult:
    given = flow.frame(reply) if frame is None else frame
    return flow.world.run_xdp(given, flow.exit if reply else flow.entrance)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
@pytest.mark.parametrize("masquerade", ["", "node"], ids=["own address", "masqueraded"])
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_frame_becomes_what_tc_would_make_of_it(
    fast: World, protocol: str, reply: bool, masquerade: str, size: int
) -> None:
    flow = known(fast, protocol, masquerade=masquerade)
    found = through(flow, reply, flow.frame(reply, size=size))
    assert found.retval == XDP_REDIRECT, fast.reasons()
    expected = bytes(flow.expected(reply, size=size))
    assert found.data[14:] == expected[14:]
    by_tc = flow.run(reply, flow.frame(reply, size=size))
    assert by_tc.retval == REDIRECT
    assert by_tc.data[14:] == found.data[14:]
    out = "pods" if reply else "nic"
    # The neighbour's address and the device's own, as the kernel would have written them.
    assert Ether(found.data).dst == FAR
    assert Ether(found.data).src == mac_of(out, fast.devices[out], id(fast))
    counted = fast.reasons()
    assert (counted["XDP_FLOW_HIT"], counted["FLOW_HIT"]) == (1, 2)


@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
def test_what_leaves_by_the_device_it_came_in_by_is_sent_back(fast: World, reply: bool) -> None:
    flow = known(fast, **in_and_out_by("nic"))
    found = through(flow, reply)
    assert found.retval == XDP_TX, fast.reasons()
    assert found.data[14:] == bytes(flow.expected(reply))[14:]
    # A veth sends nothing back, but takes what is redirected to it.
    fast.xdp_device("nic", mac=found.data[6:12], returns=0)
    moved(flow)
    again = through(flow, reply)
    assert (again.retval, again.data) == (XDP_REDIRECT, found.data)


def test_udp_without_a_checksum_stays_without_in_xdp(fast: World) -> None:
    if fast.family == 6:
        pytest.skip("IPv6 has no UDP without a checksum")
    flow = known(fast, "udp")
    frame = flow.frame()
    frame[UDP].chksum = 0
    found = through(flow, frame=frame)
    assert found.retval == XDP_REDIRECT
    assert Ether(found.data)[UDP].chksum == 0


def test_a_jumbo_frame_of_several_buffers_is_sent(fast: World) -> None:
    ip("link", "set", "nic", "mtu", "9000")
    ip("link", "set", "pods", "mtu", "9000")
    flow = known(fast, "udp")
    found = through(flow, frame=flow.frame(size=8000))
    assert found.retval == XDP_REDIRECT, fast.reasons()
    assert found.data[14:] == bytes(flow.expected(size=8000))[14:]
    # Where the device takes one buffer at a time, short ones go and long ones do not.
    fast.xdp_device("nic", takes=1)
    moved(flow)
    assert through(flow).retval == XDP_REDIRECT
    assert through(flow, frame=flow.frame(size=8000)).retval == XDP_PASS
    assert fast.reasons()["XDP_LEFT_DEVICE"] == 1


def with_partial_checksum(flow: Flow) -> Packet:
    """As a socket of this machine leaves it to a device: the sum of the pseudo header."""
    frame = flow.frame()
    layer = frame[TCP] if flow.protocol == "tcp" else frame[UDP]
    length = len(layer)
    number = 6 if flow.protocol == "tcp" else 17
    ends = flow.world.packed(flow.client) + flow.world.packed(flow.frontend)
    words = ends + number.to_bytes(2, "big") + length.to_bytes(2, "big")
    total = sum(int.from_bytes(words[i : i + 2], "big") for i in range(0, len(words), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    layer.chksum = total
    return frame


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_checksum_that_was_left_to_a_device_is_left_to_tc(fast: World, protocol: str) -> None:
    flow = known(fast, protocol)
    frame = with_partial_checksum(flow)
    found = through(flow, frame=frame)
    assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
    assert fast.reasons()["XDP_LEFT_CHECKSUM"] == 1


TO_TC: dict[str, Callable[[World], None]] = {
    "the generation has moved": lambda world: say(world, generation=2),
    "nobody watches": lambda world: say(world, trust=-1.0),
    "the family is closed": lambda world: say(world, closed="STACK_IPSEC"),
}


@pytest.mark.parametrize("name", TO_TC)
def test_a_known_flow_is_left_to_tc_when(fast: World, name: str) -> None:
    flow = known(fast)
    counted = fast.reasons()
    TO_TC[name](fast)
    frame = flow.frame()
    found = through(flow, frame=frame)
    assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
    assert fast.reasons() == counted


def moved(flow: Flow) -> None:
    """As the agent does when it hears of a change; and tc asks again."""
    say(flow.world, generation=2)
    flow.learn()


def test_a_device_that_takes_frames_no_more_gets_none(fast: World) -> None:
    flow = known(fast)
    assert through(flow).retval == XDP_REDIRECT
    fast.xdp_device("nic", takes=0)
    moved(flow)
    frame = flow.frame()
    found = through(flow, frame=frame)
    assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
    assert fast.reasons()["XDP_LEFT_DEVICE"] == 1


def test_a_neighbour_that_has_another_link_address_gets_frames_there(fast: World) -> None:
    flow = known(fast)
    assert Ether(through(flow).data).dst == FAR
    try:
        neighbour(fast, "replace", "gateway", "nic", "02:00:00:00:0f:02")
        moved(flow)
        assert Ether(through(flow).data).dst == "02:00:00:00:0f:02"
    finally:
        neighbour(fast, "replace", "gateway", "nic")


def test_a_frame_for_somebody_else_is_not_sent_by_the_cache(fast: World) -> None:
    flow = known(fast)
    counted = fast.reasons()
    for at in range(6):
        frame = bytearray(bytes(flow.frame()))
        frame[at] ^= 4
        found = fast.run_xdp(bytes(frame), flow.entrance)
        assert (found.retval, found.data) == (XDP_PASS, bytes(frame)), at
    assert fast.reasons() == counted


@pytest.mark.parametrize("flags", ["FA", "RA", "S", "SA"])
def test_a_turning_point_goes_to_tc(fast: World, flags: str) -> None:
    flow = known(fast)
    counted = fast.reasons()
    assert through(flow, frame=flow.frame(flags=flags)).retval == XDP_PASS
    assert fast.reasons() == counted


def test_a_packet_that_is_too_big_or_at_its_last_hop_goes_to_tc(fast: World) -> None:
    flow = known(fast)
    assert through(flow, frame=flow.frame(size=1461)).retval == XDP_PASS
    assert through(flow, frame=flow.frame(hops=1)).retval == XDP_PASS
    assert fast.reasons()["XDP_FLOW_HIT"] == 0


def test_what_came_by_another_device_goes_to_tc(fast: World) -> None:
    flow = known(fast)
    frame = flow.frame()
    frame[Ether].dst = mac_of("nic", fast.devices["nic"], id(fast))
    assert fast.run_xdp(frame, "nic").retval == XDP_PASS


def test_a_new_datagram_of_an_unknown_flow_is_opened_with_the_fast_path_on(fast: World) -> None:
    frame = Flow(fast, "udp", sport=41000).frame()
    assert fast.run_xdp(frame, "pods").retval == XDP_PASS
    assert len(fast.flows()) == 1
    assert fast.reasons() == {"NEW_FLOW_DIRECT": 1}


def test_on_packets_any_device_does(node: World) -> None:
    """Generic mode: the kernel sends what it made of the frame."""
    node.forget_flows()
    node.settings = {}
    open_fast_path(node, xdp=1, xdp_generic=1)
    node.service(["remote"])
    for device in ("nic", "pods"):
        mac = bytes.fromhex(mac_of(device, node.devices[device], id(node)).replace(":", ""))
        node.xdp_device(device, mac=mac, takes=0, returns=0)
    assert through(known(node)).retval == XDP_REDIRECT
