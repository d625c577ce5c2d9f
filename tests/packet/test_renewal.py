# SPDX-License-Identifier: Apache-2.0
"""A UDP client uses its port again after a pause: a new flow as to the permit, the same flow as to the endpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.packet.fast_node import (
    BOTH,
    OTHER_MACHINE,
    POD,
    REDIRECT,
    SECOND,
    Flow,
    device,
    fast_node,
    learned_flow,
    now,
    one_cpu,
    options,
    promote,
    real_time_priority,
    reset_counters,
    sweep,
    write_permits,
    young,
    young_flows_of,
)
from tests.packet.program_node import GO_ON, PRIORITY_BACKEND, PROTOCOLS, SHOT, ProgramNode

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

WHERE = pytest.mark.parametrize("in_table", [False, True], ids=["exchange", "table"])


@pytest.fixture
def fast(node: ProgramNode) -> Iterator[ProgramNode]:
    with one_cpu():
        world = fast_node(node)
        device(world, "pods", redirect=POD)
        yield world


def use(flow: Flow) -> None:
    """A query and its reply."""
    assert flow.run().data == bytes(flow.expected())
    assert flow.run(reply=True).data == bytes(flow.expected(reply=True))


def answered(world: ProgramNode, in_table: bool) -> Flow:
    flow = young(world, "udp", in_table=in_table)
    assert flow.run(reply=True).retval == REDIRECT
    return flow


def is_exchange(flow: Flow) -> bool:
    return flow.exchange() is not None


def add_choices(world: ProgramNode) -> int:
    """The UDP Service gets more endpoints, so that a new choice is probably another one; the former one's number."""
    former = world.backend_ids["remote", 2]
    world.service(["local", "remote", *(f"pod{i}" for i in range(1, 13))], protocol="udp", service=2)
    added = world.backend_ids["remote", 2].to_bytes(4, "little")
    slots = world.object.maps["slots"]
    for slot, value in list(slots.items()):
        if value[:4] == added:
            slots.update(slot, former.to_bytes(4, "little") + bytes(4))
    return former


def frontend_key(world: ProgramNode) -> bytes:
    """That of the UDP Service's ClusterIP."""
    layout = world.object.btf.struct(f"frontend{world.family}_key")
    return layout.pack(address=world.packed("cluster_ip"), port=80, protocol=PROTOCOLS["udp"])


def packets(flow: Flow) -> tuple[int, int]:
    """Those that the entries have sent, in each direction."""
    there, reply = flow.entry(), flow.entry(reply=True)
    assert there is not None
    assert reply is not None
    return there["packets"], reply["packets"]


@WHERE
def test_a_port_that_is_used_again_after_pauses_never_becomes_a_stream(fast: ProgramNode, in_table: bool) -> None:
    flow = answered(fast, in_table)
    for _ in range(20):
        flow.set_back(2.5)
        use(flow)
    sweep(fast)
    assert is_exchange(flow) != in_table
    assert flow.entries() == BOTH
    assert packets(flow) == (1, 1)
    assert not fast.promotions()


def test_a_flow_of_the_table_becomes_an_exchange_when_its_bucket_has_space(fast: ProgramNode) -> None:
    """Otherwise each busy port that once met a full bucket would stay in the table, and fill its filter."""
    flow = answered(fast, in_table=True)
    empty = bytes(fast.object.maps["exchange_heads"].value_size)
    fast.object.maps["exchange_heads"].update(flow.bucket.to_bytes(4, "little"), empty)
    former = add_choices(fast)
    flow.set_back(2.5)
    use(flow)
    assert is_exchange(flow)
    assert flow.entry()["backend"] == former  # type: ignore[index]
    assert young_flows_of(fast, "pods") == 0
    # conntrack would keep it for longer than a flow that was used once.
    flow.set_back(119)
    sweep(fast)
    assert flow.entries() == BOTH


