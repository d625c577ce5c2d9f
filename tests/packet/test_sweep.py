# SPDX-License-Identifier: Apache-2.0
"""What the agent runs: sweep_flows ends flows and requests promotions, promote_flow makes a flow the kernel's."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from pyebpf_proxy.common.bpf_constants import CLOSE, RESTORE
from tests.packet.fast_node import (
    CONFIRM,
    REDIRECT,
    SECOND,
    SNAT_PORTS,
    VARIANTS,
    Flow,
    ask_from,
    device,
    end,
    fast_node,
    learned_flow,
    one_cpu,
    promote,
    real_time_priority,
    reset_counters,
    sweep,
    tag_of,
    young,
    young_flows_of,
)
from tests.packet.program_node import GO_ON, SHOT, ProgramNode

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]
QUOTA = 8


@pytest.fixture
def fast(node: ProgramNode) -> Iterator[ProgramNode]:
    with one_cpu():
        yield fast_node(node, flow_quota=QUOTA)


def filled(world: ProgramNode, young_flows: int, entries: int = 0) -> None:
    """What the last sweep has found. ``entries``: those of kernel's flows."""
    value = world.object.btf.struct("sweep_result").pack(entries=2 * young_flows + entries, young=young_flows)
    world.object.maps["sweep_results"].update(bytes(4), value)


def is_swept(world: ProgramNode, flow: Flow, seconds: float, young_flows: int = 0, entries: int = 0) -> bool:
    flow.set_back(seconds)
    filled(world, young_flows, entries)
    sweep(world)
    gone = flow.entries() == []
    assert gone or flow.entries() == [False, True]
    return gone


def answered(world: ProgramNode, protocol: str = "tcp", in_table: bool = False) -> Flow:
    flow = young(world, protocol, in_table)
    if protocol == "tcp":
        flow.answer()
    else:
        assert flow.run(reply=True).retval == REDIRECT
    reset_counters(world)
    return flow


def test_what_a_sweep_finds(fast: ProgramNode) -> None:
    flow = answered(fast)
    # The flow that granted the permit is a kernel's flow in the table.
    assert sweep(fast) == {"entries": 4, "young": 1, "ended": 0, "requested": 0}
    flow.set_back(3)
    assert sweep(fast) == {"entries": 4, "young": 1, "ended": 0, "requested": 1}
    assert fast.promotions() == [flow.key()]


def test_flows_are_promoted_sooner_after_a_change(fast: ProgramNode) -> None:
    """Their links may be out of date. Short flows have ended by then."""
    flow = answered(fast)
    flow.set_back(0.8)
    sweep(fast)
    assert fast.promotions() == []
    fast.write_fast_path_state(generation=2)
    sweep(fast)
    assert fast.promotions() == [flow.key()]
    flow.set_back(-10)
    sweep(fast)
    assert fast.promotions() == []


def test_a_sweep_asks_from_where_the_queue_was_full(fast: ProgramNode) -> None:
    """While conntrack is full, the first flows of the table would take each place of the queue every time."""
    flow = answered(fast)
    flow.set_back(3)
    fast.fill_promotions(Flow(fast, sport=44000).key())
    full_at = ask_from(fast, 0)
    assert 1 <= full_at <= 4
    assert flow.key() not in fast.promotions()
    assert ask_from(fast, full_at + 1) == 0
    assert fast.promotions() == [], "it has had its turn"
    assert ask_from(fast, full_at) == 0
    assert fast.promotions() == [flow.key()]


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("is_answered", [False, True], ids=["unanswered", "answered"])
def test_a_flow_that_begins_while_the_sweep_runs_is_new(fast: ProgramNode, is_answered: bool, protocol: str) -> None:
    """A sweep takes milliseconds and the clock moves on: the flow may start after the time that the sweep uses.

    If the sweep took it for an old flow, its SYN-ACK would find no entry.
    """
    flow = answered(fast, protocol, in_table=True) if is_answered else young(fast, protocol, in_table=True)
    flow.set_back(-10)
    found = sweep(fast)
    assert (found["ended"], found["requested"]) == (0, 0)
    assert flow.entries() == [False, True]
    assert fast.promotions() == []


def test_a_silent_connection_from_the_port_of_a_closed_one_is_kept(fast: ProgramNode) -> None:
    """The FIN came while data before it was on its way, so the table takes the next SYN for one of the same flow."""
    flow = answered(fast)
    for reply, flags, seq, ack, size in (
        (True, "A", 501, 101, 200),
        (True, "FA", 701, 101, 0),
        (False, "A", 101, 702, 0),
        (False, "FA", 101, 702, 0),
        (True, "A", 702, 102, 0),
        # The next connection of this port; then the client is silent, as in a pool of connections.
        (False, "S", 90000, 0, 0),
        (True, "SA", 70000, 90001, 0),
        (False, "A", 90001, 70001, 0),
    ):
        frame = {"flags": flags, "seq": seq, "ack": ack, "size": size}
        found = flow.run(reply, flow.frame(reply, **frame))
        assert (found.retval, found.data) == (REDIRECT, bytes(flow.expected(reply, **frame))), flags
    assert fast.reasons()["NEW_FLOW_FAST"] == 0
    assert not is_swept(fast, flow, 1.5)
    assert not is_swept(fast, flow, 1.5)
    assert flow.key() in fast.promotions(), "the kernel keeps it from now on"


