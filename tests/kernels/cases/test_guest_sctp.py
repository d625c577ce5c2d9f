# SPDX-License-Identifier: Apache-2.0
"""SCTP with sockets at both ends: through each kind of address, from outside, from pods and from the node."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from pyebpf_proxy.lab.addresses import CLIENT
from pyebpf_proxy.lab.client import family_of
from pyebpf_proxy.lab.cluster import Lab, Pod
from pyebpf_proxy.lab.manifests import Port
from pyebpf_proxy.lab.namespace import Namespace
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import counted_between, reasons, wait_until

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

PORT = 3868
STREAM = Kind("stream", 15)
EMPTY = Kind("empty", 16)
for kind in (STREAM, EMPTY):
    kind.ports = [Port("sctp", 36412, PORT, "SCTP", 31000 + kind.number)]


@pytest.fixture(scope="module")
def streams(needs_module: Callable[..., None]) -> Iterator[Lab]:
    needs_module("sctp")
    with Lab() as lab, ExitStack() as servers:
        pods = [lab.add_pod("near", lab.nodes[0]), lab.add_pod("far", lab.nodes[1])]
        lab.add_pod("toolbox", lab.nodes[0])
        STREAM.endpoints = tuple(pods)
        write_nodes(lab)
        write_services(lab, STREAM, EMPTY)
        for pod in pods:
            for address in pod.address:
                servers.callback(pod.namespace.start(_serve, pod.name, address).stop)
        for pod in pods:
            wait_until(lambda pod=pod: _listens(pod), f"{pod.name} listens")  # type: ignore[misc]
        lab.start_agents()
        yield lab


# Bound sockets do not list their other addresses to the peer: NAT cannot follow several paths.


def _serve(name: str, address: str) -> None:
    """Send its name and the client's address to each association."""
    with socket.socket(family_of(address), socket.SOCK_STREAM, socket.IPPROTO_SCTP) as listener:
        listener.bind((address, PORT))
        listener.listen(64)
        while True:
            peer, client = listener.accept()
            with peer:
                peer.sendall(f"{name} {client[0]}".encode())


def _listens(pod: Pod) -> bool:
    """Both listeners are among the endpoints: ``LPORT`` is the sixth column."""
    rows = pod.namespace.run("cat", "/proc/net/sctp/eps").splitlines()[1:]
    return sum(row.split()[5] == str(PORT) for row in rows) == 2


def _ask(address: str, port: int, source: str = "") -> tuple[str, str]:
    """The server that answered, and the source that it saw."""
    with socket.socket(family_of(address), socket.SOCK_STREAM, socket.IPPROTO_SCTP) as sock:
        sock.settimeout(10)
        if source:
            sock.bind((source, 0))
        sock.connect((address, port))
        pod, _, seen = sock.recv(200).decode().partition(" ")
        return pod, seen


def _both(namespace: Namespace, address: str, port: int, source: str = "") -> dict[str, str]:
    """Ask until each endpoint has answered; returns the source that each one saw."""
    seen: dict[str, str] = {}

    def done() -> bool:
        pod, client = namespace.call(_ask, address, port, source)
        assert seen.setdefault(pod, client) == client
        return len(seen) == 2

    wait_until(done, "both endpoints have answered", 60)
    return seen


def test_an_outside_client_by_vip_and_node_port(streams: Lab, family: int) -> None:
    first = streams.nodes[0]
    for what in ("LoadBalancer", "NodePort"):
        target = STREAM.target(what, first)
        before = reasons(first)
        port = 36412 if what == "LoadBalancer" else 31015
        seen = _both(streams.client, target.address.of(family), port, CLIENT.of(family))
        assert seen == {pod.name: first.source_towards(pod).of(family) for pod in STREAM.endpoints}
        counted = counted_between(before, reasons(first))
        # SCTP flows are never young.
        assert counted["new_flow_netfilter"] >= 2
        assert "new_flow_fast" not in counted


def test_a_pod_by_cluster_ip_keeps_its_address(streams: Lab, family: int) -> None:
    toolbox = streams.pods["toolbox"]
    target = STREAM.target("ClusterIP", streams.nodes[0])
    seen = _both(toolbox.namespace, target.address.of(family), 36412, toolbox.address.of(family))
    assert seen == dict.fromkeys(("near", "far"), toolbox.address.of(family))


def test_a_hairpin_connection_is_masqueraded(streams: Lab, family: int) -> None:
    target = STREAM.target("ClusterIP", streams.nodes[0])
    near = streams.pods["near"]
    seen = _both(near.namespace, target.address.of(family), 36412, near.address.of(family))
    assert seen["near"] == streams.nodes[0].source_towards(near).of(family)
    assert seen["far"] == near.address.of(family)


def test_a_process_of_the_node_reaches_the_service(streams: Lab, family: int) -> None:
    first = streams.nodes[0]
    seen = _both(first.namespace, STREAM.target("ClusterIP", first).address.of(family), 36412)
    assert seen == {pod.name: first.source_towards(pod).of(family) for pod in STREAM.endpoints}


def test_a_service_without_endpoints_is_refused_at_once(streams: Lab, family: int) -> None:
    first = streams.nodes[0]
    before = reasons(first)
    task = streams.client.start(_ask, EMPTY.target("LoadBalancer", first).address.of(family), 36412)
    wait_until(lambda: counted_between(before, reasons(first)).get("reject_no_endpoints"), "the refusal is counted")
    task.stop()
