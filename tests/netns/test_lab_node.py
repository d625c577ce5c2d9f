# SPDX-License-Identifier: Apache-2.0
"""The node's own processes: translated at connect and sendmsg, without NAT (spec/service-semantics §§5, 8)."""

from __future__ import annotations

import contextlib
import errno
import itertools
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest

from pyebpf_proxy.lab.addresses import Dual
from pyebpf_proxy.lab.client import ANSWERED, REFUSED, ask, ask_many, family_of, read_answer
from pyebpf_proxy.lab.cluster import Lab, Node
from pyebpf_proxy.lab.load import Load, failed
from pyebpf_proxy.lab.servers import Ports
from tests.netns.socket_calls import ask_on_command, source_info
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import counted_between, reasons, wait_until
from tests.support.see_tools import answer

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 10)
EMPTY = Kind("empty", 11)
HOST = Kind("host", 12)
LOOPBACK = Dual("127.0.0.1", "::1")
LOOPBACK_METRIC = "kubeproxy_iptables_localhost_nodeports_accepted_packets_total"


@pytest.fixture(scope="module")
def node_lab() -> Iterator[Lab]:
    with Lab() as lab:
        first, second = lab.nodes
        WEB.endpoints = (lab.add_pod("web-1", first), lab.add_pod("web-2", second))
        write_nodes(lab)
        write_services(lab, WEB, EMPTY)
        lab.start_agents()
        yield lab


@pytest.fixture(autouse=True)
def usual_configuration(node_lab: Lab) -> Iterator[None]:
    """Restore the usual configuration after tests that restart the agents with other settings."""
    yield
    for node in node_lab.nodes:
        if node.agent.process is None:
            node.agent.start()
            node.agent.wait_synced()


def test_tcp_is_connected_directly_to_the_endpoint(node_lab: Lab, family: int) -> None:
    node = node_lab.nodes[0]
    before = reasons(node)
    address = WEB.target("ClusterIP", node).address.of(family)
    outcomes = node.namespace.call(ask_many, 20, address, 80)
    assert {outcome.kind for outcome in outcomes} == {ANSWERED}
    counted = counted_between(before, reasons(node))
    assert counted == {"new_flow_socket": 20}, counted  # none of its packets was translated
    for outcome in outcomes:
        assert outcome.answer is not None
        # No NAT: the endpoint sees the socket's own address and port.
        assert outcome.answer.peer == outcome.local


# conntrack keeps a flow for two minutes. A port that was used would belong to that flow, with its source.
_PORTS = itertools.count(20000)


def _bound(place: tuple[str, int], source: str, port: int, protocol: str) -> tuple[str, tuple[str, int], int]:
    """Use a bound, connected socket. Returns the source that the endpoint saw, the socket's own name, and the mark."""
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    with socket.socket(family_of(place[0]), kind) as sock:
        sock.settimeout(10)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 0x55)
        sock.bind((source, port))
        sock.connect(place)
        assert sock.getpeername()[:2] == place
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        text = sock.recv(65536)
        answer = read_answer(text.partition(b"\r\n\r\n")[2] if protocol == "tcp" else text)
        name = sock.getsockname()
        return answer.peer[0], (name[0], name[1]), sock.getsockopt(socket.SOL_SOCKET, socket.SO_MARK)


@pytest.mark.parametrize("place", ["external", "node port", "loopback"])
def test_a_bound_source_is_masqueraded(node_lab: Lab, family: int, protocol: str, place: str) -> None:
    """The endpoint sees the address of the egress interface (§5), whatever address the socket is bound to."""
    if place == "loopback" and family == 6:
        return  # NodePorts are not served there
    node = node_lab.nodes[0]
    target = WEB.target("NodePort" if place != "external" else "LoadBalancer", node)
    asked = (LOOPBACK if place == "loopback" else target.address).of(family), target.ports[protocol]
    both = WEB.endpoints
    try:
        for endpoint in both:
            WEB.endpoints = (endpoint,)
            node_lab.wait_synced(write_services(node_lab, WEB))
            for source in (node.address, node.gateway, LOOPBACK):
                if source is LOOPBACK and family == 6:
                    continue  # ::1 never leaves the machine
                seen, name, mark = node.namespace.call(_bound, asked, source.of(family), next(_PORTS), protocol)
                assert seen == node.source_towards(endpoint).of(family), (source, endpoint.name)
                assert name[0] == source.of(family)
                assert mark & ~0x4000 == 0x55
    finally:
        WEB.endpoints = both
        node_lab.wait_synced(write_services(node_lab, WEB))


