# SPDX-License-Identifier: Apache-2.0
"""Exchanges: young UDP flows of a few packets, which live outside the flow table (bpf/exchange.h)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from scapy.layers.l2 import Ether

from pyebpf_proxy.services.model import FrontendKind
from tests.packet.fast_node import (
    BOTH,
    EXCHANGE_WAYS,
    FAR,
    OTHER_MACHINE,
    POD,
    REDIRECT,
    SECOND,
    VARIANTS,
    Exchange,
    Flow,
    device,
    fast_node,
    filtering_node,
    fragments,
    now,
    one_cpu,
    options,
    real_time_priority,
    reset_counters,
    sweep,
    write_permits,
    young,
    young_flows_of,
)
from tests.packet.program_node import GO_ON, KINDS, PRIORITY_BACKEND, PROTOCOLS, SHOT, XDP_PASS, ProgramNode, u32

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

#: Put back so many seconds, an exchange is not complete even if the next steps take longer than 50 ms.
AT_ONCE = -1


@pytest.fixture
def fast(node: ProgramNode) -> Iterator[ProgramNode]:
    with one_cpu():
        yield fast_node(node)


def in_table(flow: Flow) -> bool:
    found = {flow.world.object.maps["flows"].lookup(flow.key(reply)) is not None for reply in BOTH}
    assert len(found) == 1, "half a flow"
    return found.pop()


def exchange_of(flow: Flow) -> Exchange:
    found = flow.exchange()
    assert found is not None
    return found


def write_last_sweep(world: ProgramNode, used: int = 0, when: int = 0) -> None:
    """As if the last sweep had found so many exchanges, at this time of the filter."""
    layout = world.object.btf.struct("exchange_sweep_result")
    world.object.maps["exchange_sweeps"].update(bytes(4), layout.pack(used=used, when=when))


def query(world: ProgramNode, **ends: Any) -> Flow:
    """An exchange with its reply."""
    flow = young(world, "udp", **ends)
    assert flow.run(reply=True).retval == REDIRECT
    return flow


def in_bucket_of(flow: Flow, count: int) -> list[Flow]:
    """Other flows of the pair that select the same bucket."""
    found = []
    for port in range(1024, 65536):
        other = Flow(flow.world, "udp", sport=port)
        if port != flow.sport and other.bucket == flow.bucket:
            found.append(other)
    assert len(found) >= count
    return found[:count]


def be_busy(world: ProgramNode, opened: int = 1000, full: int = 1000) -> None:
    """As if this CPU had just opened so many flows, so many of them with a full bucket."""
    rates = world.object.maps["exchange_rates"]
    layout = world.object.btf.struct("exchange_rate")
    # The program may run in the next window: the former one counts, too.
    value = layout.pack(window=now() >> 28, opened=opened, opened_before=opened, full=full, full_before=full)
    rates.update(bytes(4), value * len(rates.lookup_cpus(bytes(4)) or []))


def fill(flow: Flow) -> list[Flow]:
    """Fill the bucket with other exchanges that are answered."""
    others = in_bucket_of(flow, EXCHANGE_WAYS)
    for other in others:
        other.open_young()
        assert other.run(reply=True).retval == REDIRECT
        assert not in_table(other)
    return others


def permitted(world: ProgramNode) -> Flow:
    flow = Flow(world, "udp")
    flow.permit()
    return flow


def test_a_query_and_its_reply_are_no_flow_of_the_table(fast: ProgramNode) -> None:
    flow = permitted(fast)
    found = flow.open_young()
    assert found.data == bytes(flow.expected(flags="S", size=0))
    answer = flow.run(reply=True)
    assert (answer.retval, answer.data) == (REDIRECT, bytes(flow.expected(reply=True)))
    assert exchange_of(flow).head()["replies"] == 1
    assert not in_table(flow)
    assert young_flows_of(fast, "pods") == 0, "an exchange needs no share of the table"
    assert fast.reasons() == {"NEW_FLOW_FAST": 1, "FLOW_HIT": 2}


def test_connections_and_masqueraded_flows_are_none(fast: ProgramNode) -> None:
    assert in_table(young(fast))
    masqueraded = {"client": "client", "frontend": "vip", "masquerade": "node", "entrance": "nic", "snat_port": 50000}
    assert in_table(young(fast, "udp", **masqueraded))


def test_the_seventh_packet_makes_it_a_flow_of_the_table(fast: ProgramNode) -> None:
    flow = query(fast)
    for reply in (False, True, False, True):
        assert flow.run(reply).retval == REDIRECT
        assert not in_table(flow)
    assert flow.run().retval == REDIRECT
    assert in_table(flow)
    assert flow.exchange() is None
    assert [flow.entry(reply)["packets"] for reply in BOTH] == [3, 3]  # type: ignore[index]
    assert young_flows_of(fast, "pods") == 1
    flow.set_back(2.5)
    flow.run()
    assert sweep(fast)["requested"] == 1
    assert fast.promotions() == [flow.key()]


def test_a_clock_that_is_ahead_does_not_make_it_old(fast: ProgramNode) -> None:
    """Another CPU has sent its last packet, and has seen the next tick. In the table it would end at once."""
    flow = query(fast)
    flow.set_back(AT_ONCE)
    flow.run(frame=options(flow))
    assert in_table(flow)
    assert abs(flow.entry()["last_seen"] - now()) < 60 * SECOND  # type: ignore[index]


@pytest.mark.parametrize("reply", BOTH, ids=["query", "reply"])
def test_a_packet_for_the_kernel_makes_it_a_flow_of_the_table(fast: ProgramNode, reply: bool) -> None:
    """The kernel can handle it once the flow is promoted, and only flows of the table are."""
    flow = query(fast)
    found = flow.run(reply, options(flow, reply=reply))
    assert found.retval == (SHOT if reply else GO_ON)
    assert in_table(flow)
    assert fast.promotions() == [flow.key()]
    assert fast.reasons()["STACK_OPTIONS"] == 1


@pytest.fixture
def crowded(node: ProgramNode) -> Iterator[ProgramNode]:
    """The quota of the client's device is used up, so no exchange can move to the table."""
    with one_cpu():
        world = fast_node(node, flow_quota=1)
        young(world)
        yield world


