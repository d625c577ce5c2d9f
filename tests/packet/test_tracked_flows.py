# SPDX-License-Identifier: Apache-2.0
"""Flows that conntrack knew before the programs were attached: the agent enters the masqueraded ones."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from pyebpf_proxy.datapath.connections import masqueraded
from pyebpf_proxy.datapath.connections.create import Entry
from pyebpf_proxy.datapath.loader.programs import Settings
from pyebpf_proxy.services.model import Protocol
from tests.packet.fast_node import (
    CONFIRM,
    REDIRECT,
    VARIANTS,
    Flow,
    fast_node,
    one_cpu,
    reset_counters,
    sweep,
)
from tests.packet.program_node import GO_ON, XDP_PASS, ProgramNode
from tests.support.conntrack import create_now

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]
LOW, HIGH = 30000, 30001
PORTS = range(LOW, HIGH + 1)
MASQUERADED = ("masqueraded", "a NodePort, endpoint here", "hairpin")


@pytest.fixture
def fast(node: ProgramNode) -> Iterator[ProgramNode]:
    with one_cpu():
        world = fast_node(node, snat_port_min=LOW, snat_port_max=HIGH)
        for protocol in ("tcp", "udp"):
            world.endpoint("remote", 0, protocol=protocol)
        yield world


def insert(flow: Flow, state: str = "ESTABLISHED") -> None:
    """Insert the flow as another proxy would have left it in conntrack."""
    address = flow.world.address
    sender = flow.masquerade or flow.client
    ends = ["-s", address(flow.client), "-d", address(flow.frontend)]
    ends += ["--sport", str(flow.sport), "--dport", str(flow.port)]
    ends += ["-r", address(flow.endpoint), "-q", address(sender)]
    ends += ["--reply-port-src", str(flow.endpoint_port), "--reply-port-dst", str(flow.snat_port or flow.sport)]
    more = ["--state", state] if flow.protocol == "tcp" else []
    subprocess.run(["conntrack", "-I", "-p", flow.protocol, *ends, "-t", "60", *more], check=True, capture_output=True)


def enter(world: ProgramNode, most: int = 100, datagrams: bool = False) -> tuple[int, bool]:
    subject = world.object
    program = subject.programs["enter_flow"]
    addresses = {world.packed(name) for name in ("node", "pod_gateway")}
    return masqueraded.enter(
        addresses,
        PORTS,
        masqueraded.endpoint_test(subject.maps, subject.btf),
        subject.btf,
        lambda flow: program.test_run(bytes(14) + flow).retval != 0,
        most,
        datagrams,
    )


@pytest.fixture(autouse=True)
def empty(fast: ProgramNode) -> Iterator[None]:
    yield
    subprocess.run(["conntrack", "-F"], check=True, capture_output=True)


def tracked(world: ProgramNode, variant: str, protocol: str = "tcp", **ends: object) -> Flow:
    """A flow that uses the first source port of young flows."""
    return Flow(world, protocol, **{**VARIANTS[variant], "snat_port": LOW, **ends})  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("variant", MASQUERADED)
def test_no_young_flow_takes_the_source_port_of_a_tracked_flow(fast: ProgramNode, variant: str, protocol: str) -> None:
    flow = tracked(fast, variant, protocol)
    insert(flow)
    assert enter(fast) == (1, True)
    assert enter(fast) == (1, True), "a second time changes nothing"
    assert flow.entries() == [False, True]
    another = Flow(fast, protocol, **{**VARIANTS[variant], "sport": flow.sport + 1})
    another.permit()
    ports = set()
    for sport in range(flow.sport + 10, flow.sport + 14):
        another.sport = sport
        frame = another.frame(flags="S", size=0, seq=100, ack=0)
        found = another.run(frame=frame)
        if found.retval == REDIRECT:
            ports.add(another.source_port(found))
    assert ports == {HIGH}, "the only free port"


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("variant", MASQUERADED)
def test_a_tracked_flow_takes_the_fast_path_after_its_first_packets(
    fast: ProgramNode, variant: str, protocol: str
) -> None:
    flow = tracked(fast, variant, protocol)
    insert(flow)
    enter(fast)
    for reply in (False, True):
        kind = flow.pass_netfilter(reply)["kind"]
        # Each datagram of a client may be the first one of its flow.
        assert kind == CONFIRM or (protocol == "udp" and not reply)
        assert flow.run(reply).retval == REDIRECT, fast.reasons()
    assert flow.run().data == bytes(flow.expected())
    # Only packets from the flow's own device.
    reset_counters(fast)
    assert flow.run(by="nic" if flow.entrance == "pods" else "pods").retval == GO_ON
    assert fast.reasons()["STACK_OTHER_DEVICE"] == 1


def test_only_open_masqueraded_flows_to_endpoints_are_entered(fast: ProgramNode) -> None:
    for number, (changes, state) in enumerate(
        [
            ({}, "TIME_WAIT"),
            ({"snat_port": HIGH}, "CLOSE"),
            ({"snat_port": HIGH + 1}, "ESTABLISHED"),
            ({"endpoint_port": 8081}, "ESTABLISHED"),
            ({"masquerade": "", "snat_port": 0}, "ESTABLISHED"),
        ]
    ):
        flow = tracked(fast, "masqueraded", **{"sport": 41000 + number, **changes})
        insert(flow, state)
    assert enter(fast) == (0, True)


def test_tcp_comes_first_if_there_are_too_many(fast: ProgramNode) -> None:
    flows = [tracked(fast, "masqueraded", protocol) for protocol in ("udp", "tcp")]
    for flow in flows:
        insert(flow)
    assert enter(fast, most=1) == (1, False)
    assert [bool(flow.entries()) for flow in flows] == [False, True]


def test_without_the_conntrack_lookup_a_datagram_keeps_its_endpoint(node: ProgramNode) -> None:
    """Another proxy has chosen it, and the client has a permit for another endpoint."""
    with one_cpu():
        fast = fast_node(node, conntrack_lookup=False)
        fast.endpoint("remote", 0, protocol="udp")
        flow = Flow(fast, "udp")
        insert(flow)
        insert(Flow(fast, "tcp"))
        assert enter(fast) == (0, True), "they are not masqueraded"
        assert enter(fast, datagrams=True) == (1, True)
        assert flow.entries() == [False, True]
        flow.permit()
        assert flow.run().retval == GO_ON
        entry = flow.entry()
        assert entry is not None
        assert not entry["young"]


def test_xdp_does_not_ask_conntrack_and_needs_the_entry(node: ProgramNode) -> None:
    """As above, but the tc program finds the flow in conntrack."""
    with one_cpu():
        fast = fast_node(node, xdp=1)
        for service in (0, 2):
            fast.endpoint("remote", service, protocol="udp")
        flow = Flow(fast, "udp")
        places = ((flow.client, flow.sport), (flow.frontend, flow.port), (flow.endpoint, flow.endpoint_port))
        create_now([Entry(Protocol.UDP, *((fast.packed(name), port) for name, port in places))])
        flow.permit()
        assert (flow.run().retval, flow.entries()) == (GO_ON, [])
        assert enter(fast, datagrams=True) == (1, True)
        assert fast.run_xdp(flow.frame(), flow.entrance).retval == XDP_PASS
        entry = flow.entry()
        assert entry is not None
        assert not entry["young"]


@pytest.mark.parametrize(("lookup", "xdp", "asked"), [(True, False, True), (True, True, False), (False, False, False)])
def test_such_flows_are_entered_if_a_program_does_not_ask_conntrack(lookup: bool, xdp: bool, asked: bool) -> None:
    assert Settings(netns_cookie=1, conntrack_lookup=lookup, xdp=xdp).conntrack_is_asked is asked


def test_masqueraded_datagrams_come_before_others(fast: ProgramNode) -> None:
    flows = [Flow(fast, "udp", sport=41000), tracked(fast, "masqueraded", "udp")]
    for flow in flows:
        insert(flow)
    assert enter(fast, 1, datagrams=True) == (1, False)
    assert [bool(flow.entries()) for flow in flows] == [False, True]


def test_a_flow_that_is_translated_differently_leaves_the_table(fast: ProgramNode) -> None:
    """Its entry was out of date: netfilter decides."""
    flow = tracked(fast, "masqueraded")
    insert(flow)
    enter(fast)
    flow.snat_port = HIGH
    flow.pass_netfilter()
    assert fast.reasons()["FLOW_CHANGED"] == 1
    flow.snat_port = LOW
    assert flow.entries() == []


def test_the_sweep_keeps_a_tracked_flow_like_any_kernel_flow(fast: ProgramNode) -> None:
    flow = tracked(fast, "masqueraded")
    insert(flow)
    enter(fast)
    assert sweep(fast)["requested"] == 0
    assert flow.entries() == [False, True]
