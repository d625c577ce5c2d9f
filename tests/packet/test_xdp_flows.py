# SPDX-License-Identifier: Apache-2.0
"""XDP and the flow table: which packets XDP sends and how, which flows it opens, and what it leaves to tc."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scapy.layers.inet import TCP, UDP
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from pyebpf_proxy.common.bpf_constants import RESTORE
from pyebpf_proxy.datapath.connections import tracked_clients
from pyebpf_proxy.datapath.loader.libbpf import RunResult
from tests.packet.fast_node import (
    FAR,
    REDIRECT,
    SECOND,
    VARIANTS,
    Flow,
    close,
    device,
    empty_table,
    fast_node,
    filtering_node,
    learned_flow,
    note_tracked,
    now,
    one_cpu,
    open_in_slot_of,
    records,
    reset_counters,
    rewind_recent_flows,
    set_age,
    young,
)
from tests.packet.program_node import GO_ON, SHOT, XDP_DROP, XDP_PASS, XDP_REDIRECT, XDP_TX, ProgramNode, insert_entry

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


@pytest.fixture
def fast(node: ProgramNode) -> Iterator[ProgramNode]:
    with one_cpu():
        yield filtering_node(node, xdp=1)


@pytest.fixture(params=["young", "the kernel's"])
def known(request: pytest.FixtureRequest, fast: ProgramNode) -> Callable[..., Flow]:
    """A flow that the table knows."""

    def make(protocol: str = "tcp", **ends: Any) -> Flow:
        flow = (young if request.param == "young" else learned_flow)(fast, protocol, **ends)
        reset_counters(fast)
        return flow

    return make


TURNED = {"client": "client", "frontend": "vip", "masquerade": "node", "entrance": "nic", "snat_port": 50000}


def run_through_xdp(flow: Flow, reply: bool = False, frame: Packet | bytes | None = None, by: str = "") -> RunResult:
    given = flow.frame(reply) if frame is None else frame
    return flow.world.run_xdp(given, by or (flow.exit if reply else flow.entrance))


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
@pytest.mark.parametrize("size", [0, 1, 512])
def test_xdp_rewrites_a_frame_as_tc_would(known: Callable[..., Flow], protocol: str, reply: bool, size: int) -> None:
    flow = known(protocol)
    found = run_through_xdp(flow, reply, flow.frame(reply, size=size))
    assert found.retval == XDP_REDIRECT, flow.world.reasons()
    assert found.data == bytes(flow.expected(reply, size=size))
    by_tc = flow.run(reply, flow.frame(reply, size=size))
    assert (by_tc.retval, by_tc.data) == (REDIRECT, found.data)
    assert flow.world.reasons() == {"XDP_FLOW_HIT": 1, "FLOW_HIT": 1}


@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
def test_xdp_sends_packets_back_through_their_ingress_device(known: Callable[..., Flow], reply: bool) -> None:
    flow = known(**TURNED)
    found = run_through_xdp(flow, reply)
    assert (found.retval, found.data) == (XDP_TX, bytes(flow.expected(reply)))
    # A veth cannot send a frame back (XDP_TX), but accepts a redirect.
    flow.world.xdp_device("nic", returns=0)
    assert run_through_xdp(flow, reply).retval == XDP_REDIRECT
    flow.world.xdp_device("nic", returns=0, takes=0)
    assert run_through_xdp(flow, reply).retval == XDP_PASS
    assert flow.world.reasons()["XDP_LEFT_DEVICE"] == 1


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_xdp_opens_young_flows(fast: ProgramNode, protocol: str) -> None:
    flow = Flow(fast, protocol)
    flow.permit()
    frame = {"flags": "S", "size": 0, "seq": 100, "ack": 0}
    found = run_through_xdp(flow, frame=flow.frame(**frame))
    assert (found.retval, found.data) == (XDP_REDIRECT, bytes(flow.expected(**frame)))
    assert flow.entries() == [False, True]
    assert fast.reasons() == {"NEW_FLOW_FAST": 1, "XDP_FLOW_HIT": 1}


@pytest.mark.parametrize("ends", ["own address", "masqueraded"])
@pytest.mark.parametrize(("protocol", "state"), [("tcp", "ESTABLISHED"), ("tcp", "SYN_RECV"), ("udp", "")])
def test_a_flow_that_conntrack_has_is_left_to_tc(fast: ProgramNode, ends: str, protocol: str, state: str) -> None:
    """It has left the table, or was never in it: a new flow might get another endpoint."""
    flow = Flow(fast, protocol, **VARIANTS[ends])
    flow.permit()
    extra = ["--state", state] if state else ["-u", "SEEN_REPLY,ASSURED"]
    insert_entry(fast, protocol, flow.client, flow.frontend, flow.sport, flow.port, *extra, target="remote")
    assert tracked_clients.note(
        fast.object.btf, fast.object.maps["tracked_clients"], lambda key: note_tracked(fast, key), 1000
    )
    before = flow.entries()
    frame = flow.frame(flags="S", size=0)
    assert fast.run_xdp(frame, flow.entrance).retval == XDP_PASS
    found = flow.run(frame=frame)
    assert (found.retval, found.data) == (GO_ON, bytes(frame))
    assert flow.entries() == before
    fast.forget_flows()


def test_a_masqueraded_client_that_only_gets_replies_is_left_to_tc(fast: ProgramNode) -> None:
    """Netfilter translates the replies. Before that, they have the node's address. The table does not keep the flow."""
    flow = Flow(fast, "udp", **TURNED)
    flow.permit()
    insert_entry(fast, "udp", flow.client, flow.frontend, flow.sport, flow.port, target="remote")
    set_age(fast, 250)
    empty_table(fast)
    assert any(flow.pass_netfilter(reply=True) for _ in range(3))
    empty_table(fast)
    assert run_through_xdp(flow, frame=flow.frame(size=0)).retval == XDP_PASS
    assert list(fast.object.maps["flows"].items()) == []
    fast.forget_flows()


