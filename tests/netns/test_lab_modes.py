# SPDX-License-Identifier: Apache-2.0
"""Where kube-proxy's modes differ (spec/service-semantics §14), with the real agent: addresses without a frontend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.addresses import Dual, cluster_ip
from pyebpf_proxy.lab.client import ANSWERED, REFUSED, TIMED_OUT, UNREACHABLE, ask
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.scenario import Client
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import node_client, pod_client, wait_until

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 20)
UNDEFINED_PORT = 4242


@pytest.fixture(scope="module", params=["iptables", "nftables"])
def mode(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture(scope="module")
def lab(mode: str) -> Iterator[Lab]:
    """A service in one of the two modes."""
    with Lab() as lab:
        WEB.endpoints = (lab.add_pod("web-1", lab.nodes[0]),)
        lab.add_pod("toolbox", lab.nodes[0])
        write_nodes(lab)
        write_services(lab, WEB)
        lab.start_agents(config(mode))
        yield lab


def config(mode: str) -> dict[str, object]:
    return {"mode": mode, mode: {"minSyncPeriod": "10ms"}}


def clients(lab: Lab) -> list[Client]:
    return [pod_client(lab.pods["toolbox"]), node_client(lab.nodes[0])]


def outcome(client: Client, address: Dual, family: int, protocol: str, port: int = UNDEFINED_PORT) -> str:
    return client.namespace.call(ask, address.of(family), port, protocol, timeout=4.0).kind


def test_an_undefined_port_of_a_cluster_ip(lab: Lab, mode: str, family: int, protocol: str) -> None:
    for client in clients(lab):
        got = outcome(client, cluster_ip(WEB.number), family, protocol)
        # The kernel rejects an outgoing datagram to its sender with EPERM.
        denied = UNREACHABLE if client.kind == "node" and protocol == "udp" else REFUSED
        if mode == "nftables":
            assert got == denied, client.name
        else:
            # Routed like any other packet: lost, or unreachable for the last router.
            assert got in (TIMED_OUT, UNREACHABLE), client.name
        port = {"tcp": 80, "udp": 53}[protocol]
        assert outcome(client, cluster_ip(WEB.number), family, protocol, port) == ANSWERED


def test_a_pod_that_is_created_without_an_agent(lab: Lab, mode: str, family: int) -> None:
    """Only an agent attaches the program to its device (finding D10). In mode nftables connections wait for that."""
    node, ports = lab.nodes[0], {"tcp": 80, "udp": 53}
    address = cluster_ip(WEB.number).of(family)
    node.agent.kill()
    try:
        pod = lab.add_pod(f"late-{family}", node, serve=False)
        for protocol, port in ports.items():
            got = pod.namespace.call(ask, address, port, protocol, timeout=0.5).kind
            # In mode iptables it is routed like any other packet.
            assert got in ((TIMED_OUT,) if mode == "nftables" else (TIMED_OUT, UNREACHABLE)), protocol
            assert outcome(clients(lab)[0], cluster_ip(WEB.number), family, protocol, port) == ANSWERED, "an older pod"
        waiting = pod.namespace.start(ask, address, 80, timeout=60.0)
    finally:
        node.agent.start(config(mode))
        node.agent.wait_synced()
    if mode == "nftables":
        assert waiting.result().kind == ANSWERED
    for protocol, port in ports.items():
        assert outcome(pod_client(pod), cluster_ip(WEB.number), family, protocol, port) == ANSWERED


def test_a_service_that_is_added_and_removed(lab: Lab, mode: str, family: int) -> None:
    if mode != "nftables":
        pytest.skip("mode iptables never looks at such addresses")
    other = Kind("other", 21)
    other.endpoints = WEB.endpoints
    pod = clients(lab)[0]
    asked = (cluster_ip(other.number), family, "tcp")
    assert outcome(pod, *asked) != REFUSED
    lab.wait_synced(write_services(lab, other))
    assert outcome(pod, *asked) == REFUSED
    lab.wait_synced(lab.write("other.yaml", []))
    wait_until(lambda: outcome(pod, *asked) != REFUSED, "the address of a deleted service is not refused any more")