def _messages(
    places: list[tuple[str, int]], source: str, port: int, named: bool, mark: int
) -> tuple[list[tuple[str, int]], list[int]]:
    """Use an unconnected socket that is bound, or messages that set their source. Returns the sources that the servers
    saw, and the marks.
    """
    family = family_of(places[0][0])
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(10)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
        sock.bind(("" if named else source, port))
        info = source_info(source) if named else []
        seen, marks = [], []
        for place in places:
            sock.sendmsg([b"who"], info, 0, place)
            text, sender = sock.recvfrom(65536)
            assert sender[:2] == place
            seen.append(read_answer(text).peer)
            marks.append(sock.getsockopt(socket.SOL_SOCKET, socket.SO_MARK))
        return seen, marks


@pytest.mark.parametrize("named", [False, True], ids=["bound", "in the message"])
@pytest.mark.parametrize("place", ["external", "node port", "loopback"])
def test_the_source_of_a_message_is_masqueraded(node_lab: Lab, family: int, place: str, named: bool) -> None:
    """The same for unconnected sockets; messages to other addresses keep their source, at once and later."""
    if place == "loopback" and family == 6:
        return  # NodePorts are not served there
    node = node_lab.nodes[0]
    target = WEB.target("NodePort" if place != "external" else "LoadBalancer", node)
    asked = (LOOPBACK if place == "loopback" else target.address).of(family), target.ports["udp"]
    both = WEB.endpoints
    try:
        for endpoint, other in (both, both[::-1]):
            straight = other.address.of(family), 5353
            WEB.endpoints = (endpoint,)
            node_lab.wait_synced(write_services(node_lab, WEB))
            # Without a proxy no packet from a loopback address leaves the node.
            sources = [(node.address, True), (node.gateway, True)] + ([(LOOPBACK, False)] if family == 4 else [])
            for source, leaves in sources:
                places = [asked, straight, asked, asked, straight] if leaves else [asked, asked]
                seen, marks = node.namespace.call(_messages, places, source.of(family), next(_PORTS), named, 0x55)
                for where, (peer, _), mark in zip(places, seen, marks, strict=True):
                    hidden = where == asked
                    expected = node.source_towards(endpoint) if hidden else source
                    assert peer == expected.of(family), (source, endpoint.name, places)
                    assert mark == (0x4055 if hidden else 0x55)
                # One flow each, as for conntrack.
                assert len({peer for where, peer in zip(places, seen, strict=True) if where == asked}) == 1
                # A bit that the application has set stays.
                _, marks = node.namespace.call(_messages, places[:3], source.of(family), next(_PORTS), named, 0x4055)
                assert set(marks) == {0x4055}
    finally:
        WEB.endpoints = both
        node_lab.wait_synced(write_services(node_lab, WEB))


def _message_then_connection(asked: tuple[str, int], peer: tuple[str, int], source: str, port: int, named: bool) -> str:
    """A bound socket sends a message, and then connects elsewhere: the source that the peer saw."""
    with socket.socket(family_of(asked[0]), socket.SOCK_DGRAM) as sock:
        sock.settimeout(5)
        sock.bind((source, port))
        sock.sendto(b"who", asked)
        assert sock.recvfrom(65536)[1][:2] == asked
        sock.connect(peer)
        if named:
            sock.sendto(b"who", peer)
        else:
            sock.send(b"who")
        return read_answer(sock.recv(65536)).peer[0]