def long_query(world: ProgramNode) -> Flow:
    """An exchange that was to move to the table, and cannot."""
    flow = query(world, sport=40100)
    for _ in range(5):
        assert flow.run(reply=True).retval == REDIRECT
    assert not in_table(flow)
    return flow


@pytest.mark.parametrize("reason", ["SLOW_QUOTA", "STACK_OPTIONS"])
def test_without_space_in_the_table_conntrack_gets_the_flow_with_the_same_endpoint(
    crowded: ProgramNode, reason: str
) -> None:
    flow = long_query(crowded) if reason == "SLOW_QUOTA" else query(crowded, sport=40100)
    crowded.service(["local"], protocol="udp", service=2)
    before = bytes(flow.frame() if reason == "SLOW_QUOTA" else options(flow))
    reset_counters(crowded)
    found = flow.run(frame=before)
    assert (found.retval, found.data) == (GO_ON, before)
    assert found.skb is not None
    assert found.skb.priority == PRIORITY_BACKEND | crowded.backend_ids["remote", 2]
    assert crowded.reasons()[reason] == 1
    assert flow.exchange() is None
    assert not in_table(flow)


@pytest.mark.parametrize("reply", [False, True], ids=["requests", "replies"])
def test_without_space_in_the_table_fragmented_datagrams_are_counted(crowded: ProgramNode, reply: bool) -> None:
    """A client that fills its own quota must not send and receive for longer without netfilter than with one packet."""
    flow = query(crowded, sport=40100)
    first, later = fragments(flow, reply)
    for _ in range(4):
        assert flow.run(reply, first).retval == flow.run(reply, later).retval == REDIRECT
    if reply:
        assert flow.run(reply, first).retval == REDIRECT, "it must not leave untranslated"
        flow.set_back(31)
        assert flow.run(reply, first).retval == REDIRECT
        sweep(crowded)
        assert flow.exchange() is None
        return
    found = flow.run(frame=first)
    assert found.skb is not None
    assert (found.retval, found.data) == (GO_ON, bytes(first))
    assert found.skb.priority == PRIORITY_BACKEND | crowded.backend_ids["remote", 2]
    assert flow.run(frame=later).retval == GO_ON