def test_tc_opens_young_flows_if_xdp_may_not(fast: ProgramNode) -> None:
    flow = Flow(fast)
    flow.permit()
    fast.xdp_device("pods", starts_flow=0)
    assert run_through_xdp(flow, frame=flow.frame(flags="S")).retval == XDP_PASS
    assert flow.entries() == []
    flow.open_young()


def test_without_a_permit_tc_counts_why(fast: ProgramNode) -> None:
    flow = Flow(fast)
    frame = flow.frame(flags="S")
    found = run_through_xdp(flow, frame=frame)
    assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
    assert fast.reasons() == {}
    assert flow.run(frame=frame).retval == GO_ON
    assert fast.reasons() == {"NEW_FLOW_NETFILTER": 1, "SLOW_NO_PERMIT": 1}
    assert len(records(fast)) == 1


def test_a_young_flow_that_xdp_cannot_send_is_sent_by_tc(fast: ProgramNode) -> None:
    flow = Flow(fast)
    flow.permit()
    fast.xdp_device("nic", takes=0)
    frame = flow.frame(flags="S", size=0, seq=100, ack=0)
    found = run_through_xdp(flow, frame=frame)
    assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
    assert flow.entries() == [False, True]
    by_tc = flow.run(frame=frame)
    assert (by_tc.retval, by_tc.data) == (REDIRECT, bytes(flow.expected(flags="S", size=0, seq=100, ack=0)))
    assert fast.reasons() == {"NEW_FLOW_FAST": 1, "XDP_LEFT_DEVICE": 1, "FLOW_HIT": 1}


@pytest.mark.parametrize("answers", [0, 1])
def test_a_query_that_xdp_left_to_tc_ends_like_any_other(fast: ProgramNode, answers: int) -> None:
    """tc finds the entry and counts the query, so one reply still completes it."""
    fast.xdp_device("nic", takes=0)
    device(fast, "pods", redirect=2)  # a pod
    flow = Flow(fast, "udp")
    flow.permit()
    flow.fill_bucket()
    assert run_through_xdp(flow).retval == XDP_PASS
    assert flow.run().retval == REDIRECT
    for _ in range(answers):
        assert flow.run(reply=True).retval == REDIRECT
    flow.set_back(0.1)
    open_in_slot_of(fast, flow)
    assert flow.entries() == ([] if answers else [False, True])