@pytest.mark.parametrize("named", [False, True], ids=["sent", "sent by name"])
def test_a_connection_after_a_message_is_masqueraded_by_its_own_policy(node_lab: Lab, family: int, named: bool) -> None:
    """The bit of the message does not stay, and that of the connection does."""
    node = node_lab.nodes[0]
    first, second = both = WEB.endpoints
    vip = WEB.target("LoadBalancer", node).address.of(family), 53
    other_vip = EMPTY.target("LoadBalancer", node).address.of(family), 53
    straight = second.address.of(family), 5353
    source = node.gateway.of(family)
    try:
        WEB.endpoints, EMPTY.endpoints = (first,), (second,)
        node_lab.wait_synced(write_services(node_lab, WEB, EMPTY))
        for peer, expected in ((other_vip, node.source_towards(second).of(family)), (straight, source)):
            seen = node.namespace.call(_message_then_connection, vip, peer, source, next(_PORTS), named)
            assert seen == expected, peer
    finally:
        WEB.endpoints, EMPTY.endpoints = both, ()
        node_lab.wait_synced(write_services(node_lab, WEB, EMPTY))


def test_getpeername_shows_the_service(node_lab: Lab, family: int, protocol: str) -> None:
    node = node_lab.nodes[0]
    for kind in ("ClusterIP", "LoadBalancer", "NodePort"):
        target = WEB.target(kind, node)  # type: ignore[arg-type]
        asked = (target.address.of(family), target.ports[protocol])
        outcome = node.namespace.call(ask, *asked, protocol)
        assert outcome.kind == ANSWERED, outcome
        assert outcome.peer == asked


def test_unconnected_udp_answers_seem_to_come_from_the_service(node_lab: Lab, family: int) -> None:
    node = node_lab.nodes[0]
    for kind in ("ClusterIP", "LoadBalancer", "NodePort"):
        target = WEB.target(kind, node)  # type: ignore[arg-type]
        asked = (target.address.of(family), target.ports["udp"])
        for outcome in node.namespace.call(ask_many, 8, *asked, "udp", connected=False):
            assert outcome.kind == ANSWERED, outcome
            assert outcome.peer == asked


def test_unconnected_udp_to_a_pod_itself_keeps_the_pods_address(node_lab: Lab, family: int) -> None:
    pod = WEB.endpoints[1]
    asked = (pod.address.of(family), 5353)
    outcome = node_lab.nodes[0].namespace.call(ask, *asked, "udp", connected=False)
    assert outcome.peer == asked, outcome


def _answered(place: tuple[str, int], asker: tuple[str, int]) -> tuple[str, int]:
    """A server at ``place`` answers a client at ``asker``: from where, as the client sees it."""
    family = family_of(place[0])
    with socket.socket(family, socket.SOCK_DGRAM) as server, socket.socket(family, socket.SOCK_DGRAM) as client:
        server.bind(place)
        client.bind(asker)
        for sock in (server, client):
            sock.settimeout(5)
        for _ in range(2):
            client.sendto(b"question", place)
            text, sender = server.recvfrom(100)
            assert sender[:2] == asker
            server.sendto(text, sender)
            text, sender = client.recvfrom(100)
            assert text == b"question"
        return sender[0], sender[1]


def test_an_answer_to_the_number_of_a_node_port(node_lab: Lab, family: int) -> None:
    """A client of a server on the node, whose port happens to be a NodePort's number, gets its answer."""
    node = node_lab.nodes[0]
    for address in (node.address.of(family), LOOPBACK.of(family)):
        for kind in (WEB, EMPTY):
            place, asker = (address, 5999), (address, kind.target("NodePort", node).ports["udp"])
            assert node.namespace.call(_answered, place, asker) == place


