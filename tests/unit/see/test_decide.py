# SPDX-License-Identifier: Apache-2.0
"""The decision table in Python: packets to 127.0.0.0/8, and to a ClusterIP that the node has, too."""

from __future__ import annotations

import pytest

from pyebpf_proxy.common.bpf_constants import NOT_ON_LOOPBACK, ON_ALL_LOOPBACK, ON_LOCALHOST, ON_OTHER_LOOPBACK
from pyebpf_proxy.see.decide import Packet, World, decide
from pyebpf_proxy.see.state import Service, State
from pyebpf_proxy.services.model import FrontendKind, IPFamily, Protocol, ServicePortName

CLIENT, LOCALHOST, ANY = bytes([192, 0, 2, 1]), bytes([127, 0, 0, 1]), bytes(4)
NODE_PORT, OTHER = 30080, 9999
WEB = Service(
    1, ServicePortName("default", "web", "http", Protocol.TCP, IPFamily.IPV4), 1, 0, 0, True, False, False, False, False
)
PLACE = (ANY, NODE_PORT, int(Protocol.TCP))
STATE = State(services={1: WEB}, frontends={PLACE: (1, FrontendKind.NODE_PORT)})


@pytest.mark.parametrize("nft", [False, True], ids=["iptables", "nftables"])
@pytest.mark.parametrize("port", [NODE_PORT, OTHER])
@pytest.mark.parametrize(("served", "verdict"), [(True, "dropped"), (False, "left")])
def test_only_nodes_that_serve_localhost_drop_packets_from_outside_to_loopback(
    served: bool, verdict: str, port: int, nft: bool
) -> None:
    """They drop all of them (goes_to_loopback() of bpf/serve.h). Others leave them to the kernel, which does."""
    world = World({"localhost_node_ports": int(served), "nft_mode": int(nft)}, {}, frozenset(), True)
    found = decide(Packet(CLIENT, 40000, LOCALHOST, port, Protocol.TCP, 3), world, STATE)
    assert (found.verdict, found.reason) == (verdict, "drop_loopback_destination" if served else "")


@pytest.mark.parametrize(
    ("where", "served"),
    [(NOT_ON_LOOPBACK, ()), (ON_ALL_LOOPBACK, (1, 2)), (ON_LOCALHOST, (1,)), (ON_OTHER_LOOPBACK, ())],
)
def test_node_ports_at_loopback_addresses(where: int, served: tuple[int, ...]) -> None:
    """The Service has no endpoint: where its NodePort is served, it refuses."""
    settings = {"localhost_node_ports": where, "nft_mode": 1, "detector4": 0, "masquerade_all": 0}
    world = World(settings, {}, frozenset(), True)
    for last in (1, 2):
        packet = Packet(LOCALHOST, 40000, bytes([127, 0, 0, last]), NODE_PORT, Protocol.TCP, 0)
        assert decide(packet, world, STATE).verdict == ("refused" if last in served else "left")


@pytest.mark.parametrize(
    ("where", "protocol", "sockets", "verdict"),
    [
        (ON_LOCALHOST, Protocol.TCP, True, "refused"),
        (ON_OTHER_LOOPBACK, Protocol.TCP, True, "refused"),
        (NOT_ON_LOOPBACK, Protocol.TCP, True, "left"),
        (ON_LOCALHOST, Protocol.TCP, False, "left"),
        (ON_LOCALHOST, Protocol.SCTP, True, "left"),
    ],
)
def test_sockets_reach_node_ports_at_listed_loopback_addresses_of_the_node(
    where: int, protocol: Protocol, sockets: bool, verdict: str
) -> None:
    """As serves_node_ports_on_loopback() of bpf/translate.h."""
    address = bytes([127, 0, 0, 2])
    settings = {"localhost_node_ports": where, "nft_mode": 1, "detector4": 0, "masquerade_all": 0, "scheduler": 0}
    state = State(services=STATE.services, frontends={(ANY, NODE_PORT, int(protocol)): STATE.frontends[PLACE]})
    packet = Packet(LOCALHOST, 40000, address, NODE_PORT, protocol, 0)
    assert decide(packet, World(settings, {address: False}, frozenset(), sockets), state).verdict == verdict


