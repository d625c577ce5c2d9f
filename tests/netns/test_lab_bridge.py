# SPDX-License-Identifier: Apache-2.0
"""Pods on a bridge, with bridge-nf-call-iptables on and off (docs/data-plane.md explains bridged replies)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pyebpf_proxy.lab.addresses import CORE_TO_NODES
from pyebpf_proxy.lab.client import ask, ask_many
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.rules import decide
from pyebpf_proxy.lab.scenario import observe
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import counted_between, node_client, outside_client, pod_client, reasons

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

NEAR = Kind("near", 10)
BOTH = Kind("both", 11)
LOCAL = Kind("local", 12, externalTrafficPolicy="Local")


@pytest.fixture(scope="module", params=(0, 1), ids=("call-iptables-0", "call-iptables-1"))
def bridged(request: pytest.FixtureRequest) -> Iterator[tuple[Lab, int]]:
    with Lab(pod_network="bridge") as lab:
        first, second = lab.nodes
        call: int = request.param
        for node in lab.nodes:
            node.namespace.sysctl({f"net.bridge.bridge-nf-call-{name}": call for name in ("iptables", "ip6tables")})
        near = lab.add_pod("near-1", first)
        far = lab.add_pod("far-1", second)
        lab.add_pod("toolbox", first)
        NEAR.endpoints, BOTH.endpoints, LOCAL.endpoints = (near,), (near, far), (near, far)
        write_nodes(lab)
        write_services(lab, NEAR, BOTH, LOCAL)
        lab.start_agents()
        yield lab, call


@pytest.mark.parametrize("kind", ["ClusterIP", "LoadBalancer"])
@pytest.mark.parametrize(("origin", "about"), [
    ("toolbox", NEAR),  # client and endpoint are ports of one bridge
    ("toolbox", BOTH),
    ("toolbox", LOCAL),  # the source is kept: the bridge would send the reply straight back
    ("near-1", NEAR),  # the pod itself
    ("far-1", BOTH),
    ("client", BOTH),
    ("client", LOCAL),
    ("node1", BOTH),
], ids=lambda value: getattr(value, "name", value))  # fmt: skip
def test_services_of_pods_on_a_bridge(
    bridged: tuple[Lab, int], origin: str, about: Kind, kind: Any, family: int, protocol: str
) -> None:
    lab, _ = bridged
    if origin == "client":
        if kind == "ClusterIP":
            kind = "ExternalIP"
        client = outside_client(lab)
    elif origin.startswith("node"):
        client = node_client(lab.node(origin))
    else:
        client = pod_client(lab.pods[origin])
    target = about.target(kind, client.node or lab.nodes[0])
    decision = decide(kind, client.kind, external_local=target.external_local)
    observed = observe(client, target, family, protocol, decision)
    assert not observed.problem, observed.problem


def test_large_transfers_between_pods_of_one_bridge(bridged: tuple[Lab, int], family: int) -> None:
    lab, call = bridged
    toolbox = lab.pods["toolbox"].namespace
    address = NEAR.target("ClusterIP", lab.nodes[0]).address.of(family)
    before = reasons(lab.nodes[0])
    outcome = toolbox.call(ask, address, 80, size=20_000, reply_size=3_000_000)
    assert outcome.answer is not None, outcome
    assert outcome.size == 3_000_000
    lifted = counted_between(before, reasons(lab.nodes[0])).get("bridged_reply_redirected", 0)
    if call == 0:
        assert lifted > 0  # without bridge netfilter the reply reaches the node only because the program lifts it


def test_fragmented_requests_between_pods_of_one_bridge(bridged: tuple[Lab, int], family: int) -> None:
    lab, _ = bridged
    address = NEAR.target("ClusterIP", lab.nodes[0]).address.of(family)
    outcome = lab.pods["toolbox"].namespace.call(ask, address, 53, "udp", size=5_000, fragment=True)
    assert outcome.answer is not None, outcome
    assert outcome.answer.received == 5_000


def test_fragmented_answers_between_pods_of_one_bridge(bridged: tuple[Lab, int], family: int) -> None:
    lab, _ = bridged
    address = NEAR.target("ClusterIP", lab.nodes[0]).address.of(family)
    outcome = lab.pods["toolbox"].namespace.call(ask, address, 53, "udp", reply_size=9_000, fragment=True)
    assert outcome.answer is not None, outcome
    assert outcome.size == 9_000


def test_pods_of_one_bridge_reach_each_other_directly(bridged: tuple[Lab, int], family: int) -> None:
    lab, _ = bridged
    near, toolbox = lab.pods["near-1"], lab.pods["toolbox"]
    for protocol, port in (("tcp", 8080), ("udp", 5353)):
        before = reasons(lab.nodes[0])
        outcomes = toolbox.namespace.call(ask_many, 5, near.address.of(family), port, protocol)
        for outcome in outcomes:
            assert outcome.answer is not None, (protocol, outcome, counted_between(before, reasons(lab.nodes[0])))
            assert outcome.answer.peer[0] == toolbox.address.of(family)
            assert outcome.peer == (near.address.of(family), port)


def test_a_client_port_that_was_used_for_a_service_reaches_the_endpoint_directly(
    bridged: tuple[Lab, int], family: int, protocol: str
) -> None:
    """conntrack has the flow to the Service for some time. The replies of both have the same addresses and ports."""
    lab, _ = bridged
    near, toolbox = lab.pods["near-1"], lab.pods["toolbox"]
    served = NEAR.target("ClusterIP", lab.nodes[0]).address.of(family), {"tcp": 80, "udp": 53}[protocol]
    direct = near.address.of(family), {"tcp": 8080, "udp": 5353}[protocol]
    for address, port in (served, direct, served, direct, direct):
        outcome = toolbox.namespace.call(ask, address, port, protocol, source_port=20000 + family)
        assert outcome.answer is not None, (address, port, outcome)


@pytest.mark.parametrize("kind", ["macvlan", "veth"])
def test_the_node_s_addresses_are_on_top_of_the_bridge(lab: Lab, kind: str, family: int, protocol: str) -> None:
    """The bridge is not the gateway of its ports: its IP layer gets packets by another device than its routes name."""
    first, second = lab.nodes
    node = first.namespace
    node.sysctl({f"net.bridge.bridge-nf-call-{name}": 0 for name in ("iptables", "ip6tables")})
    node.ip("link add br0 type bridge forward_delay 0", "link set eth0 master br0", "link set br0 up")
    if kind == "macvlan":
        node.ip("link add up0 link br0 type macvlan mode bridge")
    else:
        node.ip("link add up0 type veth peer name port0", "link set port0 master br0 up")
    own = f"{first.address.v4}/24", f"{first.address.v6}/64"
    node.ip(
        "link set up0 up",
        *(f"addr del {address} dev eth0" for address in own),
        *(f"addr add {address} dev up0" for address in own),
        *(f"route replace default via {via} dev up0" for via in CORE_TO_NODES),
        *(f"route replace {cidr} via {via} dev up0" for cidr, via in zip(second.pod_cidr, second.address, strict=True)),
    )
    # As some distributions set it.
    node.sysctl({"net.ipv4.conf.all.rp_filter": 1})
    toolbox = lab.add_pod("toolbox", first)
    BOTH.endpoints = (lab.add_pod("far-1", second),)
    write_nodes(lab)
    write_services(lab, BOTH)
    first.agent.start()
    first.agent.wait_synced()
    for client, name in ((toolbox.namespace, "ClusterIP"), (lab.client, "LoadBalancer")):
        target = BOTH.target(name, first)  # type: ignore[arg-type]
        for _ in range(5):
            outcome = client.call(ask, target.address.of(family), target.ports[protocol], protocol)
            assert outcome.answer is not None, (name, outcome, reasons(first))