def test_no_endpoints_is_econnrefused(node_lab: Lab, family: int, protocol: str) -> None:
    """Not for a VIP: in iptables mode the node's own packets to a VIP are not refused (docs/data-plane.md)."""
    node = node_lab.nodes[0]
    for kind in ("ClusterIP", "NodePort"):
        target = EMPTY.target(kind, node)  # type: ignore[arg-type]
        asked = (target.address.of(family), target.ports[protocol])
        outcomes = node.namespace.call(ask_many, 3, *asked, protocol)
        assert {outcome.kind for outcome in outcomes} == {REFUSED}, outcomes
        # At once, unless the machine pauses.
        assert min(outcome.took for outcome in outcomes) < 0.5, outcomes
    if protocol == "udp":
        assert node.namespace.call(ask, *asked, "udp", connected=False).kind == REFUSED


def test_only_sockets_of_the_agents_namespace_are_translated(node_lab: Lab, family: int) -> None:
    """All these processes are in one cgroup. The core has no agent and no route to ClusterIPs, so it gets no answer."""
    address = WEB.target("ClusterIP", node_lab.nodes[0]).address.of(family)
    before = [reasons(node) for node in node_lab.nodes]
    outcome = node_lab.core.call(ask, address, 80, timeout=0.5)
    assert outcome.answer is None, outcome
    assert [reasons(node) for node in node_lab.nodes] == before
    # and each node's programs serve only their node
    for index, node in enumerate(node_lab.nodes):
        assert node.namespace.call(ask, address, 80).kind == ANSWERED
        counted = [counted_between(old, reasons(each)) for old, each in zip(before, node_lab.nodes, strict=True)]
        assert counted[index] == {"new_flow_socket": 1}
        before = [reasons(each) for each in node_lab.nodes]


def test_node_port_on_every_address_of_the_node(node_lab: Lab, family: int, protocol: str) -> None:
    node = node_lab.nodes[0]
    for address in (node.address.of(family), node.gateway.of(family)):
        port = WEB.target("NodePort", node).ports[protocol]
        outcome = node.namespace.call(ask, address, port, protocol)
        assert outcome.kind == ANSWERED, (address, outcome)
        assert outcome.peer == (address, port)


def test_node_port_on_loopback_is_for_ipv4_in_iptables_mode(node_lab: Lab, family: int, protocol: str) -> None:
    node = node_lab.nodes[0]
    port = WEB.target("NodePort", node).ports[protocol]
    before = accepted_on_loopback(node)
    outcome = node.namespace.call(ask, LOOPBACK.of(family), port, protocol)
    assert outcome.kind == (ANSWERED if family == 4 else REFUSED), outcome
    if family == 4:
        assert outcome.peer == ("127.0.0.1", port)
        other = node.namespace.call(ask, "127.1.2.3", port, protocol)
        assert other.kind == ANSWERED, other
    # kube-proxy's rule counts each flow once; other addresses of the node do not count.
    assert node.namespace.call(ask, node.address.v4, port, protocol).kind == ANSWERED
    assert accepted_on_loopback(node) == before + (2 if family == 4 else 0)


def accepted_on_loopback(node: Node) -> int:
    """kube-proxy's metric of mode iptables, from the agent."""
    lines = node.agent.metrics().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{LOOPBACK_METRIC} "))
    return int(float(value))


@pytest.mark.parametrize("socket_lb", ["node", "off"])
@pytest.mark.parametrize(("networks", "answers"), [
    (["127.0.0.0/8", "192.0.2.0/24"], {"127.0.0.1"}),
    (["127.0.0.0/31"], {"127.0.0.1"}),
    (["127.1.2.0/24"], set()),
    (["127.1.2.0/24", "0.0.0.0/0"], {"127.0.0.1", "127.1.2.3"}),
])  # fmt: skip
def test_listed_networks_serve_node_ports_at_the_one_loopback_address_of_the_node(
    node_lab: Lab, networks: list[str], answers: set[str], socket_lb: str
) -> None:
    """spec/service-semantics §8: "interface addresses inside one of the CIDRs"; 127.1.2.3 is on no interface."""
    node = node_lab.nodes[0]
    node.agent.stop()
    node.agent.start({"mode": "iptables", "nodePortAddresses": networks}, own={"socketLB": socket_lb})
    node.agent.wait_synced()
    for protocol, port in WEB.target("NodePort", node).ports.items():
        for address in ("127.0.0.1", "127.1.2.3"):
            outcome = node.namespace.call(ask, address, port, protocol)
            assert outcome.kind == (ANSWERED if address in answers else REFUSED), (address, outcome)