@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
def test_a_closing_flow_ends_after_a_second(fast: ProgramNode, reply: bool) -> None:
    flow = answered(fast)
    flow.write(reply, closing=1)
    assert not is_swept(fast, flow, 0.5)
    assert not is_swept(fast, flow, 0.7), "a half-closed connection may continue"
    flow.write(not reply, closing=1)
    assert is_swept(fast, flow, 0)
    assert young_flows_of(fast, "pods") == 0
    assert fast.reasons()["YOUNG_ENDED"] == 1


def test_a_flow_whose_last_data_is_not_acknowledged_does_not_end(fast: ProgramNode) -> None:
    """The client has closed first. The endpoint's data and FIN are lost behind the node, and are sent again later."""
    flow = answered(fast)
    flow.run(frame=flow.frame(flags="FA", seq=101, ack=501, size=0))
    flow.run(True, flow.frame(True, flags="FA", seq=501, ack=102, size=40))
    assert not is_swept(fast, flow, 3)
    assert sweep(fast)["requested"] == 0
    flow.run(True, flow.frame(True, flags="FA", seq=501, ack=102, size=40))
    flow.run(frame=flow.frame(seq=102, ack=542, size=0))
    assert is_swept(fast, flow, 1.1)


def test_a_flow_whose_last_data_is_never_acknowledged_is_promoted(fast: ProgramNode) -> None:
    flow = answered(fast)
    flow.run(frame=flow.frame(flags="FA", seq=101, ack=501, size=0))
    flow.run(True, flow.frame(True, flags="FA", seq=501, ack=102, size=40))
    flow.set_back(4.5)
    assert (sweep(fast)["requested"], flow.entries()) == (1, [False, True])


@pytest.mark.parametrize("what", ["sweep", "promote"])
def test_an_element_that_another_flow_has_just_taken_is_not_changed(fast: ProgramNode, what: str) -> None:
    """Another CPU may read it so: the key already belongs to the new flow, the value still to the old one."""
    flow, former = answered(fast), Flow(fast, sport=44000)
    layout = fast.object.btf.struct("flow_rewrite")
    entry = flow.entry()
    assert entry is not None
    rewrite = dict(layout.unpack(entry["rewrite"]))
    assert rewrite["tag"] == rewrite["tag_again"] == tag_of(flow.key())
    rewrite |= dict.fromkeys(("tag", "tag_again"), tag_of(former.key()))
    if what == "sweep":
        rewrite["source_port"] = former.sport  # whose replies have no entry any more
    flow.write(rewrite=layout.pack(**rewrite))
    if what == "sweep":
        sweep(fast)
    else:
        assert promote(fast, flow.key()) == 0
    assert flow.entries() == [False, True]
    assert young_flows_of(fast, "pods") == 1
    assert [flow.entry(reply)["young"] for reply in (False, True)] == [1, 1]  # type: ignore[index]


def test_an_idle_connection_does_not_end(fast: ProgramNode) -> None:
    """Both sides still know it: it is promoted, and the kernel's timeout is long."""
    flow = answered(fast)
    assert not is_swept(fast, flow, 60)
    assert fast.promotions() == [flow.key()]


def test_a_syn_without_an_answer(fast: ProgramNode) -> None:
    flow = young(fast)
    assert not is_swept(fast, flow, 4)
    assert fast.promotions() == []
    assert is_swept(fast, flow, 2)
    assert young_flows_of(fast, "pods") == 0


@pytest.mark.parametrize(
    ("redirect", "early", "late"), [(2, 0, 0.06), (1, 0.5, 0.51)], ids=["a pod", "another machine"]
)
def test_answered_datagrams_end_early_if_one_device_has_used_its_quota(
    fast: ProgramNode, redirect: int, early: float, late: float
) -> None:
    """If the replies come from another machine, the flow's next datagram may be a round trip away."""
    device(fast, "pods", redirect=redirect)
    flow = young(fast, "udp", in_table=True)
    with real_time_priority():
        assert flow.run(reply=True).retval == REDIRECT
        assert not is_swept(fast, flow, early, QUOTA)
    assert is_swept(fast, flow, late, QUOTA)


