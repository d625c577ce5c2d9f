# SPDX-License-Identifier: Apache-2.0
"""Permits: which new flows may be young, and which packets grant no permit."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from ipaddress import ip_address

import pytest

from pyebpf_proxy.see.paths import frontend_hash
from tests.packet.fast_node import (
    NEW,
    REDIRECT,
    SECOND,
    SNAT_PORTS,
    Flow,
    device,
    drop_records,
    extend_permits,
    fast_node,
    now,
    one_cpu,
    pending_record,
    permits,
    records,
    reset_counters,
    route_marks,
    write_permits,
    write_record,
)
from tests.packet.program_node import GO_ON, PRIORITY_BACKEND, PRIORITY_MASQUERADE, ProgramNode

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


@pytest.fixture
def fast(node: ProgramNode) -> Iterator[ProgramNode]:
    with one_cpu():
        yield fast_node(node)


def pair(world: ProgramNode, protocol: str = "tcp", first: int = 41000) -> tuple[Flow, Flow]:
    return Flow(world, protocol, sport=first), Flow(world, protocol, sport=first + 1)


def masqueraded(world: ProgramNode, sport: int = 40000, **more: str) -> Flow:
    """From outside to a VIP."""
    ends = {"client": "client", "frontend": "vip", "masquerade": "node", "entrance": "nic", "exit": "nic", **more}
    return Flow(world, sport=sport, snat_port=50000, **ends)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_the_second_new_flow_grants_the_permit(fast: ProgramNode, protocol: str) -> None:
    for each, seen in zip(pair(fast, protocol), (0, 1), strict=True):
        each.pass_netfilter(flags="S", new=True)
        assert len(permits(fast)) == seen
    ((key, permit),) = permits(fast)
    assert (key["device"], key["port"], key["frontend"] & 1) == (fast.devices["pods"], 8080, 0)
    assert key["client"][: len(fast.packed("pod"))] == fast.packed("pod")
    assert key["endpoint"][: len(fast.packed("remote"))] == fast.packed("remote")
    assert now() < permit["until"] <= now() + SECOND
    assert permit["back_until"] == 0, "no reply was seen"
    assert fast.reasons()["PERMIT_GRANTED"] == 1


def test_only_flows_of_the_last_second_count(fast: ProgramNode) -> None:
    first, second = pair(fast)
    first.open_through_netfilter()
    flow_packet_counts = fast.object.maps["flow_packet_counts"]
    for key, value in list(flow_packet_counts.items()):
        number = int.from_bytes(value, "little")
        if number:
            # Three seconds ago: the time is above the eight bits of the count.
            flow_packet_counts.update(key, (number - (3 << 8)).to_bytes(8, "little"))
    second.open_through_netfilter()
    assert permits(fast) == []


def test_flows_are_counted_per_source(fast: ProgramNode) -> None:
    for number in range(20):
        Flow(fast, client=f"caller{number}").open_through_netfilter()
    assert permits(fast) == []


def test_a_packet_that_begins_no_conntrack_flow_grants_nothing(fast: ProgramNode) -> None:
    for each in pair(fast):
        each.pass_netfilter(flags="S")
    assert permits(fast) == []


@pytest.mark.parametrize("make", [Flow, masqueraded], ids=["own source", "masqueraded"])
def test_a_permit_is_extended_while_conntrack_is_full(fast: ProgramNode, make: Callable[..., Flow]) -> None:
    """Then no flow can renew it. It may have expired already."""
    make(fast).permit()
    ago, later = now() - 60 * SECOND, now() + SECOND // 2
    write_permits(fast, until=ago, back_until=later)
    extend_permits(fast, {4, 6} - {fast.family})
    ((_, permit),) = permits(fast)
    assert (permit["until"], permit["back_until"]) == (ago, later), "it is of the other family"
    extend_permits(fast, {fast.family})
    ((_, permit),) = permits(fast)
    assert now() + 2 * SECOND < permit["until"] == permit["back_until"] <= now() + 3 * SECOND
    make(fast).open_young()
    long = now() + 10 * SECOND
    write_permits(fast, until=long)
    extend_permits(fast, {fast.family})
    assert permits(fast)[0][1]["until"] == long, "no permit is shortened"


def test_a_permit_that_was_voided_is_not_extended(fast: ProgramNode) -> None:
    Flow(fast).permit()
    ((_, permit),) = permits(fast)
    write_permits(fast, generation=permit["generation"] + 1, until=now(), back_until=now())
    before = permits(fast)
    extend_permits(fast, {4, 6})
    assert permits(fast) == before


@pytest.mark.parametrize("missing", ["until", "back_until"])
def test_what_was_never_proven_is_not_extended(fast: ProgramNode, missing: str) -> None:
    """Without a proof in one direction, no flow may be young."""
    Flow(fast).permit()
    write_permits(fast, **{"until": now(), "back_until": now(), missing: 0})
    extend_permits(fast, {4, 6})
    ((_, permit),) = permits(fast)
    assert permit[missing] == 0
    flow = Flow(fast)
    assert flow.run(frame=flow.frame(flags="S")).retval == GO_ON


NO_PROOF = {
    "to another address": {"endpoint": "local"},
    "to another port": {"endpoint_port": 8081},
    "from another address": {"masquerade": "node"},
    "from another port": {"snat_port": 50000},
}


@pytest.mark.parametrize("name", NO_PROOF)
def test_a_packet_that_leaves_differently_grants_no_permit(fast: ProgramNode, name: str) -> None:
    for each in pair(fast):
        each.run(frame=each.frame(flags="S"))
        record = pending_record(fast)
        left = Flow(**{**each.__dict__, **NO_PROOF[name]})
        left.leave(left.expected(flags="S"), record["number"], new=True)
    assert permits(fast) == []


STALE = {
    "an old record": {"age": 30_000_000},
    "came by another device": {"came_by": "nic"},
    "of no known device": {"by": "lo"},
    "of another packet": {"nonce": 0x800000},
    "of a packet without a nonce": {"nonce": 0},
}


@pytest.mark.parametrize("name", STALE)
def test_a_stale_or_forged_record_grants_nothing(fast: ProgramNode, name: str) -> None:
    fast.devices["lo"] = 1
    try:
        for each in pair(fast):
            each.run(frame=each.frame(flags="S"))
            found = each.leave(each.expected(flags="S"), pending_record(fast)["number"], new=True, **STALE[name])
            assert found.retval == GO_ON
            drop_records(fast)
    finally:
        del fast.devices["lo"]
    assert permits(fast) == []


@pytest.mark.parametrize("mark", [0x80, 0x81, 0x01])
def test_a_packet_with_a_mark_that_chooses_routes_grants_nothing(fast: ProgramNode, mark: int) -> None:
    """The next flow of the pair may have another mark, and conntrack has none for a flow that was promoted."""
    grants = not mark & 0x80
    with route_marks(fast, 0x80):
        for each in pair(fast):
            each.run(frame=each.frame(flags="S"))
            each.leave(each.expected(flags="S"), pending_record(fast)["number"], new=True, mark=mark)
        assert bool(permits(fast)) is grants
        assert fast.reasons()["STACK_ROUTE_MARK"] == (0 if grants else 2)


@pytest.mark.parametrize("mark", [0x80, 0x01])
def test_a_reply_with_a_mark_that_chooses_routes_completes_no_permit(fast: ProgramNode, mark: int) -> None:
    for each in pair(fast):
        each.open_through_netfilter()
    (flow, _) = pair(fast, first=42000)
    flow.open_through_netfilter()
    with route_marks(fast, 0x80):
        flow.run(True, flow.frame(True, flags="SA", size=0))
        flow.leave(flow.expected(True, flags="SA", size=0), pending_record(fast)["number"], True, mark=mark)
    ((_, permit),) = permits(fast)
    assert bool(permit["back_until"]) is (mark == 0x01)


def test_a_reply_by_another_device_does_not_complete_a_permit(fast: ProgramNode) -> None:
    """A third pod may send as the endpoint. Young flows would then wait for their replies at its device."""
    for each in pair(fast):
        each.open_through_netfilter()
    (flow, _) = pair(fast, first=42000)
    flow.open_through_netfilter()
    frame = flow.frame(True, flags="SA", size=0)
    for by, expected in (("pods", False), ("nic", True)):
        flow.run(True, frame, by=by)
        if record := pending_record(fast):
            flow.leave(flow.expected(True, flags="SA", size=0), record["number"], True, came_by=by)
        ((_, permit),) = permits(fast)
        assert bool(permit["back_until"]) == expected, by


def test_a_number_without_a_record_grants_nothing(fast: ProgramNode) -> None:
    for each in pair(fast):
        each.run(frame=each.frame(flags="S"))
        number = pending_record(fast)["number"]
        # The same slot, another number.
        each.leave(each.expected(flags="S"), number ^ 0x40, new=True)
        assert records(fast), "the record belongs to another packet"
        drop_records(fast)
    assert permits(fast) == []


def test_a_record_is_used_once(fast: ProgramNode) -> None:
    first, second = pair(fast)
    first.run(frame=first.frame(flags="S"))
    number = pending_record(fast)["number"]
    for _ in range(3):
        first.leave(first.expected(flags="S"), number, new=True)
    assert records(fast) == []
    assert permits(fast) == []
    second.open_through_netfilter()
    assert len(permits(fast)) == 1


@pytest.mark.parametrize(("tos", "priority"), [(0, 0), (0x08, 2), (0x10, 6), (0x18, 4)])
def test_the_priority_is_what_the_kernel_would_have_set(fast: ProgramNode, tos: int, priority: int) -> None:
    flow = Flow(fast)
    flow.run(frame=flow.frame(flags="S", tos=tos))
    left = flow.expected(flags="S", tos=tos)
    found = flow.leave(left, pending_record(fast)["number"], new=True)
    assert found.skb is not None
    assert (found.retval, found.data) == (GO_ON, bytes(left))
    assert found.skb.priority == (priority if fast.family == 4 else 0)


def test_priorities_of_other_programs_stay(fast: ProgramNode) -> None:
    flow = Flow(fast)
    flow.run(frame=flow.frame(flags="S"))
    found = flow.leave(flow.expected(flags="S"), pending_record(fast)["number"], priority=NEW + 1)
    assert found.skb is not None
    assert found.skb.priority == NEW + 1


# ---- the return path --------------------------------------------------------------------------------


def test_an_answer_completes_the_permit(fast: ProgramNode) -> None:
    flow = Flow(fast)
    for each in pair(fast):
        each.open_through_netfilter()
    assert flow.run(frame=flow.frame(flags="S")).retval == GO_ON, "no reply was seen"
    drop_records(fast)
    each.pass_netfilter(reply=True, flags="SA")
    ((_, permit),) = permits(fast)
    assert permit["device_back"] == fast.devices["nic"]
    assert now() < permit["back_until"] <= now() + 3 * SECOND
    for reply in each.entries():
        entry = each.entry(reply)
        assert entry is not None
        assert not entry["confirmed_until"], "a SYN-ACK confirms no flow"
    assert flow.run(frame=flow.frame(flags="S")).retval == REDIRECT


def test_an_answer_that_is_not_translated_completes_nothing(fast: ProgramNode) -> None:
    first, second = pair(fast)
    for each in (first, second):
        each.open_through_netfilter()
    second.run(reply=True, frame=second.frame(reply=True, flags="SA"))
    second.leave(second.frame(reply=True, flags="SA"), pending_record(fast)["number"], reply=True)
    ((_, permit),) = permits(fast)
    assert permit["back_until"] == 0


# ---- flows without one ------------------------------------------------------------------------------


def refused(world: ProgramNode, flow: Flow) -> dict[str, int]:
    """Why this flow is not young; netfilter gets it with its endpoint."""
    found = flow.run(frame=flow.frame(flags="S"))
    assert found.skb is not None
    assert found.retval == GO_ON
    tag = PRIORITY_MASQUERADE if flow.masquerade else PRIORITY_BACKEND
    assert found.skb.priority & 0xFF000000 == tag
    assert flow.entries() == []
    assert [record["kind"] for record in records(world)] == [1]
    return world.reasons()


def test_a_pair_with_a_permit_opens_young_flows(fast: ProgramNode) -> None:
    flow = Flow(fast)
    flow.permit()
    flow.open_young()
    assert fast.reasons() == {"NEW_FLOW_FAST": 1, "FLOW_HIT": 1}


OTHERS = {
    "another device": {"entrance": "nic"},
    "another source": {"client": "caller1"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_permit_is_for_its_pair_alone(fast: ProgramNode, name: str) -> None:
    Flow(fast).permit()
    assert refused(fast, Flow(fast, **OTHERS[name])) == {"NEW_FLOW_NETFILTER": 1, "SLOW_NO_PERMIT": 1}  # type: ignore[arg-type]


def test_a_permit_is_for_its_endpoint_port_alone(fast: ProgramNode) -> None:
    Flow(fast).permit()
    fast.service(["remote"], service=3, port=81, node_port=30081, target_port=9090)
    other = Flow(fast, port=81, endpoint_port=9090)
    assert refused(fast, other) == {"NEW_FLOW_NETFILTER": 1, "SLOW_NO_PERMIT": 1}


@pytest.mark.parametrize("what", ["address", "port"])
def test_a_permit_is_for_its_frontend_alone(fast: ProgramNode, what: str) -> None:
    """Others of the same endpoint need their own: rules may deny one of the frontends."""
    if what == "address":
        masqueraded(fast).permit()
        other = masqueraded(fast, sport=42000, frontend="external_ip")
    else:
        Flow(fast).permit()
        fast.service(["remote"], service=3, port=81, node_port=30081)
        other = Flow(fast, sport=42000, port=81)
    assert refused(fast, other) == {"NEW_FLOW_NETFILTER": 1, "SLOW_NO_PERMIT": 1}
    other.permit()
    other.open_young()


def test_the_hash_of_a_frontend_has_secret_seeds(node: ProgramNode) -> None:
    """Programs and ``explain`` agree on it."""
    seeds = 0x7E15F0C3A2B94D61, 0xC4D1900E77A35B2F
    with one_cpu():
        fast = fast_node(node, permit_seed=seeds[0], permit_seed6=seeds[1])
        Flow(fast).permit()
        ((key, _),) = permits(fast)
    assert key["frontend"] == frontend_hash(fast.packed("cluster_ip"), 80, *seeds)
    assert key["frontend"] != frontend_hash(fast.packed("cluster_ip"), 80)


@pytest.mark.parametrize(
    ("frontend", "chosen"),
    [
        (("10.96.0.25", 7007), ("130.193.20.172", 13603)),
        (("fd00:10:96::25", 7007), ("fd00:10:196::25", 7007)),
    ],
)
def test_nobody_can_choose_a_frontend_with_the_same_hash(frontend: tuple[str, int], chosen: tuple[str, int]) -> None:
    """A tenant's flows would give permits for a frontend that a rule denies. Without the seeds, these two are equal."""
    (first, port), (second, other) = ((ip_address(address).packed, port) for address, port in (frontend, chosen))
    if len(first) == 16:  # any address of which the two halves give the same
        low, high = (int.from_bytes(first[at : at + 8], sys.byteorder) for at in (0, 8))
        high ^= 1 << 57
        second, other = (low ^ 1).to_bytes(8, sys.byteorder) + high.to_bytes(8, sys.byteorder), port
    assert frontend_hash(first, port) == frontend_hash(second, other)
    pairs = [(secrets.randbits(64) | 1, secrets.randbits(64) | 1) for _ in range(1000)]
    assert not [seeds for seeds in pairs if frontend_hash(first, port, *seeds) == frontend_hash(second, other, *seeds)]