def test_a_flow_of_the_table_stays_there_while_its_bucket_is_full(fast: ProgramNode) -> None:
    """Leaving the table and entering it again costs more than all the rest."""
    flow = answered(fast, in_table=True)
    reset_counters(fast)
    flow.set_back(2.5)
    use(flow)
    assert fast.reasons() == {"FLOW_HIT": 2}


@WHERE
def test_without_a_pause_it_is_one_flow(fast: ProgramNode, in_table: bool) -> None:
    with real_time_priority():
        flow = answered(fast, in_table)
        started = flow.entry()["started"]  # type: ignore[index]
        for _ in range(2):
            use(flow)
    assert packets(flow) == (2, 3)
    assert flow.entry()["started"] == started  # type: ignore[index]


@WHERE
def test_an_unanswered_query_is_no_pause(fast: ProgramNode, in_table: bool) -> None:
    flow = young(fast, "udp", in_table=in_table)
    write_permits(fast, until=0)
    for _ in range(2):
        flow.set_back(2)
        assert flow.run().retval == REDIRECT
    assert packets(flow) == (2, 0)


@WHERE
@pytest.mark.parametrize(("seconds", "renewed"), [(0.5, False), (1.2, True)])
def test_a_client_on_another_machine_pauses_for_more_than_a_round_trip(
    fast: ProgramNode, in_table: bool, seconds: float, renewed: bool
) -> None:
    """The second flight of QUIC or DTLS must reach the same endpoint."""
    device(fast, "pods", redirect=OTHER_MACHINE)
    with real_time_priority():
        flow = answered(fast, in_table)
        flow.set_back(seconds)
        use(flow)
    assert packets(flow) == ((1, 1) if renewed else (1, 2))


@WHERE
@pytest.mark.parametrize("why", ["the permit has expired", "a rule was added", "the return path is not proven"])
def test_without_a_permit_netfilter_sees_the_query_with_the_same_endpoint(
    fast: ProgramNode, in_table: bool, why: str
) -> None:
    flow = answered(fast, in_table)
    kept = add_choices(fast)
    if why == "a rule was added":
        fast.write_fast_path_state(permit_generation=77)
    else:
        write_permits(fast, **{"until" if why == "the permit has expired" else "back_until": 0})
    flow.set_back(2)
    reset_counters(fast)
    before = bytes(flow.frame())
    found = flow.run(frame=before)
    assert (found.retval, found.data) == (GO_ON, before)
    assert found.skb is not None
    assert found.skb.priority == PRIORITY_BACKEND | kept
    assert fast.reasons()["SLOW_NO_PERMIT"] == 1
    assert flow.entries() == []
    assert young_flows_of(fast, "pods") == 0


@pytest.mark.parametrize("kept", [True, False], ids=["it terminates", "it is gone"])
def test_an_endpoint_is_kept_as_long_as_it_serves(fast: ProgramNode, kept: bool) -> None:
    """New flows get another endpoint already."""
    flow = answered(fast, in_table=False)
    former = fast.backend_ids["remote", 2]
    fast.service(["local"], protocol="udp", service=2)
    fast.endpoint("remote", 2, present=kept)
    write_permits(fast, until=0)
    flow.set_back(2)
    found = flow.run()
    assert found.retval == GO_ON
    assert found.skb is not None
    assert found.skb.priority == PRIORITY_BACKEND | (former if kept else fast.backend_ids["local", 2])


@WHERE
@pytest.mark.parametrize("field", ["out", "back"])
def test_another_way_to_the_endpoint_or_back_is_learned_again(fast: ProgramNode, in_table: bool, field: str) -> None:
    """The permit has been renewed by a flow that left by another device or to another router."""
    flow = answered(fast, in_table)
    link = {**flow.link(reply=field == "back"), "mac_to": b"\2\0\0\0\0\x99"}
    write_permits(fast, **{field: fast.object.btf.struct("link").pack(**link)})
    flow.set_back(2)
    found = flow.run()
    assert found.retval == REDIRECT
    assert (found.data[:6] == b"\2\0\0\0\0\x99") == (field == "out")
    assert flow.run(reply=True).data[:6] == (b"\2\0\0\0\0\x99" if field == "back" else bytes(flow.expected(True))[:6])


