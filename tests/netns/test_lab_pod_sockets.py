# SPDX-License-Identifier: Apache-2.0
"""``socketLB: all``: sockets of pods are translated at connect, unless only tc can serve them."""

from __future__ import annotations

import multiprocessing
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Self

import pytest

from pyebpf_proxy.lab.client import ANSWERED, REFUSED, TIMED_OUT, Outcome, ask, ask_many, family_of, read_answer
from pyebpf_proxy.lab.cluster import Lab, Pod
from tests.netns.socket_calls import ask_on_command
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import forget_old_pod_sources, reasons, served_by, wait_until

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 10)
LOCAL = Kind("local", 11, externalTrafficPolicy="Local")
STICKY = Kind("sticky", 12, sessionAffinity="ClientIP")
SELF = Kind("self", 13)
EMPTY = Kind("empty", 14)
INSIDE = Kind("inside", 15, internalTrafficPolicy="Local")


@pytest.fixture(scope="module")
def pods_lab() -> Iterator[Lab]:
    with Lab() as lab:
        first, second = lab.nodes
        asker = lab.add_pod("asker", first)
        lab.add_pod("excluded", first, serve=False)
        both = lab.add_pod("web-1", first), lab.add_pod("web-2", second)
        for pod in (asker, *both):
            # With an offset per destination, the timestamps of a VIP's connection may be older than those of a direct
            # one from the same port. An endpoint that has the latter in TIME_WAIT refuses the first SYN, and tc serves
            # the flow twice.
            pod.namespace.sysctl({"net.ipv4.tcp_timestamps": 2})
        WEB.endpoints = LOCAL.endpoints = STICKY.endpoints = both
        SELF.endpoints = (asker, both[1])
        INSIDE.endpoints = both[1:]
        write_nodes(lab)
        write_services(lab, WEB, LOCAL, STICKY, SELF, EMPTY, INSIDE)
        excluded = lab.pods["excluded"].address
        own = {"socketLB": "all", "socketLBExclude": [f"{excluded.v4}/32", f"{excluded.v6}/128"]}
        for node in lab.nodes:
            node.agent.start(own=own)
        for node in lab.nodes:
            node.agent.wait_synced()
        yield lab


@pytest.fixture
def asker(pods_lab: Lab, family: int) -> Pod:
    """A pod whose sockets the node knows."""
    pod = pods_lab.pods["asker"]
    known(pods_lab, pod, family)
    return pod


def known(lab: Lab, pod: Pod, family: int) -> None:
    """tc has recently seen one of the pod's sockets."""
    asked = WEB.target("ClusterIP", lab.nodes[0]).address.of(family), 80

    def by_socket() -> bool:
        counted, _ = counted_while(lab, lambda: [pod.namespace.call(ask, *asked)])
        return counted == {"socket": 1}

    forget_old_pod_sources(lab.nodes[0])
    wait_until(by_socket, "sockets of the pod are translated", 60)


def counted_while(lab: Lab, act: Callable[[], list[Outcome]]) -> tuple[dict[str, int], list[Outcome]]:
    before = reasons(lab.nodes[0])
    outcomes = act()
    return served_by(before, reasons(lab.nodes[0])), outcomes


def test_tc_serves_the_first_socket_and_later_ones_are_translated(pods_lab: Lab, family: int) -> None:
    pod = pods_lab.pods["web-1"]
    address = WEB.target("ClusterIP", pods_lab.nodes[0]).address.of(family)
    known(pods_lab, pod, family)
    counted, outcomes = counted_while(pods_lab, lambda: pod.namespace.call(ask_many, 20, address, 80))
    assert {outcome.kind for outcome in outcomes} == {ANSWERED}
    # tc serves those that chose the pod itself.
    assert sum(counted.values()) == 20, counted
    for outcome in outcomes:
        assert outcome.answer is not None
        assert outcome.peer == (address, 80)
        if outcome.answer.pod == "web-2":
            assert outcome.answer.peer == outcome.local


