# SPDX-License-Identifier: Apache-2.0
"""How young flows end: by a reset, by FIN from both sides, or with their endpoint; and what does not end them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from scapy.layers.inet import IP
from scapy.layers.inet6 import IPv6

from tests.packet.fast_node import (
    REDIRECT,
    Flow,
    close,
    fast_node,
    one_cpu,
    reset_after_data,
    young,
    young_flows_of,
)
from tests.packet.program_node import GO_ON, PRIORITY_BACKEND, SHOT, ProgramNode

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


@pytest.fixture
def fast(node: ProgramNode) -> Iterator[ProgramNode]:
    with one_cpu():
        yield fast_node(node)


@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
def test_a_reset_in_sequence_ends_the_flow(fast: ProgramNode, reply: bool) -> None:
    flow = young(fast)
    flow.answer()
    frame = {"flags": "R", "size": 0, "seq": 501 if reply else 101}
    found = flow.run(reply, flow.frame(reply, **frame))
    assert found.retval == REDIRECT
    assert found.data == bytes(flow.expected(reply, **frame)), "the other side gets the reset"
    assert flow.entries() == []
    assert young_flows_of(fast, "pods") == 0
    assert fast.reasons()["YOUNG_ENDED"] == 1


@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
def test_a_forged_reset_ends_nothing(fast: ProgramNode, reply: bool) -> None:
    flow = young(fast)
    flow.answer()
    assert flow.run(reply, flow.frame(reply, flags="R", size=0, seq=777)).retval == REDIRECT
    assert flow.entries() == [False, True]
    entry = flow.entry(reply)
    assert entry is not None
    assert entry["closing"] == 1
    # Acknowledgements alone prove nothing; data shows that the connection continues.
    flow.run(reply, flow.frame(reply, size=0, seq=501 if reply else 101))
    assert flow.entry(reply)["closing"] == 1  # type: ignore[index]
    flow.run(reply, flow.frame(reply, size=10, seq=501 if reply else 101))
    assert flow.entry(reply)["closing"] == 0  # type: ignore[index]


def closing(flow: Flow) -> list[int]:
    return [flow.entry(reply)["closing"] for reply in (False, True)]  # type: ignore[index]


@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
def test_the_next_syn_after_a_reset_that_follows_data_is_a_new_connection(fast: ProgramNode, reply: bool) -> None:
    """A socket that closes with unread data sends such a reset. Conntrack accepts it as the end, too."""
    flow = young(fast)
    flow.answer()
    reset_after_data(flow, reply)
    assert closing(flow)[reply] == 3
    assert flow.run(frame=flow.frame(flags="S", size=0, seq=9000, ack=0)).retval == REDIRECT
    assert fast.reasons()["NEW_FLOW_FAST"] == 2
    assert closing(flow) == [0, 0]


@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
def test_a_reset_follows_a_packet_of_more_than_64_kib(fast: ProgramNode, reply: bool) -> None:
    """Such a packet (BIG TCP) has no length in its IP header. Only the kernel's own packets are so long."""
    flow = young(fast)
    flow.answer()
    seq = 501 if reply else 101
    frame = flow.frame(reply, size=1400, seq=seq)
    frame[IP if fast.family == 4 else IPv6].setfieldval("len" if fast.family == 4 else "plen", 0)
    assert flow.run(reply, frame, gso_size=700, gso_segs=2).retval == REDIRECT
    flow.run(reply, flow.frame(reply, flags="R", size=0, seq=seq + 1400))
    assert closing(flow)[reply] == 3


@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
def test_a_flow_continues_after_forged_data_and_a_forged_reset(fast: ProgramNode, reply: bool) -> None:
    flow = young(fast)
    flow.answer()
    reset_after_data(flow, reply)
    flow.run(reply, flow.frame(reply, size=0, seq=501 if reply else 101))
    assert closing(flow)[reply] == 1
    flow.run(reply, flow.frame(reply, size=10, seq=501 if reply else 101))
    assert closing(flow) == [0, 0]
    assert flow.entries() == [False, True]