def test_a_permit_is_for_its_protocol_alone(fast: ProgramNode) -> None:
    Flow(fast).permit()
    assert refused(fast, Flow(fast, "udp"))["SLOW_NO_PERMIT"] == 1


def test_a_permit_is_for_masqueraded_flows_or_for_others(fast: ProgramNode) -> None:
    flow = masqueraded(fast)
    flow.permit()
    ((key, permit),) = permits(fast)
    assert key["frontend"] & 1
    assert permit["snat"][: len(fast.packed("node"))] == fast.packed("node")
    flow.open_young()
    low, high = SNAT_PORTS
    assert low <= flow.snat_port <= high
    assert flow.entries() == [False, True]
    # The same permit for flows that are not masqueraded.
    layout, of = fast.object.btf.struct("permit_key"), fast.object.maps["permits"]
    ((packed, value),) = of.items()
    of.delete(packed)
    of.update(layout.pack(**{**key, "frontend": key["frontend"] - 1}), value)
    assert refused(fast, masqueraded(fast, sport=40001))["SLOW_NO_PERMIT"] == 1


@pytest.mark.parametrize("field", ["until", "back_until"])
def test_a_permit_ends(fast: ProgramNode, field: str) -> None:
    flow = Flow(fast)
    flow.permit()
    write_permits(fast, **{field: now() - 1})
    assert refused(fast, flow)["SLOW_NO_PERMIT"] == 1