def test_streams_are_left_to_tc(known: Callable[..., Flow]) -> None:
    flow = known()
    frame = flow.frame(size=513)
    found = run_through_xdp(flow, frame=frame)
    assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
    assert flow.world.reasons() == {"XDP_LEFT_STREAM": 1}
    assert flow.run(frame=frame).retval == REDIRECT


def test_large_datagrams_are_no_streams(known: Callable[..., Flow]) -> None:
    flow = known("udp")
    assert run_through_xdp(flow, frame=flow.frame(size=1400)).retval == XDP_REDIRECT


def test_xdp_adds_no_checksum_to_udp_without_one(known: Callable[..., Flow]) -> None:
    flow = known("udp")
    if flow.world.family == 6:
        pytest.skip("IPv6 has no UDP without a checksum")
    frame = flow.frame()
    frame[UDP].chksum = 0
    found = run_through_xdp(flow, frame=frame)
    assert found.retval == XDP_REDIRECT
    assert Ether(found.data)[UDP].chksum == 0


def with_payload(frame: Packet, payload: bytes) -> Packet:
    """The frame with this payload and a correct checksum."""
    frame[UDP].payload = Raw(payload)
    return Ether(bytes(frame))


def test_a_checksum_that_becomes_zero_is_written_as_ones(known: Callable[..., Flow]) -> None:
    """In UDP a checksum of zero means that there is none."""
    flow = known("udp")
    sum_of_rest = with_payload(flow.expected(), bytes(2))[UDP].chksum.to_bytes(2, "big")
    frame, wanted = (with_payload(each, sum_of_rest) for each in (flow.frame(), flow.expected()))
    assert wanted[UDP].chksum == 0xFFFF
    assert run_through_xdp(flow, frame=frame).data == bytes(wanted)
    assert flow.run(frame=frame).data == bytes(wanted)


def with_partial_checksum(flow: Flow, **fields: Any) -> Packet:
    """As a local socket leaves it to a device: only the sum of the pseudo header."""
    frame = flow.frame(**fields)
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
def test_a_checksum_that_was_left_to_a_device_is_left_to_tc(known: Callable[..., Flow], protocol: str) -> None:
    flow = known(protocol)
    frame = with_partial_checksum(flow)
    found = run_through_xdp(flow, frame=frame)
    assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
    assert flow.world.reasons() == {"XDP_LEFT_CHECKSUM": 1}


@pytest.fixture
def generic(node: ProgramNode) -> Iterator[ProgramNode]:
    with one_cpu():
        yield filtering_node(node, xdp=1, xdp_generic=1)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("ends", ["own address", "masqueraded"])
def test_generic_xdp_opens_no_flow_with_a_checksum_that_was_left_to_a_device(
    generic: ProgramNode, protocol: str, ends: str
) -> None:
    """tc gets the packet without its link header: it cannot send it, and would wait for the young flow's promotion."""
    flow = Flow(generic, protocol, **VARIANTS[ends])
    flow.permit()
    first: dict[str, Any] = {"flags": "S", "size": 0, "seq": 100, "ack": 0}
    frame = with_partial_checksum(flow, **first)
    before = flow.entries()
    found = run_through_xdp(flow, frame=frame)
    assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
    assert flow.entries() == before
    assert "NEW_FLOW_FAST" not in generic.reasons()
    headerless = bytes(frame)[len(Ether()) :]
    assert flow.run(frame=headerless).retval == GO_ON
    assert "DROP_AWAITING_PROMOTION" not in generic.reasons()
    complete = Flow(generic, protocol, sport=40007, **VARIANTS[ends])
    assert run_through_xdp(complete, frame=complete.frame(**first)).retval in (XDP_REDIRECT, XDP_TX)


@pytest.mark.parametrize("partial", [False, True], ids=["complete", "partial"])
def test_generic_xdp_takes_no_flow_from_the_kernel_with_such_a_checksum(generic: ProgramNode, partial: bool) -> None:
    flow = learned_flow(generic, "udp")
    flow.permit()
    paused = now() - 2 * SECOND
    for reply in (False, True):
        flow.write(reply, confirmed_until=paused, last_seen=paused, packets=1, backend=1)
    frame = with_partial_checksum(flow) if partial else flow.frame()
    assert run_through_xdp(flow, frame=frame).retval == (XDP_PASS if partial else XDP_REDIRECT)
    assert [bool(flow.entry(reply)["young"]) for reply in (False, True)] == [not partial] * 2  # type: ignore[index]