def test_packets_of_translated_sockets_are_not_translated_again(
    pods_lab: Lab, asker: Pod, family: int, protocol: str
) -> None:
    address = WEB.target("ClusterIP", pods_lab.nodes[0]).address.of(family)
    port = {"tcp": 80, "udp": 53}[protocol]
    counted, outcomes = counted_while(pods_lab, lambda: asker.namespace.call(ask_many, 20, address, port, protocol))
    assert {outcome.kind for outcome in outcomes} == {ANSWERED}
    assert counted == {"socket": 20}, counted
    for outcome in outcomes:
        assert outcome.answer is not None
        assert outcome.answer.peer == outcome.local
        assert outcome.local is not None
        assert outcome.local[0] == asker.address.of(family)
        assert outcome.peer == (address, port)
    assert {outcome.answer.pod for outcome in outcomes if outcome.answer} == {"web-1", "web-2"}


def test_connections_to_masquerade_are_left_to_tc(pods_lab: Lab, asker: Pod, family: int, protocol: str) -> None:
    node = pods_lab.nodes[0]
    for kind in ("ExternalIP", "LoadBalancer", "NodePort"):
        target = WEB.target(kind, node)  # type: ignore[arg-type]
        asked = (target.address.of(family), target.ports[protocol], protocol)
        counted, outcomes = counted_while(pods_lab, lambda asked=asked: [asker.namespace.call(ask, *asked)])
        assert counted == {"tc": 1}, (kind, counted)
        assert outcomes[0].answer is not None
        assert outcomes[0].answer.peer[0] != asker.address.of(family)


def test_pods_reach_policy_local_directly(pods_lab: Lab, asker: Pod, family: int, protocol: str) -> None:
    node = pods_lab.nodes[0]
    for kind in ("ExternalIP", "LoadBalancer", "NodePort"):
        target = LOCAL.target(kind, node)  # type: ignore[arg-type]
        asked = (8, target.address.of(family), target.ports[protocol], protocol)
        counted, outcomes = counted_while(pods_lab, lambda asked=asked: asker.namespace.call(ask_many, *asked))
        assert counted == {"socket": 8}, (kind, counted)
        for outcome in outcomes:
            assert outcome.answer is not None
            assert outcome.answer.peer == outcome.local


def test_tc_and_socket_share_a_pods_affinity(pods_lab: Lab, asker: Pod, family: int) -> None:
    node = pods_lab.nodes[0]
    chosen = set()
    served: Counter[str] = Counter()
    for kind in ("ClusterIP", "NodePort", "LoadBalancer") * 4:
        for protocol in ("tcp",):
            target = STICKY.target(kind, node)  # type: ignore[arg-type]
            asked = (target.address.of(family), target.ports[protocol], protocol)
            counted, outcomes = counted_while(pods_lab, lambda asked=asked: [asker.namespace.call(ask, *asked)])
            served.update(counted)
            assert outcomes[0].answer is not None
            chosen.add(outcomes[0].answer.pod)
    assert len(chosen) == 1
    assert served == {"socket": 4, "tc": 8}


def test_a_hairpin_connection_sees_the_nodes_address(pods_lab: Lab, asker: Pod, family: int, protocol: str) -> None:
    """And as often as any other endpoint: tc keeps the choice of the socket program."""
    target = SELF.target("ClusterIP", pods_lab.nodes[0])
    asked = (60, target.address.of(family), target.ports[protocol], protocol)
    # Separate ports: a UDP port that was used belongs to a flow that conntrack knows.
    act = lambda: asker.namespace.call(ask_many, *asked, first_port=20_000)  # noqa: E731
    counted, outcomes = counted_while(pods_lab, act)
    assert {outcome.kind for outcome in outcomes} == {ANSWERED}
    pods = Counter(outcome.answer.pod for outcome in outcomes if outcome.answer)
    assert counted == {"socket": pods["web-2"], "tc": pods["asker"]}, (counted, pods)
    # If the endpoint were chosen twice, a quarter of 60 would be expected; 30 if the choice is kept. Five standard
    # deviations.
    assert pods["asker"] > 30 - 5 * 3.9
    for outcome in outcomes:
        assert outcome.answer is not None
        own = outcome.answer.peer[0] == asker.address.of(family)
        assert own == (outcome.answer.pod == "web-2")


