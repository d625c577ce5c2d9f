# SPDX-License-Identifier: Apache-2.0
"""A client uses one port for two flows to one endpoint: their replies look the same. If the first one is young, the
second one must wait. If conntrack has the first one, netfilter gives the second one another port.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scapy.packet import Packet

from pyebpf_proxy.datapath.connections import masqueraded, tracked_clients
from pyebpf_proxy.datapath.loader.btf import Layout
from pyebpf_proxy.datapath.loader.libbpf import RunResult
from tests.packet.fast_node import (
    CLIENT_MAC,
    FAR,
    NODE_MAC,
    REDIRECT,
    VARIANTS,
    Flow,
    close,
    drop_records,
    fast_node,
    filtering_node,
    note_tracked,
    one_cpu,
    options,
    pending_record,
    reset_after_data,
    sweep,
    write_permits,
    young,
    young_flows_of,
)
from tests.packet.program_node import GO_ON, SHOT, XDP_PASS, XDP_REDIRECT, ProgramNode, insert_entry

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


@pytest.fixture(params=["straight to the endpoint", "by another Service"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fast(node: ProgramNode) -> Iterator[ProgramNode]:
    with one_cpu():
        world = fast_node(node)
        # The agent writes each endpoint also for service 0, so that packets for the endpoint itself are checked.
        for protocol in ("tcp", "udp"):
            world.endpoint("remote", 0, protocol=protocol)
        world.service(["remote"], service=3, port=81, node_port=30081)
        world.service(["remote"], service=4, port=81, node_port=30081, protocol="udp")
        yield world


def ended(fast: ProgramNode, protocol: str) -> Flow:
    """A young flow that has ended: closed by both sides, or answered and idle."""
    flow = young(fast, protocol)
    if protocol == "tcp":
        close(flow)
    else:
        assert flow.run(reply=True).retval == REDIRECT
        flow.set_back(0.1)
    return flow


def second(flow: Flow, variant: str) -> Packet:
    """The first packet of a second flow, for netfilter: from the port of ``flow`` to the same endpoint."""
    if variant == "by another Service":
        other = Flow(flow.world, flow.protocol, port=81, sport=flow.sport)
        return options(other, flags="S", size=0, seq=7000)
    ports = flow.sport, flow.endpoint_port
    return flow.packet(flow.client, flow.endpoint, *ports, CLIENT_MAC, NODE_MAC, flags="S", size=0, seq=7000)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_the_second_flow_waits_until_the_first_is_promoted(fast: ProgramNode, variant: str, protocol: str) -> None:
    flow = young(fast, protocol)
    assert flow.run(reply=True).retval == REDIRECT
    flow.run()
    assert flow.run(frame=second(flow, variant)).retval == SHOT
    assert fast.reasons()["DROP_AWAITING_PROMOTION"] == 1
    port = flow.endpoint_port if variant == "straight to the endpoint" else 81
    assert fast.refused("DROP_AWAITING_PROMOTION") == [(flow.sport, port, fast.devices["pods"])]
    assert fast.promotions() == [flow.key()]
    assert flow.entries() == [False, True]


@pytest.mark.parametrize("swept", [True, False])
def test_the_second_flow_waits_for_a_udp_flow_of_the_table(fast: ProgramNode, variant: str, swept: bool) -> None:
    """The filter says that the table may have such a flow: by the sweep, or because the last sweep was long ago."""
    flow = young(fast, "udp", in_table=True)
    assert flow.entries() == [False, True]
    if swept:
        sweep(fast)
    assert flow.run(frame=second(flow, variant)).retval == SHOT
    assert fast.promotions() == [flow.key()]


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_packets_from_another_device_do_not_wait(fast: ProgramNode, variant: str, protocol: str) -> None:
    """A forged packet must neither drop the client's packets nor promote its flow early."""
    flow = young(fast, protocol)
    flow.run()
    frame = second(flow, variant)
    found = flow.run(frame=frame, by="nic")
    assert (found.retval, found.data) == (GO_ON, bytes(frame))
    assert fast.promotions() == []
    assert fast.reasons()["DROP_AWAITING_PROMOTION"] == 0
    assert flow.entries() == [False, True]


def test_a_flow_from_another_port_does_not_wait(fast: ProgramNode, variant: str) -> None:
    flow = young(fast)
    assert flow.run(frame=second(Flow(fast, sport=flow.sport + 1), variant)).retval == GO_ON
    assert fast.promotions() == []


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_the_second_flow_does_not_wait_after_the_first_has_ended(
    fast: ProgramNode, variant: str, protocol: str
) -> None:
    flow = ended(fast, protocol)
    assert flow.run(frame=second(flow, variant)).retval == GO_ON
    assert flow.entries() == [], "its replies would go to the first flow"
    assert young_flows_of(fast, "pods") == 0
    assert fast.reasons()["CLOSING_FLOW_REPLACED"] == 1
    assert fast.promotions() == []