@WHERE
def test_a_packet_that_only_the_kernel_can_handle_opens_a_flow_there(fast: ProgramNode, in_table: bool) -> None:
    flow = answered(fast, in_table)
    flow.set_back(2)
    frame = bytes(options(flow))
    found = flow.run(frame=frame)
    assert (found.retval, found.data) == (GO_ON, frame)
    assert flow.entries() == []


def move_routes(world: ProgramNode) -> None:
    """As the agent reports a change of routes, devices or neighbours."""
    world.write_fast_path_state(generation=5, permit_generation=5)


@WHERE
@pytest.mark.parametrize("queries", [0, 2, 4])
def test_a_query_without_an_answer_does_not_follow_an_old_route(
    fast: ProgramNode, in_table: bool, queries: int
) -> None:
    """The answer is missing because the route is broken. netfilter looks the new one up, for the same endpoint."""
    flow = young(fast, "udp", in_table=in_table)
    for _ in range(queries):
        assert flow.run().retval == REDIRECT
    kept = add_choices(fast)
    move_routes(fast)
    before = bytes(flow.frame())
    found = flow.run(frame=before)
    assert (found.retval, found.data) == (GO_ON, before)
    assert found.skb is not None
    assert found.skb.priority == PRIORITY_BACKEND | kept
    assert flow.entries() == []
    assert young_flows_of(fast, "pods") == 0


@WHERE
def test_a_flow_goes_on_if_its_permit_shows_the_same_route(fast: ProgramNode, in_table: bool) -> None:
    """An endpoint of another Service has changed, or the pair has proved its way again."""
    flow = young(fast, "udp", in_table=in_table)
    assert flow.run().retval == REDIRECT
    fast.write_fast_path_state(generation=5)
    assert flow.run().data == bytes(flow.expected())
    assert flow.run(reply=True).data == bytes(flow.expected(reply=True))
    assert flow.entry()["generation"] == 5  # type: ignore[index]
    assert packets(flow) == (2, 1)
    write_permits(fast, until=0)
    assert flow.run().retval == REDIRECT, "it was judged already"


@WHERE
@pytest.mark.parametrize("moved_first", [True, False])
def test_an_answered_flow_goes_on_and_is_promoted_if_routes_change(
    fast: ProgramNode, in_table: bool, moved_first: bool
) -> None:
    """Netfilter does not know the flow: a new rule that accepts only established flows would end it."""
    flow = young(fast, "udp", in_table=in_table)
    if moved_first:
        move_routes(fast)
    assert flow.run(reply=True).retval == REDIRECT
    if not moved_first:
        move_routes(fast)
    assert fast.promotions() == []
    for _ in range(2):
        assert flow.run().data == bytes(flow.expected())
    assert fast.promotions() == [flow.key()]
    assert flow.entries() == BOTH


@WHERE
@pytest.mark.parametrize("why", ["no endpoint", "the policy", "no Service", "a Service in removal"])
@pytest.mark.parametrize("pause", [2.0, 0.0], ids=["after a pause", "unanswered"])
def test_a_flow_that_could_not_begin_anew_goes_on_and_is_promoted(
    fast: ProgramNode, in_table: bool, why: str, pause: float
) -> None:
    """Netfilter would refuse or drop the query, or leave it untranslated. conntrack would continue the flow."""
    flow = answered(fast, in_table) if pause else young(fast, "udp", in_table=in_table)
    if why == "no endpoint":
        fast.endpoint("remote", 2, present=False)
        fast.service([], protocol="udp", service=2)
    elif why == "the policy":
        fast.service(["remote"], protocol="udp", service=2, internal_local=1)
    elif why == "a Service in removal":
        fast.object.maps["services"].update((2).to_bytes(4, "little"), bytes(8))
    else:
        fast.object.maps[f"frontends{fast.family}"].delete(frontend_key(fast))
    fast.write_fast_path_state(generation=5)
    write_permits(fast, until=0)
    flow.set_back(pause)
    use(flow)
    use(flow)
    assert fast.promotions() == [flow.key()]
    assert flow.entries() == BOTH
    assert packets(flow)[1] == (3 if pause else 2), "it was renewed"


