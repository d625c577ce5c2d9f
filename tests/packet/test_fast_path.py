# SPDX-License-Identifier: Apache-2.0
"""The flow cache: packets of established flows are rewritten and redirected; what asks for the kernel gets it."""

from __future__ import annotations

import subprocess

import pytest
from fast_world import (
    REDIRECT,
    Flow,
    beyond_the_link,
    entries,
    fast_node,
    flow_of,
    ip,
    open_fast_path,
    say,
)
from scapy.layers.inet import IP, TCP, UDP, IPOption_NOP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrDestOpt, IPv6ExtHdrFragment
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Packet
from world import GO_ON, World

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


@pytest.fixture
def fast(node: World) -> World:
    return fast_node(node)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
@pytest.mark.parametrize("masquerade", ["", "node"], ids=["own address", "masqueraded"])
@pytest.mark.parametrize("size", [0, 1, 1000, 1001])
def test_a_packet_is_rewritten_whole(fast: World, protocol: str, reply: bool, masquerade: str, size: int) -> None:
    flow = Flow(fast, protocol, masquerade=masquerade)
    flow.track()
    flow.learn()
    found = flow.run(reply, flow.frame(reply, size=size))
    assert found.retval == REDIRECT, fast.reasons()
    # Checksums are whole: made anew by somebody who knows nothing of sums of differences.
    assert beyond_the_link(found.data) == beyond_the_link(bytes(flow.expected(reply, size=size)))


def test_a_packet_in_from_outside_to_a_node_port(fast: World) -> None:
    flow = Flow(
        fast, "tcp", "client", "node", 30080, "local", masquerade="pod_gateway", entrance="nic", exit="pods"
    )  # fmt: skip
    flow.track()
    flow.learn()
    for reply in (False, True):
        found = flow.run(reply)
        assert found.retval == REDIRECT
        assert beyond_the_link(found.data) == beyond_the_link(bytes(flow.expected(reply)))


def test_udp_without_a_checksum_stays_without(fast: World) -> None:
    if fast.family == 6:
        pytest.skip("IPv6 has no UDP without a checksum")
    flow = flow_of(fast, "udp")
    flow.learn()
    frame = flow.frame()
    frame[UDP].chksum = 0
    assert Ether(flow.run(frame=frame).data)[UDP].chksum == 0


def test_counts_say_what_happened(fast: World) -> None:
    flow = flow_of(fast)
    assert flow.run().retval == GO_ON, "nobody knows the flow before its endpoint has answered"
    assert fast.reasons() == {}
    flow.learn()
    flow.run()
    assert fast.reasons() == {"FLOW_MISS": 1, "FLOW_LEARNED": 2, "FLOW_HIT": 2}


def test_the_first_packets_of_an_endpoint_are_the_kernels(node: World) -> None:
    """A connection that ends soon does not pay for an entry."""
    node.forget_flows()
    open_fast_path(node, learn_after=3)
    node.service(["remote"])
    flow, another = flow_of(node), Flow(node, sport=40001)
    another.track()
    for each in (flow, another):
        assert [each.run(reply=True).retval for _ in range(4)] == [GO_ON, GO_ON, GO_ON, REDIRECT]
    assert node.reasons() == {"FLOW_MISS": 8, "FLOW_LEARNED": 4, "FLOW_HIT": 2}
    third = Flow(node, sport=40002)
    third.track()
    for _ in range(3):
        # Whoever has the same ports next begins from the start.
        third.run(reply=True, frame=third.frame(reply=True, flags="SA"))
        assert [third.run(reply=True).retval for _ in range(2)] == [GO_ON, GO_ON]


def test_the_kernels_entry_lives_on(fast: World) -> None:
    flow = flow_of(fast)
    flow.learn()
    assert fast.flows()[0].timeout > 80_000


# ---- to the kernel: what the packet asks for ------------------------------------------------------------------


def options(flow: Flow) -> Packet:
    frame = flow.frame()
    if flow.world.family == 4:
        frame[IP].options = [IPOption_NOP()] * 4
        return frame
    below = frame[TCP]
    frame[IPv6].remove_payload()
    return frame / IPv6ExtHdrDestOpt() / below


def fragment(flow: Flow) -> Packet:
    frame = flow.frame(size=800)
    if flow.world.family == 4:
        frame[IP].flags = "MF"
        return frame
    below = frame[TCP]
    frame[IPv6].remove_payload()
    return frame / IPv6ExtHdrFragment(m=1, id=7) / below