def test_a_new_ruleset_voids_permits(fast: ProgramNode) -> None:
    flow = Flow(fast)
    flow.permit()
    fast.write_fast_path_state(permit_generation=2)
    assert refused(fast, flow)["SLOW_NO_PERMIT"] == 1


def test_under_a_new_ruleset_the_return_path_must_be_proven_again(fast: ProgramNode) -> None:
    """The new rules may drop replies only: the first packet of a flow does not prove that they pass."""
    flow = Flow(fast)
    flow.permit()
    fast.write_fast_path_state(permit_generation=2)
    first = Flow(fast, sport=flow.sport + 1)
    first.open_through_netfilter()
    ((_, permit),) = permits(fast)
    assert (permit["generation"], permit["back_until"]) == (2, 0)
    drop_records(fast)
    assert refused(fast, flow)["SLOW_NO_PERMIT"] == 2
    drop_records(fast)
    first.pass_netfilter(reply=True, flags="SA", size=0)
    flow.open_young()


OTHER_HOST = "02:00:00:00:00:77"


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_frame_for_another_host_opens_nothing(fast: ProgramNode, protocol: str) -> None:
    """A bridge floods them, or a device in promiscuous mode accepts them; the kernel drops them (finding D12)."""
    flow = Flow(fast, protocol)
    frame = flow.frame(flags="S", size=0)
    frame.dst = OTHER_HOST
    for permitted in (False, True):
        if permitted:
            flow.permit()
        found = flow.run(frame=frame)
        assert found.skb is not None
        assert (found.retval, found.data, found.skb.priority, found.skb.mark) == (GO_ON, bytes(frame), 0, 0)
        assert (flow.entries(), records(fast), fast.reasons()) == ([], [], {})
        assert flow.run(frame=flow.frame(flags="S", size=0)).retval == (REDIRECT if permitted else GO_ON)
        assert permitted or records(fast), "the same frame for this node"
        drop_records(fast)
        reset_counters(fast)


