# SPDX-License-Identifier: Apache-2.0
"""Every row of the decision table (spec/service-semantics §5) with real connections, in both families."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.client import TIMED_OUT, ask, ask_many
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.namespace import Namespace
from pyebpf_proxy.lab.rules import decide
from pyebpf_proxy.lab.scenario import DROPPED_AFTER, Client, observe
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import (
    counted_between,
    node_client,
    outside_client,
    pod_client,
    reasons,
    route_cluster_ips,
)

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

NO_DETECTOR = {"clusterCIDR": ""}
MASQUERADE_ALL = {"iptables": {"minSyncPeriod": "10ms", "masqueradeAll": True}}


class Cluster:
    """Two nodes and the services by name. web-1 and lone are on node1, web-2 on node2, a toolbox pod on each."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.first, self.second = lab.nodes
        web1, web2 = lab.add_pod("web-1", self.first), lab.add_pod("web-2", self.second)
        lone = lab.add_pod("lone", self.first)
        lab.add_pod("toolbox", self.first)
        self.services = {
            kind.name: kind
            for kind in (
                Kind("cluster", 10),
                Kind("local", 11, externalTrafficPolicy="Local"),
                Kind("internal", 12, internalTrafficPolicy="Local"),
                Kind("far-local", 13, externalTrafficPolicy="Local", internalTrafficPolicy="Local"),
                Kind("empty", 14),
                Kind("empty-local", 15, externalTrafficPolicy="Local", internalTrafficPolicy="Local"),
                Kind("near", 16),
                Kind("lone", 17, externalTrafficPolicy="Local"),
            )
        }
        for name in ("cluster", "local", "internal"):
            self.services[name].endpoints = (web1, web2)
        self.services["far-local"].endpoints = (web2,)
        self.services["near"].endpoints = (web1, lone)
        self.services["lone"].endpoints = (lone,)
        write_nodes(lab)
        write_services(lab, *self.services.values())
        route_cluster_ips(lab, self.first)
        self.config: dict[str, object] | None = None
        lab.start_agents()

    def use(self, config: dict[str, object] | None) -> None:
        """Restart the agents if they run with another configuration."""
        if config != self.config:
            self.lab.stop_agents()
            self.lab.start_agents(config)
            self.config = config
            for node in self.lab.nodes:
                # A datagram from a port that was used before would continue a flow of the old configuration.
                node.namespace.run("conntrack", "-D", "-p", "udp", check=False)

    def client(self, name: str) -> Client:
        if name == "client":
            return outside_client(self.lab)
        if name.startswith("node"):
            return node_client(self.lab.node(name))
        return pod_client(self.lab.pods[name])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Lab() as lab:
        yield Cluster(lab)