@pytest.mark.parametrize("scheduler", [0, 1], ids=["iptables", "ipvs"])
def test_sctp_to_loopback_is_not_served_in_mode_ipvs(scheduler: int) -> None:
    settings = {"localhost_node_ports": ON_ALL_LOOPBACK, "nft_mode": 1, "scheduler": scheduler}
    state = State(services=STATE.services, frontends={(ANY, NODE_PORT, int(Protocol.SCTP)): STATE.frontends[PLACE]})
    packet = Packet(LOCALHOST, 40000, LOCALHOST, NODE_PORT, Protocol.SCTP, 0)
    found = decide(packet, World(settings | {"detector4": 0, "masquerade_all": 0}, {}, frozenset(), True), state)
    assert found.verdict == ("left" if scheduler else "refused")


@pytest.mark.parametrize(
    ("where", "device", "verdict"),
    [(ON_ALL_LOOPBACK, 0, "refused"), (ON_LOCALHOST, 0, "refused"), (NOT_ON_LOOPBACK, 0, "left"), (1, 3, "left")],
    ids=["on all loopback addresses", "on 127.0.0.1", "not on loopback", "from a device"],
)
def test_the_unspecified_address_is_localhost_to_a_process_of_the_node(where: int, device: int, verdict: str) -> None:
    """As translate() of bpf/translate.h. NodePorts are in the map at this address, which is not their destination."""
    settings = {"localhost_node_ports": where, "nft_mode": 1, "detector4": 0, "masquerade_all": 0}
    found = decide(
        Packet(CLIENT, 40000, ANY, NODE_PORT, Protocol.TCP, device), World(settings, {}, frozenset(), True), STATE
    )
    assert found.verdict == verdict
    assert not any("frontends at" in step for step in found.steps)


def test_no_node_port_is_served_at_the_unspecified_ipv6_address() -> None:
    """The kernel takes it for ::1, where no NodePort is served."""
    any6, local6 = bytes(16), bytes(15) + b"\1"
    state = State(services={1: WEB}, frontends={(any6, NODE_PORT, int(Protocol.TCP)): (1, FrontendKind.NODE_PORT)})
    world = World({"localhost_node_ports": ON_ALL_LOOPBACK, "nft_mode": 0}, {}, frozenset(), True)
    found = decide(Packet(local6, 40000, any6, NODE_PORT, Protocol.TCP, 0), world, state)
    assert (found.verdict, len(found.steps)) == ("left", 1)


@pytest.mark.parametrize(
    ("device", "sockets", "protocol", "verdict"),
    [
        (0, True, Protocol.UDP, "left"),
        (0, True, Protocol.SCTP, "refused"),
        (0, False, Protocol.UDP, "refused"),
        (3, True, Protocol.UDP, "refused"),
    ],
    ids=["a process here", "SCTP", "socketLB: off", "a pod"],
)
def test_sockets_of_the_node_reach_a_cache_at_a_cluster_ip(
    device: int, sockets: bool, protocol: Protocol, verdict: str
) -> None:
    """As translate() of bpf/translate.h. The Service itself has no endpoint."""
    address = bytes([10, 96, 0, 10])
    name = ServicePortName("kube-system", "kube-dns", "dns", protocol, IPFamily.IPV4)
    dns = Service(2, name, 2, 0, 0, False, False, False, False, False)
    state = State(services={2: dns}, frontends={(address, 53, int(protocol)): (2, FrontendKind.CLUSTER_IP)})
    world = World({"localhost_node_ports": 0, "nft_mode": 1}, {address: True}, frozenset(), sockets)
    assert decide(Packet(CLIENT, 40000, address, 53, protocol, device), world, state).verdict == verdict


@pytest.mark.parametrize("serves", [True, False])
def test_the_hint_names_node_ports_only_where_they_are_served(serves: bool) -> None:
    node = bytes([192, 168, 9, 1])
    world = World({"localhost_node_ports": 0, "nft_mode": 1}, {node: serves}, frozenset(), True)
    found = decide(Packet(CLIENT, 40000, node, OTHER, Protocol.TCP, 3), world, STATE)
    assert any("30080/TCP (default/web:http)" in step for step in found.steps) is serves
