# SPDX-License-Identifier: Apache-2.0
"""Packets with a forged source, from another pod and from outside: no flow of the fast path is ended or moved."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether

from pyebpf_proxy.lab.addresses import CLIENT, cluster_ip
from pyebpf_proxy.lab.cluster import Pod
from pyebpf_proxy.lab.manifests import Port, service, slices
from pyebpf_proxy.lab.namespace import Namespace
from tests.netns.tcp_ends import End, exchange_data
from tests.support.conversation import PORT
from tests.support.fast_lab import Ask, FastWorld
from tests.support.lab_tools import Capture, wait_until
from tests.support.new_flows import BOTH, NewFlows, ending, entries, wait_until_fast

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

OWN_PORT, NODE_PORT = 7301, 30073
NAMED, TWO = cluster_ip(21), cluster_ip(22)
_own_ports = itertools.count(22_000)


@dataclass
class Scene:
    """``attacker``: a pod of the same node. ``outside``: a host between the outside client and the node."""

    world: FastWorld
    attacker: Pod

    @property
    def outside(self) -> Namespace:
        return self.world.lab.core

    def begin(self, namespace: Namespace, address: str, port: int) -> tuple[End, End, int]:
        """A new connection that is in the flow table from its first packet on."""

        def young() -> tuple[End, End, int] | None:
            before = self.world.count("new_flow_fast")
            own_port = next(_own_ports)
            client, server = End(namespace), End(self.world.near.namespace)
            client.connect(address, port, own_port)
            server.accept(OWN_PORT)
            if self.world.count("new_flow_fast") > before:
                return client, server, own_port
            client.reset()
            return None

        begun: tuple[End, End, int] = wait_until(young, "a flow that is young")
        return begun


@pytest.fixture(scope="module")
def scene(fast_world: FastWorld) -> Scene:
    near = fast_world.near
    End(near.namespace).listen(OWN_PORT)
    ports = [Port("tcp", OWN_PORT, OWN_PORT, "TCP", NODE_PORT)]
    named = [service("named", ports, NAMED), *slices("named", ports, [(near.address, near.node.name)])]
    both = [Port("tcp", PORT, PORT), Port("udp", PORT, PORT, "UDP")]
    endpoints = [(pod.address, pod.node.name) for pod in (near, fast_world.far)]
    fast_world.node.agent.wait_synced(fast_world.lab.write("named.yaml", named))
    two = [service("two", both, TWO), *slices("two", both, endpoints)]
    fast_world.node.agent.wait_synced(fast_world.lab.write("two.yaml", two))
    return Scene(fast_world, fast_world.lab.add_pod("attacker", fast_world.node, serve=False))


@pytest.fixture(params=["pod", "outside"])
def origin(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


def send(family: int, source: tuple[str, int], to: tuple[str, int], packets: list[tuple[str, int, int]]) -> None:
    """Segments with the source ``source``: flags, sequence number, acknowledgement."""
    inet = socket.AF_INET if family == 4 else socket.AF_INET6
    head = (IP if family == 4 else IPv6)(src=source[0], dst=to[0])
    with socket.socket(inet, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        for flags, sequence, acknowledged in packets:
            segment = TCP(sport=source[1], dport=to[1], flags=flags, seq=sequence, ack=acknowledged)
            raw.sendto(bytes(head / segment), (to[0], 0))


def numbers(client: End, server: End, own_port: int) -> tuple[int, int]:
    """The client's next sequence number, and the one that it expects."""
    namespace = client.namespace
    seen = Capture(namespace, "eth0", lambda frame: _is_from(frame, own_port))
    exchange_data(client, server, 1)
    frame = seen.frame()
    assert frame is not None
    last = Ether(frame)[TCP]
    # The captured request and its answer.
    return (last.seq + 200) & 0xFFFFFFFF, (last.ack + 200) & 0xFFFFFFFF


def _is_from(frame: bytes, own_port: int) -> bool:
    packet = Ether(frame)
    return TCP in packet and packet[TCP].sport == own_port and bool(packet[TCP].payload)


ATTACKS: dict[str, Callable[[int, int], list[tuple[str, int, int]]]] = {
    "RST": lambda sequence, acknowledged: [
        (flags, (sequence + (n << 28) + 12345) & 0xFFFFFFFF, acknowledged)
        for n in range(1, 16)
        for flags in ("R", "RA")
    ],
    "FIN": lambda sequence, acknowledged: [
        ("FA", (sequence + (n << 28) + 12345) & 0xFFFFFFFF, acknowledged) for n in range(1, 16)
    ],
    "SYN": lambda sequence, acknowledged: [("S", (sequence + (n << 28)) & 0xFFFFFFFF, 0) for n in range(1, 16)],
    "RST, then SYN": lambda sequence, acknowledged: [
        ("R", (sequence + (7 << 28)) & 0xFFFFFFFF, 0),
        ("S", (sequence + (3 << 28)) & 0xFFFFFFFF, 0),
    ],
    "SYN, RST, SYN": lambda sequence, acknowledged: [
        ("S", (sequence + (3 << 28)) & 0xFFFFFFFF, 0),
        ("R", (sequence + (7 << 28)) & 0xFFFFFFFF, 0),
        ("S", (sequence + (5 << 28)) & 0xFFFFFFFF, 0),
    ],
}


