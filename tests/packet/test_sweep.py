# SPDX-License-Identifier: Apache-2.0
"""What the agent runs: sweep_flows ends what is over and asks for promotions, promote_flow hands a flow over."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from tests.packet.fast_node import (
    CONFIRM,
    REDIRECT,
    SNAT_PORTS,
    WAYS,
    Flow,
    ask_from,
    count_of_young,
    device,
    end,
    fast_node,
    learned,
    one_cpu,
    promote,
    sweep,
    tag_of,
    undisturbed,
    wipe_reasons,
    young,
)
from tests.packet.program_node import GO_ON, ProgramNode

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]
QUOTA = 8


@pytest.fixture
def fast(node: ProgramNode) -> Iterator[ProgramNode]:
    with one_cpu():
        yield fast_node(node, flow_quota=QUOTA)


def filled(world: ProgramNode, young_flows: int, entries: int = 0) -> None:
    """What the last sweep found. ``entries``: those of the kernel's flows."""
    value = world.object.btf.struct("sweep_result").pack(entries=2 * young_flows + entries, young=young_flows)
    world.object.maps["sweep_results"].update(bytes(4), value)


def is_swept(world: ProgramNode, flow: Flow, seconds: float, young_flows: int = 0, entries: int = 0) -> bool:
    flow.older(seconds)
    filled(world, young_flows, entries)
    sweep(world)
    gone = flow.entries() == []
    assert gone or flow.entries() == [False, True]
    return gone


def answered(world: ProgramNode, protocol: str = "tcp") -> Flow:
    flow = young(world, protocol)
    if protocol == "tcp":
        flow.answer()
    else:
        assert flow.run(reply=True).retval == REDIRECT
    wipe_reasons(world)
    return flow


def test_what_a_sweep_finds(fast: ProgramNode) -> None:
    flow = answered(fast)
    # The flow that gave the permit is the kernel's, and in the table, too.
    assert sweep(fast) == {"entries": 4, "young": 1, "ended": 0, "requested": 0}
    flow.older(3)
    assert sweep(fast) == {"entries": 4, "young": 1, "ended": 0, "requested": 1}
    assert fast.promotions() == [flow.key()]


def test_a_sweep_asks_from_where_the_queue_was_full(fast: ProgramNode) -> None:
    """While conntrack is full, the first flows of the table would take each place of the queue every time."""
    flow = answered(fast)
    flow.older(3)
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
    """A sweep takes milliseconds, and the clock moves on: the flow's start is after that of the sweep.

    If it were taken for old, its SYN-ACK would find no entry.
    """
    flow = answered(fast, protocol) if is_answered else young(fast, protocol)
    flow.older(-10)
    found = sweep(fast)
    assert (found["ended"], found["requested"]) == (0, 0)
    assert flow.entries() == [False, True]
    assert fast.promotions() == []


@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
def test_what_is_closing_ends_after_a_second(fast: ProgramNode, reply: bool) -> None:
    flow = answered(fast)
    flow.write(reply, closing=1)
    assert not is_swept(fast, flow, 0.5)
    assert not is_swept(fast, flow, 0.7), "half closed it may continue"
    flow.write(not reply, closing=1)
    assert is_swept(fast, flow, 0)
    assert count_of_young(fast, "pods") == 0
    assert fast.reasons()["YOUNG_ENDED"] == 1


@pytest.mark.parametrize("what", ["sweep", "promote"])
def test_an_element_that_has_just_been_given_to_another_flow_is_left_alone(fast: ProgramNode, what: str) -> None:
    """As another processor may find it: the key is the new flow's already, what follows is the former flow's."""
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
    assert count_of_young(fast, "pods") == 1
    assert [flow.entry(reply)["young"] for reply in (False, True)] == [1, 1]  # type: ignore[index]


def test_an_idle_connection_does_not_end(fast: ProgramNode) -> None:
    """Its sides know it: it is the kernel's, whose timeout is long."""
    flow = answered(fast)
    assert not is_swept(fast, flow, 60)
    assert fast.promotions() == [flow.key()]


def test_a_syn_without_an_answer(fast: ProgramNode) -> None:
    flow = young(fast)
    assert not is_swept(fast, flow, 4)
    assert fast.promotions() == []
    assert is_swept(fast, flow, 2)
    assert count_of_young(fast, "pods") == 0


@pytest.mark.parametrize(
    ("redirect", "early", "late"), [(2, 0, 0.06), (1, 0.5, 0.51)], ids=["a pod", "another machine"]
)
def test_answered_datagrams_end_early_if_one_device_has_used_its_quota(
    fast: ProgramNode, redirect: int, early: float, late: float
) -> None:
    """From another machine, the flow's next datagram may take a round trip to come."""
    device(fast, "pods", redirect=redirect)
    flow = young(fast, "udp")
    with undisturbed():
        assert flow.run(reply=True).retval == REDIRECT
        assert not is_swept(fast, flow, early, QUOTA)
    assert is_swept(fast, flow, late, QUOTA)