@pytest.fixture(params=["conntrack_lookup", "xdp"])
def unasked(node: ProgramNode, request: pytest.FixtureRequest) -> Iterator[ProgramNode]:
    """As ``crowded``. Some program that opens flows does not look them up in conntrack first."""
    with one_cpu():
        world = fast_node(node, flow_quota=1, **({"xdp": 1} if request.param == "xdp" else {"conntrack_lookup": 0}))
        young(world)
        yield world


def test_without_space_or_lookup_the_flow_keeps_its_endpoint(unasked: ProgramNode) -> None:
    """The pair has a permit, so without the exchange the next datagram would begin a flow, to any endpoint."""
    flow = long_query(unasked)
    unasked.service(["local"], protocol="udp", service=2)
    for _ in range(40):
        flow.set_back(20)
        found = flow.run()
        assert (found.retval, found.data) == (GO_ON, bytes(flow.frame()))
        assert found.skb is not None
        assert found.skb.priority == PRIORITY_BACKEND | unasked.backend_ids["remote", 2]
        sweep(unasked)
    assert flow.run(reply=True).retval == REDIRECT
    flow.set_back(31)
    assert flow.run(reply=True).retval == REDIRECT
    sweep(unasked)
    assert flow.exchange() is None, "only replies for 30 s: no rule of netfilter would see them"


def test_without_space_or_lookup_a_drain_leaves_the_flow_to_conntrack(unasked: ProgramNode) -> None:
    flow = long_query(unasked)
    unasked.write_fast_path_state(draining=1)
    assert flow.run().retval == GO_ON
    assert flow.exchange() is None
    assert flow.run().retval == GO_ON
    assert flow.exchange() is None


def test_without_space_in_the_table_replies_go_on(crowded: ProgramNode) -> None:
    flow = long_query(crowded)
    assert flow.run(reply=True).data == bytes(flow.expected(reply=True))
    found = flow.run(True, options(flow, reply=True))
    assert found.retval == SHOT, "it must not leave untranslated"


@pytest.mark.parametrize("seconds", [25, 31])
def test_without_space_in_the_table_the_sweep_ends_it(crowded: ProgramNode, seconds: int) -> None:
    """It is not in conntrack, so no rule of netfilter, however new, would see its packets."""
    flow = long_query(crowded)
    flow.set_back(seconds)
    assert flow.run(reply=True).retval == REDIRECT
    sweep(crowded)
    assert (flow.exchange() is None) == (seconds > 30)


def test_without_space_in_the_table_it_stays_a_stream(crowded: ProgramNode) -> None:
    """Its counters are bytes."""
    flow = long_query(crowded)
    flow.write(reply=True, packets=255)
    assert flow.run(reply=True).retval == REDIRECT
    flow.set_back(31)
    assert flow.run(reply=True).retval == REDIRECT
    sweep(crowded)
    assert flow.exchange() is None


def test_the_sweep_moves_it_as_soon_as_there_is_space(crowded: ProgramNode) -> None:
    flow = long_query(crowded)
    crowded.object.maps["young_counts"].delete(crowded.devices["pods"].to_bytes(4, "little"))
    sweep(crowded)
    assert in_table(flow)


def test_without_space_in_the_table_a_stream_is_not_overwritten(crowded: ProgramNode) -> None:
    device(crowded, "pods", redirect=POD)
    stream = long_query(crowded)
    flow = in_bucket_of(stream, 1)[0]
    with real_time_priority():
        stream.set_back(1.5)
        be_busy(crowded, opened=10_000)
        flow.open_young()
    assert stream.entries() == flow.entries() == BOTH


def test_a_full_bucket_sends_new_flows_to_the_table(fast: ProgramNode) -> None:
    flow = permitted(fast)
    others = fill(flow)
    for other in others:
        other.set_back(20)
    flow.open_young()
    assert in_table(flow)
    assert flow.run(reply=True).retval == REDIRECT
    assert [other.entries() for other in others] == [BOTH] * EXCHANGE_WAYS