@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
@pytest.mark.parametrize("what", ["far ahead", "behind", "somewhere, without data"])
def test_a_forged_acknowledgment_does_not_choose_the_number_of_a_reset(
    fast: ProgramNode, reply: bool, what: str
) -> None:
    """Client and endpoint may be behind the same device: then a third host can forge packets of both."""
    flow = young(fast)
    flow.answer()
    other, seq = not reply, 101 if reply else 501
    number = 0xF8000000 if what == "behind" else 0x90000000
    flow.run(other, flow.frame(other, size=0, seq=0x70000000 if what == "somewhere, without data" else seq, ack=number))
    flow.run(reply, flow.frame(reply, flags="R", size=0, seq=number, ack=0))
    assert flow.entries() == [False, True]
    assert closing(flow) == [0, 0]
    flow.run(reply, flow.frame(reply, flags="R", size=0, seq=501 if reply else 101))
    assert flow.entries() == [], "the real one"


@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
@pytest.mark.parametrize("forged", [False, True])
def test_a_large_step_of_the_acknowledgments_is_believed_with_the_right_sequence_number(
    fast: ProgramNode, reply: bool, forged: bool
) -> None:
    """A lost segment that arrives late is acknowledged together with all that followed it."""
    flow = young(fast)
    flow.answer()
    other, before = not reply, 501 if reply else 101
    after = before + (8 << 20)
    seq = (101 if reply else 501) + (forged << 30)
    flow.run(other, flow.frame(other, size=0, seq=seq, ack=after))
    flow.run(reply, flow.frame(reply, flags="R", size=0, seq=after))
    assert flow.entries() == ([False, True] if forged else [])


@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
def test_a_reset_far_from_the_expected_number_marks_nothing(fast: ProgramNode, reply: bool) -> None:
    """Forged data must not make any reset the right one."""
    flow = young(fast)
    flow.answer()
    far = 501 + (8 << 20)
    flow.run(reply, flow.frame(reply, size=40, seq=far))
    assert flow.run(reply, flow.frame(reply, flags="R", size=0, seq=far + 40, ack=0)).retval == REDIRECT
    assert closing(flow) == [0, 0]


def test_a_syn_of_the_endpoint_ends_nothing(fast: ProgramNode) -> None:
    """Both sides may open at the same time; and an endpoint must not change the quota of its client's device."""
    flow = young(fast)
    flow.answer()
    for _ in range(3):
        found = flow.run(reply=True, frame=flow.frame(True, flags="S", size=0))
        assert found.retval == REDIRECT, fast.reasons()
        assert found.data == bytes(flow.expected(True, flags="S", size=0))
    assert flow.entries() == [False, True]
    assert (young_flows_of(fast, "pods"), young_flows_of(fast, "nic")) == (1, 0)


def test_a_syn_of_the_endpoint_after_the_end_is_counted_for_the_client(fast: ProgramNode) -> None:
    """The entries of the flow are deleted, and the client's device has one young flow less."""
    flow = young(fast)
    other = Flow(fast, sport=45000)
    other.open_young()
    close(flow)
    assert (young_flows_of(fast, "pods"), young_flows_of(fast, "nic")) == (2, 0)
    frame = flow.frame(True, flags="S", size=0)
    found = flow.run(reply=True, frame=frame)
    assert (found.retval, found.data) == (GO_ON, bytes(frame))
    assert (flow.entries(), other.entries()) == ([], [False, True])
    assert (young_flows_of(fast, "pods"), young_flows_of(fast, "nic")) == (1, 0)


def test_a_connection_that_both_have_closed_makes_room_for_the_next(fast: ProgramNode) -> None:
    flow = young(fast)
    close(flow)
    assert flow.entries() == [False, True]
    assert [flow.entry(reply)["closing"] for reply in (False, True)] == [2, 2]  # type: ignore[index]
    found = flow.run(frame=flow.frame(flags="S", size=0, seq=9000, ack=0))
    assert found.retval == REDIRECT
    assert fast.reasons()["NEW_FLOW_FAST"] == 2, "it is another flow, with a new choice"
    assert young_flows_of(fast, "pods") == 1


@pytest.mark.parametrize("closed", ["no side", "the client", "a forger"])
def test_a_syn_of_an_open_flow_goes_to_the_same_endpoint(fast: ProgramNode, closed: str) -> None:
    flow = young(fast)
    flow.answer()
    if closed == "the client":
        flow.run(frame=flow.frame(flags="FA", size=0, seq=101, ack=501))
    if closed == "a forger":
        for reply in (False, True):
            flow.run(reply, flow.frame(reply, flags="FA", size=0, seq=777, ack=777))
    made = fast.reasons()["NEW_FLOW_FAST"]
    found = flow.run(frame=flow.frame(flags="S", size=0, seq=9000, ack=0))
    assert (found.retval, found.data) == (REDIRECT, bytes(flow.expected(flags="S", size=0, seq=9000, ack=0)))
    assert fast.reasons()["NEW_FLOW_FAST"] == made == 1


