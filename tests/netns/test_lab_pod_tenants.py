# SPDX-License-Identifier: Apache-2.0
"""``socketLB: all``: one pod's sockets affect neither another pod's sockets nor the addresses that the node knows for
it.
"""

from __future__ import annotations

import json
import multiprocessing
import select
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from pyebpf_proxy.lab.client import ANSWERED, TIMED_OUT, ask, family_of, read_answer
from pyebpf_proxy.lab.cluster import Lab, Node, Pod
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import forget_old_pod_sources, reasons, served_by, wait_until

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 10)
OTHERS = tuple(Kind(f"other-{number}", 20 + number) for number in range(6))
# Pods reach a VIP of policy Local directly: without masquerading, and the ranges apply to their source.
RANGED = Kind("ranged", 11, externalTrafficPolicy="Local")
CHURN = 100_000
IP_TRANSPARENT, IPV6_TRANSPARENT = 19, 75


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        first, second = lab.nodes
        for name in ("asker", "churner", "forger-4", "forger-6"):
            lab.add_pod(name, first, serve=False)
        both = lab.add_pod("web-1", first), lab.add_pod("web-2", second)
        for kind in (WEB, RANGED, *OTHERS):
            kind.endpoints = both
        allowed = both[1].address
        RANGED.spec["loadBalancerSourceRanges"] = [f"{allowed.v4}/32", f"{allowed.v6}/128"]
        write_nodes(lab)
        write_services(lab, WEB, RANGED, *OTHERS)
        for node in lab.nodes:
            node.agent.start(own={"socketLB": "all"})
        for node in lab.nodes:
            node.agent.wait_synced()
        yield lab


def known(node: Node, pod: Pod, family: int) -> None:
    """The pod's sockets are translated from now on, for longer than a test takes."""
    asked = WEB.target("ClusterIP", node).address.of(family), 80

    def by_socket() -> bool:
        before = reasons(node)
        pod.namespace.call(ask, *asked)
        return served_by(before, reasons(node)) == {"socket": 1}

    forget_old_pod_sources(node)
    wait_until(by_socket, f"sockets of {pod.name} are translated", 60)


def _churn(place: tuple[str, int], count: int) -> int:
    """Use a Service from so many UDP sockets of one pod, half of them connected. Returns how many the kernel
    refused.
    """
    refused = 0
    for number in range(count):
        with socket.socket(family_of(place[0]), socket.SOCK_DGRAM) as sock:
            try:
                if number % 2:
                    sock.connect(place)
                else:
                    sock.sendto(b"churn", place)
            except OSError:
                refused += 1
    return refused


def _keeps(place: tuple[str, int], others: list[tuple[str, int]], rounds: Connection) -> dict[str, Any]:
    """Sockets that send requests, read answers and report on command."""
    family = family_of(place[0])
    with (
        socket.socket(family, socket.SOCK_DGRAM) as connected,
        socket.socket(family, socket.SOCK_DGRAM) as free,
        socket.create_connection((others[0][0], 80), timeout=10) as stream,
    ):
        connected.connect(place)
        connected.send(b"who")
        # More services than a socket has room for, and the first one again.
        for each in (*others, place):
            free.sendto(b"who", each)
            if not select.select([free], [], [], 10)[0]:
                raise TimeoutError(f"no answer from {each}")
            if each != place:
                free.recv(65536)
        if not select.select([connected], [], [], 10)[0]:
            raise TimeoutError("no answer")
        rounds.send("asked")
        rounds.recv()
        answer, sender = free.recvfrom(65536)
        first = read_answer(answer).pod
        later = set()
        for _ in range(12):
            free.sendto(b"who", place)
            later.add(read_answer(free.recv(65536)).pod)
        return {
            "free": sender[:2],
            "peer": connected.getpeername()[:2],
            "connected": connected.recvfrom(65536)[1][:2],
            "stream": stream.getpeername()[:2],
            "moved": sorted(later - {first}),
        }


def test_many_sockets_of_one_pod_do_not_affect_another_pods_sockets(lab: Lab, family: int) -> None:
    """If all sockets shared the map, its room would be 32 768 (docs/maps.md, finding D16)."""
    node = lab.nodes[0]
    asker, churner = lab.pods["asker"], lab.pods["churner"]
    known(node, asker, family)
    known(node, churner, family)
    place = WEB.target("ClusterIP", node).address.of(family), 53
    others = [(kind.target("ClusterIP", node).address.of(family), 53) for kind in OTHERS[:3]]
    channel, other_end = multiprocessing.Pipe()
    with channel:
        task = asker.namespace.start(_keeps, place, others, other_end)
        other_end.close()
        assert channel.recv() == "asked"
        before = reasons(node)
        assert churner.namespace.call(_churn, place, CHURN) == 0
        counted = served_by(before, reasons(node))
        assert counted.get("socket", 0) > CHURN * 0.9, counted
        channel.send("continue")
        stream = others[0][0], 80
        assert task.result() == {"free": place, "peer": place, "connected": place, "stream": stream, "moved": []}


def test_a_pod_that_sends_to_itself_fills_no_shared_map(lab: Lab, family: int) -> None:
    """From the number of a NodePort: such a sender is noted on the node, so that the answer reaches it."""
    node, churner = lab.nodes[0], lab.pods["churner"]
    known(node, churner, family)
    port = WEB.target("NodePort", node).ports["udp"]
    pin = str(node.agent.pin(f"socket_revnat{family}"))
    loopback = "127.0.0.1" if family == 4 else "::1"

    def noted() -> int:
        return len(json.loads(node.namespace.run("bpftool", "-j", "map", "dump", "pinned", pin)))

    before = noted()
    assert churner.namespace.call(_to_itself, loopback, port, 100) == 100
    assert noted() <= before