def test_an_excluded_device(fast: ProgramNode) -> None:
    flow = Flow(fast)
    device(fast, "nic", redirect=0)
    flow.permit()
    assert refused(fast, flow) == {"NEW_FLOW_NETFILTER": 1, "STACK_DEVICE": 1}


def test_most_datagrams_of_a_pair_with_a_permit_write_no_record(fast: ProgramNode) -> None:
    """Otherwise a flood without replies would take every record, and the observer would learn nothing."""
    flow = Flow(fast, "udp")
    flow.permit()
    write_permits(fast, back_until=now() - 1)
    assert refused(fast, flow)["SLOW_NO_PERMIT"] == 1
    of, key = fast.object.maps["recent_next"], (1).to_bytes(4, "little")
    for _ in range(3):
        write_record(fast, records(fast)[0]["number"], number=0)
        used_up = (now() // 10**9 & 0xFFFFF) << 12 | 1024
        of.update(key, used_up.to_bytes(8, "little") * len(of.lookup_cpus(key) or []))
        flow.run()
        if not records(fast):
            break
    assert records(fast) == []
    # The permit must be renewed in time.
    write_permits(fast, until=now() + 400_000_000)
    assert refused(fast, flow)["SLOW_NO_PERMIT"] >= 3


def test_a_record_names_the_ingress_device(fast: ProgramNode) -> None:
    flow = Flow(fast)
    flow.run(frame=flow.frame(flags="S"))
    record = pending_record(fast)
    assert record["key"] == flow.key()
    assert (record["device"], record["ip_device"]) == (fast.devices["pods"],) * 2
    assert (record["backend"], record["service"]) == (fast.backend_ids["remote", 1], 1)
    assert record["mac_from"].hex(":") == "02:00:00:00:0c:01"
    write_record(fast, record["number"], number=0)
