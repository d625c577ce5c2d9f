# SPDX-License-Identifier: Apache-2.0
"""New flows that need not be looked up in conntrack, because it has no flow of their client by the filter."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

from pyebpf_proxy.datapath.connections import tracked_clients
from tests.packet.fast_node import (
    REDIRECT,
    SECOND,
    VARIANTS,
    Flow,
    complete_filter,
    empty_table,
    fast_node,
    learned_flow,
    note_tracked,
    now,
    one_cpu,
    permits,
    promote,
    set_age,
    sweep,
    young,
)
from tests.packet.program_node import GO_ON, PRIORITY_BACKEND, ProgramNode, insert_entry

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

LOAD = 7
#: How long conntrack keeps a UDP flow, and the programs' reserve: udp_stream_seconds and 60 s, in units of 2^30 ns.
KEPT = 180 * SECOND >> 30
#: NOTED_TCP_NS.
KEPT_TCP = 200 * SECOND >> 30
PROTOCOLS = pytest.mark.parametrize("protocol", ["tcp", "udp"])


@pytest.fixture
def fast(node: ProgramNode) -> Iterator[ProgramNode]:
    with one_cpu():
        world = fast_node(node, load=LOAD)
        sweep(world)
        yield world
        subprocess.run(["conntrack", "-F"], check=True, capture_output=True)


def track(flow: Flow) -> None:
    """Insert the flow into conntrack. No program has seen a packet of it."""
    state = ["--state", "ESTABLISHED"] if flow.protocol == "tcp" else []
    ends = (flow.client, flow.frontend, flow.sport, flow.port)
    insert_entry(flow.world, flow.protocol, *ends, *state, target=flow.endpoint)


def permitted(world: ProgramNode, protocol: str = "udp", **ends: object) -> Flow:
    flow = Flow(world, protocol, **ends)  # type: ignore[arg-type]
    if not permits(world):
        flow.permit()
    return flow


def is_asked(flow: Flow) -> bool:
    """Whether conntrack, which has the flow, is asked: then its flow continues. Otherwise the packet opens a flow."""
    track(flow)
    result = flow.run(frame=flow.frame(**({"flags": "S"} if flow.protocol == "tcp" else {})))
    if result.retval == REDIRECT:
        return False
    assert result.skb is not None
    assert (result.retval, result.skb.priority) == (GO_ON, 0)
    assert flow.entry() is None
    return True


def noted(world: ProgramNode) -> set[int]:
    """The bytes of the filter that are not 0."""
    value = world.object.maps["tracked_clients"].lookup(bytes(4)) or b""
    return set(value[4:]) - {0}


@PROTOCOLS
def test_a_new_flow_is_not_looked_up(fast: ProgramNode, protocol: str) -> None:
    complete_filter(fast)
    assert not is_asked(permitted(fast, protocol))
    assert fast.reasons() == {"NEW_FLOW_FAST": 1, "FLOW_HIT": 1}


@PROTOCOLS
def test_all_are_looked_up_until_the_agent_has_noted_what_conntrack_has(fast: ProgramNode, protocol: str) -> None:
    assert is_asked(permitted(fast, protocol))


def test_all_are_looked_up_after_the_programs_were_loaded_again(fast: ProgramNode) -> None:
    """Programs of another version, which note nothing, may have run in between."""
    value = fast.object.maps["tracked_clients"].lookup(bytes(4)) or b""
    fast.object.maps["tracked_clients"].update(bytes(4), (LOAD + 1).to_bytes(4, "little") + value[4:])
    assert is_asked(permitted(fast))


def test_all_are_looked_up_by_programs_that_have_no_number(node: ProgramNode) -> None:
    with one_cpu():
        world = fast_node(node)
        sweep(world)
        complete_filter(world)
        assert is_asked(permitted(world))
        subprocess.run(["conntrack", "-F"], check=True, capture_output=True)


def test_all_are_looked_up_if_the_agent_has_stopped(fast: ProgramNode) -> None:
    """Nothing notes the kernel's flows of the table any more."""
    complete_filter(fast)
    layout = fast.object.btf.struct("exchange_sweep_result")
    fast.object.maps["exchange_sweeps"].update(bytes(4), layout.pack(when=(now() >> 30) - 10))
    assert is_asked(permitted(fast))