def decided(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """The reasons that were counted in between, without flows of earlier tests that the sweep has ended."""
    return {name: count for name, count in counted_between(before, after).items() if name != "young_ended"}


def check(cluster: Cluster, origin: str, service: str, kind: str, family: int, protocol: str, at: str = "") -> None:
    """One row: send a request, and compare the result with the table."""
    client, about = cluster.client(origin), cluster.services[service]
    target = about.target(kind, client.node or cluster.first, cluster.lab.node(at) if at else None)  # type: ignore[arg-type]
    source = client.kind
    if at and client.node is not None and client.node.name != at:
        # A NodePort of another node: that node serves it, and for it a process of this node is an ordinary client.
        client = client._replace(node=None, kind="external" if source == "node" else source)
    decision = decide(
        target.kind,
        client.kind,
        external_local=target.external_local,
        internal_local=target.internal_local,
        masquerade_all=cluster.config == MASQUERADE_ALL,
        detector=cluster.config != NO_DETECTOR,
    )
    observed = observe(client, target, family, protocol, decision)
    assert not observed.problem, observed.problem


@pytest.mark.parametrize("origin", ["toolbox", "client", "node1", "node2"])
@pytest.mark.parametrize("kind", ["ClusterIP", "ExternalIP", "LoadBalancer", "NodePort"])
@pytest.mark.parametrize("service", ["cluster", "local"])
def test_policy(cluster: Cluster, service: str, kind: str, origin: str, family: int, protocol: str) -> None:
    cluster.use(None)
    check(cluster, origin, service, kind, family, protocol)


@pytest.mark.parametrize(("origin", "service"), [
    ("toolbox", "cluster"), ("client", "cluster"), ("node1", "cluster"), ("client", "local"), ("node1", "local"),
])  # fmt: skip
def test_node_port_of_the_other_node(cluster: Cluster, origin: str, service: str, family: int, protocol: str) -> None:
    cluster.use(None)
    check(cluster, origin, service, "NodePort", family, protocol, at="node2")


@pytest.mark.parametrize("origin", ["toolbox", "node1", "node2"])
def test_internal_policy_local_uses_only_local_endpoints(
    cluster: Cluster, origin: str, family: int, protocol: str
) -> None:
    cluster.use(None)
    check(cluster, origin, "internal", "ClusterIP", family, protocol)


@pytest.mark.parametrize("kind", ["ExternalIP", "LoadBalancer", "NodePort"])
def test_internal_policy_does_not_apply_to_external_addresses(
    cluster: Cluster, kind: str, family: int, protocol: str
) -> None:
    cluster.use(None)
    check(cluster, "client", "internal", kind, family, protocol)


@pytest.mark.parametrize(("origin", "kind"), [
    ("toolbox", "ClusterIP"), ("client", "LoadBalancer"), ("client", "ExternalIP"), ("client", "NodePort"),
])  # fmt: skip
def test_policy_local_without_a_local_endpoint_drops(
    cluster: Cluster, origin: str, kind: str, family: int, protocol: str
) -> None:
    cluster.use(None)
    before = reasons(cluster.first)
    check(cluster, origin, "far-local", kind, family, protocol)
    counted = counted_between(before, reasons(cluster.first))
    assert counted.get("drop_no_local_endpoints", 0) >= 1, counted


def test_policy_local_without_a_local_endpoint_drops_packets_of_the_node(cluster: Cluster, family: int) -> None:
    """A dropped connect cannot wait in a hook: it fails at once or gets no answer."""
    cluster.use(None)
    target = cluster.services["far-local"].target("ClusterIP", cluster.first)
    outcome = cluster.first.namespace.call(ask, target.address.of(family), 80, timeout=DROPPED_AFTER)
    assert outcome.answer is None, outcome


# In mode iptables the node's own packets to an externalIP or VIP are not refused (docs/data-plane.md).
@pytest.mark.parametrize(("service", "kind", "origin"), [
    ("empty", "ClusterIP", "toolbox"), ("empty", "ClusterIP", "client"), ("empty", "ClusterIP", "node1"),
    ("empty", "NodePort", "toolbox"), ("empty", "NodePort", "client"), ("empty", "NodePort", "node1"),
    ("empty", "ExternalIP", "toolbox"), ("empty", "ExternalIP", "client"),
    ("empty", "LoadBalancer", "toolbox"), ("empty", "LoadBalancer", "client"),
    ("empty-local", "ClusterIP", "toolbox"), ("empty-local", "ClusterIP", "client"),
    ("empty-local", "ClusterIP", "node1"),
    ("empty-local", "LoadBalancer", "toolbox"), ("empty-local", "LoadBalancer", "client"),
])  # fmt: skip
def test_without_endpoints_packets_are_refused_at_once(
    cluster: Cluster, service: str, kind: str, origin: str, family: int, protocol: str
) -> None:
    cluster.use(None)
    before = reasons(cluster.first)
    check(cluster, origin, service, kind, family, protocol)
    name = "reject_no_endpoints_socket" if origin == "node1" else "reject_no_endpoints"
    counted = counted_between(before, reasons(cluster.first))
    assert counted.get(name, 0) >= 1, counted


def test_a_refusal_arrives_before_a_retransmission(cluster: Cluster, family: int) -> None:
    cluster.use(None)
    target = cluster.services["empty"].target("LoadBalancer", cluster.first)
    for protocol, port in target.ports.items():
        before = _errors_while_locked(cluster.lab.client)
        outcome = cluster.lab.client.call(ask, target.address.of(family), port, protocol)
        # A SYN is sent again after one second. While connect() holds the socket, the client's kernel ignores an ICMP
        # error. If all namespaces share a CPU, the error may come that early; the kernel counts it.
        assert outcome.took < 0.9 or _errors_while_locked(cluster.lab.client) > before, outcome


def _errors_while_locked(namespace: Namespace) -> int:
    return int(namespace.run("nstat", "-az", "TcpExtLockDroppedIcmps").split()[-2])


@pytest.mark.parametrize("kind", ["ClusterIP", "ExternalIP", "LoadBalancer", "NodePort"])
def test_hairpin(cluster: Cluster, kind: str, family: int, protocol: str) -> None:
    """A pod that reaches itself through a service sees the node's address, with any policy."""
    cluster.use(None)
    check(cluster, "lone", "lone", kind, family, protocol)
    check(cluster, "lone", "near", kind, family, protocol)


@pytest.mark.parametrize(("origin", "service", "kind"), [
    ("toolbox", "cluster", "ClusterIP"),  # masqueraded now
    ("client", "near", "ClusterIP"),
    ("toolbox", "local", "LoadBalancer"),  # masqueradeAll does not apply to these
    ("client", "local", "LoadBalancer"),
    ("client", "cluster", "NodePort"),
])  # fmt: skip
def test_masquerade_all(cluster: Cluster, origin: str, service: str, kind: str, family: int, protocol: str) -> None:
    cluster.use(MASQUERADE_ALL)
    check(cluster, origin, service, kind, family, protocol)


@pytest.mark.parametrize(("origin", "service", "kind"), [
    ("toolbox", "cluster", "ClusterIP"),
    ("client", "near", "ClusterIP"),  # kept, without a detector
    ("toolbox", "local", "LoadBalancer"),  # no short cut: only local endpoints
    ("toolbox", "local", "NodePort"),
    ("toolbox", "cluster", "LoadBalancer"),
    ("client", "local", "LoadBalancer"),
    ("lone", "lone", "ClusterIP"),
])  # fmt: skip
def test_without_detector(cluster: Cluster, origin: str, service: str, kind: str, family: int, protocol: str) -> None:
    cluster.use(NO_DETECTOR)
    check(cluster, origin, service, kind, family, protocol)


@pytest.mark.parametrize("origin", ["toolbox", "client"])
def test_each_new_flow_is_counted_by_the_path_that_it_took(
    cluster: Cluster, origin: str, family: int, protocol: str
) -> None:
    """The first flow to each endpoint passes netfilter, which grants the permit for later flows."""
    cluster.use(None)
    target = cluster.services["cluster"].target("LoadBalancer", cluster.first)
    before = reasons(cluster.first)
    namespace = cluster.client(origin).namespace
    # Separate ports: a port that was used belongs to a flow that conntrack knows for minutes.
    asked = (10, target.address.of(family), target.ports[protocol], protocol)
    outcomes = namespace.call(ask_many, *asked, first_port=20000)
    assert all(outcome.answer for outcome in outcomes)
    counted = counted_between(before, reasons(cluster.first))
    slow, fast = counted.get("new_flow_netfilter", 0), counted.get("new_flow_fast", 0)
    assert slow + fast >= 10, counted
    # A permit is valid for a second: on a slow machine a later flow may have none.
    assert fast >= 1 <= counted.get("permit_granted", 0), counted
    assert slow >= counted.get("slow_no_permit", 0) >= 1, counted


def _alternate(addresses: list[str], port: int, times: int) -> list[tuple[str, str]]:
    """One socket sends to each address in turn. Returns the address and the server that answered."""
    seen = []
    with socket.socket(socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(10)
        for index in range(times):
            asked = addresses[index % len(addresses)]
            sock.sendto(b"who", (asked, port))
            try:
                answered = sock.recvfrom(4096)[1][0]
            except TimeoutError:
                answered = ""
            seen.append((asked, answered))
    return seen


def test_one_socket_uses_two_frontends_of_one_endpoint(cluster: Cluster, family: int) -> None:
    """Same client port, same endpoint, two frontends: each answer must come from the address that was asked."""
    cluster.use(None)
    kind = cluster.services["lone"]
    targets = [kind.target(name, cluster.first) for name in ("ClusterIP", "LoadBalancer")]
    toolbox = cluster.client("toolbox").namespace
    # So that both have a permit.
    for target in targets:
        assert all(each.answer for each in toolbox.call(ask_many, 3, target.address.of(family), 53, "udp"))
    addresses = [target.address.of(family) for target in targets]
    seen = toolbox.call(_alternate, addresses, targets[0].ports["udp"], 10)
    assert [answered for _, answered in seen] == [asked for asked, _ in seen]


def test_choice_is_uniform(cluster: Cluster, family: int) -> None:
    """400 connections over two endpoints: 140 to 260 each; other numbers occur once in 10^9 runs."""
    cluster.use(None)
    target = cluster.services["cluster"].target("LoadBalancer", cluster.first)
    outcomes = cluster.lab.client.call(ask_many, 400, target.address.of(family), 80)
    pods = [outcome.answer.pod for outcome in outcomes if outcome.answer]
    assert len(pods) == 400
    assert 140 <= pods.count("web-1") <= 260


def test_packets_to_an_address_of_no_service_are_not_changed(cluster: Cluster, family: int, protocol: str) -> None:
    """Another port of a VIP is not served: the packet is routed in circles or away; the programs neither answer nor
    refuse it.
    """
    cluster.use(None)
    before = reasons(cluster.first)
    target = cluster.services["cluster"].target("LoadBalancer", cluster.first)
    outcome = cluster.lab.client.call(ask, target.address.of(family), 4242, protocol, timeout=0.3)
    assert outcome.kind in (TIMED_OUT, "unreachable"), outcome
    assert decided(before, reasons(cluster.first)) == {}


def test_packets_to_pods_and_by_plain_routes_are_not_changed(cluster: Cluster, family: int, protocol: str) -> None:
    cluster.use(None)
    pod = cluster.lab.pods["web-2"]
    before = reasons(cluster.first)
    port = {"tcp": 8080, "udp": 5353}[protocol]
    outcome = cluster.lab.pods["toolbox"].namespace.call(ask, pod.address.of(family), port, protocol)
    assert outcome.answer is not None, outcome
    assert outcome.answer.peer[0] == cluster.lab.pods["toolbox"].address.of(family)
    assert decided(before, reasons(cluster.first)) == {}
