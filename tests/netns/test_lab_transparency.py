# SPDX-License-Identifier: Apache-2.0
"""Processes of the node and pods must not notice what the socket programs change: real sockets, used in every way that
applications use them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.lab.addresses import cluster_ip
from pyebpf_proxy.lab.client import ANSWERED, ask
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.manifests import Port, service, slices
from pyebpf_proxy.lab.namespace import Namespace
from tests.netns.io_uring_calls import io_uring_connect, supported
from tests.netns.small_dns import serve
from tests.netns.socket_calls import (
    TCP,
    UDP,
    Call,
    many_connected_and_named,
    service_then_endpoint,
    tcp_mapped,
    two_services,
    udp_mapped,
)
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import forget_old_pod_sources, reasons, served_by, wait_until

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 10)
PAIR = Kind("pair", 11)
SAME = Kind("same", 12)
DNS_PORTS = [Port("dns", 53, 5300, "UDP"), Port("dns-tcp", 53, 5300, "TCP")]
DNS_ADDRESS = cluster_ip(20)
FOUND = ("203.0.113.53", "2001:db8:53::53")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as made:
        first, second = made.nodes
        made.add_pod("asker", first, serve=False)
        server = made.add_pod("server", second)
        WEB.endpoints = SAME.endpoints = (server,)
        PAIR.endpoints = (server, made.add_pod("other", second))
        write_nodes(made)
        write_services(made, WEB, PAIR, SAME)
        dns = slices("dns", DNS_PORTS, [(server.address, second.name)])
        made.write("dns.yaml", [service("dns", DNS_PORTS, DNS_ADDRESS), *dns])
        resolver = server.namespace.start(serve, 5300, *FOUND)
        first.agent.start(own={"socketLB": "all"})
        first.agent.wait_synced()
        yield made
        resolver.stop()


class Side:
    """A client: a namespace and its address."""

    def __init__(self, namespace: Namespace, address: str) -> None:
        self.namespace = namespace
        self.address = address


@pytest.fixture(params=("node", "pod"))
def side(request: pytest.FixtureRequest, lab: Lab, family: int) -> Side:
    """A process of the node, or a pod whose sockets the node knows."""
    node = lab.nodes[0]
    if request.param == "node":
        return Side(node.namespace, node.address.of(family))
    pod = lab.pods["asker"]

    def by_socket() -> bool:
        before = reasons(node)
        kind = pod.namespace.call(ask, cluster_ip(WEB.number).of(family), 80).kind
        return kind == ANSWERED and served_by(before, reasons(node)) == {"socket": 1}

    forget_old_pod_sources(node)
    wait_until(by_socket, "the pod's sockets are translated", 60)
    return Side(pod.namespace, pod.address.of(family))


def check(lab: Lab, side: Side, call: Call, port: int, family: int) -> None:
    """``call`` gets its answers from the endpoint, and only socket programs translate."""
    place = cluster_ip(WEB.number).of(family), port
    before = reasons(lab.nodes[0])
    answers = side.namespace.call(call, place, side.address)
    assert answers
    for answer in answers:
        assert answer.pod == "server"
        assert answer.peer[0] == side.address
    counted = served_by(before, reasons(lab.nodes[0]))
    assert set(counted) == {"socket"}, counted


@pytest.mark.parametrize("call", TCP, ids=lambda call: call.__name__)
def test_tcp(lab: Lab, side: Side, family: int, call: Call) -> None:
    if call is tcp_mapped and family == 6:
        pytest.skip("is IPv4 on an IPv6 socket")
    check(lab, side, call, 80, family)


@pytest.mark.parametrize("call", UDP, ids=lambda call: call.__name__)
def test_udp(lab: Lab, side: Side, family: int, call: Call) -> None:
    if call is udp_mapped and family == 6:
        pytest.skip("is IPv4 on an IPv6 socket")
    check(lab, side, call, 53, family)


def test_a_message_to_the_peer_by_its_name_keeps_the_endpoint(lab: Lab, side: Side, family: int) -> None:
    """The kernel accepts datagrams of the connected endpoint only."""
    place = cluster_ip(PAIR.number).of(family), 53
    found = side.namespace.call(many_connected_and_named, place, side.address, 20)
    assert all(len(set(pods)) == 1 for pods in found), found
    assert {pods[0] for pods in found} == {"server", "other"}


def test_a_service_and_its_endpoint_by_one_socket(lab: Lab, side: Side, family: int) -> None:
    place = cluster_ip(WEB.number).of(family), 53
    side.namespace.call(service_then_endpoint, place, (lab.pods["server"].address.of(family), 5353))


def test_two_services_of_one_endpoint_by_one_socket(lab: Lab, side: Side, family: int) -> None:
    """A datagram comes from the service that was asked last."""
    first, second = (cluster_ip(kind.number).of(family) for kind in (WEB, SAME))
    side.namespace.call(two_services, (first, 53), (second, 53))


def test_io_uring(lab: Lab, side: Side, family: int) -> None:
    why = supported()
    if why:
        pytest.skip(why)
    check(lab, side, io_uring_connect, 80, family)


def _listen(place: tuple[str, int]) -> None:
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            connection.close()


def test_a_listener_on_the_port_of_a_node_port(lab: Lab, side: Side, family: int) -> None:
    """The port is free to listen on, and requests to the NodePort reach the service."""
    node = lab.nodes[0]
    place = node.address.of(family), WEB.target("NodePort", node).ports["tcp"]
    listener = node.namespace.start(_listen, place)
    try:
        wait_until(lambda: node.namespace.run("ss", "-Hltn", f"sport = :{place[1]}"), "a server listens")
        for _ in range(4):
            outcome = side.namespace.call(ask, *place)
            assert outcome.answer is not None, outcome
            assert outcome.answer.pod == "server"
            assert outcome.peer == place
    finally:
        listener.stop()


@pytest.mark.parametrize("name", ["small.test", "big.test"])
def test_name_resolution_by_the_c_library(lab: Lab, side: Side, family: int, name: str, tmp_path: Path) -> None:
    """Over UDP, and over TCP for large answers."""
    configuration = tmp_path / "resolv.conf"
    configuration.write_text(f"nameserver {DNS_ADDRESS.of(family)}\noptions timeout:5 attempts:6\n")
    script = f"mount --bind {configuration} /etc/resolv.conf && exec getent ahosts {name}"
    before = reasons(lab.nodes[0])
    found = side.namespace.run("unshare", "-m", "sh", "-c", script)
    assert {line.split()[0] for line in found.splitlines()} == set(FOUND)
    counted = served_by(before, reasons(lab.nodes[0]))
    assert set(counted) == {"socket"}, counted
