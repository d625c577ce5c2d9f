# SPDX-License-Identifier: Apache-2.0
"""Kernel's flows in the flow table: learned from packets that leave netfilter, confirmed by such packets each
second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Packet

from pyebpf_proxy.datapath.loader.libbpf import SkBuff
from tests.packet.fast_node import (
    CONFIRM,
    FAR,
    NODE_MAC,
    REDIRECT,
    SECOND,
    Flow,
    device,
    drop_records,
    fast_node,
    learned_flow,
    now,
    one_cpu,
    options,
    pending_record,
    permits,
    records,
    route_marks,
)
from tests.packet.program_node import GO_ON, PRIORITY_MIDSTREAM, ProgramNode

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


@pytest.fixture
def fast(node: ProgramNode) -> Iterator[ProgramNode]:
    with one_cpu():
        yield fast_node(node)


MASQUERADED = {"client": "client", "frontend": "vip", "masquerade": "node", "entrance": "nic", "snat_port": 50000}


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("ends", [{}, MASQUERADED], ids=["own address", "masqueraded"])
def test_packets_are_rewritten_completely(fast: ProgramNode, protocol: str, ends: dict[str, Any]) -> None:
    flow = learned_flow(fast, protocol, **ends)
    for size in (0, 1, 1000):
        for reply in (False, True):
            found = flow.run(reply, flow.frame(reply, size=size))
            assert found.retval == REDIRECT, fast.reasons()
            assert found.data == bytes(flow.expected(reply, size=size))
    assert fast.reasons() == {"FLOW_HIT": 6}


def test_tcp_is_learned_from_the_second_packet_of_the_endpoint(fast: ProgramNode) -> None:
    flow = Flow(fast)
    assert flow.pass_netfilter(reply=True, flags="SA")["learn"] == 0
    assert flow.pass_netfilter(reply=True) == {}, "one reply is not enough: the connection may end with it"
    assert flow.entries() == []
    assert flow.pass_netfilter(reply=True)["learn"] == 1
    assert flow.entries() == [False, True]
    assert fast.reasons() == {"FLOW_LEARNED": 1}
    entry = flow.entry(True)
    assert entry is not None
    assert (entry["young"], entry["reply"]) == (0, 1)
    assert now() < entry["confirmed_until"] <= now() + SECOND
    assert flow.entry()["confirmed_until"] == 0, "no packet of the client has left netfilter yet"  # type: ignore[index]


def test_udp_is_learned_from_its_first_datagram(fast: ProgramNode) -> None:
    flow = Flow(fast, "udp")
    flow.pass_netfilter(new=True)
    assert flow.entries() == [False, True]
    assert flow.entry()["confirmed_until"] == 0  # type: ignore[index]
    flow.pass_netfilter()
    assert flow.run().retval == REDIRECT
    assert flow.run(reply=True).retval == GO_ON


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_untranslated_replies_get_a_record_once_a_second(fast: ProgramNode, protocol: str) -> None:
    flow = Flow(fast, protocol)
    asked = 0
    for _ in range(40):
        assert flow.run(reply=True).retval == GO_ON
        record = pending_record(fast)
        if record:
            asked += 1
            frame = flow.packet("remote", "pod", 8080, 40000, NODE_MAC, FAR, hops=63)
            flow.leave(frame, record["number"], reply=True)
    # Two or three at first, then one for each second that has begun.
    assert 1 <= asked <= 6
    assert flow.entries() == []
    assert not fast.reasons()["FLOW_LEARNED"]


def test_replies_of_no_endpoint_get_no_record(fast: ProgramNode) -> None:
    flow = Flow(fast, endpoint="local")
    for _ in range(3):
        assert flow.run(reply=True).retval == GO_ON
        assert records(fast) == []


def test_a_marked_packet_is_not_learned_from(fast: ProgramNode) -> None:
    flow = Flow(fast, "udp")
    for _ in range(3):
        flow.run(reply=True, mark=7)
        assert records(fast) == []


# ---- confirmation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
def test_each_second_netfilter_sees_a_packet(fast: ProgramNode, reply: bool) -> None:
    flow = learned_flow(fast)
    flow.write(reply, confirmed_until=now() - 1)
    record = flow.pass_netfilter(reply)
    assert record["kind"] == CONFIRM
    entry = flow.entry(reply)
    assert entry is not None
    assert now() < entry["confirmed_until"] <= now() + SECOND
    assert fast.reasons() == {"STACK_NOT_CONFIRMED": 1, "FLOW_CONFIRMED": 1}
    assert flow.run(reply).retval == REDIRECT


@pytest.mark.parametrize("mark", [0x80, 0x01])
@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
def test_a_packet_with_a_mark_that_chooses_routes_confirms_nothing(fast: ProgramNode, reply: bool, mark: int) -> None:
    flow = learned_flow(fast)
    flow.write(reply, confirmed_until=now() - 1)
    with route_marks(fast, 0x80):
        flow.run(reply)
        flow.leave(flow.expected(reply), pending_record(fast)["number"], reply, mark=mark)
    assert flow.run(reply).retval == (GO_ON if mark == 0x80 else REDIRECT)
    assert fast.reasons()["STACK_ROUTE_MARK"] == (mark == 0x80)


def test_a_flow_is_not_learned_from_packets_with_a_mark_that_chooses_routes(fast: ProgramNode) -> None:
    flow = Flow(fast, "udp")
    with route_marks(fast, 0x80):
        flow.run()
        flow.leave(flow.expected(), pending_record(fast)["number"], new=True, mark=0x80)
        assert flow.entries() == []
    flow = Flow(fast, "udp", sport=41000)
    flow.pass_netfilter(new=True)
    assert flow.entries() == [False, True]


def test_a_new_generation_is_confirmed_at_once(fast: ProgramNode) -> None:
    flow = learned_flow(fast)
    fast.write_fast_path_state(generation=2)
    for reply in (False, True):
        assert flow.pass_netfilter(reply)["kind"] == CONFIRM
        assert flow.run(reply).retval == REDIRECT


@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
def test_the_new_link_address_of_a_device_is_learned(fast: ProgramNode, reply: bool) -> None:
    """Without it, all later packets would take the slow path, and the table would not see their sequence numbers."""
    flow = learned_flow(fast)
    flow.write_rewrite(reply, mac_in=bytes.fromhex("020000000e77"))
    assert flow.pass_netfilter(reply)["kind"] == CONFIRM
    assert flow.run(reply).retval == REDIRECT


def test_the_link_address_of_another_host_is_not_learned(fast: ProgramNode) -> None:
    """Nor does the frame, which a bridge forwards untranslated, remove the flow."""
    flow = learned_flow(fast)
    flow.write_rewrite(mac_in=bytes.fromhex("020000000e77"))
    before = flow.entry()
    frame = flow.frame()
    assert flow.run(frame=frame).retval == GO_ON
    flow.leave(frame, pending_record(fast)["number"])
    assert flow.entry() == before
    frame[Ether].dst = FAR
    drop_records(fast)
    context = SkBuff(ifindex=fast.devices["pods"])
    assert fast.object.programs["tc_bridge_port"].test_run(bytes(frame), context).retval == GO_ON
    assert not pending_record(fast)


def unconfirmed(world: ProgramNode) -> Flow:
    flow = learned_flow(world)
    for reply in (False, True):
        flow.write(reply, confirmed_until=0)
    return flow


OTHERWISE: dict[str, dict[str, Any]] = {
    "another endpoint": {"endpoint": "local"},
    "another port of the endpoint": {"endpoint_port": 8081},
    "another source": {"masquerade": "node"},
    "another source port": {"snat_port": 50001},
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_flow_that_is_translated_in_another_way_is_forgotten(fast: ProgramNode, name: str) -> None:
    flow = unconfirmed(fast)
    assert flow.run().retval == GO_ON
    left = Flow(**{**flow.__dict__, **OTHERWISE[name]}).expected()
    flow.leave(left, pending_record(fast)["number"])
    assert flow.entries() == []
    assert fast.reasons()["FLOW_CHANGED"] == 1


@pytest.mark.parametrize("new", [False, True], ids=["conntrack has the flow", "conntrack has a new flow"])
def test_a_syn_from_another_device(fast: ProgramNode, new: bool) -> None:
    """It may be forged. If conntrack does not have the flow any more, the client may have moved."""
    flow = learned_flow(fast)
    before = [flow.entry(False), flow.entry(True)]
    assert flow.run(frame=flow.frame(flags="S", size=0), by="nic").retval == GO_ON
    flow.leave(flow.expected(flags="S", size=0), pending_record(fast)["number"], new=new, came_by="nic")
    assert fast.reasons()["FLOW_CHANGED"] == int(new)
    if not new:
        assert [flow.entry(False), flow.entry(True)] == before


def test_a_new_address_of_the_neighbour_is_used(fast: ProgramNode) -> None:
    flow = unconfirmed(fast)
    flow.run()
    left = flow.expected()
    left[Ether].dst = "02:00:00:00:0f:02"
    flow.leave(left, pending_record(fast)["number"])
    assert flow.link()["mac_to"].hex(":") == "02:00:00:00:0f:02"
    found = flow.run()
    assert (found.retval, found.data) == (REDIRECT, bytes(left))


def test_another_egress_interface_is_used(fast: ProgramNode) -> None:
    flow = unconfirmed(fast)
    device(fast, "pods", mtu=1400)
    flow.run()
    flow.leave(flow.expected(), pending_record(fast)["number"], by="pods")
    link = flow.link()
    assert (link["device"], link["mtu"]) == (fast.devices["pods"], 1400)
    assert flow.run().retval == REDIRECT


def test_nothing_is_sent_through_an_excluded_device(fast: ProgramNode) -> None:
    flow = unconfirmed(fast)
    device(fast, "nic", redirect=0)
    for _ in range(2):
        assert flow.pass_netfilter()["kind"] == CONFIRM


STALE: dict[str, dict[str, Any]] = {
    "an old record": {"age": 30_000_000},
    "came by another device": {"came_by": "nic"},
    "of no known device": {"by": "lo"},
}


@pytest.mark.parametrize("name", STALE)
def test_a_stale_or_forged_record_confirms_nothing(fast: ProgramNode, name: str) -> None:
    flow = unconfirmed(fast)
    flow.run()
    fast.devices["lo"] = 1
    try:
        flow.leave(flow.expected(), pending_record(fast)["number"], **STALE[name])
    finally:
        del fast.devices["lo"]
    assert flow.entry()["confirmed_until"] == 0  # type: ignore[index]
    assert not fast.reasons()["FLOW_CONFIRMED"]


def test_another_record_number_confirms_nothing(fast: ProgramNode) -> None:
    flow = unconfirmed(fast)
    flow.run()
    flow.leave(flow.expected(), pending_record(fast)["number"] ^ 0x40)
    assert flow.entry()["confirmed_until"] == 0  # type: ignore[index]


def test_a_packet_of_another_protocol_confirms_nothing(fast: ProgramNode) -> None:
    flow = unconfirmed(fast)
    flow.run()
    other = Flow(**{**flow.__dict__, "protocol": "udp"})
    other.leave(other.expected(), pending_record(fast)["number"])
    assert flow.entries() == [False, True]
    assert flow.entry()["confirmed_until"] == 0  # type: ignore[index]


# ---- to the kernel ----------------------------------------------------------------------------------


def tagged(flow: Flow) -> Packet:
    frame = flow.frame()
    below = frame[Ether].payload
    frame[Ether].remove_payload()
    return frame / Dot1Q(vlan=0, prio=3) / below


UNUSUAL = {
    "options": (options, "STACK_OPTIONS"),
    "the last hop": (lambda flow: flow.frame(hops=1), "STACK_HOPS"),
    "too big": (lambda flow: flow.frame(size=1500), "STACK_TOO_BIG"),
    "a priority tag": (tagged, ""),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_packets_that_need_the_kernel_are_left_to_it(fast: ProgramNode, name: str) -> None:
    make, reason = UNUSUAL[name]
    flow = learned_flow(fast)
    frame = make(flow)
    found = flow.run(frame=frame)
    assert (found.retval, found.data) == (GO_ON, bytes(frame))
    if reason:
        assert fast.reasons() == {reason: 1}
    assert flow.run().retval == REDIRECT, "the next packet takes the fast path"


def test_a_packet_with_another_programs_mark_is_left_to_the_kernel(fast: ProgramNode) -> None:
    flow = learned_flow(fast)
    assert flow.run(mark=7).retval == GO_ON
    assert fast.reasons() == {"STACK_NOT_PLAIN": 1}


@pytest.mark.parametrize("flags", ["FA", "R", "RA", "S", "SA"])
@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
def test_the_kernel_sees_the_end_and_must_confirm_again(fast: ProgramNode, flags: str, reply: bool) -> None:
    flow = learned_flow(fast)
    frame = flow.frame(reply, flags=flags)
    found = flow.run(reply, frame)
    assert (found.retval, found.data) == (GO_ON, bytes(frame))
    assert fast.reasons()["STACK_ENDING"] == 1
    drop_records(fast)
    for direction in (False, True):
        assert flow.pass_netfilter(direction)["kind"] == CONFIRM


def test_the_agent_is_dead(fast: ProgramNode) -> None:
    flow = learned_flow(fast)
    fast.write_fast_path_state(alive=-1)
    assert flow.run().retval == GO_ON
    assert fast.reasons() == {"STACK_NO_AGENT": 1}


def test_the_family_is_closed(fast: ProgramNode) -> None:
    flow = learned_flow(fast)
    fast.write_fast_path_state(**{f"closed{fast.family}": fast.object.btf.enum("slow_path_reason")["STACK_RULES"]})
    assert flow.run().retval == GO_ON
    assert fast.reasons() == {"STACK_RULES": 1}


def test_numbers_are_noted_while_netfilter_gets_all_packets(fast: ProgramNode) -> None:
    """They tell later whether a RST or FIN is in sequence."""
    flow = learned_flow(fast)
    fast.write_fast_path_state(**{f"closed{fast.family}": fast.object.btf.enum("slow_path_reason")["STACK_RULES"]})
    flow.run(frame=flow.frame(seq=70000, ack=90000, size=10))
    entry = flow.entry()
    assert entry is not None
    assert (entry["acknowledged"], entry["sent_until"]) == (90000, 70010 & 0xFFFF)


def without_request(entry: dict[str, Any] | None) -> dict[str, Any]:
    assert entry is not None
    return {name: value for name, value in entry.items() if name not in ("promote", "last_seen")}


@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
@pytest.mark.parametrize("flags", ["A", "R", "S"])
def test_packets_from_another_device_are_not_changed(fast: ProgramNode, reply: bool, flags: str) -> None:
    """But conntrack sees a RST, so its entry may have to be restored. And the side that sends has not vanished."""
    flow = learned_flow(fast)
    flow.set_back(900)
    before = [flow.entry(False), flow.entry(True)]
    flow.run(reply, flow.frame(reply, flags=flags), by="pods" if reply else "nic")
    assert [without_request(flow.entry(False)), without_request(flow.entry(True))] == list(map(without_request, before))
    for direction in (False, True):
        entry = flow.entry(direction)
        assert entry is not None
        assert (now() - entry["last_seen"] < 60 * SECOND) == (direction == reply and flags != "S")
    assert fast.reasons()["STACK_OTHER_DEVICE"] == 1


def test_a_packet_that_needs_confirmation_starts_no_connection(fast: ProgramNode) -> None:
    """conntrack may have forgotten the connection: then it is reset, as any other that is unknown."""
    flow = learned_flow(fast)
    flow.write(confirmed_until=0)
    found = flow.run(frame=flow.frame(flags="PA"))
    assert (found.retval, found.skb.priority) == (GO_ON, PRIORITY_MIDSTREAM)
    assert fast.reasons()["STACK_NOT_CONFIRMED"] == 1


def test_a_datagram_to_a_removed_endpoint_deletes_the_flow(fast: ProgramNode) -> None:
    flow = Flow(fast, "udp")
    flow.pass_netfilter(new=True)
    fast.endpoint("remote", 2, present=False)
    fast.write_fast_path_state(generation=2)
    flow.run()
    assert flow.entries() == []


def test_permits_and_flows_have_separate_generations(fast: ProgramNode) -> None:
    learned_flow(fast)
    assert permits(fast) == []