def test_a_flow_of_the_table_that_could_not_begin_anew_becomes_no_exchange(fast: ProgramNode) -> None:
    flow = answered(fast, in_table=True)
    empty = bytes(fast.object.maps["exchange_heads"].value_size)
    fast.object.maps["exchange_heads"].update(flow.bucket.to_bytes(4, "little"), empty)
    fast.service([], protocol="udp", service=2)
    flow.set_back(2.5)
    use(flow)
    assert not is_exchange(flow)


@WHERE
def test_a_flow_that_would_be_masqueraded_anew_keeps_its_source(fast: ProgramNode, in_table: bool) -> None:
    """Its traffic policy was Local when it began."""
    fast.service(["remote"], protocol="udp", service=2, external_local=1)
    flow = young(fast, "udp", in_table=in_table, frontend="external_ip")
    assert flow.run(reply=True).retval == REDIRECT
    fast.service(["remote"], protocol="udp", service=2)
    write_permits(fast, until=0)
    flow.set_back(2.5)
    use(flow)
    sweep(fast)
    assert set(fast.promotions()) == {flow.key()}


def lose_device(world: ProgramNode, name: str, how: str) -> None:
    devices, key = world.object.maps["devices"], world.devices[name].to_bytes(4, "little")
    if how == "gone":
        devices.delete(key)
        return
    layout = world.object.btf.struct("node_device")
    devices.update(key, layout.pack(**{**layout.unpack(devices.lookup(key) or b""), "mtu": 0}))


@pytest.mark.parametrize("how", ["gone", "down"])
@WHERE
def test_a_client_whose_device_is_replaced_keeps_its_endpoint(fast: ProgramNode, in_table: bool, how: str) -> None:
    """Answers would leave by the device that is gone. As long as it is there and up, the packets may be forged."""
    flow = answered(fast, in_table)
    kept = add_choices(fast)
    frame = bytes(flow.frame())
    assert flow.run(frame=frame, by="nic").retval == GO_ON
    assert flow.entries() == BOTH
    lose_device(fast, "nic", how)
    answer = flow.run(reply=True, by="pods")
    assert (answer.retval, flow.entries()) == (SHOT, BOTH), "only the client's packets show that it is back"
    lose_device(fast, "pods", how)
    found = flow.run(frame=frame, by="nic")
    assert (found.retval, found.data) == (GO_ON, frame)
    assert found.skb is not None
    assert found.skb.priority == PRIORITY_BACKEND | kept
    assert flow.entries() == []
    assert young_flows_of(fast, "pods") == 0
    assert flow.run(reply=True).retval == GO_ON, "conntrack translates it"


@WHERE
def test_a_query_with_a_mark_is_not_renewed(fast: ProgramNode, in_table: bool) -> None:
    """Another program has set it for a rule of netfilter or for routing, as on the first packet of a flow."""
    flow = answered(fast, in_table)
    kept = add_choices(fast)
    # No pause, however slow the machine is.
    flow.set_back(-1)
    assert flow.run(mark=7).retval == REDIRECT, "the flow goes on until it pauses"
    assert flow.run(reply=True).retval == REDIRECT
    flow.set_back(2)
    reset_counters(fast)
    frame = bytes(flow.frame())
    found = flow.run(frame=frame, mark=7)
    assert (found.retval, found.data) == (GO_ON, frame)
    assert found.skb is not None
    assert (found.skb.mark, found.skb.priority) == (7, PRIORITY_BACKEND | kept)
    assert fast.reasons()["STACK_NOT_PLAIN"] == 1
    assert flow.entries() == []