@pytest.mark.parametrize(
    ("networks", "answers"),
    [
        (["127.0.0.0/8"], {"127.0.0.1", "127.1.2.3"}),
        (["127.1.2.3/32"], {"127.1.2.3"}),
        (["127.0.0.1/32"], {"127.0.0.1"}),
    ],
)
def test_node_ports_at_listed_loopback_addresses_that_are_on_a_device(
    node_lab: Lab, networks: list[str], answers: set[str]
) -> None:
    """As with kube-proxy, which reads the node's addresses. 127.1.2.4 is on no device."""
    node = node_lab.nodes[0]
    node.agent.stop()
    node.namespace.ip("address add 127.1.2.3/8 dev lo")
    try:
        node.agent.start({"mode": "iptables", "nodePortAddresses": networks})
        node.agent.wait_synced()
        for protocol, port in WEB.target("NodePort", node).ports.items():
            for address in ("127.1.2.3", "127.1.2.4", "127.0.0.1"):
                outcome = node.namespace.call(ask, address, port, protocol)
                assert outcome.kind == (ANSWERED if address in answers else REFUSED), (address, outcome)
                view = answer(node, "explain", "127.0.0.1", f"{address}:{port}", protocol)
                assert (view["verdict"] != "left") == (address in answers), view
    finally:
        node.namespace.ip("address delete 127.1.2.3/8 dev lo")
        node.agent.stop()


@pytest.mark.parametrize("config", [
    {"iptables": {"localhostNodePorts": False, "minSyncPeriod": "10ms"}},
    {"mode": "nftables", "nftables": {"minSyncPeriod": "10ms"}},
], ids=["switched off", "nftables"])  # fmt: skip
def test_node_port_on_loopback_switched_off(node_lab: Lab, config: dict[str, object]) -> None:
    node = node_lab.nodes[0]
    node.agent.stop()
    node.agent.start(config)
    node.agent.wait_synced()
    for protocol, port in WEB.target("NodePort", node).ports.items():
        assert node.namespace.call(ask, "127.0.0.1", port, protocol).kind == REFUSED
        assert node.namespace.call(ask, node.address.v4, port, protocol).kind == ANSWERED
    # As with kube-proxy: only in mode iptables, with any value of localhostNodePorts.
    assert (f"\n{LOOPBACK_METRIC} " in node.agent.metrics()) == ("mode" not in config)
    node.agent.stop()


def test_mode_ipvs_without_socket_programs_serves_no_node_port_on_loopback(node_lab: Lab) -> None:
    """As kube-proxy's: without route_localnet the kernel drops a packet from 127.0.0.1 that nftables has translated."""
    node = node_lab.nodes[0]
    node.agent.stop()
    node.namespace.sysctl({"net.ipv4.conf.all.route_localnet": 0})
    node.agent.start({"mode": "ipvs"}, own={"socketLB": "off"})
    node.agent.wait_synced()
    for protocol, port in WEB.target("NodePort", node).ports.items():
        assert node.namespace.call(ask, "127.0.0.1", port, protocol).kind == REFUSED
        assert node.namespace.call(ask, node.address.v4, port, protocol).kind == ANSWERED
        assert answer(node, "explain", "127.0.0.1", f"127.0.0.1:{port}", protocol)["verdict"] == "left"
    node.agent.stop()


def test_node_port_addresses_select_where_node_ports_are_served(node_lab: Lab, family: int, protocol: str) -> None:
    node = node_lab.nodes[0]
    node.agent.stop()
    node.agent.start({"nodePortAddresses": ["192.0.2.0/24", "2001:db8:1::/64"]})
    node.agent.wait_synced()
    port = WEB.target("NodePort", node).ports[protocol]
    for namespace in (node.namespace, node_lab.client):
        assert namespace.call(ask, node.address.of(family), port, protocol).kind == ANSWERED
        assert namespace.call(ask, node.gateway.of(family), port, protocol).kind == REFUSED
    node.agent.stop()