def test_all_are_looked_up_if_conntrack_keeps_flows_for_longer_than_the_filter(node: ProgramNode) -> None:
    with one_cpu():
        world = fast_node(node, load=LOAD, udp_stream_seconds=300)
        sweep(world)
        complete_filter(world)
        assert is_asked(permitted(world))
        subprocess.run(["conntrack", "-F"], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("protocol", "age", "asked"),
    [
        *[("udp", age, asked) for age, asked in ((-1, True), (0, True), (KEPT, True), (KEPT + 5, False), (250, False))],
        *[("tcp", age, asked) for age, asked in ((-1, True), (KEPT_TCP, True), (KEPT_TCP + 5, False))],
    ],
)
def test_a_note_expires_when_conntrack_has_forgotten_the_flow(
    fast: ProgramNode, protocol: str, age: int, asked: bool
) -> None:
    """Another CPU's clock may be ahead."""
    complete_filter(fast)
    set_age(fast, age)
    assert is_asked(permitted(fast, protocol)) == asked


def test_a_note_lasts_as_long_as_flows_without_replies(node: ProgramNode) -> None:
    """Their timeout may be the longer one."""
    with one_cpu():
        world = fast_node(node, load=LOAD, udp_seconds=200)
        sweep(world)
        complete_filter(world)
        set_age(world, KEPT + 5)
        assert is_asked(permitted(world))
        subprocess.run(["conntrack", "-F"], check=True, capture_output=True)


def note(world: ProgramNode, most: int = 1000) -> int:
    """As the agent notes what conntrack has."""
    subject = world.object
    return tracked_clients.note(
        subject.btf, subject.maps["tracked_clients"], lambda key: note_tracked(world, key), most
    )


@PROTOCOLS
def test_the_agent_notes_what_conntrack_has(fast: ProgramNode, protocol: str) -> None:
    flow = permitted(fast, protocol)
    track(flow)
    assert note(fast) >= 1
    assert flow.run(frame=flow.frame(flags="S")).retval == GO_ON
    assert flow.entry() is None
    # The filter is complete, and has nothing of other clients.
    assert not is_asked(permitted(fast, protocol, sport=40002))


def test_the_agent_notes_all_clients_if_conntrack_has_very_many_flows(fast: ProgramNode) -> None:
    for port in range(3):
        track(Flow(fast, "udp", sport=42_000 + port))
    assert note(fast, most=2) == 2
    assert is_asked(permitted(fast, sport=40002))
    set_age(fast, KEPT + 5)
    assert not is_asked(permitted(fast, sport=40003))


def note_connections(world: ProgramNode, most: int = 1000) -> int:
    """As the agent notes them again and again."""
    subject, programs = world.object, (lambda key: note_tracked(world, key))
    return tracked_clients.note_connections(subject.btf, subject.maps["tracked_clients"], programs, most)


def test_a_connection_outlives_its_note(fast: ProgramNode) -> None:
    """A SYN with a forged source must not take its place. The table has no entry: it was idle for more than an hour."""
    complete_filter(fast)
    flow = permitted(fast, "tcp")
    track(flow)
    set_age(fast, KEPT_TCP + 5)
    assert note_connections(fast) == 1
    assert flow.run(frame=flow.frame(flags="S")).retval == GO_ON
    assert flow.entry() is None
    assert not is_asked(permitted(fast, "tcp", sport=40002))


@pytest.mark.parametrize(
    ("protocol", "state", "seconds", "noted"),
    [
        *[("udp", "", 3600, 0), ("tcp", "TIME_WAIT", 100, 0)],
        *[("tcp", "ESTABLISHED", 100, 1), ("tcp", "CLOSE_WAIT", 3600, 1)],
    ],
)
def test_only_connections_that_may_outlive_their_notes_are_noted_again(
    fast: ProgramNode, protocol: str, state: str, seconds: int, noted: int
) -> None:
    complete_filter(fast)
    more = [*(["--state", state] if state else []), "--timeout", str(seconds)]
    insert_entry(fast, protocol, "pod", "cluster_ip", 40001, 80, *more, target="remote")
    assert note_connections(fast) == noted