def test_tc_refuses_without_endpoints_and_drops_without_local_ones(
    pods_lab: Lab, asker: Pod, family: int, protocol: str
) -> None:
    for kind, end, patience in ((EMPTY, REFUSED, 10.0), (INSIDE, TIMED_OUT, 0.6)):
        target = kind.target("ClusterIP", pods_lab.nodes[0])
        asked = (target.address.of(family), target.ports[protocol], protocol)
        counted, outcomes = counted_while(
            pods_lab, lambda asked=asked, patience=patience: [asker.namespace.call(ask, *asked, timeout=patience)]
        )
        assert outcomes[0].kind == end
        assert not [name for name in counted if name.endswith("socket")], counted


def test_sockets_of_excluded_pods_are_not_translated(pods_lab: Lab, family: int) -> None:
    pod = pods_lab.pods["excluded"]
    address = WEB.target("ClusterIP", pods_lab.nodes[0]).address.of(family)
    counted, outcomes = counted_while(pods_lab, lambda: pod.namespace.call(ask_many, 6, address, 80))
    assert {outcome.kind for outcome in outcomes} == {ANSWERED}
    assert counted == {"tc": 6}


def test_rules_in_a_pod_see_the_service_address(pods_lab: Lab, asker: Pod, family: int) -> None:
    """A service mesh redirects connections by the address that the application used."""
    address = WEB.target("ClusterIP", pods_lab.nodes[0]).address.of(family)
    wide = "ip" if family == 4 else "ip6"
    asker.namespace.run("nft", "add", "table", wide, "mesh")
    try:
        asker.namespace.run("nft", f"add chain {wide} mesh out {{ type nat hook output priority -100; }}")
        counted, _ = counted_while(pods_lab, lambda: asker.namespace.call(ask_many, 6, address, 80))
        assert counted == {"tc": 6}
        asker.namespace.run("nft", f"add rule {wide} mesh out {wide} daddr {address} tcp dport 80 redirect to :8080")
        counted, outcomes = counted_while(pods_lab, lambda: asker.namespace.call(ask_many, 3, address, 80))
        assert counted == {}
        assert {outcome.answer.pod for outcome in outcomes if outcome.answer} == {"asker"}
    finally:
        asker.namespace.run("nft", "delete", "table", wide, "mesh")
    counted, _ = counted_while(pods_lab, lambda: asker.namespace.call(ask_many, 6, address, 80))
    assert counted == {"socket": 6}


def test_sockets_of_a_pod_with_two_networks_are_not_translated(pods_lab: Lab, asker: Pod, family: int) -> None:
    address = WEB.target("ClusterIP", pods_lab.nodes[0]).address.of(family)
    asker.namespace.ip("link add second0 type bridge", "link set second0 up")
    try:
        counted, outcomes = counted_while(pods_lab, lambda: asker.namespace.call(ask_many, 6, address, 80))
        assert counted == {"tc": 6}, outcomes
    finally:
        asker.namespace.ip("link del second0")


def test_sockets_of_external_clients_are_not_translated(pods_lab: Lab, family: int) -> None:
    """Its processes are in the same cgroup; its packets come from a router."""
    target = WEB.target("LoadBalancer", pods_lab.nodes[0])
    counted, outcomes = counted_while(
        pods_lab, lambda: pods_lab.client.call(ask_many, 6, target.address.of(family), 80)
    )
    assert {outcome.kind for outcome in outcomes} == {ANSWERED}
    assert counted == {"tc": 6}


def _who(sock: socket.socket, target: tuple[str, int]) -> tuple[str, tuple[str, int]]:
    sock.sendto(b"who", target)
    text, sender = sock.recvfrom(65536)
    return read_answer(text).pod, (sender[0], sender[1])


def _talk(address: str, port: int) -> list[tuple[str, tuple[str, int]]]:
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as sock:
        sock.settimeout(5)
        return [_who(sock, (address, port)) for _ in range(12)]