def test_endpoint_in_the_nodes_own_network(node_lab: Lab, family: int, protocol: str) -> None:
    """A pod with hostNetwork: its address is the node's, outside the pod network."""
    first, second = node_lab.nodes
    first.serve(Ports(http=(9080,), echo=(), udp=(9053,)))
    target_port = {"tcp": 9080, "udp": 9053}[protocol]
    port = next(each for each in HOST.ports if each.protocol == protocol.upper())
    port.target = target_port
    HOST.endpoints = ()
    objects = HOST.objects()
    for index, made in enumerate(objects[1:]):
        made["endpoints"] = [{"addresses": [first.address[index]], "nodeName": first.name}]
    try:
        node_lab.wait_synced(node_lab.write("host.yaml", objects))
        asked = (HOST.target("ClusterIP", first).address.of(family), port.port, protocol)
        outside = HOST.target("LoadBalancer", first)
        namespaces = [first.namespace, second.namespace, WEB.endpoints[0].namespace, WEB.endpoints[1].namespace]
        outcomes = [namespace.call(ask, *asked) for namespace in namespaces]
        outcomes.append(node_lab.client.call(ask, outside.address.of(family), port.port, protocol))
        for outcome in outcomes:
            assert outcome.answer is not None, outcome
            assert outcome.answer.pod == "host-node1"
        # pod sources are kept towards the ClusterIP
        for pod, outcome in zip(WEB.endpoints, outcomes[2:4], strict=True):
            assert outcome.answer is not None
            assert outcome.answer.peer[0] == pod.address.of(family)
    finally:
        first.stop_servers()
        first._servers.clear()


def _until_aborted(address: str, rounds: Connection) -> str:
    """A connected socket that sends a request for each word from the pipe; returns how its owner learns that it was
    ended.
    """
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as sock:
        sock.connect((address, 53))
        sock.settimeout(10)
        rounds.send("up")
        while rounds.recv():
            try:
                sock.send(b"question")
                rounds.send(read_answer(sock.recv(1000)).pod)
            except OSError as error:
                rounds.send(errno.errorcode[error.errno or 0])
    return "done"


def test_a_connected_udp_socket_ends_with_its_endpoint(node_lab: Lab, family: int) -> None:
    """The agent ends the socket when other endpoints serve: its owner connects again, as after any error (§10)."""
    node = node_lab.nodes[0]
    both = WEB.endpoints
    channel, other_end = multiprocessing.Pipe()
    with channel:
        try:
            WEB.endpoints = both[:1]
            node_lab.wait_synced(write_services(node_lab, WEB))
            task = node.namespace.start(_until_aborted, WEB.target("ClusterIP", node).address.of(family), other_end)
            other_end.close()
            assert channel.recv() == "up"

            def answer() -> str:
                channel.send(True)
                return str(channel.recv())

            assert answer() == "web-1"
            WEB.endpoints = both
            node_lab.wait_synced(write_services(node_lab, WEB))
            assert answer() == "web-1", "additional endpoints do not end it"
            WEB.endpoints = both[1:]
            node_lab.wait_synced(write_services(node_lab, WEB))
            # A read fails with ECONNABORTED; a write finds the socket unconnected.
            wait_until(lambda: answer() == "EDESTADDRREQ", "the socket is ended")
            channel.send(False)
            assert task.result() == "done"
        finally:
            WEB.endpoints = both
            node_lab.wait_synced(write_services(node_lab, WEB))


def _ends(answer: Callable[[], str]) -> None:
    wait_until(lambda: os.strerror(errno.EDESTADDRREQ) in answer(), "the socket is ended", 30)


