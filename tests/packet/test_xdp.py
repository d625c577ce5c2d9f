# SPDX-License-Identifier: Apache-2.0
"""XDP alone, and XDP before tc: what it does itself, and that what it leaves is as if it had not been there.

The decision table goes through both mains in test_decisions; PEP_XDP=1 sends every packet of this folder through both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from fast_world import FAR, REDIRECT, Flow, ip, mac_of, neighbour, open_fast_path, say
from scapy.layers.inet import IP, TCP, UDP, IPOption_NOP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrDestOpt, IPv6ExtHdrFragment
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Packet, Raw
from world import GO_ON, MARK, PRIORITY_BACKEND, XDP_DROP, XDP_PASS, XDP_REDIRECT, XDP_TX, World

from pyebpf_proxy.datapath.loader.libbpf import RunResult, SkBuff

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


@pytest.fixture
def before(node: World) -> World:
    """A node whose devices carry XDP before tc; no fast path."""
    node.forget_flows()
    node.settings = {"xdp": 1}
    node.load()
    return node


def alone(world: World, frame: Packet, device: str = "nic") -> RunResult:
    """Through XDP, and no further."""
    assert world.xdp is not None
    return world.xdp.run_frame(bytes(frame), world.devices[device])


# ---- new flows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("source", ["client", "pod"])
def test_a_flow_is_opened_and_its_packet_goes_up_unchanged(before: World, protocol: str, source: str) -> None:
    before.service(["remote"], protocol=protocol)
    frame = (before.tcp if protocol == "tcp" else before.udp)(source, "cluster_ip", 80)
    found = alone(before, frame)
    assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
    (flow,) = before.flows()
    assert flow.reply[0] == before.address("remote")
    assert (flow.reply[1] == before.address("node")) == (source == "client")
    assert before.reasons() == {"NEW_FLOW_DIRECT": 1}
    # tc finds a flow that exists; other people's rules find the mark that tc alone would have set.
    result = before.run("tc_ethernet", frame)
    assert result.skb is not None
    assert (result.retval, result.skb.mark) == (GO_ON, MARK if source == "client" else 0)
    assert [(f.original, f.reply) for f in before.flows()] == [(flow.original, flow.reply)]
    assert before.reasons() == {"NEW_FLOW_DIRECT": 1}


def test_the_mark_is_for_flows_without_an_answer(before: World) -> None:
    before.service(["remote"], protocol="udp")
    flow = Flow(before, "udp", "client", "vip", masquerade="node")
    flow.track()
    result = before.run("tc_ethernet", before.udp("client", "vip", 80))
    assert result.skb is not None
    assert (result.retval, result.skb.mark) == (GO_ON, 0)


def test_a_drop_is_given_before_there_is_a_packet(before: World) -> None:
    before.service(["remote"], ranges=[f"{before.address('client')}/{32 if before.family == 4 else 128}"])
    assert alone(before, before.tcp("blocked", "vip", 80)).retval == XDP_DROP
    assert before.reasons() == {"DROP_SOURCE_RANGE": 1}


def test_loopback_addresses_are_guarded(node: World) -> None:
    if node.family == 6:
        pytest.skip("the guard is of IPv4")
    node.settings = {"xdp": 1, "localhost_node_ports": 1}
    node.load()
    frame = Ether(dst="02:00:00:00:00:02") / IP(src=node.address("client"), dst="127.0.0.1") / Raw(b"x" * 20)
    assert alone(node, frame).retval == XDP_DROP
    assert node.reasons() == {"DROP_LOOPBACK_DESTINATION": 1}


def with_options(world: World) -> Packet:
    frame = world.tcp("client", "vip", 80)
    if world.family == 4:
        frame[IP].options = [IPOption_NOP()] * 4
        return frame
    below = frame[TCP]
    frame[IPv6].remove_payload()
    return frame / IPv6ExtHdrDestOpt() / below


def test_headers_may_have_options(before: World) -> None:
    before.service(["remote"])
    assert alone(before, with_options(before)).retval == XDP_PASS
    assert before.reasons() == {"NEW_FLOW_DIRECT": 1}


def test_a_first_fragment_opens_its_flow_as_in_tc(before: World) -> None:
    before.service(["remote"], protocol="udp")
    assert alone(before, first_fragment(before)).retval == XDP_PASS
    assert before.reasons() == {"NEW_FLOW_DIRECT": 1}


def tagged(world: World) -> Packet:
    frame = world.tcp("client", "vip", 80)
    below = frame.payload
    frame.remove_payload()
    return Ether(src=frame.src, dst=frame.dst) / Dot1Q(vlan=7) / below


def for_somebody_else(world: World) -> Packet:
    frame = world.tcp("client", "vip", 80)
    frame[Ether].dst = "02:00:00:00:00:03"
    return frame


def first_fragment(world: World) -> Packet:
    frame = world.udp("client", "vip", 80)
    if world.family == 4:
        frame[IP].flags = "MF"
        return frame
    below = frame[UDP]
    frame[IPv6].remove_payload()
    return frame / IPv6ExtHdrFragment(m=1, id=7, nh=17) / below


LEFT: dict[str, Callable[[World], Packet]] = {
    "a VLAN's": tagged,
    "somebody else's": for_somebody_else,
    "SCTP": lambda world: world.sctp("client", "vip", 80),
    "no service's": lambda world: world.tcp("client", "elsewhere", 80),
    "in the middle of a connection": lambda world: world.tcp("client", "vip", 80, flags="A"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_for_xdp_goes_up_untouched(before: World, name: str) -> None:
    for number, protocol in enumerate(("tcp", "udp", "sctp")):
        before.service(["remote"], protocol=protocol, service=1 + number)
    frame = LEFT[name](before)
    found = alone(before, frame)
    assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
    assert not before.flows()
    assert not before.reasons()


def test_where_no_flows_may_be_opened_they_are_left_to_tc(before: World) -> None:
    before.service(["remote"])
    before.xdp_device("nic", opens=0)
    assert alone(before, before.tcp("client", "vip", 80)).retval == XDP_PASS
    assert not before.flows()


def test_headers_that_are_not_in_the_first_buffer_go_up(before: World) -> None:
    """A frame that ends in the middle of its headers is nothing to read beyond."""
    before.service(["remote"])
    frame = bytes(before.tcp("client", "vip", 80))
    for length in range(14, 14 + (20 if before.family == 4 else 40) + 14):
        assert before.xdp is not None
        assert before.xdp.run_frame(frame[:length], before.devices["nic"]).retval == XDP_PASS
    assert not before.flows()


def test_a_refusal_is_tcs_and_counted_once(before: World) -> None:
    before.service([])
    frame = before.tcp("client", "vip", 80)
    assert alone(before, frame).retval == XDP_PASS
    assert not before.reasons()
    before.run("tc_ethernet", frame)
    assert before.reasons() == {"REJECT_NO_ENDPOINTS": 1}


# ---- a choice that only tc can carry out -----------------------------------------------------------------------


def choices(world: World) -> list[tuple[bytes, bytes]]:
    return list(world.object.maps["xdp_choices"].items())


def chosen(world: World, sport: int) -> int:
    """The endpoint that tc hands to our nft table, after XDP has seen the packet."""
    result = world.run("tc_ethernet", world.tcp("client", "cluster_ip", 80, sport=sport))
    assert result.skb is not None
    assert result.skb.priority & 0xFF000000 == PRIORITY_BACKEND
    return result.skb.priority & 0xFFFFFF


def test_the_endpoint_that_xdp_chose_is_the_one_that_tc_carries_out(before: World) -> None:
    """Not another one: half of the choices would differ."""
    before.service(["outside", "nowhere"])
    tc = before.object.programs["tc_ethernet"]
    for sport in range(41000, 41016):
        frame = before.tcp("client", "cluster_ip", 80, sport=sport)
        assert alone(before, frame).retval == XDP_PASS
        ((_, choice),) = choices(before)
        result = tc.test_run(bytes(frame), SkBuff(ifindex=before.devices["nic"]))
        assert result.skb is not None
        assert result.skb.priority == PRIORITY_BACKEND | int.from_bytes(choice[4:8], "little")
        assert not choices(before), "taken over once"
    counted = before.reasons()
    assert counted["NEW_FLOW_NETFILTER"] == counted["LANE_BACKEND_OUTSIDE"] + counted["LANE_NO_ROUTE"] == 16
    assert set(counted) == {"NEW_FLOW_NETFILTER", "LANE_BACKEND_OUTSIDE", "LANE_NO_ROUTE"}


def test_round_robin_takes_one_turn_for_a_flow_that_both_see(node: World) -> None:
    node.settings = {"xdp": 1, "scheduler": 1}
    node.load()
    node.service(["nowhere", "outside", "remote"])
    seen: Counter[str] = Counter()
    names = {number: name for (name, _), number in node.backend_ids.items()}
    node.forget_flows()
    for sport in range(41000, 41030):
        result = node.run("tc_ethernet", node.tcp("client", "cluster_ip", 80, sport=sport))
        assert result.skb is not None
        if result.skb.priority:
            seen[names[result.skb.priority & 0xFFFFFF]] += 1
        else:
            seen["remote"] += 1
    assert seen == {"nowhere": 10, "outside": 10, "remote": 10}


def test_affinity_is_that_of_the_first_choice(before: World) -> None:
    before.service(["outside", "nowhere"], affinity_seconds=100)
    assert len({chosen(before, sport) for sport in range(41000, 41020)}) == 1


def test_a_choice_of_another_time_is_not_believed(before: World) -> None:
    """Between the two programs the service may have got another list."""
    before.service(["outside"])
    frame = before.tcp("client", "cluster_ip", 80)
    assert alone(before, frame).retval == XDP_PASS
    before.service(["nowhere"])
    result = before.object.programs["tc_ethernet"].test_run(bytes(frame), SkBuff(ifindex=before.devices["nic"]))
    assert result.skb is not None
    assert result.skb.priority == PRIORITY_BACKEND | before.backend_ids["nowhere", 1]


# ---- established flows -----------------------------------------------------------------------------------------


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
    return alone(flow.world, given, flow.exit if reply else flow.entrance)


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
    again = through(flow, reply)
    assert (again.retval, again.data) == (XDP_REDIRECT, found.data)
    fast.xdp_device("nic", mac=found.data[6:12], returns=0, takes=0)
    assert through(flow, reply).retval == XDP_PASS


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


def no_frames(flow: Flow) -> None:
    flow.world.xdp_device("nic", takes=0)


def another_way(flow: Flow) -> None:
    address = flow.world.address("remote")
    ip("route", "add", f"{address}/{32 if flow.world.family == 4 else 128}", "dev", "pods")
    neighbour(flow.world, "replace", "remote", "pods")


def back_again(flow: Flow) -> None:
    address = flow.world.address("remote")
    ip("route", "del", f"{address}/{32 if flow.world.family == 4 else 128}", "dev", "pods")
    neighbour(flow.world, "del", "remote", "pods")


TO_TC: dict[str, tuple[Callable[[Flow], object], Callable[[Flow], object], str]] = {
    "its way out takes no frames": (no_frames, lambda flow: None, "XDP_LEFT_DEVICE"),
    "nobody's link address": (
        lambda flow: neighbour(flow.world, "del", "gateway", "nic"),
        lambda flow: neighbour(flow.world, "replace", "gateway", "nic"),
        "XDP_LEFT_NEIGHBOUR",
    ),
    "the route has moved": (another_way, back_again, "XDP_LEFT_NEIGHBOUR"),
    "the generation has moved": (lambda flow: say(flow.world, generation=2), lambda flow: None, ""),
    "nobody watches": (lambda flow: say(flow.world, trust=-1.0), lambda flow: None, ""),
    "the family is closed": (lambda flow: say(flow.world, closed="STACK_IPSEC"), lambda flow: None, ""),
}


@pytest.mark.parametrize("name", TO_TC)
def test_a_known_flow_is_left_to_tc_when(fast: World, name: str) -> None:
    flow = known(fast)
    change, undo, reason = TO_TC[name]
    counted = fast.reasons()
    change(flow)
    try:
        frame = flow.frame()
        found = through(flow, frame=frame)
        assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
        assert fast.reasons() - counted == (Counter({reason: 1}) if reason else Counter())
    finally:
        undo(flow)


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
    assert alone(fast, frame, "nic").retval == XDP_PASS


def test_a_new_datagram_of_an_unknown_flow_is_opened_with_the_fast_path_on(fast: World) -> None:
    frame = Flow(fast, "udp", sport=41000).frame()
    assert alone(fast, frame, "pods").retval == XDP_PASS
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