def tagged(flow: Flow) -> Packet:
    frame = flow.frame()
    below = frame[Ether].payload
    frame[Ether].remove_payload()
    return frame / Dot1Q(vlan=0, prio=3) / below


def for_others(flow: Flow) -> Packet:
    frame = flow.frame()
    frame[Ether].dst = "02:00:00:00:00:77"
    return frame


ASKING = {
    "SYN": (lambda flow: flow.frame(flags="S"), ""),
    "FIN": (lambda flow: flow.frame(flags="FA"), "STACK_ENDING"),
    "RST": (lambda flow: flow.frame(flags="R"), "STACK_ENDING"),
    "a fragment": (fragment, "STACK_FRAGMENT"),
    "options": (options, "STACK_OPTIONS"),
    "the last hop": (lambda flow: flow.frame(hops=1), "STACK_HOPS"),
    "no hop left": (lambda flow: flow.frame(hops=0), "STACK_HOPS"),
    "larger than the MTU": (lambda flow: flow.frame(size=1500), "STACK_TOO_BIG"),
    "a priority tag": (tagged, ""),
    "a frame for somebody else": (for_others, ""),
}


@pytest.mark.parametrize("asking", ASKING)
def test_what_asks_for_the_kernel_gets_it(fast: World, asking: str) -> None:
    make, reason = ASKING[asking]
    if reason == "STACK_FRAGMENT" and fast.family == 6:
        reason = "STACK_OPTIONS"  # a header between
    flow = flow_of(fast)
    flow.learn()
    before = fast.reasons()
    frame = make(flow)
    found = flow.run(frame=frame)
    assert found.retval == GO_ON, fast.reasons()
    assert found.data == bytes(frame), "it goes on as it was"
    more = fast.reasons() - before
    if reason:
        assert more[reason] == 1
    assert not more["FLOW_HIT"]


def test_segments_that_fit_are_sent_as_one(fast: World) -> None:
    flow = flow_of(fast)
    flow.learn()
    frame = flow.frame(size=2800)
    assert flow.run(frame=frame, gso_size=1400, gso_segs=2).retval == REDIRECT
    assert flow.run(frame=frame, gso_size=1490, gso_segs=2).retval == GO_ON
    assert fast.reasons()["STACK_TOO_BIG"] == 1


def test_a_mark_of_somebodys_is_for_the_kernel(fast: World) -> None:
    flow = flow_of(fast)
    flow.learn()
    assert flow.run(mark=7).retval == GO_ON
    assert fast.reasons()["STACK_NOT_PLAIN"] == 1


# ---- to the kernel: what the flow asks for --------------------------------------------------------------------

STATES = {
    "SYN_SENT": "FLOW_NOT_YET",
    "SYN_RECV": "FLOW_NOT_YET",
    "FIN_WAIT": "STACK_ENDING",
    "CLOSE_WAIT": "STACK_ENDING",
    "TIME_WAIT": "STACK_ENDING",
}


@pytest.mark.parametrize("state", STATES)
def test_only_established_connections(fast: World, state: str) -> None:
    flow = Flow(fast)
    flow.track(state)
    assert flow.run(reply=True).retval == GO_ON
    assert fast.reasons()[STATES[state]] == 1


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_only_what_conntrack_is_assured_of(fast: World, protocol: str) -> None:
    flow = Flow(fast, protocol)
    flow.track(status="SEEN_REPLY")
    assert flow.run(reply=True).retval == GO_ON
    assert fast.reasons()["FLOW_NOT_YET"] == 1


def test_no_entry_no_fast_path(fast: World) -> None:
    assert Flow(fast).run(reply=True).retval == GO_ON
    assert fast.reasons() == {"FLOW_MISS": 1, "FLOW_NOT_YET": 1}


def test_a_flow_that_is_not_translated_is_asked_about_once(fast: World) -> None:
    flow = Flow(fast)
    words = ["conntrack", "-I", "-p", "tcp", "-s", fast.address("pod"), "-d", fast.address("remote")]
    words += ["--sport", "40000", "--dport", "8080", "-t", "100", "-u", "SEEN_REPLY,ASSURED", "--state", "ESTABLISHED"]
    subprocess.run(words, check=True, capture_output=True)
    for _ in range(3):
        assert flow.run(reply=True).retval == GO_ON
    assert fast.reasons() == {"FLOW_MISS": 1, "FLOW_LEARNED": 1, "STACK_NOT_TRANSLATED": 3}