def test_a_masqueraded_flow_is_not_renewed(fast: ProgramNode) -> None:
    """Its replies come to the port that it has."""
    flow = young(fast, "udp", client="outside", masquerade="node", entrance="nic", exit="pods", frontend="external_ip")
    assert flow.run(reply=True).retval == REDIRECT
    for count in (2, 3):
        flow.set_back(2)
        use(flow)
        assert packets(flow) == (count - 1, count)


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_masqueraded_flow_whose_links_may_have_moved_is_promoted(fast: ProgramNode, is_answered: bool) -> None:
    """netfilter then learns its new links. Without a reply it begins anew at once."""
    flow = young(fast, "udp", client="outside", masquerade="node", entrance="nic", exit="pods", frontend="external_ip")
    if is_answered:
        assert flow.run(reply=True).retval == REDIRECT
    assert fast.promotions() == []
    fast.write_fast_path_state(generation=5, permit_generation=5)
    flow.set_back(2)
    assert flow.run().retval == (REDIRECT if is_answered else GO_ON)
    assert len(fast.promotions()) == int(is_answered)
    assert flow.entries() == ([False, True] if is_answered else [])


def test_the_entry_of_its_own_replies_is_no_reason_for_another_port(fast: ProgramNode) -> None:
    """Another CPU is just removing the flow, and has removed the client's entry. netfilter opens the next one."""
    flow = answered(fast, in_table=True)
    fast.object.maps["flows"].delete(flow.key())
    before = bytes(flow.frame())
    found = flow.run(frame=before)
    assert (found.retval, found.data) == (GO_ON, before)
    assert flow.entries() == []
    assert fast.reasons()["SLOW_NO_PORT"] == 1


def test_a_leftover_of_a_kernels_flow_is_replaced(fast: ProgramNode) -> None:
    """The sweep of a full table may remove one direction first."""
    flow = answered(fast, in_table=True)
    assert promote(fast, flow.key()) == 1
    flow.set_back(2)
    fast.object.maps["flows"].delete(flow.key())
    assert flow.run().data == bytes(flow.expected())
    assert flow.entry(reply=True)["young"] == 1  # type: ignore[index]
    assert flow.run(reply=True).data == bytes(flow.expected(reply=True))


# ---- flows that conntrack has --------------------------------------------------------------------


def kernels(world: ProgramNode) -> Flow:
    """A flow that was promoted. conntrack has it, and its packets must be confirmed."""
    flow = answered(world, in_table=True)
    assert promote(world, flow.key()) == 1
    assert young_flows_of(world, "pods") == 0
    reset_counters(world)
    return flow


def test_a_kernels_flow_is_young_again_after_a_pause(fast: ProgramNode) -> None:
    """Else every port that a resolver uses would pass netfilter in the end."""
    flow = kernels(fast)
    flow.set_back(2)
    use(flow)
    assert flow.entry()["young"] == flow.entry(reply=True)["young"] == 1  # type: ignore[index]
    assert young_flows_of(fast, "pods") == 1
    assert packets(flow) == (1, 1)
    assert fast.reasons() == {"FLOW_HIT": 2}
    # It stays in the table: as a new flow it would meet its entry in conntrack, and pass netfilter.
    fast.object.maps["exchange_heads"].update(
        flow.bucket.to_bytes(4, "little"), bytes(fast.object.maps["exchange_heads"].value_size)
    )
    flow.set_back(2)
    use(flow)
    assert not is_exchange(flow)
    assert packets(flow) == (1, 1)