def test_a_device_that_accepts_no_redirects_gets_none(known: Callable[..., Flow]) -> None:
    flow = known()
    flow.world.xdp_device("nic", takes=0)
    frame = flow.frame()
    found = run_through_xdp(flow, frame=frame)
    assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
    assert flow.world.reasons() == {"XDP_LEFT_DEVICE": 1}


def test_a_device_with_one_buffer_gets_no_jumbo_frames(fast: ProgramNode) -> None:
    for name in ("nic", "pods"):
        device(fast, name, mtu=9000)
    flow = young(fast, "udp")
    frame = flow.frame(size=8000)
    found = run_through_xdp(flow, frame=frame)
    assert (found.retval, found.data) == (XDP_REDIRECT, bytes(flow.expected(size=8000)))
    fast.xdp_device("nic", takes=1)
    assert run_through_xdp(flow).retval == XDP_REDIRECT
    assert run_through_xdp(flow, frame=frame).retval == XDP_PASS


@pytest.mark.parametrize("flags", ["A", "R", "FA", "S"])
@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
def test_packets_from_another_device_are_not_changed(known: Callable[..., Flow], flags: str, reply: bool) -> None:
    flow = known()
    before = [flow.entry(False), flow.entry(True)]
    frame = flow.frame(reply, flags=flags)
    found = run_through_xdp(flow, reply, frame, by="pods" if reply else "nic")
    assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
    assert [flow.entry(False), flow.entry(True)] == before


def test_frames_for_another_host_are_not_sent(known: Callable[..., Flow]) -> None:
    flow = known()
    for at in range(6):
        frame = bytearray(bytes(flow.frame()))
        frame[at] ^= 4
        found = run_through_xdp(flow, frame=bytes(frame))
        assert (found.retval, found.data) == (XDP_PASS, bytes(frame)), at
    assert not flow.world.reasons()


@pytest.mark.parametrize("size", [1461, 1500])
def test_unusual_packets_are_left_to_tc(known: Callable[..., Flow], size: int) -> None:
    flow = known("udp")
    assert run_through_xdp(flow, frame=flow.frame(size=size + 12)).retval == XDP_PASS
    assert run_through_xdp(flow, frame=flow.frame(hops=1)).retval == XDP_PASS
    assert not flow.world.reasons()
    assert flow.world.promotions() == [], "tc requests the promotion"


def test_packets_that_need_confirmation_pass(fast: ProgramNode) -> None:
    flow = learned_flow(fast)
    flow.write(confirmed_until=now() - 1)
    frame = flow.frame()
    found = run_through_xdp(flow, frame=frame)
    assert (found.retval, found.data) == (XDP_PASS, bytes(frame))
    assert fast.reasons() == {}
    flow.pass_netfilter()
    flow.write(confirmed_until=now() + 3600 * SECOND)
    assert run_through_xdp(flow).retval == XDP_REDIRECT


@pytest.mark.parametrize("flags", ["FA", "RA", "S", "SA"])
def test_the_kernel_sees_the_end_of_its_flow(fast: ProgramNode, flags: str) -> None:
    flow = learned_flow(fast)
    assert run_through_xdp(flow, frame=flow.frame(flags=flags)).retval == XDP_PASS
    for reply in (False, True):
        assert flow.entry(reply)["confirmed_until"] <= now()  # type: ignore[index]


def test_a_syn_waits_for_a_restoration_only_if_it_is_for_this_node(fast: ProgramNode) -> None:
    flow = learned_flow(fast)
    flow.write(promote=RESTORE)
    frame = flow.frame(flags="S", size=0)
    assert run_through_xdp(flow, frame=frame).retval == XDP_DROP
    assert fast.reasons() == {"DROP_AWAITING_PROMOTION": 1}
    frame[Ether].dst = "02:00:00:00:00:03"
    assert run_through_xdp(flow, frame=frame).retval == XDP_PASS
    assert flow.run(frame=frame).retval == GO_ON
    assert fast.reasons() == {"DROP_AWAITING_PROMOTION": 1}