@pytest.mark.parametrize(
    ("client", "seconds", "replaced"),
    [(POD, 0.004, False), (POD, 0.02, True), (OTHER_MACHINE, 0.5, False), (OTHER_MACHINE, 1.1, True)],
    ids=["a pod, at once", "a pod", "another machine, within a round trip", "another machine"],
)
def test_a_complete_exchange_makes_room_if_there_are_many(
    fast: ProgramNode, client: int, seconds: float, replaced: bool
) -> None:
    """The client's next datagram belongs to the same flow. It may arrive a round trip later."""
    device(fast, "pods", redirect=client)
    flow = permitted(fast)
    others = fill(flow)
    exchanges = [exchange_of(other) for other in others]
    # Building a packet takes longer than the pause if the processor is emulated.
    frame = flow.frame()
    with real_time_priority():
        be_busy(fast)
        for exchange in exchanges:
            exchange.set_idle(seconds)
        assert flow.run(frame=frame).retval == REDIRECT
    assert in_table(flow) != replaced
    assert sum(other.exchange() is None for other in others) == replaced


@pytest.mark.parametrize(("opened", "replaced"), [(2000, False), (10_000, True)])
def test_a_complete_exchange_makes_room_before_a_free_element_if_very_many_open(
    fast: ProgramNode, opened: int, replaced: bool
) -> None:
    """Else the flows of a resolver at full speed use all elements, and each of its ports again before they are free."""
    device(fast, "pods", redirect=POD)
    flow = permitted(fast)
    with real_time_priority():
        first, second = in_bucket_of(flow, 2)
        for other in (first, second):
            other.open_young()
            assert other.run(reply=True).retval == REDIRECT
        first.set_back(AT_ONCE)
        second.set_back(0.2)
        be_busy(fast, opened)
        flow.open_young()
    assert not in_table(flow)
    assert first.entries() == BOTH
    assert (second.exchange() is None) == replaced


@pytest.mark.parametrize("what", ["unanswered", "has lasted longer than its pause"])
def test_an_exchange_that_is_not_complete_stays(fast: ProgramNode, what: str) -> None:
    device(fast, "pods", redirect=POD)
    flow = permitted(fast)
    with real_time_priority():
        others = fill(flow)
        for other in others:
            if what == "unanswered":
                assert other.run().retval == REDIRECT
                other.set_back(1.5)
            else:
                exchange = exchange_of(other)
                exchange.set_idle(0.06)
                exchange.write_head(started=exchange.head()["started"] - 1000)
        be_busy(fast)
        flow.open_young()
    assert in_table(flow)
    assert [other.entries() for other in others] == [BOTH] * EXCHANGE_WAYS


def test_an_element_that_is_being_written_is_not_taken(fast: ProgramNode) -> None:
    """Another CPU writes it: its owner is odd."""
    flow = permitted(fast)
    for other in fill(flow):
        other.set_back(1.5)
        exchange_of(other).write_head(owner=exchange_of(other).head()["owner"] | 1)
    be_busy(fast)
    flow.open_young()
    assert in_table(flow)


def test_an_element_that_has_just_been_written_is_another_flows(fast: ProgramNode) -> None:
    """The tags in the bucket still match, but those of the entry do not: the packet is of no known flow."""
    flow = query(fast)
    exchange = exchange_of(flow)
    rewrite = {**exchange.rewrite(reply=False), "tag": 1}
    exchange.write(False, rewrite=fast.object.btf.struct("flow_rewrite").pack(**rewrite))
    write_permits(fast, until=0)
    assert flow.run().retval != REDIRECT
    assert fast.reasons().get("FLOW_HIT", 0) == 2, "the first query and its reply"


@pytest.mark.parametrize("what", ["source", "destination", "source_port", "destination_port", "ipv6"])
@pytest.mark.parametrize("reply", BOTH, ids=["query", "reply"])
def test_two_keys_with_the_same_tag_are_two_flows(fast: ProgramNode, reply: bool, what: str) -> None:
    flow = query(fast)
    exchange = exchange_of(flow)
    if what == "ipv6":
        exchange.write(reply, ipv6=1 - exchange.value()["ipv6"])
    else:
        # What the packets of the other direction look like when they leave.
        other = exchange.rewrite(not reply)
        other[what] = other[what] ^ 1 if what.endswith("port") else bytes([other[what][0] ^ 1]) + other[what][1:]
        exchange.write(not reply, rewrite=fast.object.btf.struct("flow_rewrite").pack(**other))
    write_permits(fast, until=0)
    # The endpoint would see the same ports in two flows: such a query waits until the first one is in conntrack.
    clashes = not reply and what != "ipv6"
    assert flow.run(reply).retval == (SHOT if clashes else GO_ON)