@contextlib.contextmanager
def _connected(node: Node, place: tuple[str, int]) -> Iterator[Callable[[], str]]:
    """A connected UDP socket: the function asks once, and returns who answered, or the error."""
    channel, other_end = multiprocessing.Pipe()
    with channel:
        task = node.namespace.start(ask_on_command, place, True, other_end)
        other_end.close()
        assert channel.recv() == ("up", place)

        def answer() -> str:
            channel.send(True)
            return str(channel.recv()[0])

        yield answer
        channel.send(False)
        assert task.result() == "done"


def test_a_socket_that_was_connected_before_there_was_the_service_is_ended(node_lab: Lab, family: int) -> None:
    """No program runs when it sends. Its owner connects again, and the socket is translated (§10)."""
    node = node_lab.nodes[0]
    late = Kind(f"late-{family}", 20 + family)
    late.endpoints = WEB.endpoints
    place = late.target("ClusterIP", node).address.of(family), 53
    with _connected(node, place) as answer:
        node_lab.wait_synced(write_services(node_lab, late))
        _ends(answer)
    with _connected(node, place) as answer:
        assert answer().startswith("web-")


def test_a_socket_that_was_connected_before_the_service_had_the_address_is_ended(node_lab: Lab, family: int) -> None:
    """An external address may come later than the Service and its endpoints."""
    node = node_lab.nodes[0]
    late = Kind(f"late-address-{family}", 30 + family)
    late.endpoints = WEB.endpoints
    place = Dual("198.51.100.77", "2001:db8:77::77").of(family), 53
    objects = late.objects()
    objects[0]["spec"]["externalIPs"] = []
    node_lab.wait_synced(node_lab.write("late-address.yaml", objects))
    with _connected(node, place) as answer:
        # It takes so long that the agent has looked at sockets because of the new endpoints.
        assert answer() == "timed out"
        objects[0]["spec"]["externalIPs"] = [place[0]]
        node_lab.wait_synced(node_lab.write("late-address.yaml", objects))
        _ends(answer)
    with _connected(node, place) as answer:
        assert answer().startswith("web-")


def test_a_socket_lives_from_its_entry_in_conntrack_and_no_longer(node_lab: Lab, family: int) -> None:
    """As after a take-over from kube-proxy: nft rules have translated its flow, which programs cannot see."""
    node = node_lab.nodes[0]
    place = WEB.target("ClusterIP", node).address.of(family), 53
    node.agent.stop()
    node.agent.start(own={"socketLB": "off"})
    node.agent.wait_synced()
    with _connected(node, place) as answer:
        pod = answer()
        assert pod.startswith("web-")
        node.agent.stop()
        node.agent.start()
        node.agent.wait_synced()
        begin = time.monotonic()
        while time.monotonic() < begin + 12:
            assert answer() == pod
            time.sleep(1)
        node.namespace.run("conntrack", "-D", "-p", "udp", "--dport", "53", "-f", f"ipv{family}")
        _ends(answer)


def test_a_mark_that_is_restored_on_output_erases_no_masquerade(node_lab: Lab, family: int, protocol: str) -> None:
    """CONNMARK --restore-mark in mangle OUTPUT, which comes before NAT."""
    node = node_lab.nodes[0]
    target = WEB.target("LoadBalancer", node)
    asked = target.address.of(family), target.ports[protocol]
    both = WEB.endpoints
    node.namespace.run("nft", "add table inet mangling")
    try:
        node.namespace.run("nft", "add chain inet mangling restore { type route hook output priority -150 ; }")
        node.namespace.run("nft", "add rule inet mangling restore meta mark set ct mark")
        WEB.endpoints = both[1:]
        node_lab.wait_synced(write_services(node_lab, WEB))
        source = node.gateway.of(family)
        seen, _, _ = node.namespace.call(_bound, asked, source, next(_PORTS), protocol)
        assert seen == node.source_towards(both[1]).of(family)
    finally:
        node.namespace.run("nft", "delete table inet mangling")
        WEB.endpoints = both
        node_lab.wait_synced(write_services(node_lab, WEB))