@pytest.mark.parametrize("fails", [False, True], ids=["very many", "refused"])
def test_all_clients_are_noted_if_connections_are_not_listed(
    fast: ProgramNode, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete_filter(fast)
    flow = permitted(fast, "tcp")
    set_age(fast, KEPT_TCP + 5)
    for port in range(2):
        track(Flow(fast, "udp", sport=42_000 + port))
    if fails:

        def refuse(family: object) -> NoReturn:
            raise OSError

        monkeypatch.setattr(tracked_clients, "entries", refuse)
    note_connections(fast, most=1000 if fails else 1)
    assert is_asked(flow)
    set_age(fast, KEPT_TCP + 5)
    assert not is_asked(permitted(fast, "tcp", sport=40003))


def note_by_netfilter(world: ProgramNode, protocol: str) -> None:
    """Its pair has no permit."""
    flow = Flow(world, protocol)
    result = flow.run(frame=flow.frame(flags="S"))
    assert result.skb is not None
    assert result.skb.priority & PRIORITY_BACKEND == PRIORITY_BACKEND


def note_by_sweep(world: ProgramNode, protocol: str) -> None:
    learned_flow(world, protocol)
    set_age(world, 250)
    sweep(world)
    empty_table(world)


def note_by_promotion(world: ProgramNode, protocol: str) -> None:
    flow = young(world, protocol, in_table=True)
    set_age(world, 250)
    assert promote(world, flow.key())
    empty_table(world)


NOTES = [note_by_netfilter, note_by_sweep, note_by_promotion]


@PROTOCOLS
@pytest.mark.parametrize("noted_by", NOTES, ids=[each.__name__.removeprefix("note_by_") for each in NOTES])
def test_a_client_that_conntrack_may_have_is_looked_up(
    fast: ProgramNode, protocol: str, noted_by: Callable[[ProgramNode, str], None]
) -> None:
    complete_filter(fast)
    noted_by(fast, protocol)
    assert is_asked(permitted(fast, protocol))


def test_a_client_that_only_gets_replies_is_looked_up(fast: ProgramNode) -> None:
    """The client sends nothing, and the table had no space."""
    complete_filter(fast)
    assert Flow(fast, "udp").run(reply=True).retval == GO_ON
    assert is_asked(permitted(fast))


def test_a_flow_for_which_the_table_has_no_space_stays_in_conntrack(node: ProgramNode) -> None:
    """An exchange that should move to the table, whose quota is used up: conntrack has it from now on."""
    with one_cpu():
        world = fast_node(node, load=LOAD, flow_quota=1)
        sweep(world)
        complete_filter(world)
        young(world)
        flow = Flow(world, "udp", sport=40100)
        flow.permit()
        flow.open_young()
        for _ in range(5):
            assert flow.run(reply=True).retval == REDIRECT
        assert flow.run().retval == GO_ON
        assert flow.exchange() is None
        assert is_asked(flow)
        subprocess.run(["conntrack", "-F"], check=True, capture_output=True)


@PROTOCOLS
def test_each_first_packet_of_a_tracked_flow_renews_the_note(fast: ProgramNode, protocol: str) -> None:
    complete_filter(fast)
    flow = permitted(fast, protocol)
    set_age(fast, 100)
    before = noted(fast)
    assert is_asked(flow)
    (fresh,) = noted(fast) - before
    assert fresh in {((now() >> 30) - back) % 255 + 1 for back in (0, 1)}


@PROTOCOLS
def test_a_young_flow_is_not_noted(fast: ProgramNode, protocol: str) -> None:
    """Otherwise short flows would fill the filter."""
    complete_filter(fast)
    flow = permitted(fast, protocol)
    empty_table(fast)
    set_age(fast, 250)
    before = noted(fast)
    flow.fill_bucket()
    flow.open_young()
    sweep(fast)
    assert flow.entry() is not None
    assert noted(fast) == before


@PROTOCOLS
def test_without_a_permit_a_flow_is_looked_up(fast: ProgramNode, protocol: str) -> None:
    complete_filter(fast)
    assert is_asked(Flow(fast, protocol))


@pytest.mark.parametrize("variant", ["masqueraded", "hairpin"])
def test_a_masqueraded_datagram_is_looked_up(fast: ProgramNode, variant: str) -> None:
    """Its replies, which conntrack also counts, do not go to the client's address."""
    complete_filter(fast)
    assert is_asked(permitted(fast, **VARIANTS[variant]))


@pytest.mark.parametrize(
    "rows", [{"any_endpoints": 0}, {"external_local": 1, "any_endpoints": 1}], ids=["reject", "drop"]
)
def test_a_flow_continues_where_new_ones_are_refused(fast: ProgramNode, rows: dict[str, int]) -> None:
    complete_filter(fast)
    fast.service([], protocol="udp", service=2, **rows)
    assert is_asked(Flow(fast, "udp", client="client", frontend="vip", entrance="nic"))