def test_the_second_flow_waits_if_only_the_client_has_closed(fast: ProgramNode, variant: str) -> None:
    flow = young(fast)
    flow.answer()
    flow.run(frame=flow.frame(flags="FA", size=0, seq=101, ack=501))
    assert flow.run(frame=second(flow, variant)).retval == SHOT
    assert fast.promotions() == [flow.key()]


def test_a_flow_that_one_side_closed_long_ago_reserves_no_port(fast: ProgramNode, variant: str) -> None:
    """Without an agent only this would remove it: its last data may have overtaken the other side's FIN."""
    flow = young(fast)
    flow.answer()
    flow.run(frame=flow.frame(flags="FA", size=0, seq=101, ack=501))
    flow.set_back(6)
    assert flow.run(frame=second(flow, variant)).retval == GO_ON
    assert flow.entries() == []
    assert fast.promotions() == []


@pytest.mark.parametrize("reply", [False, True], ids=["client", "endpoint"])
def test_a_flow_that_was_reset_after_data_reserves_no_port(fast: ProgramNode, variant: str, reply: bool) -> None:
    """The flow's own client may open a new connection from its port at once, too."""
    flow = young(fast)
    flow.answer()
    reset_after_data(flow, reply)
    assert flow.run(frame=second(flow, variant)).retval == GO_ON
    assert flow.entries() == []
    assert fast.promotions() == []


def test_an_idle_flow_reserves_its_port(fast: ProgramNode, variant: str) -> None:
    flow = young(fast)
    flow.answer()
    flow.set_back(600)
    assert flow.run(frame=second(flow, variant)).retval == SHOT


# ---- netfilter gives the second flow another source port -----------------------------------------------------


def remapped(fast: ProgramNode, flow: Flow) -> RunResult:
    """A new flow of the same client and endpoint; netfilter gives it the source port of ``flow``."""
    other = Flow(fast, flow.protocol, sport=flow.sport + 7)
    write_permits(fast, until=0)
    drop_records(fast)
    assert flow.run(frame=options(other, flags="S", size=0, seq=7000)).retval == GO_ON, fast.reasons()
    ports = flow.sport, flow.endpoint_port
    left = flow.packet(flow.client, flow.endpoint, *ports, NODE_MAC, FAR, flags="S", size=0, seq=7000, hops=63)
    return flow.leave(left, pending_record(fast)["number"], new=True)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_netfilter_chooses_the_port_of_a_young_flow(fast: ProgramNode, protocol: str) -> None:
    flow = young(fast, protocol)
    assert flow.run(reply=True).retval == REDIRECT
    flow.run()
    assert remapped(fast, flow).retval == SHOT
    assert fast.reasons()["DROP_AWAITING_PROMOTION"] == 1
    assert fast.refused("DROP_AWAITING_PROMOTION") == [(flow.sport, flow.endpoint_port, fast.devices["pods"])]
    assert fast.promotions() == [flow.key()]
    assert flow.entries() == [False, True]


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_netfilter_chooses_the_port_of_a_young_flow_that_has_ended(fast: ProgramNode, protocol: str) -> None:
    flow = ended(fast, protocol)
    assert remapped(fast, flow).retval == GO_ON
    assert flow.entries() == [], "replies would go to the first flow"
    assert fast.reasons()["CLOSING_FLOW_REPLACED"] == 1
    assert fast.promotions() == []


def test_netfilter_masquerades_a_client_to_the_address_and_port_of_a_young_flow(fast: ProgramNode) -> None:
    """By a rule of the CNI plugin. The client's device is not that of the young flow, but the packet is not forged."""
    flow = young(fast, **VARIANTS["masqueraded"])
    flow.answer()
    other = Flow(fast, sport=flow.sport + 7)
    drop_records(fast)
    assert other.run(frame=options(other, flags="S", size=0, seq=7000)).retval == GO_ON, fast.reasons()
    ports = flow.snat_port, flow.endpoint_port
    left = flow.packet("node", flow.endpoint, *ports, NODE_MAC, FAR, flags="S", size=0, seq=7000, hops=63)
    assert other.leave(left, pending_record(fast)["number"], new=True).retval == SHOT
    assert fast.promotions() == [flow.key()]


