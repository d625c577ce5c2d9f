# SPDX-License-Identifier: Apache-2.0
"""XDP alone, and XDP before tc: what XDP does itself, and that it changes nothing for the packets that it leaves to tc.

test_decisions sends its table through both; PEP_XDP=1 sends every packet of this folder through both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from scapy.layers.inet import IP, TCP, UDP, IPOption_NOP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrDestOpt, IPv6ExtHdrFragment
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Packet, Raw

from pyebpf_proxy.datapath.connections import tracked_clients
from pyebpf_proxy.datapath.loader.libbpf import SkBuff
from tests.packet.fast_node import complete_filter, note_tracked, sweep
from tests.packet.program_node import (
    GO_ON,
    PRIORITY_BACKEND,
    PRIORITY_MASQUERADE,
    SHOT,
    XDP_DROP,
    XDP_PASS,
    ProgramNode,
    insert_entry,
)

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


@pytest.fixture
def before(node: ProgramNode) -> ProgramNode:
    """A node whose devices have XDP before tc. The agent allows no young flows. conntrack is known to have no flow."""
    node.forget_flows()
    return with_xdp(node)


def with_xdp(node: ProgramNode, **settings: int) -> ProgramNode:
    node.settings = {"xdp": 1, "load": 1, **settings}
    node.load()
    sweep(node)
    complete_filter(node)
    return node


@pytest.fixture
def scheduled(before: ProgramNode) -> ProgramNode:
    """The same with scheduler rr: tc must not choose again, so XDP passes on its choice."""
    return with_xdp(before, scheduler=1)


# ---- new flows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("source", ["client", "pod"])
def test_a_first_packet_goes_up_unchanged_and_tc_hands_it_to_netfilter(
    before: ProgramNode, protocol: str, source: str
) -> None:
    before.service(["remote"], protocol=protocol)
    frame = (before.tcp if protocol == "tcp" else before.udp)(source, "cluster_ip", 80)
    found = before.run_xdp(frame)
    assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
    assert not before.reasons()
    result = before.run("tc_ethernet", frame)
    assert result.skb is not None
    tag = PRIORITY_MASQUERADE if source == "client" else PRIORITY_BACKEND
    assert (result.retval, result.skb.priority) == (GO_ON, tag | before.backend_ids["remote", 1])
    assert not before.flows()
    assert before.reasons() == {"NEW_FLOW_NETFILTER": 1}


def test_xdp_drops_before_the_kernel_allocates_a_packet(before: ProgramNode) -> None:
    before.service(["remote"], ranges=[f"{before.address('client')}/{32 if before.family == 4 else 128}"])
    assert before.run_xdp(before.tcp("blocked", "vip", 80)).retval == XDP_DROP
    assert before.reasons() == {"DROP_SOURCE_RANGE": 1}


@pytest.mark.parametrize(
    ("protocol", "address", "by_xdp"), [("udp", "vip", True), ("tcp", "node", True), ("udp", "node", False)]
)
def test_drops_that_need_no_conntrack(before: ProgramNode, protocol: str, address: str, by_xdp: bool) -> None:
    """A datagram to the node may be a reply. tc knows, and drops a new flow."""
    before.service(["remote"], protocol=protocol, external_local=1)
    make = before.tcp if protocol == "tcp" else before.udp
    frame = make("client", address, 80 if address == "vip" else 30080)
    assert before.run_xdp(frame).retval == (XDP_DROP if by_xdp else XDP_PASS)
    assert before.reasons() == ({"DROP_NO_LOCAL_ENDPOINTS": 1} if by_xdp else {})
    assert before.run("tc_ethernet", frame).retval == SHOT


def test_xdp_drops_packets_to_loopback(node: ProgramNode) -> None:
    if node.family == 6:
        pytest.skip("the guard is of IPv4")
    node.settings = {"xdp": 1, "localhost_node_ports": 1}
    node.load()
    frame = Ether(dst="02:00:00:00:00:02") / IP(src=node.address("client"), dst="127.0.0.1") / Raw(b"x" * 20)
    assert node.run_xdp(frame).retval == XDP_DROP
    assert node.reasons() == {"DROP_LOOPBACK_DESTINATION": 1}


def with_options(world: ProgramNode) -> Packet:
    frame = world.tcp("client", "vip", 80)
    if world.family == 4:
        frame[IP].options = [IPOption_NOP()] * 4
        return frame
    below = frame[TCP]
    frame[IPv6].remove_payload()
    return frame / IPv6ExtHdrDestOpt() / below


def test_headers_may_have_options(scheduled: ProgramNode) -> None:
    scheduled.service(["remote"])
    assert scheduled.run_xdp(with_options(scheduled)).retval == XDP_PASS
    assert len(choices(scheduled)) == 1


def test_a_first_fragment_opens_a_flow_as_in_tc(scheduled: ProgramNode) -> None:
    scheduled.service(["remote"], protocol="udp")
    assert scheduled.run_xdp(first_fragment(scheduled)).retval == XDP_PASS
    assert len(choices(scheduled)) == 1


def tagged(world: ProgramNode) -> Packet:
    frame = world.tcp("client", "vip", 80)
    below = frame.payload
    frame.remove_payload()
    return Ether(src=frame.src, dst=frame.dst) / Dot1Q(vlan=7) / below


def for_another_host(world: ProgramNode) -> Packet:
    frame = world.tcp("client", "vip", 80)
    frame[Ether].dst = "02:00:00:00:00:03"
    return frame


def first_fragment(world: ProgramNode) -> Packet:
    frame = world.udp("client", "vip", 80)
    if world.family == 4:
        frame[IP].flags = "MF"
        return frame
    below = frame[UDP]
    frame[IPv6].remove_payload()
    return frame / IPv6ExtHdrFragment(m=1, id=7, nh=17) / below


LEFT: dict[str, Callable[[ProgramNode], Packet]] = {
    "a VLAN's": tagged,
    "another host's": for_another_host,
    "SCTP": lambda world: world.sctp("client", "vip", 80),
    "no service's": lambda world: world.tcp("client", "elsewhere", 80),
    "in the middle of a connection": lambda world: world.tcp("client", "vip", 80, flags="A"),
}


@pytest.mark.parametrize("name", LEFT)
def test_packets_that_xdp_does_not_serve_pass_unchanged(scheduled: ProgramNode, name: str) -> None:
    for number, protocol in enumerate(("tcp", "udp", "sctp")):
        scheduled.service(["remote"], protocol=protocol, service=1 + number)
    frame = LEFT[name](scheduled)
    found = scheduled.run_xdp(frame)
    assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
    assert not choices(scheduled)
    assert not scheduled.reasons()


def test_new_flows_are_left_to_tc_if_xdp_may_open_none(scheduled: ProgramNode) -> None:
    scheduled.service(["remote"])
    scheduled.xdp_device("nic", starts_flow=0)
    assert scheduled.run_xdp(scheduled.tcp("client", "vip", 80)).retval == XDP_PASS
    assert not choices(scheduled)


def test_packets_with_headers_beyond_the_first_buffer_pass(scheduled: ProgramNode) -> None:
    """A program must not read beyond a frame that ends within its headers."""
    scheduled.service(["remote"])
    frame = bytes(scheduled.tcp("client", "vip", 80))
    for length in range(14, 14 + (20 if scheduled.family == 4 else 40) + 14):
        assert scheduled.xdp is not None
        assert scheduled.xdp.run_frame(frame[:length], scheduled.devices["nic"]).retval == XDP_PASS
    assert not choices(scheduled)


def test_tc_counts_a_refusal_once(before: ProgramNode) -> None:
    before.service([])
    frame = before.tcp("client", "vip", 80)
    assert before.run_xdp(frame).retval == XDP_PASS
    assert not before.reasons()
    before.run("tc_ethernet", frame)
    assert before.reasons() == {"REJECT_NO_ENDPOINTS": 1}


# ---- flows that conntrack has, and the flow table has not: those to the node's own endpoints, for example ------


def track(world: ProgramNode, protocol: str) -> Packet:
    """A flow of the client in conntrack; returns its frame, which could also be a flow's first one."""
    world.forget_flows()
    extra = ["--state", "ESTABLISHED"] if protocol == "tcp" else ["-u", "SEEN_REPLY,ASSURED"]
    insert_entry(world, protocol, "client", "vip", 40000, 80, *extra, target="remote")
    noted = tracked_clients.note(
        world.object.btf, world.object.maps["tracked_clients"], lambda key: note_tracked(world, key), 1000
    )
    assert noted
    return (world.tcp if protocol == "tcp" else world.udp)("client", "vip", 80)


