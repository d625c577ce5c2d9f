# SPDX-License-Identifier: Apache-2.0
"""Short flows make room for later ones: a new young flow takes the slot of an earlier one, which may end then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.packet.fast_node import (
    BOTH,
    OTHER_MACHINE,
    POD,
    REDIRECT,
    Flow,
    close,
    device,
    fast_node,
    one_cpu,
    open_in_slot_of,
    real_time_priority,
    reset_counters,
    rewind_recent_flows,
    sweep,
    tag_of,
    young,
    young_flows_of,
)
from tests.packet.program_node import ProgramNode

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


@pytest.fixture
def fast(node: ProgramNode) -> Iterator[ProgramNode]:
    with one_cpu():
        yield fast_node(node)


def asked(world: ProgramNode, client: int) -> Flow:
    device(world, "pods", redirect=client)
    return young(world, "udp", in_table=True)


def answer(flow: Flow) -> None:
    assert flow.run(reply=True).retval == REDIRECT
    reset_counters(flow.world)


@pytest.mark.parametrize(
    ("client", "seconds", "ends"),
    [(POD, 0, False), (POD, 0.1, True), (OTHER_MACHINE, 0.5, False), (OTHER_MACHINE, 1.1, True)],
    ids=["a pod, at once", "a pod", "another machine, within a round trip", "another machine"],
)
def test_an_answered_query_ends(fast: ProgramNode, client: int, seconds: float, ends: bool) -> None:
    """The client's next datagram belongs to the same flow. It may arrive a round trip later."""
    flow = asked(fast, client)
    with real_time_priority():
        answer(flow)
        flow.set_back(seconds)
        open_in_slot_of(fast, flow)
    assert flow.entries() == ([] if ends else BOTH)
    assert fast.reasons().get("YOUNG_ENDED", 0) == ends
    assert young_flows_of(fast, "pods") == 2 - ends


def test_a_query_without_an_answer_stays(fast: ProgramNode) -> None:
    flow = asked(fast, POD)
    flow.set_back(1.5)
    open_in_slot_of(fast, flow)
    assert flow.entries() == BOTH


def test_two_queries_and_one_answer_stay(fast: ProgramNode) -> None:
    flow = asked(fast, POD)
    answer(flow)
    assert flow.run().retval == REDIRECT
    flow.set_back(1.5)
    open_in_slot_of(fast, flow)
    assert flow.entries() == BOTH


@pytest.mark.parametrize(("exchanges", "stays"), [(2, False), (4, True)])
def test_a_stream_may_pause(fast: ProgramNode, exchanges: int, stays: bool) -> None:
    """Until the agent promotes the flow, only its entry knows its endpoint."""
    flow = asked(fast, POD)
    answer(flow)
    for _ in range(exchanges - 1):
        assert flow.run().retval == REDIRECT
        answer(flow)
    flow.set_back(1.5)
    open_in_slot_of(fast, flow)
    assert flow.entries() == (BOTH if stays else [])


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed by both sides"])
def test_a_connection_ends_if_both_sides_have_closed_it(fast: ProgramNode, closed: bool) -> None:
    flow = young(fast)
    if closed:
        close(flow)
    else:
        flow.answer()
    flow.set_back(0.1)
    open_in_slot_of(fast, flow)
    assert flow.entries() == ([] if closed else BOTH)


def ends(world: ProgramNode) -> dict[int, int]:
    """``recent_ends``, without the empty elements."""
    found = (
        (int.from_bytes(key, "little"), int.from_bytes(tag, "little"))
        for key, tag in world.object.maps["recent_ends"].items()
    )
    return {number: tag for number, tag in found if tag}


@pytest.mark.parametrize("reply", BOTH, ids=["by the client", "by the endpoint"])
def test_a_flow_that_has_ended_is_noted(fast: ProgramNode, reply: bool) -> None:
    """Its slot needs no lookup, which waits for memory."""
    flow = young(fast)
    flow.answer()
    frame = flow.frame(reply, flags="R", size=0, seq=501 if reply else 101)
    assert flow.run(reply, frame).retval == REDIRECT
    assert flow.entries() == []
    tag = tag_of(flow.key())
    assert ends(fast) == {tag >> 20: tag}


def test_a_flow_that_is_noted_is_not_looked_up(fast: ProgramNode) -> None:
    flow = young(fast)
    close(flow)
    flow.set_back(0.1)
    tag = tag_of(flow.key())
    fast.object.maps["recent_ends"].update((tag >> 20).to_bytes(4, "little"), tag.to_bytes(4, "little"))
    open_in_slot_of(fast, flow)
    assert flow.entries() == BOTH


def test_a_note_of_an_earlier_flow_does_not_keep_a_new_one_from_its_port(fast: ProgramNode) -> None:
    """The client uses its port again. The new flow has the same key, and is closed by FIN."""
    earlier = young(fast)
    earlier.answer()
    assert earlier.run(frame=earlier.frame(flags="R", size=0, seq=101)).retval == REDIRECT
    flow = Flow(fast)
    flow.open_young()
    assert ends(fast) == {}
    close(flow)
    flow.set_back(0.1)
    open_in_slot_of(fast, flow)
    assert flow.entries() == []


def test_the_slot_of_an_earlier_flow_does_not_end_a_new_one_from_its_port(fast: ProgramNode) -> None:
    """The client uses its port again. The new flow has the same key as the old one, but another slot."""
    earlier = asked(fast, POD)
    earlier.set_back(31)
    sweep(fast)
    assert earlier.entries() == []
    again = Flow(fast, "udp")
    again.fill_bucket()
    again.open_young()
    answer(again)
    again.set_back(0.1)
    rewind_recent_flows(fast, 2)
    later = Flow(fast, again.protocol, sport=43000)
    later.fill_bucket()
    later.open_young()
    assert again.entries() == BOTH
    open_in_slot_of(fast, again, 43001, 0)
    assert again.entries() == []


@pytest.mark.parametrize(("seconds", "ends"), [(0.1, False), (1.1, True)])
def test_an_old_flow_that_was_used_again_stays_for_a_round_trip(fast: ProgramNode, seconds: float, ends: bool) -> None:
    """The client has used its port for another exchange. The next datagram must reach the same endpoint."""
    flow = asked(fast, POD)
    flow.set_back(5)
    with real_time_priority():
        answer(flow)
        assert flow.run().retval == REDIRECT
        answer(flow)
        assert flow.run(reply=True).retval == REDIRECT
        flow.set_back(seconds)
        open_in_slot_of(fast, flow)
    assert flow.entries() == ([] if ends else BOTH)