def test_source_ports_are_taken_one_after_the_other(fast: ProgramNode) -> None:
    """A port that the endpoint may still have in TIME_WAIT is used again as late as possible."""
    flow = Flow(fast, **VARIANTS["masqueraded"])
    flow.permit()
    ports = []
    for sport in range(43000, 43008):
        flow.sport = sport
        flow.open_young()
        ports.append(flow.snat_port)
    assert ports == list(range(ports[0], ports[0] + 8))


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("lookup", [True, False], ids=["lookup", "no lookup"])
@pytest.mark.parametrize("last", [20000, 20001])
def test_another_source_port_is_none_that_conntrack_has(
    node: ProgramNode, protocol: str, lookup: bool, last: int
) -> None:
    """A client uses one port with two Services of an endpoint, and another one for a connection straight to it."""
    with one_cpu():
        world = fast_node(node, snat_port_min=20000, snat_port_max=last, conntrack_lookup=int(lookup))
        for number, each in ((3, "tcp"), (4, "udp")):
            world.endpoint("remote", 0, protocol=each)
            world.service(["remote"], service=number, port=81, node_port=30081, protocol=each)
        other = Flow(world, protocol, port=81)
        Flow(world, protocol, port=81, sport=45000).permit()
        direct = Flow(world, protocol, sport=20000)
        assert direct.run(frame=second(direct, "straight to the endpoint")).retval == GO_ON
        track(direct, "straight to the endpoint")
        young(world, protocol, in_table=True)
        found = other.run(frame=other.frame(flags="S", size=0))
        if last == 20000:
            assert found.retval == SHOT
            assert world.reasons()["SLOW_NO_PORT"] == 1
        else:
            assert found.retval == REDIRECT
            assert other.source_port(found) == 20001
        world.forget_flows()


# ---- conntrack has the first flow -----------------------------------------------------------------------


@pytest.fixture(params=["tc", "xdp"])
def noting(request: pytest.FixtureRequest, node: ProgramNode) -> Iterator[ProgramNode]:
    """The programs note the clients whose flows conntrack may have."""
    with one_cpu():
        world = filtering_node(node, xdp=int(request.param == "xdp"))
        for protocol in ("tcp", "udp"):
            world.endpoint("remote", 0, protocol=protocol)
        yield world
        world.forget_flows()


def track(flow: Flow, variant: str, state: str = "ESTABLISHED") -> None:
    """Insert another flow from the port of ``flow`` to its endpoint into conntrack."""
    extra = ["--state", state] if flow.protocol == "tcp" else []
    if variant == "by another Service":
        insert_entry(
            flow.world, flow.protocol, flow.client, "external_ip", flow.sport, 81, *extra, target=flow.endpoint
        )
    else:
        insert_entry(flow.world, flow.protocol, flow.client, flow.endpoint, flow.sport, flow.endpoint_port, *extra)


def is_opened(flow: Flow) -> bool:
    """Send the first packet of ``flow``, which has a permit; whether a young flow was opened."""
    frame = flow.frame(flags="S", size=0)
    if flow.world.xdp is not None:
        found = flow.world.run_xdp(frame, flow.entrance)
        assert found.retval in (XDP_PASS, XDP_REDIRECT)
        if found.retval == XDP_REDIRECT:
            return True
    return flow.run(frame=frame).retval == REDIRECT


def permitted(world: ProgramNode, protocol: str, **ends: str) -> Flow:
    flow = Flow(world, protocol, **ends)  # type: ignore[arg-type]
    flow.permit()
    return flow


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_no_young_flow_takes_a_port_that_conntrack_has(fast: ProgramNode, variant: str, protocol: str) -> None:
    """An endpoint would take the SYN for one of the first connection, and that connection could be reset."""
    flow = permitted(fast, protocol)
    track(flow, variant)
    assert not is_opened(flow)
    assert fast.reasons()["SLOW_NO_PORT"] == 1
    assert flow.entries() == []
    flow.sport += 1
    assert is_opened(flow)
    fast.forget_flows()


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_flow_straight_to_the_endpoint_keeps_its_port(noting: ProgramNode, protocol: str) -> None:
    """The program notes its client, so conntrack is asked."""
    flow = permitted(noting, protocol)
    frame = second(flow, "straight to the endpoint")
    assert flow.run(frame=frame).retval == GO_ON
    track(flow, "straight to the endpoint")
    assert not is_opened(flow)
    assert noting.reasons()["SLOW_NO_PORT"] == 1
    flow.sport += 1
    assert is_opened(flow)