def test_an_unconnected_socket_keeps_an_endpoint_that_terminates(node_lab: Lab, family: int) -> None:
    """While it serves, and whatever the policies are by now: they are for new flows (§§5, 10)."""
    node = node_lab.nodes[0]
    place = WEB.target("LoadBalancer", node).address.of(family), 53
    channel, other_end = multiprocessing.Pipe()
    both = WEB.endpoints
    with channel:
        try:
            WEB.endpoints = both[:1]
            node_lab.wait_synced(write_services(node_lab, WEB))
            task = node.namespace.start(ask_on_command, place, False, other_end)
            other_end.close()
            assert channel.recv() == ("up", place)

            def answers() -> set[str]:
                found = set()
                for _ in range(4):
                    channel.send(True)
                    pod, sender = channel.recv()
                    assert sender == place, pod
                    found.add(pod)
                return found

            assert answers() == {"web-1"}
            WEB.endpoints = both
            for serving, ranges, expected in (
                (True, [], "web-1"),
                (True, ["192.0.2.99/32", "2001:db8::99/128"], "web-1"),
                (False, [], "web-2"),
            ):
                made = WEB.objects()
                made[0]["spec"]["loadBalancerSourceRanges"] = ranges
                for each in made[1:]:
                    conditions = {"ready": False, "serving": serving, "terminating": True}
                    each["endpoints"][0]["conditions"] = conditions
                node_lab.wait_synced(node_lab.write("web.yaml", made))
                new = node.namespace.call(ask, *place, "udp", connected=False, timeout=2)
                assert (new.answer is None) == bool(ranges), new
                assert answers() == {expected}, (serving, ranges)
            channel.send(False)
            assert task.result() == "done"
        finally:
            WEB.endpoints = both
            node_lab.wait_synced(write_services(node_lab, WEB))


def _asked_at(place: tuple[str, int], moments: list[float], count: int) -> list[set[str]]:
    """Unconnected sockets that all ask at these moments (seconds): who answered each of them."""
    socks = [socket.socket(family_of(place[0]), socket.SOCK_DGRAM) for _ in range(count)]
    found: list[set[str]] = [set() for _ in socks]
    begin = time.monotonic()
    for moment in moments:
        time.sleep(max(0.0, begin + moment - time.monotonic()))
        for sock, pods in zip(socks, found, strict=True):
            sock.settimeout(5)
            sock.sendto(b"who", place)
            pods.add(read_answer(sock.recvfrom(65536)[0]).pod)
    for sock in socks:
        sock.close()
    return found


def test_an_unconnected_socket_keeps_its_endpoint_by_the_timeouts_of_conntrack(node_lab: Lab, family: int) -> None:
    """The longer one is for a flow that is answered after two seconds."""
    node = node_lab.nodes[0]
    node.agent.stop()
    node.agent.start({"conntrack": {"udpTimeout": "2s", "udpStreamTimeout": "60s"}})
    try:
        node.agent.wait_synced()
        place = WEB.target("ClusterIP", node).address.of(family), 53
        changed = [len(pods) for pods in node.namespace.call(_asked_at, place, [0, 3], 16)]
        assert set(changed) == {1, 2}
        kept = [len(pods) for pods in node.namespace.call(_asked_at, place, [0, 1, 2, 3, 6], 16)]
        assert set(kept) == {1}
    finally:
        node.agent.stop()
        node.namespace.run("sysctl", "-qw", "net.netfilter.nf_conntrack_udp_timeout=30")
        node.namespace.run("sysctl", "-qw", "net.netfilter.nf_conntrack_udp_timeout_stream=120")


def test_sockets_are_translated_without_the_agent(node_lab: Lab) -> None:
    """connect continues while the agent is stopped and started."""
    node = node_lab.nodes[0]
    target = WEB.target("ClusterIP", node)
    loads = [Load(node.namespace, target.address.v4, 80), Load(node.namespace, target.address.v6, 53, "udp")]
    node.agent.kill()
    node.agent.start()
    node.agent.wait_synced()
    for load in loads:
        samples = load.stop()
        assert samples
        assert not failed(samples)