@pytest.fixture
def tracking(before: ProgramNode) -> Iterator[ProgramNode]:
    yield before
    before.forget_flows()


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("why", ["source ranges", "no local endpoint"])
def test_a_flow_that_a_new_one_would_not_get_continues(tracking: ProgramNode, protocol: str, why: str) -> None:
    other = "203.0.113.7/32" if tracking.family == 4 else "2001:db8:77::1/128"
    if why == "source ranges":
        tracking.service(["remote"], protocol=protocol, ranges=[other])
    else:
        tracking.service(["remote"], protocol=protocol, external_local=1)
    frame = track(tracking, protocol)
    assert tracking.run_xdp(frame).retval == XDP_PASS
    assert tracking.run("tc_ethernet", frame).retval == GO_ON
    assert not tracking.reasons()


def test_a_reply_to_a_port_that_is_also_a_frontends_is_not_dropped(tracking: ProgramNode) -> None:
    """A masqueraded pod or the node itself has asked from this port. The filter notes clients of Services only."""
    tracking.service(["remote"], protocol="udp", external_local=1)
    frame = tracking.udp("client", "node", 30080, sport=53)
    insert_entry(tracking, "udp", "node", "client", 30080, 53, "-u", "SEEN_REPLY,ASSURED")
    assert tracking.run_xdp(frame).retval == XDP_PASS
    assert tracking.run("tc_ethernet", frame).retval == GO_ON