def victim(scene: Scene, origin: str, family: int) -> tuple[Namespace, str, tuple[str, int]]:
    """The owner of the connection, its address, and its target."""
    if origin == "pod":
        client = scene.world.client
        return client.namespace, client.address.of(family), (NAMED.of(family), OWN_PORT)
    return scene.world.lab.client, CLIENT.of(family), (scene.world.node.address.of(family), NODE_PORT)


@pytest.mark.parametrize("what", ATTACKS)
@pytest.mark.parametrize("age", ["young", "of the kernel's"])
def test_forged_packets_with_guessed_numbers(scene: Scene, family: int, origin: str, what: str, age: str) -> None:
    """The connection also continues if it is silent afterwards (finding D4)."""
    namespace, source, target = victim(scene, origin, family)
    client, server, own_port = scene.begin(namespace, *target)
    exchange_data(client, server, 3)
    sequence, acknowledged = numbers(client, server, own_port)
    if age != "young":
        wait_until(lambda: not _is_young(scene, (source, "tcp", own_port)), "it is promoted")
        exchange_data(client, server, 3)
        sequence, acknowledged = numbers(client, server, own_port)
    attacker = scene.attacker.namespace if origin == "pod" else scene.outside
    attacker.call(send, family, (source, own_port), target, ATTACKS[what](sequence, acknowledged))
    # And in the other direction, with the endpoint's source; from outside that cannot come through the endpoint's
    # device.
    endpoint = scene.world.near.address.of(family), OWN_PORT
    for name in (endpoint, target):
        attacker.call(send, family, name, (source, own_port), ATTACKS[what](acknowledged, sequence))
    if age == "young":
        wait_until(lambda: not _is_young(scene, (source, "tcp", own_port)), "its second is over")
    else:
        # Otherwise conntrack forgets the connection if it stays silent: after ten seconds, if there was a RST.
        wait_until(lambda: _outlives_silence(scene, family, own_port), "conntrack expects it to continue", deadline=8)
    exchange_data(client, server, 5)
    assert not client.namespace.call(_has_ended, own_port)
    client.reset()


def _outlives_silence(scene: Scene, family: int, own_port: int) -> bool:
    """Whether conntrack keeps the connection from this port for a day, as one that is established."""
    text = scene.world.node.namespace.run(
        "conntrack", "-L", "-f", f"ipv{family}", "-p", "tcp", "--orig-port-src", str(own_port)
    )
    found = [line.split()[2:4] for line in text.splitlines() if f"sport={own_port} " in line]
    return [state for seconds, state in found if int(seconds) > 1000] == ["ESTABLISHED"]


def _is_young(scene: Scene, flow: tuple[str, str, int]) -> bool:
    return any(e["young"] and e["client"] == flow for e in entries(scene.world))


def _has_ended(own_port: int) -> bool:
    from tests.netns.tcp_ends import connections

    return not any(each.getsockname()[1] == own_port for each in connections.values())


@pytest.mark.parametrize("what", ["RA", "FA", "S"])
def test_forged_packets_of_a_pod_that_knows_the_numbers(scene: Scene, family: int, what: str) -> None:
    """The attacker has another device, so none of its packets affects a young flow (finding D4)."""
    namespace, source, target = victim(scene, "pod", family)
    client, server, own_port = scene.begin(namespace, *target)
    exchange_data(client, server, 3)
    sequence, acknowledged = numbers(client, server, own_port)
    before = scene.world.count("stack_other_device")
    scene.attacker.namespace.call(send, family, (source, own_port), target, [(what, sequence, acknowledged)])
    wait_until(lambda: scene.world.count("stack_other_device") > before, "it has come")
    exchange_data(client, server, 5)
    client.reset()


def send_datagrams(family: int, source: tuple[str, int], to: tuple[str, int], count: int) -> None:
    inet = socket.AF_INET if family == 4 else socket.AF_INET6
    head = (IP if family == 4 else IPv6)(src=source[0], dst=to[0])
    with socket.socket(inet, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        for _ in range(count):
            raw.sendto(bytes(head / UDP(sport=source[1], dport=to[1]) / b"not me"), (to[0], 0))


def places(scene: Scene, flow: tuple[str, str, int]) -> set[str]:
    """The endpoint of the flow's packets."""
    return {e["endpoint"] for e in entries(scene.world) if e["client"] == flow and not e["reply"]}


@pytest.mark.parametrize("protocol", BOTH)
def test_no_flow_is_moved(scene: Scene, ask: Ask, family: int, protocol: str) -> None:
    """Forged first packets of the client's flow: any of them could choose another endpoint (finding D4)."""
    world = scene.world
    flows = NewFlows(world.client.namespace, TWO.of(family), protocol)
    with ending(flows):
        wait_until_fast(world, flows)
        conversations = [ask(world.client.namespace, TWO.of(family), protocol) for _ in range(4)]
    clients = [each.client for each in conversations]
    for conversation in conversations:
        conversation.wait()
    before = {client: places(scene, client) for client in clients}
    assert all(len(found) == 1 for found in before.values()), before
    for address, _, port in clients:
        source, target = (address, port), (TWO.of(family), PORT)
        if protocol == "udp":
            scene.attacker.namespace.call(send_datagrams, family, source, target, 10)
        else:
            scene.attacker.namespace.call(send, family, source, target, [("S", n << 20, 0) for n in range(10)])
    for conversation in conversations:
        conversation.wait(50)
    wait_until(lambda: not any(_is_young(scene, client) for client in clients), "all are promoted")
    for conversation in conversations:
        conversation.wait(50)
    after = {client: places(scene, client) for client in clients}
    assert all(after[client] <= before[client] for client in clients), (before, after)