def test_a_connmark_is_for_the_kernels_rules(fast: World) -> None:
    flow = Flow(fast)
    flow.track("ESTABLISHED", "SEEN_REPLY,ASSURED", "-m", "5")
    assert flow.run(reply=True).retval == GO_ON
    assert fast.reasons()["STACK_SPECIAL_FLOW"] == 1


def test_one_way_datagrams_are_looked_at_each(fast: World) -> None:
    flow = Flow(fast, "udp")
    flow.track(status="")
    for _ in range(3):
        assert flow.run().retval == GO_ON
    assert entries(fast) == []


# ---- ends, and what changes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "least", "most"), [("FA", 100, 120), ("R", 1, 10), ("RA", 1, 10)])
@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
def test_the_end_stops_both_directions_and_shortens_the_entry(
    fast: World, flags: str, least: int, most: int, reply: bool
) -> None:
    flow = flow_of(fast)
    flow.learn()
    assert flow.run(reply, flow.frame(reply, flags=flags)).retval == GO_ON
    assert least <= fast.flows()[0].timeout <= most
    for direction in (False, True):
        assert flow.run(direction).retval == GO_ON
    assert least <= fast.flows()[0].timeout <= most, "nothing pushes it on again"


@pytest.mark.parametrize(("flags", "reply"), [("S", False), ("SA", True)], ids=["client", "endpoint"])
def test_after_a_syn_the_kernel_is_asked_who_has_the_ports_now(fast: World, flags: str, reply: bool) -> None:
    flow = flow_of(fast)
    flow.learn()
    fast.forget_flows()
    assert flow.run(reply).retval == REDIRECT, "nothing says yet that the entry is gone"
    flow.run(reply, flow.frame(reply, flags=flags))
    assert flow.run(reply).retval == GO_ON
    assert fast.reasons()["FLOW_FORGOTTEN"] == 1


def test_a_syn_alone_replaces_no_living_connection(fast: World) -> None:
    flow = flow_of(fast)
    flow.learn()
    flow.run(frame=flow.frame(flags="S"))
    assert not fast.reasons()["CLOSING_FLOW_REPLACED"]


def test_the_generation_asks_again_at_once(fast: World) -> None:
    flow = flow_of(fast)
    flow.learn()
    fast.forget_flows()
    assert flow.run().retval == REDIRECT, "nothing says yet that the entry is gone"
    say(fast, generation=2)
    for reply in (False, True):
        assert flow.run(reply).retval == GO_ON
    assert entries(fast) == [], "nothing is left of it"


def test_a_smaller_mtu_is_asked_for(fast: World) -> None:
    flow = flow_of(fast)
    flow.learn()
    frame = flow.frame(size=1300)
    assert flow.run(frame=frame).retval == REDIRECT
    ip("link", "set", "dev", "nic", "mtu", "1280")
    try:
        say(fast, generation=2)
        assert flow.run(frame=frame).retval == GO_ON
        assert fast.reasons()["STACK_TOO_BIG"] == 1
    finally:
        ip("link", "set", "dev", "nic", "mtu", "1500")


def test_a_datagram_for_an_endpoint_that_is_gone_heals(fast: World) -> None:
    flow = flow_of(fast, "udp")
    flow.learn()
    fast.endpoint("remote", 2, present=False)
    say(fast, generation=2)
    assert flow.run().retval == GO_ON
    assert fast.reasons()["STALE_UDP_REPLACED"] == 1


def test_a_datagram_of_a_living_flow_is_sent_on_again(fast: World) -> None:
    flow = flow_of(fast, "udp")
    flow.learn()
    say(fast, generation=2)
    assert flow.run().retval == REDIRECT
    assert fast.reasons()["FLOW_STALE"] == 1


def test_off_is_off(node: World) -> None:
    node.forget_flows()
    node.load(fast_path=0)
    node.service(["remote"])
    flow = flow_of(node)
    for reply in (True, False, True):
        found = flow.run(reply)
        assert found.retval == GO_ON
        assert found.data == bytes(flow.frame(reply))
    assert node.reasons() == {}


def test_packets_of_others_are_not_touched(fast: World) -> None:
    frame = Flow(fast).packet("client", "elsewhere", 1234, 443, "A", 50, 64, "nic")
    found = Flow(fast).run(reply=True, frame=frame)
    assert (found.retval, found.data, fast.reasons()) == (GO_ON, bytes(frame), {})