def test_unconnected_udp_keeps_its_first_endpoint(pods_lab: Lab, family: int) -> None:
    target = WEB.target("ClusterIP", pods_lab.nodes[0])
    asked = target.address.of(family), 53
    fresh = pods_lab.add_pod(f"fresh-{family}", pods_lab.nodes[0], serve=False)
    # Then tc is on its device, but knows only its address of the other family.
    known(pods_lab, fresh, 10 - family)
    before = reasons(pods_lab.nodes[0])
    # tc serves the first message of an unknown pod, and all later ones of this socket.
    for _ in range(6):
        shown = fresh.namespace.call(_talk, *asked)
        assert len({pod for pod, _ in shown}) == 1, shown
        assert {sender for _, sender in shown} == {asked}
    counted = served_by(before, reasons(pods_lab.nodes[0]))
    assert counted == {"tc": 1, "socket": 5}


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "unconnected"])
def test_a_udp_socket_continues_with_another_endpoint(pods_lab: Lab, asker: Pod, family: int, connected: bool) -> None:
    """A pod's socket need not be ended: packets to a removed endpoint pass the node (spec/service-semantics §10)."""
    both = WEB.endpoints
    place = WEB.target("ClusterIP", pods_lab.nodes[0]).address.of(family), 53
    channel, other_end = multiprocessing.Pipe()
    with channel:
        try:
            WEB.endpoints = both[:1]
            pods_lab.wait_synced(write_services(pods_lab, WEB))
            before = reasons(pods_lab.nodes[0])
            task = asker.namespace.start(ask_on_command, place, connected, other_end)
            other_end.close()
            assert channel.recv() == ("up", place)

            def answer() -> tuple[str, tuple[str, int]]:
                channel.send(True)
                found: tuple[str, tuple[str, int]] = channel.recv()
                return found

            assert answer() == ("web-1", place)
            assert served_by(before, reasons(pods_lab.nodes[0])) == {"socket": 1}
            for name, endpoints in (("web-1", both), ("web-2", both[1:]), ("web-1", both[:1])):
                WEB.endpoints = endpoints
                pods_lab.wait_synced(write_services(pods_lab, WEB))
                # No message is lost: the first one after the change is answered.
                assert [answer() for _ in range(3)] == [(name, place)] * 3
            channel.send(False)
            assert task.result() == "done"
        finally:
            WEB.endpoints = both
            pods_lab.wait_synced(write_services(pods_lab, WEB))


def test_a_udp_socket_that_was_masqueraded_keeps_its_endpoint_and_source(
    pods_lab: Lab, asker: Pod, family: int
) -> None:
    """A policy is for new flows (spec/service-semantics §5). conntrack has this flow, and tc serves it."""
    address = WEB.target("LoadBalancer", pods_lab.nodes[0]).address.of(family)
    with ExitStack() as stack:
        talks = [stack.enter_context(_Talk(asker, (address, 53))) for _ in range(6)]
        before = [talk.answer() for talk in talks]
        WEB.spec["externalTrafficPolicy"] = "Local"
        try:
            pods_lab.wait_synced(write_services(pods_lab, WEB))
            assert [talk.answer() for talk in talks] == before
        finally:
            del WEB.spec["externalTrafficPolicy"]
            pods_lab.wait_synced(write_services(pods_lab, WEB))


class _Talk:
    """An unconnected UDP socket of a pod: each answer names the endpoint, and the source that it saw."""

    def __init__(self, pod: Pod, place: tuple[str, int]) -> None:
        self._channel, other_end = multiprocessing.Pipe()
        self._task = pod.namespace.start(_talk_on_command, place, other_end)
        other_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._task.stop()

    def answer(self) -> tuple[str, str]:
        self._channel.send(True)
        pod, source = self._channel.recv()
        return pod, source


def _talk_on_command(place: tuple[str, int], channel: Connection) -> None:
    with socket.socket(family_of(place[0]), socket.SOCK_DGRAM) as sock:
        sock.settimeout(5)
        while channel.recv():
            sock.sendto(b"who", place)
            found = read_answer(sock.recv(65536))
            channel.send((found.pod, found.peer[0]))