@pytest.mark.parametrize("moved", [False, True], ids=["nothing", "routes"])
def test_a_repeated_syn_without_an_answer_follows_a_change_of_routes(fast: ProgramNode, moved: bool) -> None:
    """The first SYN may have gone nowhere. Else the connection would wait until the sweep ends the flow."""
    flow = young(fast)
    if moved:
        fast.write_fast_path_state(generation=5, permit_generation=5)
    frame = bytes(flow.frame(flags="S", size=0, seq=100, ack=0))
    found = flow.run(frame=frame)
    assert (found.retval, found.data == frame) == ((GO_ON, True) if moved else (REDIRECT, False))
    assert flow.entries() == ([] if moved else [False, True])
    assert young_flows_of(fast, "pods") == (not moved)


def test_a_repeated_syn_after_an_answer_does_not(fast: ProgramNode) -> None:
    flow = young(fast)
    flow.answer()
    fast.write_fast_path_state(generation=5, permit_generation=5)
    assert flow.run(frame=flow.frame(flags="S", size=0, seq=100, ack=0)).retval == REDIRECT
    assert flow.entries() == [False, True]


@pytest.mark.parametrize("gone", [False, True], ids=["its device is there", "its device is gone"])
def test_a_syn_by_another_device(fast: ProgramNode, gone: bool) -> None:
    """A pod with the address of one that has ended. Its answers must not leave by the former device."""
    flow = young(fast)
    flow.answer()
    if gone:
        fast.object.maps["devices"].delete(fast.devices["pods"].to_bytes(4, "little"))
    assert flow.run(frame=flow.frame(flags="A", seq=101), by="nic").retval == SHOT
    assert flow.entries() == [False, True], "no new connection"
    assert flow.run(frame=flow.frame(flags="S", size=0, seq=9000, ack=0), by="nic").retval == GO_ON
    assert flow.entries() == ([] if gone else [False, True])


def test_a_syn_to_a_removed_endpoint_gets_another(fast: ProgramNode) -> None:
    flow = young(fast)
    flow.answer()
    fast.service(["local"])
    fast.endpoint("remote", 0, protocol="tcp", present=False)
    found = flow.run(frame=flow.frame(flags="S", size=0))
    assert found.skb is not None
    assert (found.retval, found.skb.priority) == (GO_ON, PRIORITY_BACKEND | fast.backend_ids["local", 1])
    assert flow.entries() == []


def test_a_syn_after_a_forged_end_gets_another_endpoint_if_the_service_has_lost_it(fast: ProgramNode) -> None:
    """It is still an endpoint of another Service."""
    flow = young(fast)
    flow.answer()
    flow.run(frame=flow.frame(flags="FA", size=0, seq=7777, ack=501))
    fast.service(["local"])
    fast.object.maps[f"backends{fast.family}"].delete(fast.backend_ids["remote", 1].to_bytes(4, sys.byteorder))
    found = flow.run(frame=flow.frame(flags="S", size=0, seq=9000, ack=0))
    assert found.skb is not None
    assert (found.retval, found.skb.priority) == (GO_ON, PRIORITY_BACKEND | fast.backend_ids["local", 1])


def test_a_datagram_to_a_removed_endpoint_gets_another(fast: ProgramNode) -> None:
    flow = young(fast, "udp")
    fast.service(["local"], protocol="udp", service=2)
    fast.endpoint("remote", 2, present=False)
    assert flow.run().retval == REDIRECT, "no packet has found the change yet"
    fast.write_fast_path_state(generation=2)
    found = flow.run()
    assert found.skb is not None
    assert (found.retval, found.skb.priority) == (GO_ON, PRIORITY_BACKEND | fast.backend_ids["local", 2])
    assert flow.entries() == []
    assert young_flows_of(fast, "pods") == 0


def test_a_datagram_of_an_open_flow_continues(fast: ProgramNode) -> None:
    flow = young(fast, "udp")
    fast.write_fast_path_state(generation=2)
    assert flow.run().retval == REDIRECT
    assert flow.entry()["generation"] == 2  # type: ignore[index]
