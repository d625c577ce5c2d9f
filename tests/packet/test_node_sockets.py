# SPDX-License-Identifier: Apache-2.0
"""Masqueraded young flows leave the ports of the node's own sockets alone: conntrack does not know young flows, so the
endpoint's replies to the socket would go to the client of the flow.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.packet.fast_node import REDIRECT, VARIANTS, Flow, filtering_node, one_cpu
from tests.packet.program_node import XDP_TX, ProgramNode

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

#: The only two ports for masqueraded young flows.
TAKEN, FREE = 20000, 20001
FLOWS = 12


@pytest.fixture(params=["tc", "xdp"])
def fast(request: pytest.FixtureRequest, node: ProgramNode) -> Iterator[ProgramNode]:
    with one_cpu():
        yield filtering_node(node, snat_port_min=TAKEN, snat_port_max=FREE, xdp=int(request.param == "xdp"))


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_socket(world: ProgramNode, sockets: ExitStack, protocol: str, name: str) -> socket.socket:
    """A socket of the node that is bound to the port TAKEN of this address."""
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    opened = socket.socket(socket.AF_INET if world.family == 4 else socket.AF_INET6, kind)
    sockets.enter_context(opened)
    opened.setblocking(False)
    opened.bind((world.address(name), TAKEN))
    return opened


def ports_of_young_flows(world: ProgramNode, protocol: str) -> set[int]:
    """Open more flows of one pair than there are ports; returns the source ports that the endpoint sees."""
    flow = Flow(world, protocol, **VARIANTS["masqueraded"])
    flow.permit()
    ports = set()
    for number in range(FLOWS):
        each = Flow(world, protocol, **{**VARIANTS["masqueraded"], "sport": 42000 + number})
        frame = each.frame(flags="S", size=0)
        found = world.run_xdp(frame, each.entrance) if world.xdp else each.run(frame=frame)
        if found.retval in (REDIRECT, XDP_TX):
            ports.add(each.source_port(found))
    return ports


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_without_sockets_young_flows_use_all_ports(fast: ProgramNode, protocol: str) -> None:
    assert ports_of_young_flows(fast, protocol) == {TAKEN, FREE}


@pytest.mark.parametrize("name", ["node", "unspecified"])
def test_a_bound_udp_socket_keeps_its_port(fast: ProgramNode, sockets: ExitStack, name: str) -> None:
    open_socket(fast, sockets, "udp", name)
    assert ports_of_young_flows(fast, "udp") == {FREE}
    assert fast.reasons()["NEW_FLOW_FAST"] == 1


def test_a_connection_to_the_endpoint_keeps_its_port(fast: ProgramNode, sockets: ExitStack) -> None:
    connection = open_socket(fast, sockets, "tcp", "node")
    with pytest.raises(BlockingIOError):
        connection.connect((fast.address("remote"), 8080))
    assert ports_of_young_flows(fast, "tcp") == {FREE}


def test_a_listener_keeps_its_port(fast: ProgramNode, sockets: ExitStack) -> None:
    open_socket(fast, sockets, "tcp", "unspecified").listen()
    assert ports_of_young_flows(fast, "tcp") == {FREE}


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_socket_connected_elsewhere_takes_no_port(fast: ProgramNode, sockets: ExitStack, protocol: str) -> None:
    """Its peer's packets differ from the endpoint's."""
    connection = open_socket(fast, sockets, protocol, "node")
    if connection.type == socket.SOCK_STREAM:
        with pytest.raises(BlockingIOError):
            connection.connect((fast.address("local"), 8080))
    else:
        connection.connect((fast.address("local"), 8080))
    assert ports_of_young_flows(fast, protocol) == {TAKEN, FREE}


@pytest.mark.parametrize(("socket_protocol", "protocol"), [("tcp", "udp"), ("udp", "tcp")])
def test_a_socket_of_the_other_protocol_takes_no_port(
    fast: ProgramNode, sockets: ExitStack, socket_protocol: str, protocol: str
) -> None:
    opened = open_socket(fast, sockets, socket_protocol, "node")
    if socket_protocol == "tcp":
        opened.listen()
    assert ports_of_young_flows(fast, protocol) == {TAKEN, FREE}