def test_a_query_from_another_device_does_not_belong_to_it(fast: ProgramNode) -> None:
    flow = query(fast)
    before = exchange_of(flow).value(), exchange_of(flow).head()
    frame = flow.frame()
    found = flow.run(frame=frame, by="nic")
    assert (found.retval, found.data) == (GO_ON, bytes(frame))
    assert (exchange_of(flow).value(), exchange_of(flow).head()) == before
    assert fast.reasons()["STACK_OTHER_DEVICE"] == 1


@pytest.mark.parametrize("in_table", [False, True], ids=["exchange", "table"])
def test_a_reply_from_another_device_waits_for_the_agent(fast: ProgramNode, in_table: bool) -> None:
    """conntrack does not know the flow: the client would get the reply from the endpoint's address, and refuse it."""
    device(fast, "pods", redirect=POD)
    flow = young(fast, "udp", in_table=in_table)
    assert [flow.run(True, by="pods").retval for _ in range(2)] == [SHOT, SHOT]
    assert fast.promotions() == [flow.key()], "requested once"
    assert fast.reasons()["DROP_AWAITING_PROMOTION"] == 2
    # It stays the kernel's: the next ones come in there, too.
    entry = flow.entry(True)
    assert entry is not None
    assert entry["packets"] > 5


def test_a_frame_for_another_host_is_no_reply(fast: ProgramNode) -> None:
    flow = query(fast)
    frame = flow.frame(True)
    frame[Ether].dst = FAR
    assert [flow.run(True, frame, by=name).retval for name in ("nic", "pods")] == [GO_ON, GO_ON]
    assert fast.promotions() == []


@pytest.mark.parametrize("in_table", [False, True], ids=["exchange", "table"])
@pytest.mark.parametrize("by", [OTHER_MACHINE, POD], ids=["uplink", "pod"])
def test_replies_may_come_in_by_another_uplink(fast: ProgramNode, by: int, in_table: bool) -> None:
    """With several uplinks: routes depend on the flow (ECMP), or change. A pod may forge the endpoint's address."""
    device(fast, "nic", redirect=OTHER_MACHINE)
    device(fast, "pods", redirect=by)
    flow = young(fast, "udp", in_table=in_table)
    wanted = [SHOT, REDIRECT, SHOT] if by == POD else [REDIRECT, REDIRECT, REDIRECT]
    assert [flow.run(True, by=name).retval for name in ("pods", "nic", "pods")] == wanted


@pytest.mark.parametrize("in_table", [False, True], ids=["exchange", "table"])
def test_its_replies_go_on_when_the_device_has_another_link_address(fast: ProgramNode, in_table: bool) -> None:
    flow = young(fast, "udp", in_table=in_table)
    frame = flow.frame(True)
    assert flow.run(True, frame).retval == REDIRECT
    flow.write_rewrite(True, mac_in=bytes.fromhex("020000000e77"))
    assert [flow.run(True, frame).retval for _ in range(2)] == [REDIRECT, REDIRECT]


@pytest.mark.parametrize("in_table", [False, True], ids=["exchange", "table"])
def test_an_endpoint_that_goes_on_sending_meets_new_routes(fast: ProgramNode, in_table: bool) -> None:
    """The client does not send again, so no query shows that the link of the replies is out of date."""
    flow = young(fast, "udp", in_table=in_table)
    assert flow.run(True).retval == REDIRECT
    fast.write_fast_path_state(generation=2)
    assert [flow.run(True).retval for _ in range(2)] == [REDIRECT, REDIRECT]
    assert fast.promotions() == [flow.key()]


@pytest.mark.parametrize("in_table", [False, True], ids=["exchange", "table"])
def test_the_answer_to_a_query_promotes_nothing(fast: ProgramNode, in_table: bool) -> None:
    """After a change, a busy resolver's answers would all be promoted."""
    flow = young(fast, "udp", in_table=in_table)
    fast.write_fast_path_state(generation=2)
    assert flow.run(True).retval == REDIRECT
    assert fast.promotions() == []
    assert (flow.exchange() is None) == in_table