def _to_itself(address: str, port: int, count: int) -> int:
    """From this port to ``count`` sockets; the number of messages received."""
    received = 0
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as sender:
        sender.bind((address, port))
        for _ in range(count):
            with socket.socket(family_of(address), socket.SOCK_DGRAM) as receiver:
                receiver.settimeout(10)
                receiver.bind((address, 0))
                sender.sendto(b"x", receiver.getsockname())
                received += len(receiver.recvfrom(10)[0])
    return received


def test_a_socket_with_more_services_than_its_storage_holds(lab: Lab, family: int) -> None:
    """Further services are in the maps that all sockets share."""
    node = lab.nodes[0]
    asker = lab.pods["asker"]
    known(node, asker, family)
    places = [(kind.target("ClusterIP", node).address.of(family), 53) for kind in (WEB, *OTHERS)]
    senders, pods = asker.namespace.call(_talks_to_all, places)
    assert senders == places * 4
    # Each service keeps its first endpoint.
    for number in range(len(places)):
        assert len(set(pods[number :: len(places)])) == 1, pods


def _talks_to_all(places: list[tuple[str, int]]) -> tuple[list[tuple[str, int]], list[str]]:
    senders, pods = [], []
    with socket.socket(family_of(places[0][0]), socket.SOCK_DGRAM) as sock:
        sock.settimeout(10)
        for place in places * 4:
            sock.sendto(b"who", place)
            text, sender = sock.recvfrom(65536)
            senders.append(sender[:2])
            pods.append(read_answer(text).pod)
    return senders, pods


def _forge(source: str, place: tuple[str, int], count: int) -> None:
    """First packets of UDP sockets with a source that is not the pod's; they get no answer."""
    ipv6 = ":" in source
    for _ in range(count):
        with socket.socket(family_of(source), socket.SOCK_DGRAM) as sock:
            level, name = (socket.IPPROTO_IPV6, IPV6_TRANSPARENT) if ipv6 else (socket.IPPROTO_IP, IP_TRANSPARENT)
            sock.setsockopt(level, name, 1)
            sock.bind((source, 0))
            sock.sendto(b"forged", place)


def test_a_forged_source_is_not_learned(lab: Lab, family: int) -> None:
    """A pod that is not known yet sends from another pod's address: it gains nothing (finding D16)."""
    node = lab.nodes[0]
    forger = lab.pods[f"forger-{family}"]
    place = RANGED.target("LoadBalancer", node).address.of(family), 80
    # Its first packet of the other family makes the agent attach tc to its device.
    known(node, forger, 10 - family)
    forged = lab.pods["web-2"].address.of(family)
    before = reasons(node)
    forger.namespace.call(_forge, forged, (WEB.target("ClusterIP", node).address.of(family), 53), 3)
    assert sum(served_by(before, reasons(node)).values()) == 3, "tc has seen the forged packets"
    before = reasons(node)
    outcome = forger.namespace.call(ask, *place, timeout=0.6)
    assert outcome.kind == TIMED_OUT, outcome
    assert "socket" not in served_by(before, reasons(node))
    # The pod's own source is learned anyway, and is used.
    known(node, forger, family)
    assert forger.namespace.call(ask, WEB.target("ClusterIP", node).address.of(family), 80).kind == ANSWERED
    assert forger.namespace.call(ask, *place, timeout=0.6).kind == TIMED_OUT


@pytest.fixture(scope="module")
def bridged() -> Iterator[Lab]:
    with Lab(nodes=1, pod_network="bridge") as lab:
        (node,) = lab.nodes
        for name in ("forger-4", "forger-6", "allowed"):
            lab.add_pod(name, node, serve=False)
        web = lab.add_pod("web-1", node)
        allowed = lab.pods["allowed"].address
        WEB.endpoints = RANGED.endpoints = (web,)
        RANGED.spec["loadBalancerSourceRanges"] = [f"{allowed.v4}/32", f"{allowed.v6}/128"]
        write_nodes(lab)
        write_services(lab, WEB, RANGED)
        node.agent.start(own={"socketLB": "all"})
        node.agent.wait_synced()
        yield lab


def test_a_forged_source_on_a_bridge_is_not_learned(bridged: Lab, family: int) -> None:
    """The same bridge leads to its address, but its link address differs. Pods on a bridge are learned by link
    address.
    """
    node = bridged.nodes[0]
    forger = bridged.pods[f"forger-{family}"]
    known(node, forger, 10 - family)
    allowed = bridged.pods["allowed"]
    forged = allowed.address.of(family)
    # From now on the node knows its link address.
    allowed.namespace.call(ask, node.address.of(family), 1, timeout=1.0)
    allowed.namespace.call(ask, WEB.target("ClusterIP", node).address.of(family), 80)
    before = reasons(node)
    forger.namespace.call(_forge, forged, (WEB.target("ClusterIP", node).address.of(family), 53), 3)
    assert sum(served_by(before, reasons(node)).values()) >= 3, "tc has seen the forged packets"
    place = RANGED.target("LoadBalancer", node).address.of(family), 80
    assert forger.namespace.call(ask, *place, timeout=0.6).kind == TIMED_OUT
    known(node, forger, family)