@pytest.fixture(params=["tc", "xdp"])
def without_lookup(request: pytest.FixtureRequest, node: ProgramNode) -> Iterator[ProgramNode]:
    """The programs cannot look up conntrack."""
    with one_cpu():
        world = fast_node(node, conntrack_lookup=0, xdp=int(request.param == "xdp"))
        for protocol in ("tcp", "udp"):
            world.endpoint("remote", 0, protocol=protocol)
        yield world
        world.forget_flows()


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_without_the_lookup_clients_straight_to_the_endpoint_are_noted(
    without_lookup: ProgramNode, protocol: str
) -> None:
    flow = permitted(without_lookup, protocol)
    assert flow.run(frame=second(flow, "straight to the endpoint")).retval == GO_ON
    assert not is_opened(flow)
    assert without_lookup.reasons()["SLOW_NO_PORT"] == 1
    flow.sport += 1
    assert is_opened(flow)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_without_the_lookup_the_agent_notes_what_conntrack_has(without_lookup: ProgramNode, protocol: str) -> None:
    """Only flows straight to endpoints: the others are not compared with."""
    flow = permitted(without_lookup, protocol)
    other, elsewhere = (Flow(without_lookup, protocol, sport=flow.sport + more) for more in (1, 2))
    track(flow, "straight to the endpoint")
    track(other, "by another Service")
    elsewhere.endpoint = "outside"
    track(elsewhere, "straight to the endpoint")
    elsewhere.endpoint = flow.endpoint
    assert note_straight(without_lookup) == 1
    assert not is_opened(flow)
    assert is_opened(other)
    assert is_opened(elsewhere)


def test_without_the_lookup_a_note_ends(without_lookup: ProgramNode) -> None:
    """After the time that conntrack keeps a flow. The agent notes longer ones again."""
    flow = permitted(without_lookup, "udp")
    track(flow, "straight to the endpoint")
    assert note_straight(without_lookup) == 1
    assert not is_opened(flow)
    set_notes_back(without_lookup, 100)
    assert not is_opened(flow)
    set_notes_back(without_lookup, 100)
    assert is_opened(flow)


def test_without_the_lookup_a_flow_to_another_endpoint_takes_no_port(without_lookup: ProgramNode) -> None:
    flow = permitted(without_lookup, "tcp")
    without_lookup.endpoint("local", 0, protocol="tcp")
    flow.endpoint = "local"
    track(flow, "straight to the endpoint")
    flow.endpoint = "remote"
    assert note_straight(without_lookup) == 1
    assert is_opened(flow)


def set_notes_back(world: ProgramNode, units: int) -> None:
    """Units of 2^30 ns."""
    of, layout = world.object.maps["straight_flows"], world.object.btf.struct("straight_flow")
    value = of.lookup(bytes(4)) or b""
    slots = [value[at : at + layout.size] for at in range(0, len(value), layout.size)]
    moved = [slot if not any(slot) else _set_back(layout, slot, units) for slot in slots]
    of.update(bytes(4), b"".join(moved))


def _set_back(layout: Layout, slot: bytes, units: int) -> bytes:
    note = layout.unpack(slot)
    return layout.pack(tag=note["tag"], when=(int(note["when"]) - units) & 0xFFFFFFFF)  # type: ignore[call-overload]


def test_without_the_lookup_only_so_many_flows_are_listed(without_lookup: ProgramNode) -> None:
    for number in range(3):
        track(Flow(without_lookup, sport=41000 + number), "straight to the endpoint")
    assert note_straight(without_lookup, most=2) == 2


def note_straight(world: ProgramNode, most: int = 1000) -> int:
    """As the agent does at its start, and again and again."""
    subject = world.object
    is_endpoint = masqueraded.endpoint_test(subject.maps, subject.btf)
    return tracked_clients.note_straight(subject.btf, lambda key: note_tracked(world, key), is_endpoint, most)


def test_conntrack_is_not_asked_for_other_clients(noting: ProgramNode) -> None:
    """To show it, conntrack has a flow that no program has seen."""
    flow = permitted(noting, "tcp")
    track(flow, "straight to the endpoint")
    assert is_opened(flow)


def test_a_connection_that_has_ended_leaves_its_port(fast: ProgramNode, variant: str) -> None:
    flow = permitted(fast, "tcp")
    track(flow, variant, state="TIME_WAIT")
    assert is_opened(flow)
    fast.forget_flows()


def test_a_masqueraded_flow_needs_no_port_of_its_client(fast: ProgramNode) -> None:
    flow = permitted(
        fast, "tcp", **{key: VARIANTS["masqueraded"][key] for key in ("client", "frontend", "masquerade", "entrance")}
    )
    insert_entry(fast, "tcp", "client", "remote", flow.sport, 8080, "--state", "ESTABLISHED")
    assert is_opened(flow)
    fast.forget_flows()