@pytest.mark.parametrize(
    "why", ["no pause", "no reply", "no permit", "no space", "another link", "no backend", "a stream", "a reply"]
)
def test_a_kernels_flow_stays_the_kernels(fast: ProgramNode, why: str) -> None:
    flow = kernels(fast)
    if why != "no pause":
        flow.set_back(2)
    if why == "no reply":
        flow.write(last_seen=flow.entry(reply=True)["last_seen"] + SECOND // 2)  # type: ignore[index]
    if why == "no permit":
        write_permits(fast, until=0)
    if why == "no space":
        fast.object.maps["young_counts"].update(fast.devices["pods"].to_bytes(4, "little"), bytes([255, 255, 255, 0]))
    if why == "no backend":
        flow.write(backend=0)
    if why == "a stream":
        flow.write(packets=3)
        flow.write(True, packets=3)
    if why == "another link":
        link = {**flow.link(), "mac_to": b"\2\0\0\0\0\x99"}
        write_permits(fast, out=fast.object.btf.struct("link").pack(**link))
    if why == "no pause":
        flow.write(True, last_seen=now())
    assert flow.run(reply=why == "a reply").retval == GO_ON
    assert flow.entry()["young"] == 0  # type: ignore[index]
    assert fast.reasons()["STACK_NOT_CONFIRMED"] == 1


def test_a_flow_that_another_cpu_makes_young_is_sent_and_counted_once(fast: ProgramNode) -> None:
    """Until the other CPU is done, this one finds a kernel's flow that is confirmed."""
    flow = kernels(fast)
    flow.set_back(2)
    flow.write(confirmed_until=(1 << 64) - 1)
    assert flow.run().data == bytes(flow.expected())
    assert young_flows_of(fast, "pods") == 0


def test_a_flow_with_packets_for_the_kernel_stays_the_kernels(fast: ProgramNode) -> None:
    """Otherwise each reply that is too big for the client's link would be dropped once."""
    flow = answered(fast, in_table=True)
    flow.run(frame=options(flow))
    assert promote(fast, flow.key()) == 1
    flow.set_back(2)
    flow.write(True, last_seen=flow.entry()["last_seen"])  # type: ignore[index]
    assert flow.run().retval == GO_ON
    assert flow.entry()["young"] == 0  # type: ignore[index]


def test_a_confirmed_kernels_flow_is_sent_as_before(fast: ProgramNode) -> None:
    flow = learned_flow(fast, "udp")
    flow.permit()
    flow.set_back(2)
    for reply in BOTH:
        flow.write(reply, confirmed_until=now() + SECOND)
    assert flow.run().data == bytes(flow.expected())
    assert flow.entry()["young"] == 0  # type: ignore[index]


# ---- how long it stays ---------------------------------------------------------------------------


@WHERE
@pytest.mark.parametrize(
    ("again", "seconds", "stays"), [(False, 29, True), (False, 31, False), (True, 119, True), (True, 121, False)]
)
def test_a_flow_that_was_used_again_stays_for_as_long_as_in_conntrack(
    fast: ProgramNode, in_table: bool, again: bool, seconds: float, stays: bool
) -> None:
    """nf_conntrack_udp_timeout, and nf_conntrack_udp_timeout_stream for a flow with packets after two seconds."""
    flow = answered(fast, in_table)
    if again:
        flow.set_back(2.5)
        use(flow)
    flow.set_back(seconds)
    sweep(fast)
    assert flow.entries() == (BOTH if stays else [])


@WHERE
def test_a_flow_that_waits_for_a_reply_stays_no_longer(fast: ProgramNode, in_table: bool) -> None:
    """No rule of netfilter sees its packets."""
    flow = answered(fast, in_table)
    flow.set_back(2.5)
    use(flow)
    assert flow.run().retval == REDIRECT
    flow.set_back(31)
    sweep(fast)
    assert flow.entries() == []


def test_the_sweep_does_not_end_an_exchange_in_use(fast: ProgramNode) -> None:
    flow = answered(fast, in_table=False)
    flow.set_back(29)
    use(flow)
    sweep(fast)
    assert is_exchange(flow)