@pytest.mark.parametrize(
    ("flows", "seconds"), [(QUOTA // 2, 30), (QUOTA // 2 + 1, 10), (QUOTA // 4 * 3, 10), (QUOTA // 4 * 3 + 1, 2)]
)
def test_idle_datagrams_end_the_sooner_the_more_young_flows_there_are(
    fast: ProgramNode, flows: int, seconds: int
) -> None:
    flow = young(fast, "udp", in_table=True)
    assert not is_swept(fast, flow, seconds - 0.5, flows)
    assert is_swept(fast, flow, 1, flows)
    assert young_flows_of(fast, "pods") == 0


def test_flows_of_the_kernel_that_fill_the_table_end_no_datagrams(fast: ProgramNode) -> None:
    """conntrack knows those flows, and they leave the table first. Only the table knows the endpoint of a young
    flow.
    """
    flow = young(fast, "udp", in_table=True)
    assert flow.run(reply=True).retval == REDIRECT
    assert not is_swept(fast, flow, 29, entries=4 * QUOTA)
    assert is_swept(fast, flow, 2, entries=4 * QUOTA)


def test_an_answered_flow_that_continues_is_due(fast: ProgramNode) -> None:
    flow = answered(fast)
    flow.set_back(1.5)
    assert sweep(fast)["requested"] == 0
    flow.set_back(1)
    assert sweep(fast)["requested"] == 1
    assert sweep(fast)["requested"] == 1, "the agent has not promoted it, and gets another request"
    assert fast.promotions() == [flow.key()] * 2


def test_one_query_and_its_answer_are_not_due(fast: ProgramNode) -> None:
    flow = answered(fast, "udp", in_table=True)
    for _ in range(4):
        flow.run()
    flow.set_back(3)
    assert sweep(fast)["requested"] == 0
    # One more packet, just now.
    flow.run()
    assert sweep(fast)["requested"] == 1
    assert fast.promotions() == [flow.key()]


def test_draining_requests_all_answered_flows(fast: ProgramNode) -> None:
    flow = answered(fast)
    other = Flow(fast, sport=40005)
    other.open_young()
    assert sweep(fast)["requested"] == 0
    fast.write_fast_path_state(draining=1)
    assert sweep(fast)["requested"] == 1
    assert fast.promotions() == [flow.key()]


@pytest.mark.parametrize("reply", [False, True], ids=["the answers' left", "the client's left"])
def test_the_rest_of_a_half_flow_is_deleted(fast: ProgramNode, reply: bool) -> None:
    flow = answered(fast)
    fast.object.maps["flows"].delete(flow.key(not reply))
    flow.set_back(1.5)
    sweep(fast)
    assert flow.entries() == []


def test_a_new_half_flow_stays(fast: ProgramNode) -> None:
    """The entry of the replies is written first."""
    flow = young(fast)
    fast.object.maps["flows"].delete(flow.key())
    sweep(fast)
    assert flow.entries() == [True]


@pytest.mark.parametrize(("protocol", "seconds"), [("tcp", 3600), ("udp", 180)])
def test_idle_kernel_flows_are_forgotten(fast: ProgramNode, protocol: str, seconds: int) -> None:
    if time.monotonic() < seconds + 60:
        pytest.skip(f"this machine has been up for less than {seconds} s, which a flow cannot have been idle for")
    flow = learned_flow(fast, protocol)
    assert not is_swept(fast, flow, seconds - 1)
    assert is_swept(fast, flow, 2)
    assert fast.reasons()["FLOW_FORGOTTEN"] == 2


@pytest.mark.parametrize("seconds", [180, 600])
def test_udp_flows_of_the_kernels_stay_as_long_as_conntrack_has_them(node: ProgramNode, seconds: int) -> None:
    """``conntrack.udpStreamTimeout`` may be longer than its default."""
    if time.monotonic() < seconds + 60:
        pytest.skip(f"this machine has been up for less than {seconds} s, which a flow cannot have been idle for")
    with one_cpu():
        world = fast_node(node, flow_quota=QUOTA, udp_stream_seconds=seconds - 60)
        flow = learned_flow(world, "udp")
        assert not is_swept(world, flow, seconds - 1)
        assert is_swept(world, flow, 2)


@pytest.mark.parametrize("flags", ["FA", "R"])
@pytest.mark.parametrize("reply", [False, True], ids=["the client", "the endpoint"])
def test_closed_kernel_flows_are_forgotten_soon(fast: ProgramNode, reply: bool, flags: str) -> None:
    """The table does not know the other side's numbers, but conntrack does."""
    flow = learned_flow(fast)
    flow.write(not reply, acknowledged=0)
    flow.run(reply, flow.frame(reply, flags=flags))
    assert not is_swept(fast, flow, 9)
    assert is_swept(fast, flow, 2)


@pytest.mark.parametrize("reply", [False, True], ids=["the client", "the endpoint"])
def test_a_young_flow_that_a_reset_after_data_has_ended_is_never_promoted(fast: ProgramNode, reply: bool) -> None:
    """Its conntrack entry would keep the endpoint for minutes: conntrack closes such a connection for ten seconds."""
    flow = reset_after_data(fast, reply)
    flow.set_back(3)
    assert (sweep(fast)["requested"], flow.entries()) == (0, [False, True])
    flow.set_back(6)
    assert (sweep(fast)["requested"], flow.entries()) == (0, [False, True])
    flow.set_back(2)
    assert (sweep(fast)["requested"], flow.entries()) == (0, [])


def test_a_young_flow_that_continues_after_a_reset_is_promoted(fast: ProgramNode) -> None:
    """Its ends cannot keep it young: the endpoint resets it, and the client sends nevertheless."""
    flow = reset_after_data(fast, True)
    flow.set_back(9)
    flow.run()
    assert (sweep(fast)["requested"], flow.entries()) == (1, [False, True])


def reset_after_data(world: ProgramNode, reply: bool) -> Flow:
    """A young flow: data of one side, and its RST before the other side has acknowledged the data."""
    flow = answered(world)
    seq = 501 if reply else 101
    flow.run(reply, flow.frame(reply, size=40, seq=seq))
    assert flow.run(reply, flow.frame(reply, flags="R", size=0, seq=seq + 40, ack=0)).retval == REDIRECT
    return flow


def test_a_kernel_flow_that_began_again_is_kept(fast: ProgramNode) -> None:
    flow = learned_flow(fast)
    for reply in (False, True):
        flow.run(reply, flow.frame(reply, flags="FA"))
    for reply in (False, True):
        assert flow.pass_netfilter(reply)["kind"] == CONFIRM
    assert not is_swept(fast, flow, 60)


def test_half_of_a_kernel_flow_is_forgotten_soon(fast: ProgramNode) -> None:
    flow = learned_flow(fast)
    fast.object.maps["flows"].delete(flow.key())
    flow.set_back(9)
    sweep(fast)
    assert flow.entries() == [True]
    flow.set_back(2)
    sweep(fast)
    assert flow.entries() == []


def test_in_a_full_table_idle_kernel_flows_are_forgotten_soon(fast: ProgramNode) -> None:
    flow = learned_flow(fast)
    assert is_swept(fast, flow, 3, 2 * QUOTA + 1), "the table has sent none of its packets"
    flow = learned_flow(fast)
    for reply in (False, True):
        flow.run(reply)
    assert not is_swept(fast, flow, 9, 2 * QUOTA + 1)
    assert is_swept(fast, flow, 2, 2 * QUOTA + 1)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_kernel_flow_whose_packets_netfilter_forwards_is_not_idle(fast: ProgramNode, protocol: str) -> None:
    """For example one packet in two seconds: each of them is confirmed, none is sent by the table."""
    flow = learned_flow(fast, protocol)
    flow.set_back(60)
    for reply in (False, True):
        flow.write(reply, confirmed_until=0)
        assert flow.pass_netfilter(reply)["kind"] == CONFIRM or (protocol == "udp" and not reply)
    assert not is_swept(fast, flow, 1, 0, 2 * QUOTA * 2 + 1)


def test_a_kernel_flow_is_not_idle_while_its_family_is_closed(fast: ProgramNode) -> None:
    flow = learned_flow(fast, "udp")
    flow.set_back(60)
    fast.write_fast_path_state(closed4=1, closed6=1)
    for reply in (False, True):
        assert flow.run(reply).retval == GO_ON
    assert not is_swept(fast, flow, 1, 0, 2 * QUOTA * 2 + 1)


@pytest.mark.parametrize(
    ("lookup", "xdp"), [(0, 0), (1, 0), (1, 1)], ids=["no lookup", "lookup", "lookup, but not in XDP"]
)
def test_in_a_full_table_answered_datagrams_stay_without_conntrack_lookup(
    node: ProgramNode, lookup: int, xdp: int
) -> None:
    """conntrack keeps the flow for longer. The next datagram would open another flow, to any endpoint."""
    with one_cpu():
        world = fast_node(node, flow_quota=QUOTA, conntrack_lookup=lookup, xdp=xdp)
        flow = learned_flow(world, "udp")
        for reply in (False, True):
            flow.run(reply)
        assert is_swept(world, flow, 60, 0, 2 * QUOTA * 2 + 1) == (lookup > xdp)
        connection = learned_flow(world)
        assert is_swept(world, connection, 11, 0, 2 * QUOTA * 2 + 1)
        unanswered = Flow(world, "udp", sport=41000)
        unanswered.pass_netfilter(new=True)
        assert is_swept(world, unanswered, 3, 0, 2 * QUOTA * 2 + 1)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("variant", ["masqueraded", "a NodePort, endpoint here", "hairpin"])
def test_in_a_full_table_a_source_port_stays_taken(fast: ProgramNode, variant: str, protocol: str) -> None:
    """conntrack still has the flow. The endpoint would take a young flow with this port for the same connection."""
    low, _ = SNAT_PORTS
    flow = learned_flow(fast, protocol, **{**VARIANTS[variant], "snat_port": low + 7})
    assert not is_swept(fast, flow, 60, 0, 2 * QUOTA * 2 + 1)
    other = learned_flow(fast, protocol, **{**VARIANTS[variant], "snat_port": 50000, "sport": 41000})
    assert is_swept(fast, other, 11, 0, 2 * QUOTA * 2 + 1)
    if protocol == "tcp":
        # One side has closed: conntrack keeps the connection for an hour (kube-proxy's tcpCloseWaitTimeout).
        flow.run(frame=flow.frame(flags="FA", seq=1, ack=1, size=0))
        flow.pass_netfilter(True, seq=1, ack=2, size=0)
        assert not is_swept(fast, flow, 60)
        flow.run(True, flow.frame(True, flags="FA", seq=1, ack=2, size=0))
        flow.pass_netfilter(seq=2, ack=2, size=0)
        assert not is_swept(fast, flow, 9)
        assert is_swept(fast, flow, 2)


def test_an_agent_of_an_earlier_version_gives_no_data(fast: ProgramNode) -> None:
    """It may drain by the pinned program, after a downgrade."""
    flow = young(fast)
    flow.answer()
    flow.set_back(3)
    assert fast.object.programs["sweep_flows"].test_run(bytes(14)).retval == 0
    entry = flow.entry()
    assert entry is not None
    assert entry["promote"]


# ---- promotion --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["own address", "masqueraded"])
def test_a_promoted_flow_is_a_kernel_flow(fast: ProgramNode, variant: str) -> None:
    flow = young(fast, **VARIANTS[variant])
    flow.answer()
    reset_counters(fast)
    assert promote(fast, flow.key()) == 1
    assert young_flows_of(fast, flow.entrance) == 0
    for reply in (False, True):
        entry = flow.entry(reply)
        assert entry is not None
        assert (entry["young"], entry["confirmed_until"]) == (0, 0)
        assert flow.pass_netfilter(reply)["kind"] == CONFIRM
        assert flow.run(reply).retval == REDIRECT
    assert fast.reasons()["FLOW_PROMOTED"] == 1
    assert promote(fast, flow.key()) == 0, "only once"
    assert young_flows_of(fast, flow.entrance) == 0


def test_only_young_flows_are_promoted_and_by_the_clients_key(fast: ProgramNode) -> None:
    flow = answered(fast)
    assert promote(fast, flow.key(reply=True)) == 0
    assert promote(fast, Flow(fast, sport=45000).key()) == 0
    assert flow.entry()["young"] == 1  # type: ignore[index]
    fast.object.maps["flows"].delete(flow.key(reply=True))
    assert promote(fast, flow.key()) == 0, "half of its entries are gone"


def test_only_the_flow_that_the_agent_has_read_is_promoted(fast: ProgramNode) -> None:
    """The client may reuse the port before the agent runs the program."""
    flow = answered(fast)
    started = flow.entry()["started"]
    assert isinstance(started, int)
    another = flow.key() + (started - 1).to_bytes(8, sys.byteorder)
    assert (promote(fast, another), end(fast, another)) == (0, 0)
    assert flow.entry()["young"] == 1
    assert promote(fast, flow.key() + started.to_bytes(8, sys.byteorder)) == 1


@pytest.mark.parametrize("by", ["client", "endpoint"])
def test_a_kernel_flow_that_was_reset_is_reported_once(fast: ProgramNode, by: str) -> None:
    """conntrack has not seen the packets that the table sent, and treats the RST like a forged one."""
    flow = promoted(fast)
    resets(fast, flow, reply=by == "endpoint")
    assert sweep(fast)["requested"] == 1
    assert fast.promotions() == [flow.key()]
    for _ in range(2):
        assert sweep(fast)["requested"] == 0
        flow.set_back(1.5)
    # The connection continues, and is reset again.
    flow.pass_netfilter(by == "endpoint", seq=1, ack=1, size=10)
    flow.pass_netfilter(by != "endpoint")
    for reply in (False, True):
        assert flow.run(reply).retval == REDIRECT
    assert sweep(fast)["requested"] == 0
    resets(fast, flow, reply=by == "endpoint")
    assert sweep(fast)["requested"] == 1


@pytest.mark.parametrize("by", ["client", "endpoint"])
def test_a_forged_acknowledgment_does_not_choose_the_number_of_a_reset(fast: ProgramNode, by: str) -> None:
    """Not even after a forged SYN. conntrack's entry must stay."""
    flow, reply = promoted(fast), by == "endpoint"
    for side in (False, True):
        flow.run(side, flow.frame(side, size=0, seq=1000, ack=1000))
    flow.run(reply, flow.frame(reply, flags="S", size=0, seq=5, ack=0))
    flow.run(not reply, flow.frame(not reply, size=0, seq=1000, ack=0x90000000))
    flow.run(reply, flow.frame(reply, flags="R", size=0, seq=0x90000000, ack=0))
    assert flow.entry(reply)["closing"] != 2, "in sequence"  # type: ignore[index]


@pytest.mark.parametrize(("flags", "ack", "vanished"), [("A", 1000, 1), ("", 0, 0), ("PU", 0, 0)])
@pytest.mark.parametrize("by", ["client", "endpoint"])
def test_a_forged_packet_without_an_acknowledgment_makes_no_side_vanish(
    fast: ProgramNode, by: str, flags: str, ack: int, vanished: int
) -> None:
    """The other side drops it unanswered (RFC 9293, 3.10.7.4). The entry in conntrack must keep its timeout."""
    flow, reply = promoted(fast), by == "endpoint"
    for side in (False, True):
        flow.run(side, flow.frame(side, size=0, seq=1000, ack=1000))
    flow.run(reply, flow.frame(reply, flags=flags, size=100, seq=1000, ack=ack))
    for side, seconds in ((reply, 200), (not reply, 260)):
        flow.write(side, last_seen=time.monotonic_ns() - seconds * SECOND)
    assert sweep(fast)["requested"] == vanished


@pytest.mark.parametrize("end", ["RST", "FIN of both sides"])
def test_the_next_connection_of_the_ports_has_numbers_of_its_own(fast: ProgramNode, end: str) -> None:
    flow = promoted(fast)
    for side in (False, True):
        flow.run(side, flow.frame(side, size=0, seq=1000, ack=1000))
    for side in (False, True) if end == "FIN of both sides" else (False,):
        flow.run(side, flow.frame(side, flags="R" if end == "RST" else "FA", size=0, seq=1000, ack=1000))
    flow.run(frame=flow.frame(flags="S", size=0, seq=0x40000000, ack=0))
    flow.run(True, flow.frame(True, flags="SA", size=0, seq=0x50000000, ack=0x40000001))
    flow.run(False, flow.frame(False, size=0, seq=0x40000001, ack=0x50000001))
    flow.run(True, flow.frame(True, size=10, seq=0x50000001, ack=0x40000001))
    assert [flow.entry(side)["acknowledged"] for side in (False, True)] == [0x50000001, 0x40000001]  # type: ignore[index]


def test_a_kernel_flow_that_was_reset_is_reported_to_the_next_agent_too(fast: ProgramNode) -> None:
    """The agent that was asked may have ended before it has closed the entry."""
    flow = promoted(fast)
    resets(fast, flow)
    assert sweep(fast)["requested"] == 1
    fast.promotions()
    assert sweep(fast, anew=True)["requested"] == 1
    assert fast.promotions() == [flow.key()]
    assert sweep(fast)["requested"] == 0


@pytest.mark.parametrize("size", [0, 10])
@pytest.mark.parametrize("by", ["client", "endpoint"])
def test_a_kernel_flow_whose_reset_overtook_a_packet_stays_reset(fast: ProgramNode, by: str, size: int) -> None:
    flow, reply = promoted(fast), by == "endpoint"
    resets(fast, flow, reply)
    flow.pass_netfilter(reply, flags="A", seq=(1 - size) % (1 << 32), ack=1, size=size)
    entry = flow.entry(reply)
    assert entry is not None
    assert entry["confirmed_until"]
    assert sweep(fast)["requested"] == 1
    assert fast.promotions() == [flow.key()]


@pytest.mark.parametrize("by", ["client", "endpoint"])
def test_a_kernel_flow_whose_data_is_acknowledged_after_a_reset_goes_on(fast: ProgramNode, by: str) -> None:
    """The RST was forged while data was on its way: the other side expected a later number."""
    flow, reply = promoted(fast), by == "endpoint"
    resets(fast, flow, reply)
    flow.run(not reply, flow.frame(not reply, flags="A", seq=1, ack=11, size=0))
    assert flow.run(reply, flow.frame(reply, flags="A", seq=11, ack=1, size=0)).retval == GO_ON
    assert sweep(fast)["requested"] == 0


@pytest.mark.parametrize("by", ["client", "endpoint"])
def test_a_kernel_flow_that_was_reset_right_after_data_is_reported(fast: ProgramNode, by: str) -> None:
    """The other side acknowledges the data when the RST has passed, for which conntrack extends the entry to a day."""
    flow, reply = promoted(fast), by == "endpoint"
    flow.run(reply, flow.frame(reply, seq=1, size=100))
    resets(fast, flow, reply, seq=100)
    flow.pass_netfilter(not reply, seq=1, ack=101, size=0)
    assert sweep(fast)["requested"] == 1
    assert fast.promotions() == [flow.key()]


@pytest.mark.parametrize("seq", [99, 101, 100 + (1 << 16), 100 + (4 << 20), 100 - (1 << 16)])
def test_a_reset_that_does_not_follow_the_data_is_not_reported(fast: ProgramNode, seq: int) -> None:
    """XDP leaves it to tc, which judges it again."""
    flow = promoted(fast)
    flow.run(frame=flow.frame(seq=1, size=100))
    for _ in range(2):
        resets(fast, flow, seq=seq)
    sweep(fast)
    entry = flow.entry()
    assert entry is not None
    # A limit: only the lower half of the number is stored.
    assert (entry["promote"] == CLOSE) is (seq == 100 + (1 << 16))


@pytest.mark.parametrize("by", ["client", "endpoint"])
def test_a_second_reset_does_not_show_that_the_flow_goes_on(fast: ProgramNode, by: str) -> None:
    """The side that has reset the connection answers each packet that is still on its way, with the number of its
    acknowledgement.
    """
    flow, reply = promoted(fast), by == "endpoint"
    resets(fast, flow, reply)
    resets(fast, flow, reply, seq=-500)
    assert sweep(fast)["requested"] == 1


def test_the_numbers_of_packets_are_known_though_no_agent_runs(fast: ProgramNode) -> None:
    flow = promoted(fast)
    fast.write_fast_path_state(alive=-1)
    assert flow.run(True, flow.frame(True, seq=1, ack=5001, size=0)).retval == GO_ON
    fast.write_fast_path_state()
    resets(fast, flow, seq=5000)
    assert sweep(fast)["requested"] == 1


def test_the_end_of_the_next_connection_is_reported_although_no_sweep_ran_before(fast: ProgramNode) -> None:
    flow = promoted(fast)
    resets(fast, flow)
    assert sweep(fast)["requested"] == 1
    flow.pass_netfilter(flags="S", seq=5000, ack=0, size=0, new=True)
    flow.run(True, flow.frame(True, flags="SA", seq=7000, ack=5001, size=0))
    for reply, seq, ack in ((False, 5001, 7001), (True, 7001, 5001)):
        flow.run(reply, flow.frame(reply, seq=seq, ack=ack, size=0))
    assert flow.run(frame=flow.frame(flags="R", seq=5001, ack=0, size=0)).retval == GO_ON
    assert sweep(fast)["requested"] == 1


def test_a_kernel_flow_that_was_reset_is_reported_before_it_is_removed(fast: ProgramNode) -> None:
    """No sweep ran for more than ten seconds: the agent had too little CPU time."""
    flow = promoted(fast)
    resets(fast, flow)
    flow.set_back(20)
    assert sweep(fast)["requested"] == 1
    assert flow.entry()
    assert flow.entry(reply=True), "the agent reads both"
    for _ in range(2):
        assert sweep(fast)["requested"] == 0
    assert not flow.entry()
    assert not flow.entry(reply=True)


@pytest.mark.parametrize("by", ["client", "endpoint"])
def test_the_next_connection_with_these_ports_is_not_reported(fast: ProgramNode, by: str) -> None:
    flow = promoted(fast)
    resets(fast, flow, reply=by == "endpoint")
    assert flow.run(frame=flow.frame(flags="S", seq=5000, ack=0, size=0)).retval == GO_ON
    assert sweep(fast)["requested"] == 0


def test_a_fin_is_not_reported(fast: ProgramNode) -> None:
    flow = promoted(fast)
    resets(fast, flow, flags="FA")
    entry = flow.entry()
    assert entry is not None
    assert entry["closing"]
    assert sweep(fast)["requested"] == 0


#: Numbers, relative to the expected one, that the other side ignores, and some that it may not ignore: the packet
#: before it was lost, or comes after the FIN.
IGNORED = {"R": [1, -1, 1 << 15, -(1 << 15), 1 << 31], "FA": [(4 << 20) + 1, -(4 << 20) - 1, 1 << 31]}
HEEDED = {"R": [0], "FA": [0, 4 << 20, -(4 << 20)]}


@pytest.mark.parametrize("by", ["client", "endpoint", "another device"])
@pytest.mark.parametrize(("flags", "seq"), [(flags, seq) for flags in IGNORED for seq in IGNORED[flags]])
def test_the_entry_of_a_flow_whose_end_was_forged_is_to_be_restored(
    fast: ProgramNode, by: str, flags: str, seq: int
) -> None:
    """conntrack does not check the number, and would forget the connection after some silent seconds."""
    reply = by == "endpoint"
    flow = acknowledged(fast, reply)
    for _ in range(2):
        forge(flow, reply, flags, 100 + seq, by)
        for direction in (False, True):
            entry = flow.entry(direction)
            assert entry is not None
            assert not entry["closing"]
        # Twice: at first the packet may not have reached conntrack yet.
        for _ in range(2):
            assert sweep(fast)["requested"] == 1
            assert fast.promotions() == [flow.key()]
        assert sweep(fast)["requested"] == 0


@pytest.mark.parametrize("by", ["client", "endpoint", "another device"])
@pytest.mark.parametrize(("flags", "seq"), [(flags, seq) for flags in HEEDED for seq in HEEDED[flags]])
def test_the_entry_of_a_flow_that_really_ends_is_not_to_be_restored(
    fast: ProgramNode, by: str, flags: str, seq: int
) -> None:
    reply = by == "endpoint"
    flow = acknowledged(fast, reply)
    forge(flow, reply, flags, 100 + seq, by)
    entry = flow.entry(reply)
    assert entry is not None
    assert entry["promote"] < RESTORE
    assert bool(entry["closing"]) is (by != "another device")


def test_data_on_its_way_does_not_make_a_fin_a_forged_one(fast: ProgramNode) -> None:
    """More than a sequence number that is only guessed may differ."""
    flow = promoted(fast)
    flow.write(sent_until=(1 + (5 << 20)) & 0xFFFF)
    resets(fast, flow, seq=5 << 20, flags="FA")
    assert sweep(fast)["requested"] == 0
    resets(fast, flow, seq=5 << 20 | 1 << 31, flags="FA")
    assert sweep(fast)["requested"] == 1


@pytest.mark.parametrize("flags", ["R", "FA"])
@pytest.mark.parametrize("moved", ["client", "endpoint", ""])
def test_the_end_counts_although_the_other_side_comes_in_by_another_device(
    fast: ProgramNode, moved: str, flags: str
) -> None:
    """The table does not see that side's acknowledgments any more, but conntrack does."""
    flow, reply = promoted(fast), moved == "client"
    flow.set_back(5)
    if moved:
        flow.run(not reply, flow.frame(not reply, seq=1, ack=1, size=10), by="nic" if moved == "client" else "pods")
    flow.write(reply, sent_until=(1 + (80 << 20)) & 0xFFFF)
    # Also if it is sent again.
    for _ in range(2):
        resets(fast, flow, reply, seq=80 << 20, flags=flags)
        assert sweep(fast)["requested"] == (0 if moved else 1)
    resets(fast, flow, reply, seq=(80 << 20) + 1, flags=flags)
    assert sweep(fast)["requested"] == 1, "forged"


@pytest.mark.parametrize("moved", [True, False])
def test_numbers_go_on_although_the_other_side_comes_in_by_another_device(fast: ProgramNode, moved: bool) -> None:
    flow = promoted(fast)
    flow.set_back(5)
    if moved:
        flow.run(frame=flow.frame(seq=1, ack=1, size=10), by="nic")
    flow.run(True, flow.frame(True, seq=1 + (80 << 20), ack=1 + (1 << 20), size=10))
    assert flow.entry(True)["acknowledged"] == (1 + (1 << 20) if moved else 1)  # type: ignore[index]


def test_the_answer_to_a_syn_is_no_forged_reset(fast: ProgramNode) -> None:
    """The endpoint has restarted. Its RST must end conntrack's entry, so that the next SYN gets a live endpoint."""
    flow = promoted(fast)
    assert flow.run(frame=flow.frame(flags="S", seq=5000, ack=0, size=0)).retval == GO_ON
    flow.run(True, flow.frame(True, flags="RA", seq=0, ack=5001, size=0))
    assert sweep(fast)["requested"] == 0


@pytest.mark.parametrize("by", ["client", "another device"])
def test_a_syn_waits_until_the_entry_is_restored(fast: ProgramNode, by: str) -> None:
    """If the forged RST has closed conntrack's entry, conntrack would replace it at the next SYN."""
    flow = promoted(fast)
    resets(fast, flow, seq=1 << 31)
    entrance = "" if by == "client" else "nic"
    syn = flow.frame(flags="S", seq=5000, ack=0, size=0)
    assert flow.run(frame=syn, by=entrance).retval == SHOT
    assert sweep(fast)["requested"] == 1
    assert flow.run(frame=syn, by=entrance).retval == SHOT, "the agent has been asked, but may not have done it yet"
    assert fast.reasons()["DROP_AWAITING_PROMOTION"] == 2
    assert sweep(fast)["requested"] == 1
    assert flow.run(frame=syn, by=entrance).retval == GO_ON


def test_no_syn_waits_for_an_agent_that_does_not_run(fast: ProgramNode) -> None:
    flow = promoted(fast)
    resets(fast, flow, seq=1 << 31)
    fast.write_fast_path_state(alive=-1)
    assert flow.run(frame=flow.frame(flags="S", seq=5000, ack=0, size=0)).retval == GO_ON
    assert sweep(fast)["requested"] == 1, "the next agent restores the entry"


@pytest.mark.parametrize("forged_by", ["client", "endpoint"])
@pytest.mark.parametrize("by", ["client", "endpoint"])
def test_the_end_of_a_flow_counts_although_one_was_forged_before(fast: ProgramNode, by: str, forged_by: str) -> None:
    flow = promoted(fast)
    resets(fast, flow, forged_by == "endpoint", seq=1 << 31)
    resets(fast, flow, by == "endpoint")
    for requested in (1, 0, 0):
        assert sweep(fast)["requested"] == requested
        entry = flow.entry()
        assert entry is not None
        assert entry["promote"] == CLOSE


@pytest.mark.parametrize("forged_by", ["client", "endpoint"])
@pytest.mark.parametrize("by", ["client", "endpoint"])
def test_a_syn_does_not_wait_after_the_end_of_a_flow(fast: ProgramNode, by: str, forged_by: str) -> None:
    flow = promoted(fast)
    resets(fast, flow, forged_by == "endpoint", seq=1 << 31)
    resets(fast, flow, by == "endpoint")
    assert flow.run(frame=flow.frame(flags="S", seq=5000, ack=0, size=0)).retval == GO_ON


def acknowledged(world: ProgramNode, reply: bool) -> Flow:
    """A promoted flow: 100 bytes of one side, which the other one has acknowledged."""
    flow = promoted(world)
    flow.run(reply, flow.frame(reply, seq=1, size=100))
    flow.run(not reply, flow.frame(not reply, seq=1, ack=101, size=0))
    return flow


def forge(flow: Flow, reply: bool, flags: str, seq: int, by: str) -> None:
    entrance = "nic" if by == "another device" else ""
    flow.run(reply, flow.frame(reply, flags=flags, seq=(1 + seq) % (1 << 32), ack=0, size=0), by=entrance)


def test_a_kernel_flow_whose_endpoint_has_acknowledged_nothing_here_is_not_reported(fast: ProgramNode) -> None:
    """An attacker could use 0 as the sequence number without guessing."""
    flow = promoted(fast)
    flow.write(reply=True, acknowledged=0)
    flow.run(frame=flow.frame(flags="R", seq=0, ack=0, size=0))
    assert sweep(fast)["requested"] == 0


def test_a_half_closed_young_flow_is_not_treated_as_reset(fast: ProgramNode) -> None:
    flow = answered(fast)
    assert flow.run(frame=flow.frame(flags="FA", seq=101, ack=501, size=0)).retval == REDIRECT
    assert promote(fast, flow.key()) == 1
    assert sweep(fast)["requested"] == 0


def promoted(world: ProgramNode) -> Flow:
    """A promoted flow whose packets the table sends. Both sides have acknowledged 1."""
    flow = answered(world)
    assert promote(world, flow.key()) == 1
    for reply in (False, True):
        confirm(flow, reply)
    assert sweep(world)["requested"] == 0
    return flow


def confirm(flow: Flow, reply: bool) -> None:
    """A packet passes netfilter, and the table sends the next one. Again if the machine stood still meanwhile."""
    while True:
        begun = time.monotonic()
        flow.pass_netfilter(reply)
        if flow.run(reply).retval == REDIRECT:
            return
        assert time.monotonic() - begun > 0.9


def resets(world: ProgramNode, flow: Flow, reply: bool = False, seq: int = 0, flags: str = "R") -> None:
    """A RST with the expected sequence number plus ``seq``. Netfilter gets it."""
    frame = flow.frame(reply, flags=flags, seq=(1 + seq) % (1 << 32), ack=0, size=0)
    assert flow.run(reply, frame).retval == GO_ON


def test_the_syn_of_a_promoted_flow_goes_to_netfilter(fast: ProgramNode) -> None:
    flow = answered(fast)
    promote(fast, flow.key())
    assert flow.run(frame=flow.frame(flags="S")).retval == GO_ON
    assert fast.reasons()["STACK_ENDING"] == 1


# ---- what conntrack does not take -------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["own address", "masqueraded"])
def test_a_flow_without_a_place_in_conntrack_is_ended(fast: ProgramNode, variant: str) -> None:
    flow = young(fast, **VARIANTS[variant])
    flow.answer()
    assert end(fast, flow.key()) == 1
    assert flow.entries() == []
    assert young_flows_of(fast, flow.entrance) == 0
    assert fast.reasons()["YOUNG_ENDED"] == 1
    assert flow.run().retval == GO_ON, "netfilter gets its packets"
    assert end(fast, flow.key()) == 0


def test_only_young_flows_are_ended_and_by_the_clients_key(fast: ProgramNode) -> None:
    flow = answered(fast)
    assert end(fast, flow.key(reply=True)) == 0
    promote(fast, flow.key())
    assert end(fast, flow.key()) == 0
    assert flow.entries() == [False, True]