@pytest.mark.parametrize(
    ("flows", "seconds"), [(QUOTA // 2, 30), (QUOTA // 2 + 1, 10), (QUOTA // 4 * 3, 10), (QUOTA // 4 * 3 + 1, 2)]
)
def test_idle_datagrams_end_the_sooner_the_more_young_flows_there_are(
    fast: ProgramNode, flows: int, seconds: int
) -> None:
    flow = young(fast, "udp")
    assert not is_swept(fast, flow, seconds - 0.5, flows)
    assert is_swept(fast, flow, 1, flows)
    assert count_of_young(fast, "pods") == 0


def test_flows_of_the_kernel_that_fill_the_table_end_no_datagrams(fast: ProgramNode) -> None:
    """Conntrack has those flows, and they leave the table first. Nothing else has a young flow's endpoint."""
    flow = young(fast, "udp")
    assert flow.run(reply=True).retval == REDIRECT
    assert not is_swept(fast, flow, 29, entries=4 * QUOTA)
    assert is_swept(fast, flow, 2, entries=4 * QUOTA)


def test_what_was_answered_and_goes_on_is_for_the_kernel(fast: ProgramNode) -> None:
    flow = answered(fast)
    flow.older(1.5)
    assert sweep(fast)["requested"] == 0
    flow.older(1)
    assert sweep(fast)["requested"] == 1
    assert sweep(fast)["requested"] == 1, "the agent could not do it, and is asked again"
    assert fast.promotions() == [flow.key()] * 2


def test_a_question_and_its_answer_are_not_for_the_kernel(fast: ProgramNode) -> None:
    flow = answered(fast, "udp")
    for _ in range(4):
        flow.run()
    flow.older(3)
    assert sweep(fast)["requested"] == 0
    # One more, just now.
    flow.run()
    assert sweep(fast)["requested"] == 1
    assert fast.promotions() == [flow.key()]


def test_draining_asks_for_all_that_were_answered(fast: ProgramNode) -> None:
    flow = answered(fast)
    other = Flow(fast, sport=40005)
    other.open_young()
    assert sweep(fast)["requested"] == 0
    fast.say_of_fast_path(draining=1)
    assert sweep(fast)["requested"] == 1
    assert fast.promotions() == [flow.key()]


@pytest.mark.parametrize("reply", [False, True], ids=["the answers' left", "the client's left"])
def test_half_a_flow_is_left_over(fast: ProgramNode, reply: bool) -> None:
    flow = answered(fast)
    fast.object.maps["flows"].delete(flow.key(not reply))
    flow.older(1.5)
    sweep(fast)
    assert flow.entries() == []


def test_a_half_that_was_just_made_stays(fast: ProgramNode) -> None:
    """The answers' entry is written first."""
    flow = young(fast)
    fast.object.maps["flows"].delete(flow.key())
    sweep(fast)
    assert flow.entries() == [True]


@pytest.mark.parametrize(("protocol", "seconds"), [("tcp", 3600), ("udp", 180)])
def test_idle_flows_of_the_kernels_are_forgotten(fast: ProgramNode, protocol: str, seconds: int) -> None:
    if time.monotonic() < seconds + 60:
        pytest.skip(f"this machine has been up for less than {seconds} s, which a flow cannot have been idle for")
    flow = learned(fast, protocol)
    assert not is_swept(fast, flow, seconds - 1)
    assert is_swept(fast, flow, 2)
    assert fast.reasons()["FLOW_FORGOTTEN"] == 2


@pytest.mark.parametrize("flags", ["FA", "R"])
@pytest.mark.parametrize("reply", [False, True], ids=["the client", "the endpoint"])
def test_flows_of_the_kernels_that_were_closed_are_forgotten_soon(fast: ProgramNode, reply: bool, flags: str) -> None:
    flow = learned(fast)
    flow.run(reply, flow.frame(reply, flags=flags))
    assert not is_swept(fast, flow, 9)
    assert is_swept(fast, flow, 2)


def test_a_flow_of_the_kernels_that_began_again_is_kept(fast: ProgramNode) -> None:
    flow = learned(fast)
    for reply in (False, True):
        flow.run(reply, flow.frame(reply, flags="FA"))
    for reply in (False, True):
        assert flow.through(reply)["kind"] == CONFIRM
    assert not is_swept(fast, flow, 60)


def test_half_of_a_flow_of_the_kernels_is_forgotten_soon(fast: ProgramNode) -> None:
    flow = learned(fast)
    fast.object.maps["flows"].delete(flow.key())
    flow.older(9)
    sweep(fast)
    assert flow.entries() == [True]
    flow.older(2)
    sweep(fast)
    assert flow.entries() == []


def test_in_a_full_table_idle_flows_of_the_kernels_are_forgotten_soon(fast: ProgramNode) -> None:
    flow = learned(fast)
    assert is_swept(fast, flow, 3, 2 * QUOTA + 1), "nothing was sent by it"
    flow = learned(fast)
    for reply in (False, True):
        flow.run(reply)
    assert not is_swept(fast, flow, 9, 2 * QUOTA + 1)
    assert is_swept(fast, flow, 2, 2 * QUOTA + 1)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_flow_of_the_kernels_whose_packets_netfilter_forwards_is_not_idle(fast: ProgramNode, protocol: str) -> None:
    """One packet in two seconds, say: each of them is confirmed, and none is sent from the table."""
    flow = learned(fast, protocol)
    flow.older(60)
    for reply in (False, True):
        flow.write(reply, confirmed_until=0)
        assert flow.through(reply)["kind"] == CONFIRM or (protocol == "udp" and not reply)
    assert not is_swept(fast, flow, 1, 0, 2 * QUOTA * 2 + 1)


def test_a_flow_of_the_kernels_is_not_idle_while_its_family_is_closed(fast: ProgramNode) -> None:
    flow = learned(fast, "udp")
    flow.older(60)
    fast.say_of_fast_path(closed4=1, closed6=1)
    for reply in (False, True):
        assert flow.run(reply).retval == GO_ON
    assert not is_swept(fast, flow, 1, 0, 2 * QUOTA * 2 + 1)


@pytest.mark.parametrize("lookup", [0, 1], ids=["no lookup", "lookup"])
def test_in_a_full_table_answered_datagrams_stay_if_conntrack_cannot_be_asked(node: ProgramNode, lookup: int) -> None:
    """It has the flow for longer. The next datagram would open another one, to any endpoint."""
    with one_cpu():
        world = fast_node(node, flow_quota=QUOTA, conntrack_lookup=lookup)
        flow = learned(world, "udp")
        for reply in (False, True):
            flow.run(reply)
        assert is_swept(world, flow, 60, 0, 2 * QUOTA * 2 + 1) == bool(lookup)
        connection = learned(world)
        assert is_swept(world, connection, 11, 0, 2 * QUOTA * 2 + 1)
        unanswered = Flow(world, "udp", sport=41000)
        unanswered.through(new=True)
        assert is_swept(world, unanswered, 3, 0, 2 * QUOTA * 2 + 1)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("way", ["masqueraded", "a NodePort, endpoint here", "hairpin"])
def test_in_a_full_table_a_source_port_stays_taken(fast: ProgramNode, way: str, protocol: str) -> None:
    """Conntrack has the flow. The endpoint would take a young flow with this port for the same connection."""
    low, _ = SNAT_PORTS
    flow = learned(fast, protocol, **{**WAYS[way], "snat_port": low + 7})
    assert not is_swept(fast, flow, 60, 0, 2 * QUOTA * 2 + 1)
    other = learned(fast, protocol, **{**WAYS[way], "snat_port": 50000, "sport": 41000})
    assert is_swept(fast, other, 11, 0, 2 * QUOTA * 2 + 1)
    if protocol == "tcp":
        flow.run(frame=flow.frame(flags="FA"))
        assert not is_swept(fast, flow, 9)
        assert is_swept(fast, flow, 2)


# ---- promotion --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["own address", "masqueraded"])
def test_a_promoted_flow_is_the_kernels(fast: ProgramNode, way: str) -> None:
    flow = young(fast, **WAYS[way])
    flow.answer()
    wipe_reasons(fast)
    assert promote(fast, flow.key()) == 1
    assert count_of_young(fast, flow.entrance) == 0
    for reply in (False, True):
        entry = flow.entry(reply)
        assert entry is not None
        assert (entry["young"], entry["confirmed_until"]) == (0, 0)
        assert flow.through(reply)["kind"] == CONFIRM
        assert flow.run(reply).retval == REDIRECT
    assert fast.reasons()["FLOW_PROMOTED"] == 1
    assert promote(fast, flow.key()) == 0, "only once"
    assert count_of_young(fast, flow.entrance) == 0


def test_only_young_flows_by_the_clients_key(fast: ProgramNode) -> None:
    flow = answered(fast)
    assert promote(fast, flow.key(reply=True)) == 0
    assert promote(fast, Flow(fast, sport=45000).key()) == 0
    assert flow.entry()["young"] == 1  # type: ignore[index]
    fast.object.maps["flows"].delete(flow.key(reply=True))
    assert promote(fast, flow.key()) == 0, "half of it is gone"


def test_only_the_flow_that_was_read(fast: ProgramNode) -> None:
    """The client may reuse the port before the agent runs the programs."""
    flow = answered(fast)
    started = flow.entry()["started"]
    assert isinstance(started, int)
    another = flow.key() + (started - 1).to_bytes(8, sys.byteorder)
    assert (promote(fast, another), end(fast, another)) == (0, 0)
    assert flow.entry()["young"] == 1
    assert promote(fast, flow.key() + started.to_bytes(8, sys.byteorder)) == 1


@pytest.mark.parametrize("by", ["client", "endpoint"])
def test_a_kernel_flow_that_was_reset_is_reported_once(fast: ProgramNode, by: str) -> None:
    """conntrack has not seen the packets that the table sent, and takes the RST for one that may be forged."""
    flow = promoted(fast)
    resets(fast, flow, reply=by == "endpoint")
    assert sweep(fast)["requested"] == 1
    assert fast.promotions() == [flow.key()]
    assert sweep(fast)["requested"] == 0
    # Packets go on, and it is reset again.
    for reply in (False, True):
        flow.through(reply)
        assert flow.run(reply).retval == REDIRECT
    assert sweep(fast)["requested"] == 0
    resets(fast, flow, reply=by == "endpoint")
    assert sweep(fast)["requested"] == 1


@pytest.mark.parametrize("changes", [{"seq": 1}, {"seq": -1}, {"flags": "FA"}], ids=["ahead", "behind", "a FIN"])
def test_a_kernel_flow_that_may_go_on_is_not_reported(fast: ProgramNode, changes: dict[str, int | str]) -> None:
    flow = promoted(fast)
    resets(fast, flow, **changes)
    entry = flow.entry()
    assert entry is not None
    assert entry["closing"]
    assert sweep(fast)["requested"] == 0


def test_a_kernel_flow_whose_endpoint_has_acknowledged_nothing_here_is_not_reported(fast: ProgramNode) -> None:
    """0 is no sequence number that an attacker would have to guess."""
    flow = promoted(fast)
    flow.write(reply=True, acknowledged=0)
    flow.run(frame=flow.frame(flags="R", seq=0, ack=0, size=0))
    assert sweep(fast)["requested"] == 0


def test_a_young_flow_that_one_side_has_closed_is_not_taken_for_one_that_was_reset(fast: ProgramNode) -> None:
    flow = answered(fast)
    assert flow.run(frame=flow.frame(flags="FA", seq=101, ack=501, size=0)).retval == REDIRECT
    assert promote(fast, flow.key()) == 1
    assert sweep(fast)["requested"] == 0


def promoted(world: ProgramNode) -> Flow:
    """A kernel flow whose packets the table sends. Both sides have acknowledged 1."""
    flow = answered(world)
    assert promote(world, flow.key()) == 1
    for reply in (False, True):
        flow.through(reply)
        assert flow.run(reply).retval == REDIRECT
    assert sweep(world)["requested"] == 0
    return flow


def resets(world: ProgramNode, flow: Flow, reply: bool = False, seq: int = 0, flags: str = "R") -> None:
    """A RST with the expected sequence number, plus ``seq``. Netfilter gets it."""
    frame = flow.frame(reply, flags=flags, seq=(1 + seq) % (1 << 32), ack=0, size=0)
    assert flow.run(reply, frame).retval == GO_ON


def test_a_promoted_flows_syn_is_netfilters(fast: ProgramNode) -> None:
    flow = answered(fast)
    promote(fast, flow.key())
    assert flow.run(frame=flow.frame(flags="S")).retval == GO_ON
    assert fast.reasons()["STACK_ENDING"] == 1


# ---- what conntrack does not take -------------------------------------------------------------------


@pytest.mark.parametrize("way", ["own address", "masqueraded"])
def test_a_flow_without_a_place_in_conntrack_is_ended(fast: ProgramNode, way: str) -> None:
    flow = young(fast, **WAYS[way])
    flow.answer()
    assert end(fast, flow.key()) == 1
    assert flow.entries() == []
    assert count_of_young(fast, flow.entrance) == 0
    assert fast.reasons()["YOUNG_ENDED"] == 1
    assert flow.run().retval == GO_ON, "its packets are netfilter's"
    assert end(fast, flow.key()) == 0


def test_only_young_flows_are_ended_and_by_the_clients_key(fast: ProgramNode) -> None:
    flow = answered(fast)
    assert end(fast, flow.key(reply=True)) == 0
    promote(fast, flow.key())
    assert end(fast, flow.key()) == 0
    assert flow.entries() == [False, True]