def test_an_answer_to_the_host_of_an_external_ip_is_not_dropped(tracking: ProgramNode) -> None:
    """The host is behind this node, and its datagram came first."""
    tracking.service(["remote"], protocol="udp", external_local=1)
    first = tracking.udp("external_ip", "client", 40000, sport=80)
    assert tracking.run("tc_ethernet", first, "pods").retval == GO_ON
    insert_entry(tracking, "udp", "external_ip", "client", 80, 40000, "-u", "SEEN_REPLY,ASSURED")
    answer = tracking.udp("client", "external_ip", 80)
    assert tracking.run_xdp(answer).retval == XDP_PASS
    assert tracking.run("tc_ethernet", answer).retval == GO_ON
    assert not tracking.reasons()


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_known_flow_does_not_renew_session_affinity(tracking: ProgramNode, protocol: str) -> None:
    tracking.service(["remote", "outside"], protocol=protocol, affinity_seconds=100)
    assert tracking.run_xdp(track(tracking, protocol)).retval == XDP_PASS
    assert not list(tracking.object.maps["affinities"].items())


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_known_flow_takes_no_turn_of_a_scheduler(scheduled: ProgramNode, protocol: str) -> None:
    scheduled.service(["remote", "outside"], protocol=protocol)
    frame = track(scheduled, protocol)
    try:
        assert scheduled.run_xdp(frame).retval == XDP_PASS
        assert not choices(scheduled)
    finally:
        scheduled.forget_flows()


# ---- a choice that only tc can carry out -----------------------------------------------------------------------


def choices(world: ProgramNode) -> list[tuple[bytes, bytes]]:
    return list(world.object.maps["xdp_choices"].items())


def chosen(world: ProgramNode, sport: int) -> int:
    """The endpoint in the tag for the agent's nft table, after XDP has seen the packet."""
    result = world.run("tc_ethernet", world.tcp("client", "cluster_ip", 80, sport=sport))
    assert result.skb is not None
    assert result.skb.priority & 0xFF000000 == PRIORITY_MASQUERADE
    return result.skb.priority & 0xFFFFFF


def test_tc_uses_the_endpoint_that_xdp_chose(scheduled: ProgramNode) -> None:
    """Not another one: round robin would now choose the next."""
    scheduled.service(["outside", "nowhere"])
    tc = scheduled.object.programs["tc_ethernet"]
    for sport in range(41000, 41016):
        frame = scheduled.tcp("client", "cluster_ip", 80, sport=sport)
        assert scheduled.run_xdp(frame).retval == XDP_PASS
        ((_, choice),) = choices(scheduled)
        result = tc.test_run(bytes(frame), SkBuff(ifindex=scheduled.devices["nic"]))
        assert result.skb is not None
        assert result.skb.priority == PRIORITY_MASQUERADE | int.from_bytes(choice[4:8], "little")
        assert not choices(scheduled), "used once"
    assert scheduled.reasons() == {"NEW_FLOW_NETFILTER": 16}


def test_round_robin_takes_one_turn_for_a_flow_that_both_see(scheduled: ProgramNode) -> None:
    scheduled.service(["nowhere", "outside", "remote"])
    seen: Counter[str] = Counter()
    names = {number: name for (name, _), number in scheduled.backend_ids.items()}
    scheduled.forget_flows()
    for sport in range(41000, 41030):
        result = scheduled.run("tc_ethernet", scheduled.tcp("client", "cluster_ip", 80, sport=sport))
        assert result.skb is not None
        seen[names[result.skb.priority & 0xFFFFFF]] += 1
    assert seen == {"nowhere": 10, "outside": 10, "remote": 10}


def test_without_a_scheduler_tc_chooses_by_itself(before: ProgramNode) -> None:
    """A random choice is not passed on: that would cost more than choosing again."""
    before.service(["outside", "nowhere"])
    assert "xdp_choices" not in before.object.maps
    seen = {chosen(before, sport) for sport in range(41000, 41032)}
    assert len(seen) == 2


def test_affinity_is_that_of_the_first_choice(before: ProgramNode) -> None:
    before.service(["outside", "nowhere"], affinity_seconds=100)
    assert len({chosen(before, sport) for sport in range(41000, 41020)}) == 1


def test_a_choice_of_an_older_service_config_is_not_used(scheduled: ProgramNode) -> None:
    """The service may have got another list between the two programs."""
    scheduled.service(["outside"])
    frame = scheduled.tcp("client", "cluster_ip", 80)
    assert scheduled.run_xdp(frame).retval == XDP_PASS
    scheduled.service(["nowhere"])
    result = scheduled.object.programs["tc_ethernet"].test_run(bytes(frame), SkBuff(ifindex=scheduled.devices["nic"]))
    assert result.skb is not None
    assert result.skb.priority == PRIORITY_MASQUERADE | scheduled.backend_ids["nowhere", 1]