@pytest.mark.parametrize("in_table", [False, True], ids=["exchange", "table"])
def test_an_endpoint_that_goes_on_sending_stays_when_the_client_has_sent_since(
    fast: ProgramNode, in_table: bool
) -> None:
    """Its query has shown that the links are right."""
    flow = young(fast, "udp", in_table=in_table)
    fast.write_fast_path_state(generation=2)
    assert [flow.run(reply).retval for reply in (False, True, True, True)] == [REDIRECT] * 4
    assert fast.promotions() == []


def test_another_service_of_the_endpoint_gets_another_port(fast: ProgramNode) -> None:
    """The replies of both flows would look the same."""
    fast.service(["remote"], service=9, port=81, protocol="udp")
    flow = query(fast)
    Flow(fast, "udp", port=81, sport=42000).permit()
    other = Flow(fast, "udp", port=81)
    found = other.run()
    assert found.retval == REDIRECT
    assert flow.source_port(found) != flow.sport
    assert flow.run(reply=True).data == bytes(flow.expected(reply=True))


def test_replies_that_would_be_queries_of_another_exchange_get_another_port(
    fast: ProgramNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod's address is a frontend, too, and the endpoint is a client of it: of both keys, the query's is found."""
    fast.service(["remote"], protocol="udp", service=9, port=81)
    monkeypatch.setitem(KINDS, "pod", FrontendKind.CLUSTER_IP)
    fast.service(["local"], protocol="udp", service=2)
    query(fast, client="remote", sport=8080, frontend="pod", endpoint="local", entrance="nic", exit="pods")
    flow = Flow(fast, "udp", sport=80, port=81)
    flow.permit()
    found = flow.open_young()
    assert flow.source_port(found) != flow.sport


def test_a_flow_of_the_table_keeps_its_port_from_exchanges(fast: ProgramNode) -> None:
    fast.service(["remote"], service=9, port=81, protocol="udp")
    flow = young(fast, "udp", in_table=True)
    fast.object.maps["exchange_heads"].update(
        flow.bucket.to_bytes(4, "little"), bytes(fast.object.btf.struct("exchange_bucket").size)
    )
    Flow(fast, "udp", port=81, sport=42000).permit()
    other = Flow(fast, "udp", port=81)
    found = other.run()
    assert found.retval == REDIRECT
    assert flow.source_port(found) != flow.sport
    assert other.exchange() is None


@pytest.mark.parametrize("what", ["its frontend", "another Service of its endpoint"])
def test_a_forged_source_does_not_hide_it(fast: ProgramNode, what: str) -> None:
    """netfilter forwards a datagram of another pod with this client's address and port. Replies are still its own."""
    flow = query(fast)
    if what == "its frontend":
        fast.service(["local"], protocol="udp", service=2)
        forged = Flow(fast, "udp", endpoint="local", entrance="nic", exit="pods")
    else:
        fast.service(["remote"], service=9, port=81, protocol="udp")
        forged = Flow(fast, "udp", port=81, entrance="nic")
    assert forged.pass_netfilter(new=True)
    assert not any(fast.object.maps["flows"].lookup(each.key(reply)) for each in (flow, forged) for reply in BOTH)
    assert flow.run().data == bytes(flow.expected())
    assert flow.run(reply=True).data == bytes(flow.expected(reply=True))


@pytest.mark.parametrize("reply", BOTH, ids=["there", "reply"])
def test_a_flow_with_the_tag_of_an_exchange_enters_the_table(fast: ProgramNode, reply: bool) -> None:
    """Of the elements with one tag, only the first is compared."""
    flow = query(fast)
    exchange_of(flow).leave_only_tag(reply)
    flow.open_young()
    assert in_table(flow)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after a late reply"])
def test_a_removed_endpoint_ends_it(fast: ProgramNode, late: bool) -> None:
    flow = query(fast)
    fast.endpoint("remote", 2, present=False)
    fast.service(["local"], protocol="udp", service=2)
    fast.write_fast_path_state(generation=2)
    if late:
        assert flow.run(reply=True).retval == REDIRECT
    assert flow.run().retval == GO_ON
    assert flow.exchange() is None


@pytest.mark.parametrize("table", [False, True], ids=["exchange", "table"])
@pytest.mark.parametrize("what", ["the only endpoint", "the Service"])
def test_without_another_endpoint_it_stays(fast: ProgramNode, what: str, table: bool) -> None:
    """As in conntrack (service-semantics 10): a pod that is not ready for a while loses no flow."""
    flow = young(fast, "udp", in_table=table)
    fast.endpoint("remote", 2, present=False)
    if what == "the Service":
        fast.object.maps["services"].update(u32(2), bytes(8))
    else:
        fast.service([], protocol="udp", service=2)
    fast.write_fast_path_state(generation=2)
    for reply in (False, True, False):
        assert flow.run(reply).data == bytes(flow.expected(reply))
    fast.service(["local"], protocol="udp", service=2)
    fast.write_fast_path_state(generation=3)
    assert flow.run().retval == GO_ON
    assert not flow.entries()


@pytest.mark.parametrize("table", [False, True], ids=["exchange", "table"])
@pytest.mark.parametrize("serves", [False, True], ids=["another endpoint", "the same endpoint"])
@pytest.mark.parametrize("former", ["is there", "is deleted"])
def test_the_endpoints_of_the_service_that_has_the_address_now_count(
    fast: ProgramNode, former: str, serves: bool, table: bool
) -> None:
    """An address may move to another Service; the flow's former Service and its endpoint may stay."""
    flow = young(fast, "udp", in_table=table)
    if former == "is deleted":
        fast.endpoint("remote", 2, present=False)
        fast.object.maps["services"].update(u32(2), bytes(8))
    fast.service(["remote" if serves else "local"], protocol="udp", service=3)
    fast.write_fast_path_state(generation=2)
    assert flow.run().retval == (REDIRECT if serves else GO_ON)
    assert bool(flow.entries()) == serves


@pytest.mark.parametrize("table", [False, True], ids=["exchange", "table"])
def test_a_flow_to_an_address_that_no_service_has_any_more_stays(fast: ProgramNode, table: bool) -> None:
    """As in conntrack, also if its endpoint leaves the Service afterwards: nothing else translates its packets."""
    flow = young(fast, "udp", in_table=table)
    fast.service(["local"], protocol="udp", service=2)
    fast.endpoint("remote", 2, present=False)
    layout = fast.object.btf.struct(f"frontend{fast.family}_key")
    key = layout.pack(address=fast.packed("cluster_ip"), port=80, protocol=PROTOCOLS["udp"])
    fast.object.maps[f"frontends{fast.family}"].delete(key)
    fast.write_fast_path_state(generation=2)
    assert flow.run().data == bytes(flow.expected())


@pytest.mark.parametrize(("used", "seconds"), [(0, 30), (12288 // 2 + 1, 10), (12288 // 4 * 3 + 1, 2)])
def test_the_sweep_ends_idle_exchanges(fast: ProgramNode, used: int, seconds: int) -> None:
    flow = query(fast)
    layout = fast.object.btf.struct("exchange_sweep_result")
    result = fast.object.maps["exchange_sweeps"]
    for span, left in ((seconds - 1, BOTH), (2, [])):
        flow.set_back(span)
        write_last_sweep(fast, used=used)
        sweep(fast)
        assert flow.entries() == left
        assert layout.unpack(result.lookup(bytes(4)) or b"")["used"] == len(left) / 2
    assert fast.reasons()["YOUNG_ENDED"] == 1


@pytest.mark.parametrize(("seconds", "left"), [(9, BOTH), (11, [])])
def test_an_unanswered_exchange_lives_for_ten_seconds_in_a_flood(
    fast: ProgramNode, seconds: int, left: list[bool]
) -> None:
    """A resolver may answer late. A pod that fills all elements must not cost others their answers."""
    flow = permitted(fast)
    flow.open_young()
    flow.set_back(seconds)
    write_last_sweep(fast, used=12288)
    sweep(fast)
    assert flow.entries() == left


def test_a_drain_counts_exchanges_for_which_the_table_has_no_space(crowded: ProgramNode) -> None:
    """The agent reports them as not drained."""
    flow = query(crowded, sport=40100)
    assert sweep(crowded)["young"] == 1
    crowded.write_fast_path_state(draining=1)
    assert sweep(crowded)["young"] == 2
    assert flow.exchange() is not None


def test_a_drain_moves_exchanges_to_the_table_and_has_them_promoted(fast: ProgramNode) -> None:
    flow = query(fast)
    fast.write_fast_path_state(draining=1)
    assert sweep(fast)["requested"] == 1
    assert in_table(flow)
    assert fast.promotions() == [flow.key()]
    assert flow.run(reply=True).data == bytes(flow.expected(reply=True))


# ---- the filter: whether the table may have a datagram's flow -------------------------------------------------


def write_filter(world: ProgramNode, byte: int) -> None:
    """Every byte of the filter."""
    filtered = world.object.maps["udp_filter"]
    filtered.update(bytes(4), bytes([byte]) * filtered.value_size)


@pytest.mark.parametrize("reply", BOTH, ids=["query", "reply"])
@pytest.mark.parametrize("swept", [True, False], ids=["inserted", "swept"])
def test_a_flow_of_the_table_is_found(fast: ProgramNode, reply: bool, swept: bool) -> None:
    sweep(fast)
    flow = young(fast, "udp", in_table=True)
    if swept:
        write_filter(fast, 0)
        sweep(fast)
    write_permits(fast, until=0)
    assert flow.run(reply).retval == REDIRECT


@pytest.mark.parametrize("reply", BOTH, ids=["query", "reply"])
def test_a_flow_that_has_just_moved_to_the_table_is_found(fast: ProgramNode, reply: bool) -> None:
    flow = query(fast)
    sweep(fast)
    for direction in (False, True, False, True, False):
        assert flow.run(direction).retval == REDIRECT
    assert in_table(flow)
    write_permits(fast, until=0)
    assert flow.run(reply).retval == REDIRECT


@pytest.mark.parametrize("reply", BOTH, ids=["query", "reply"])
def test_a_masqueraded_flow_is_found(fast: ProgramNode, reply: bool) -> None:
    """It is never an exchange. Its replies have another client address and port, so both directions are noted."""
    sweep(fast)
    flow = young(fast, protocol="udp", **VARIANTS["masqueraded"])
    assert in_table(flow)
    assert flow.run(reply).retval == REDIRECT


@pytest.mark.parametrize("seconds", [0, 10], ids=["just swept", "the agent has stopped"])
def test_the_table_is_asked_if_the_last_sweep_was_long_ago(fast: ProgramNode, seconds: int) -> None:
    """So a filter that is not kept up to date loses no flow. With a fresh one the lookup is really saved."""
    flow = young(fast, "udp", in_table=True)
    sweep(fast)
    write_filter(fast, 0)
    write_last_sweep(fast, when=(now() >> 30) - seconds)
    write_permits(fast, until=0)
    assert (flow.run().retval == REDIRECT) == bool(seconds)


@pytest.mark.parametrize(("seconds", "asked"), [(-1, True), (0, True), (6, True), (9, False), (200, False)])
def test_a_note_of_the_filter_expires(fast: ProgramNode, seconds: int, asked: bool) -> None:
    """The table is asked for as long as a sweep may be late, and a little longer. Another CPU's clock may be ahead."""
    flow = young(fast, "udp", in_table=True)
    write_permits(fast, until=0)
    for _ in range(100):
        sweep(fast)
        clock = now() >> 30
        write_filter(fast, (clock - seconds) % 255 + 1)
        found = flow.run().retval == REDIRECT
        if now() >> 30 == clock:
            break
    assert found == asked


# ---- XDP ------------------------------------------------------------------------------------------------------


def test_a_query_that_xdp_left_to_tc_is_complete_with_one_reply(node: ProgramNode) -> None:
    """tc finds the exchange and counts the query."""
    with one_cpu():
        world = filtering_node(node, xdp=1)
        world.xdp_device("pods")
        world.xdp_device("nic", takes=0)
        flow = permitted(world)
        frame = flow.frame()
        assert world.run_xdp(frame, "pods").retval == XDP_PASS
        assert exchange_of(flow).head()["first_counted"] == 1
        assert flow.run(frame=frame).retval == REDIRECT
        assert flow.run(reply=True).retval == REDIRECT
        head = exchange_of(flow).head()
        assert (head["queries"], head["replies"]) == (1, 1)
        assert flow.entry()["first_counted"] == 1  # type: ignore[index]
