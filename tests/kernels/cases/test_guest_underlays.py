# SPDX-License-Identifier: Apache-2.0
"""Pod networks over tunnels: another node's pods are behind a vxlan, geneve, ipip, gre or wireguard device."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator

import pytest
from pyroute2 import WireGuard

from pyebpf_proxy.lab.addresses import Dual
from pyebpf_proxy.lab.client import ANSWERED, ask
from pyebpf_proxy.lab.cluster import Lab, Node
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import counted_between, pod_client, reasons

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 21)
LOCAL = Kind("local", 22, externalTrafficPolicy="Local")
LINKS = {
    "vxlan": "link add under0 type vxlan id 7 local {own} remote {other} dstport 4789 dev eth0",
    "geneve": "link add under0 type geneve id 7 remote {other}",
    "ipip": "link add under0 type ipip local {own} remote {other}",
    # To any peer: the neighbours' link addresses are the other ends.
    "gre": "link add under0 type gre local {own}",
    "wireguard": "link add under0 type wireguard",
}

MODULES = {"gre": "ip_gre"}


def _address(node: Node) -> Dual:
    """The tunnel device's address; packets that are masqueraded into it have it."""
    return Dual(f"10.255.0.{node.number}", f"fd00:255::{node.number}")


@pytest.fixture(scope="module", params=LINKS)
def underlay(request: pytest.FixtureRequest, needs_module: Callable[..., None]) -> Iterator[tuple[Lab, str]]:
    kind: str = request.param
    needs_module(MODULES.get(kind, kind))
    with Lab() as lab:
        first, second = lab.nodes
        for own, other in ((first, second), (second, first)):
            own.namespace.ip(LINKS[kind].format(own=own.address.v4, other=other.address.v4))
        if kind == "wireguard":
            _introduce(first, second)
        for own, other in ((first, second), (second, first)):
            local, remote = _address(own), _address(other)
            lines = [f"addr add {local.v4}/24 dev under0", "link set under0 up"]
            lines += [f"route replace {other.pod_cidr.v4} via {remote.v4} dev under0 onlink"]
            if kind != "ipip":  # ipip carries only IPv4
                lines += [f"addr add {local.v6}/64 dev under0 nodad"]
                lines += [f"route replace {other.pod_cidr.v6} via {remote.v6} dev under0 onlink"]
            if kind == "gre":
                lines += [f"neigh add {each} lladdr {other.address.v4} dev under0 nud permanent" for each in remote]
            own.namespace.ip(*lines)
        WEB.endpoints = LOCAL.endpoints = (lab.add_pod("far", second),)
        lab.add_pod("toolbox", first)
        write_nodes(lab)
        write_services(lab, WEB, LOCAL)
        lab.start_agents()
        yield lab, kind


def _introduce(first: Node, second: Node) -> None:
    """Each node gets a key; the kernel derives the public key for the other one."""
    keys = {node.number: node.namespace.call(_make_key) for node in (first, second)}
    for own, other in ((first, second), (second, first)):
        own.namespace.call(_add_peer, keys[other.number], other.address.v4)


def _make_key() -> str:
    with WireGuard() as wireguard:
        wireguard.set("under0", private_key=base64.b64encode(os.urandom(32)).decode(), listen_port=51820)
        (answer,) = wireguard.info("under0")
        key = answer.get_attr("WGDEVICE_A_PUBLIC_KEY")
        return key.decode() if isinstance(key, bytes) else str(key)


def _add_peer(key: str, address: str) -> None:
    peer = {
        "public_key": key,
        "endpoint_addr": address,
        "endpoint_port": 51820,
        "allowed_ips": ["0.0.0.0/0", "::/0"],
    }
    with WireGuard() as wireguard:
        wireguard.set("under0", peer=peer)


def _skip_if_not_carried(kind: str, family: int) -> None:
    if kind == "ipip" and family == 6:
        pytest.skip("ipip carries IPv4 only")


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_client_from_outside_is_masqueraded_by_the_tunnel(
    underlay: tuple[Lab, str], family: int, protocol: str
) -> None:
    lab, kind = underlay
    _skip_if_not_carried(kind, family)
    first = lab.nodes[0]
    target = WEB.target("LoadBalancer", first)
    outcome = lab.client.call(ask, target.address.of(family), target.ports[protocol], protocol)
    assert outcome.answer is not None, outcome
    assert outcome.answer.peer[0] == _address(first).of(family)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_pod_keeps_its_address(underlay: tuple[Lab, str], family: int, protocol: str) -> None:
    lab, kind = underlay
    _skip_if_not_carried(kind, family)
    client = pod_client(lab.pods["toolbox"])
    target = WEB.target("ClusterIP", lab.nodes[0])
    outcome = client.namespace.call(ask, target.address.of(family), target.ports[protocol], protocol)
    assert outcome.answer is not None, outcome
    assert outcome.answer.peer[0] == client.address.of(family)


def test_the_node_reaches_the_pod(underlay: tuple[Lab, str], family: int) -> None:
    lab, kind = underlay
    _skip_if_not_carried(kind, family)
    first = lab.nodes[0]
    outcome = first.namespace.call(ask, WEB.target("ClusterIP", first).address.of(family), 80)
    assert outcome.answer is not None, outcome
    assert outcome.answer.peer[0] == _address(first).of(family)


def test_large_transfers_through_the_tunnel(underlay: tuple[Lab, str], family: int) -> None:
    """More than a packet in each direction: the tunnel's MTU is smaller than that of the client's network."""
    lab, kind = underlay
    _skip_if_not_carried(kind, family)
    address = WEB.target("LoadBalancer", lab.nodes[0]).address.of(family)
    outcome = lab.client.call(ask, address, 80, size=30_000, reply_size=300_000, timeout=20.0)
    assert outcome.answer is not None, outcome
    assert outcome.size == 300_000


def test_a_request_from_a_tunnel_is_served(underlay: tuple[Lab, str], family: int) -> None:
    """A pod of the other node uses this node's NodePort: the request comes out of the tunnel's own device."""
    lab, kind = underlay
    _skip_if_not_carried(kind, family)
    first = lab.nodes[0]
    far = lab.pods["far"]
    # This node answers over two crossings. LOCAL has no endpoint on the first node: its packets are dropped and
    # counted.
    assert far.namespace.call(ask, _address(first).of(family), 30000 + WEB.number).kind == ANSWERED
    before = reasons(first)
    outcome = lab.client.call(ask, LOCAL.target("LoadBalancer", first).address.of(family), 80, timeout=1.0)
    assert outcome.kind != ANSWERED
    assert counted_between(before, reasons(first)).get("drop_no_local_endpoints")