@pytest.mark.parametrize("flags", ["A", "R", "S"])
def test_frames_for_another_host_change_no_entry_without_a_device(fast: ProgramNode, flags: str) -> None:
    """The entry of a flow that conntrack had before has none until a packet has left."""
    flow = learned_flow(fast)
    for reply in (False, True):
        flow.write(reply, confirmed_until=0)
        flow.write_rewrite(reply, device_in=0, mac_in=bytes(6))
    before = [flow.entry(False), flow.entry(True)]
    frame = flow.frame(flags=flags, seq=77777)
    frame[Ether].dst = "02:00:00:00:00:03"
    assert run_through_xdp(flow, frame=frame).retval == XDP_PASS
    assert [flow.entry(False), flow.entry(True)] == before


@pytest.mark.parametrize(
    ("flags", "seq", "closing", "other"),
    [("S", 1000, 0, 1), ("FA", 5000 + (100 << 20), 2, 0)],
    ids=["a SYN after the other side's FIN", "a FIN out of sequence after a RST"],
)
def test_tc_alone_judges_the_end_of_a_kernels_flow(
    fast: ProgramNode, flags: str, seq: int, closing: int, other: int
) -> None:
    """Judged twice, the packet would be taken for a repeated one."""
    found = []
    for through_xdp, sport in ((False, 40000), (True, 40007)):
        flow = learned_flow(fast, sport=sport)
        flow.write(closing=closing, acknowledged=4000)
        flow.write(True, closing=other, acknowledged=5000)
        frame = flow.frame(flags=flags, size=0, seq=seq)
        if through_xdp:
            assert run_through_xdp(flow, frame=frame).retval == XDP_PASS
        assert flow.run(frame=frame).retval == GO_ON
        entries = [flow.entry(reply) for reply in (False, True)]
        found.append([(each["acknowledged"], each["closing"], each["promote"]) for each in entries])  # type: ignore[index]
    assert found[0] == found[1]


def test_xdp_removes_no_flow_if_it_has_no_space_for_the_new_one(node: ProgramNode) -> None:
    """tc gets the packet next, and removes one."""
    with one_cpu():
        fast = filtering_node(node, xdp=1, flow_quota=1)
        flow = young(fast)
        close(flow)
        time.sleep(0.06)  # until it is complete
        rewind_recent_flows(fast)
        frame = Flow(fast, sport=43000).frame(flags="S", size=0)
        assert run_through_xdp(flow, frame=frame).retval == XDP_PASS
        assert flow.entries() == [False, True]
        assert flow.run(frame=frame).retval == GO_ON
        assert flow.entries() == []


def test_a_reset_in_sequence_ends_a_young_flow(fast: ProgramNode) -> None:
    flow = young(fast)
    flow.answer()
    assert run_through_xdp(flow, frame=flow.frame(flags="R", size=0, seq=777)).retval == XDP_REDIRECT
    assert flow.entries() == [False, True]
    assert run_through_xdp(flow, frame=flow.frame(flags="R", size=0, seq=101)).retval == XDP_REDIRECT
    assert flow.entries() == []


def test_young_flows_continue_without_an_agent(fast: ProgramNode) -> None:
    mine, kernels = young(fast), learned_flow(fast, sport=40007)
    fast.write_fast_path_state(alive=-1)
    assert run_through_xdp(mine).retval == XDP_REDIRECT
    assert run_through_xdp(kernels).retval == XDP_PASS


def test_generic_xdp_works_on_any_device(node: ProgramNode) -> None:
    """Generic mode: the kernel sends the frame that the program has changed."""
    with one_cpu():
        fast = fast_node(node, xdp=1, xdp_generic=1)
        for name in ("nic", "pods"):
            fast.xdp_device(name, takes=0, returns=0)
        flow = young(fast)
        assert run_through_xdp(flow).retval == XDP_REDIRECT
        assert run_through_xdp(flow, True, flow.frame(True, hops=1)).retval == XDP_PASS
        assert flow.run(True, flow.frame(True, hops=1)).retval == SHOT
        assert Ether(run_through_xdp(flow).data).dst == FAR
