# SPDX-License-Identifier: Apache-2.0
"""The planner over time: the result of a change, and that the path to a state does not matter."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyebpf_proxy.kube.objects import Node, Service
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.services import endpoints, no_endpoints
from pyebpf_proxy.services.addresses import format_address, format_address_port
from pyebpf_proxy.services.model import Endpoint, IPFamily, Protocol, ServicePort, ServicePortName
from pyebpf_proxy.services.planner import Planner, PlanSettings
from tests.unit.services.planned import (
    NODE,
    cluster,
    endpoint_slice,
    frontends,
    gone,
    name_of,
    node,
    service,
    service_cidr,
)


@pytest.fixture
def planner() -> Planner:
    return Planner(PlanSettings(NODE))


def test_slice_before_its_service(planner: Planner) -> None:
    assert planner.update([endpoint_slice("web-1", "web", "10.244.1.1")]) == {}
    delta = planner.update([service("web")])
    assert cluster(delta[name_of("web")]) == ["10.244.1.1:8080"]


def test_slice_outlives_its_service(planner: Planner) -> None:
    planner.update([service("web"), endpoint_slice("web-1", "web", "10.244.1.1")])
    assert planner.update([gone(service("web"))]) == {name_of("web"): None}
    assert planner.update([endpoint_slice("web-1", "web", "10.244.1.2")]) == {}
    assert cluster(planner.update([service("web")])[name_of("web")]) == ["10.244.1.2:8080"]


def test_slice_moves_to_another_service(planner: Planner) -> None:
    planner.update([service("a", "10.96.0.1"), service("b", "10.96.0.2"), endpoint_slice("s", "a", "10.244.1.1")])
    delta = planner.update([endpoint_slice("s", "b", "10.244.1.1")])
    assert cluster(delta[name_of("a")]) == []
    assert cluster(delta[name_of("b")]) == ["10.244.1.1:8080"]
    delta = planner.update([endpoint_slice("s", None, "10.244.1.1")])
    assert list(delta) == [name_of("b")]


def test_irrelevant_changes_give_no_delta(planner: Planner) -> None:
    first = endpoint_slice("web-1", "web", "10.244.1.1", "10.244.1.2")
    planner.update([service("web"), first])
    assert planner.update([first]) == {}
    assert planner.update([endpoint_slice("web-1", "web", "10.244.1.2", "10.244.1.1")]) == {}
    assert planner.update([service("web", type="NodePort")]) == {}
    not_ready = {"addresses": ["10.244.1.3"], "conditions": {"ready": False}}
    assert planner.update([endpoint_slice("web-2", "web", endpoints=[not_ready])]) == {}


def test_of_duplicates_the_last_slice_by_name_counts() -> None:
    """Whichever came first: a restart must give the same plan."""
    here = endpoint_slice("b", "web", endpoints=[{"addresses": ["10.244.1.1"], "nodeName": NODE}])
    there = endpoint_slice("a", "web", endpoints=[{"addresses": ["10.244.1.1"], "nodeName": "node-2"}])
    for order in ([here, there], [there, here]):
        planner = Planner(PlanSettings(NODE))
        for change in order:
            planner.update([change])
        (port,) = planner.update([service("web")]).values()
        assert port is not None
        assert [endpoint.local for endpoint in port.cluster] == [True]


def test_only_the_last_of_several_changes_counts(planner: Planner) -> None:
    planner.update([service("web"), endpoint_slice("web-1", "web", "10.244.1.1")])
    there_and_back = [gone(service("web")), service("web"), endpoint_slice("web-1", "web", "10.244.1.9")]
    assert planner.update([*there_and_back, endpoint_slice("web-1", "web", "10.244.1.1")]) == {}


def test_the_label_of_another_proxy_removes_the_service(planner: Planner) -> None:
    change = service("web")
    planner.update([change])
    assert isinstance(change.object, Service)
    metadata = msgspec.structs.replace(change.object.metadata, labels={"service.kubernetes.io/service-proxy-name": "x"})
    labelled = msgspec.structs.replace(change.object, metadata=metadata)
    assert planner.update([change._replace(object=labelled)]) == {name_of("web"): None}
    assert list(planner.update([change])) == [name_of("web")]


def test_a_renamed_port_is_another_service_port(planner: Planner) -> None:
    planner.update([service("web", ports=[{"name": "a", "port": 80}])])
    delta = planner.update([service("web", ports=[{"name": "b", "port": 80}])])
    assert delta[name_of("web", "a")] is None
    assert frontends(delta[name_of("web", "b")]) == ["10.96.0.1:80"]
    assert not planner.conflicts


def test_a_slice_affects_only_its_service(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(50):
        change = endpoint_slice(f"s{i}-1", f"s{i}", f"10.244.1.{i + 1}")
        planner.update([service(f"s{i}", f"10.96.1.{i + 1}"), change])
    made: list[tuple[str, Protocol]] = []
    merge = endpoints.merge

    def counting(views: Any, port: tuple[str, Protocol], most: int) -> Any:
        made.append(port)
        return merge(views, port, most)

    monkeypatch.setattr(endpoints, "merge", counting)
    assert list(planner.update([endpoint_slice("s7-1", "s7", "10.244.2.7")])) == [name_of("s7")]
    assert len(made) == 1
    planner.update([endpoint_slice("s7-1", "s7", "10.244.2.7")])
    planner.update([node("node-2", zone="a", pod_cidrs=["10.244.2.0/24"])])
    assert len(made) == 1
    planner.update([node(NODE, zone="a")])
    assert len(made) == 51


# ---- this node and the others -----------------------------------------------------------------------------------


def test_the_nodes_zone_affects_every_service(planner: Planner) -> None:
    in_zone = [
        {"addresses": [f"10.244.1.{i}"], "hints": {"forZones": [{"name": zone}]}} for i, zone in ((1, "a"), (2, "b"))
    ]
    planner.update([service("web"), endpoint_slice("web-1", "web", endpoints=in_zone), node(NODE, zone="a")])
    assert cluster(planner.get(name_of("web"))) == ["10.244.1.1:8080"]
    assert cluster(planner.update([node(NODE, zone="b")])[name_of("web")]) == ["10.244.1.2:8080"]
    assert planner.update([node("node-2", zone="a")]) == {}
    assert planner.zone == "b"
    assert len(cluster(planner.update([gone(node(NODE))])[name_of("web")])) == 2


def test_external_ips_are_served_unless_the_gate_forbids_it() -> None:
    """Policies stay: a Service of type ClusterIP with external IPs may have externalTrafficPolicy
    (spec/service-semantics §1.3).
    """
    web = service("web", externalIPs=["203.0.113.1"], externalTrafficPolicy="Local")
    for allowed, expected in ((True, ["10.96.0.1:80", "203.0.113.1:80"]), (False, ["10.96.0.1:80"])):
        planner = Planner(PlanSettings(NODE, external_ips=allowed))
        assert frontends(planner.update([web])[name_of("web")]) == expected
    planner.update([endpoint_slice("web-1", "web", "10.244.1.1")])
    made = planner.get(name_of("web"))
    assert made is not None
    assert (len(made.cluster), made.any_endpoints) == (1, True)


@pytest.mark.parametrize("other", ["2001:db8::1", "127.0.0.1", "none"])
def test_an_external_ip_without_the_gate_gives_its_family_a_local_list(other: str) -> None:
    """As in kube-proxy, whose ExternallyAccessible() does not know the gate: a metric counts the others."""
    planner = Planner(PlanSettings(NODE, external_ips=False))
    here = [{"addresses": ["10.244.1.1"], "nodeName": NODE}, {"addresses": ["10.244.2.1"], "nodeName": "node-2"}]
    web = service("web", type="LoadBalancer", externalIPs=[other], externalTrafficPolicy="Local")
    planner.update([web, endpoint_slice("web-1", "web", endpoints=here)])
    assert lists(planner) == (2, 0)
    both = service("web", type="LoadBalancer", externalIPs=[other, "203.0.113.1"], externalTrafficPolicy="Local")
    assert planner.differs("default", "web", both.object)  # type: ignore[arg-type]
    delta = planner.update([both])
    assert lists(planner) == (2, 1)
    assert frontends(delta[name_of("web")]) == ["10.96.0.1:80"]


def test_an_address_that_is_vip_and_external_ip_keeps_the_source_ranges(planner: Planner) -> None:
    """A documented difference: kube-proxy's mode iptables ignores the ranges there. The planner knows no modes."""
    status = {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}}
    ranges = {"externalIPs": ["203.0.113.1", "203.0.113.2"], "loadBalancerSourceRanges": ["198.51.100.0/24"]}
    port = planner.update([service("web", type="LoadBalancer", status=status, **ranges)])[name_of("web")]
    assert port is not None
    kinds = {format_address(each.address): each.kind.name for each in port.frontends}
    assert kinds == {"10.96.0.1": "CLUSTER_IP", "203.0.113.1": "LOAD_BALANCER", "203.0.113.2": "EXTERNAL_IP"}
    assert [each.prefix_length for each in port.source_ranges] == [24]


def lists(planner: Planner) -> tuple[int, int]:
    """Lengths of the two lists of the only service port."""
    made = planner.get(name_of("web"))
    assert made is not None
    return len(made.cluster), len(made.local)


def test_facts_of_the_nodes(planner: Planner) -> None:
    planner.update(
        [
            node(NODE, internal_ip="192.0.2.1", pod_cidrs=["10.244.1.0/24", "10.245.1.0/24", "fd00:1::/64"]),
            node("node-2", internal_ip="192.0.2.2", pod_cidrs=["10.244.2.0/24"]),
        ]
    )
    assert {family: str(cidr) for family, cidr in planner.facts.node_cidrs.items()} == {
        IPFamily.IPV4: "10.244.1.0/24",
        IPFamily.IPV6: "fd00:1::/64",
    }
    before = planner.facts
    planner.update([node("node-2", internal_ip="192.0.2.3", pod_cidrs=["10.244.3.0/24"], zone="z")])
    planner.update([gone(node("node-2"))])
    assert planner.facts is before, "another Node's"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (None, ["2001:db8::1", "192.0.2.1"]),
        (bytes([198, 51, 100, 7]), ["198.51.100.7", "2001:db8::1"]),
    ],
)
def test_node_ips(override: bytes | None, expected: list[str]) -> None:
    """InternalIP before ExternalIP, one per family; bindAddress replaces its family's and comes first."""
    planner = Planner(PlanSettings(NODE, override))
    addresses = [
        ("ExternalIP", "203.0.113.1"), ("Hostname", "n"), ("InternalIP", "2001:db8::1"), ("InternalIP", "2001:db8::2"),
        ("InternalIP", "192.0.2.1"), ("ExternalIP", "2001:db8::3"),
    ]  # fmt: skip
    document = {"status": {"addresses": [{"type": kind, "address": text} for kind, text in addresses]}}
    planner.update([Change("Node", "", NODE, msgspec.convert(document, Node))])
    assert [format_address(address) for address in planner.facts.node_ips.values()] == expected


def test_node_ip_inside_a_source_range(planner: Planner) -> None:
    balancer = {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}}
    planner.update([service("open"), service("web", loadBalancerSourceRanges=["192.0.2.0/24"], status=balancer)])
    for address, changed in (
        ("192.0.2.9", [("web", True)]), ("192.0.2.10", []), ("192.0.3.9", [("web", False)]),
        ("192.0.2.9", [("web", True)]), ("", [("web", False)]),
    ):  # fmt: skip
        delta = planner.update([node(NODE, internal_ip=address)])
        assert [(name.name, port and port.vip_source_allowed) for name, port in delta.items()] == changed


# ---- properties ------------------------------------------------------------------------------------------------

small = st.integers(1, 3)
maybe = st.sampled_from([None, True, False])
zones = st.lists(st.sampled_from(["a", "b", ""]), max_size=2, unique=True)
slice_endpoints = st.lists(
    st.fixed_dictionaries(
        {
            "addresses": st.lists(st.sampled_from(["10.244.1.1", "10.244.1.2", "10.244.1.10", "0.0.0.0"]), max_size=2),
            "conditions": st.none() | st.fixed_dictionaries({"ready": maybe, "serving": maybe, "terminating": maybe}),
            "nodeName": st.sampled_from([None, NODE, "node-2"]),
            "hints": st.none()
            | st.builds(
                lambda zones, nodes: {
                    "forZones": [{"name": name} for name in zones],
                    "forNodes": [{"name": name} for name in nodes],
                },
                zones,
                st.lists(st.sampled_from([NODE, "node-2"]), max_size=2),
            ),
        }
    ),
    max_size=4,
)


externals = st.sampled_from(["203.0.113.1", "10.96.0.1", "192.0.2.1", "2001:db8::1"])
vips = st.sampled_from([[], ["203.0.113.2"], ["192.0.2.1"]])


@st.composite
def changes(draw: st.DrawFn) -> Change:
    kind = draw(st.sampled_from([*["Service", "EndpointSlice"] * 3, "Node", "Node", "ServiceCIDR"]))
    policy = st.sampled_from([None, "Cluster", "Local"])
    if kind == "Service":
        change = service(
            f"s{draw(small)}",
            draw(st.sampled_from(["10.96.0.1", "10.96.0.2", "10.96.0.3", "None"])),
            created=draw(st.sampled_from(["", "2024-01-01T00:00:00Z", "2024-01-02T00:00:00Z"])),
            type=draw(st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"])),
            externalIPs=draw(st.lists(externals, max_size=2)),
            ports=[
                {"name": name, "port": draw(small | st.just(30001)),
                 "nodePort": draw(st.sampled_from([None, 30001, 30002])),
                 "protocol": draw(st.sampled_from(["TCP", "UDP"]))}
                for name in draw(st.lists(st.sampled_from(["", "x"]), min_size=1, max_size=2))
            ],
            externalTrafficPolicy=draw(policy),
            internalTrafficPolicy=draw(policy),
            loadBalancerSourceRanges=draw(st.lists(st.sampled_from(["192.0.2.0/24", "::/0"]), max_size=2)),
            status={"loadBalancer": {"ingress": [{"ip": ip} for ip in draw(vips)]}},
        )  # fmt: skip
        change = change._replace(namespace=draw(st.sampled_from(["default", "default", "tenant"])))
    elif kind == "EndpointSlice":
        change = endpoint_slice(
            f"e{draw(small)}",
            draw(st.sampled_from(["s1", "s2", "s3", None])),
            addressType=draw(st.sampled_from(["IPv4", "IPv4", "FQDN"])),
            endpoints=draw(slice_endpoints),
            ports=[
                {"name": name, "port": draw(small), "protocol": draw(st.sampled_from(["TCP", "UDP"]))}
                for name in draw(st.lists(st.sampled_from(["", "x", None]), max_size=3))
            ],
        )
    elif kind == "ServiceCIDR":
        change = service_cidr(draw(st.sampled_from(["10.96.0.0/16", "203.0.113.0/24"])))
    else:
        change = node(
            draw(st.sampled_from([NODE, "node-2"])),
            zone=draw(st.sampled_from(["", "a", "b"])),
            internal_ip=draw(st.sampled_from(["", "192.0.2.1", "192.0.3.1"])),
            pod_cidrs=draw(st.lists(st.sampled_from(["10.244.1.0/24", "10.244.2.0/24"]), max_size=2)),
        )
    return gone(change) if draw(st.integers(0, 4)) == 0 else change


@settings(max_examples=100)
@given(st.lists(st.lists(changes(), min_size=1, max_size=4), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_the_path_to_a_state_does_not_matter(batches: list[list[Change]], shuffle: random.Random) -> None:
    """The deltas add up to the plan of the last state, in any order."""
    planner = Planner(PlanSettings(NODE))
    state: dict[tuple[str, str, str], Change] = {}
    programmed: dict[ServicePortName, ServicePort] = {}
    for batch in batches:
        for name, port in planner.update(batch).items():
            assert programmed.get(name) != port
            if port is None:
                del programmed[name]
            else:
                programmed[name] = port
        state |= {(change.kind, change.namespace, change.name): change for change in batch}
    left = [change for change in state.values() if change.object is not None]
    shuffle.shuffle(left)
    fresh = Planner(PlanSettings(NODE))
    assert fresh.update(left) == programmed
    assert fresh.conflicts == planner.conflicts
    assert (planner.lost, planner.shared) == (len(planner.conflicts), len(planner.overlaps))
    assert fresh.overlaps == planner.overlaps
    assert set(planner.names) == set(programmed)
    assert fresh.facts == planner.facts
    # And no address is served by two.
    served = [
        (frontend.address, frontend.port, name.protocol)
        for name, port in programmed.items()
        for frontend in port.frontends
    ]
    assert len(served) == len(set(served))


@settings(max_examples=400)
@given(slice_endpoints, st.booleans(), st.booleans(), st.sampled_from(["", "a", "b"]))
def test_lists_follow_the_specification(
    documents: list[dict[str, Any]], use_cluster: bool, use_local: bool, zone: str
) -> None:
    """A slow second implementation of spec/service-semantics §1.4 and §3; duplicates as in v1.36."""
    change = endpoint_slice("e", "s", endpoints=documents)
    view = endpoints.view_slice(change.object, NODE)  # type: ignore[arg-type]
    assert view is not None
    known = endpoints.merge([view], ("", Protocol.TCP))
    lists = endpoints.choose_lists(
        known, endpoints.Topology(NODE, zone), cluster=use_cluster, local=use_local, serving=True
    )

    merged: dict[str, dict[str, Any]] = {}
    for document in documents:
        if not document["addresses"] or document["addresses"][0] == "0.0.0.0":
            continue
        conditions = document["conditions"] or {}
        hints = document["hints"] or {}
        new = {
            "ready": conditions.get("ready") in (None, True),
            "serving": conditions.get("serving") in (None, True),
            "terminating": conditions.get("terminating") is True,
            "local": document["nodeName"] == NODE,
            "zones": {hint["name"] for hint in hints.get("forZones", [])},
            "nodes": {hint["name"] for hint in hints.get("forNodes", [])},
        }
        text = f"{document['addresses'][0]}:8080"
        if text in merged and new["terminating"]:  # whatever the earlier one is, as in v1.36
            continue
        merged[text] = new
    ready = {text for text, it in merged.items() if it["ready"]}
    last_resort = {text for text, it in merged.items() if it["serving"] and it["terminating"]}
    here = {text for text, it in merged.items() if it["local"]}
    near = {text for text in ready if NODE in merged[text]["nodes"]}
    if not near or not all(merged[text]["nodes"] for text in ready):
        near = {text for text in ready if zone in merged[text]["zones"]}
        if not zone or not near or not all(merged[text]["zones"] for text in ready):
            near = ready
    want_cluster = (near or last_resort) if use_cluster else set()
    want_local = (ready & here or last_resort & here) if use_local else set()

    def texts(found: tuple[Endpoint, ...]) -> list[str]:
        return [format_address_port(endpoint.address, endpoint.port) for endpoint in found]

    assert texts(lists.cluster) == sorted(want_cluster)
    assert texts(lists.local) == sorted(want_local)
    assert texts(lists.serving) == sorted(text for text, it in merged.items() if it["serving"])
    assert lists.any_endpoints == bool(want_cluster or (use_local and (ready or last_resort)))
    assert all(
        endpoint.local == (text in here) for endpoint, text in zip(lists.cluster, texts(lists.cluster), strict=True)
    )


NOT_READY, ENDED = {"ready": False}, {"ready": False, "serving": False, "terminating": True}


@pytest.mark.parametrize(
    ("slices", "why"),
    [
        ([], "it has no IPv4 EndpointSlice"),
        (
            [{"addressType": "IPv6", "endpoints": [{"addresses": ["fd00::1"]}]}],
            "it has no IPv4 EndpointSlice, but some of the other family",
        ),
        ([{}], "its IPv4 EndpointSlices have no usable address"),
        (
            [{"ports": [{"name": "web", "port": 1}], "endpoints": [{"addresses": ["10.0.0.1"]}]}],
            'its IPv4 EndpointSlices have the port "web"/TCP, but not "http"/TCP',
        ),
        (
            [
                {"ports": [{"name": name, "port": 1, "protocol": "UDP"}], "endpoints": [{"addresses": ["10.0.0.1"]}]}
                for name in ("http", "dns")
            ],
            'its IPv4 EndpointSlices have the ports "dns"/UDP, "http"/UDP, but not "http"/TCP',
        ),
        (
            [{"ports": [], "endpoints": [{"addresses": ["10.0.0.1"]}]}],
            "its IPv4 EndpointSlices have no port: a named targetPort must be the name of a container's port",
        ),
        (
            [
                {
                    "ports": [{"name": "http", "port": 1}],
                    "endpoints": [
                        {"addresses": [f"10.0.0.{number}"], "conditions": conditions}
                        for number, conditions in enumerate((NOT_READY, NOT_READY, ENDED), 1)
                    ],
                }
            ],
            "no endpoint is ready: 1 terminating, 2 not ready",
        ),
        ([{"ports": [{"name": "http", "port": 1}], "endpoints": [{"addresses": ["10.0.0.1"]}]}], None),
    ],
)
def test_why_a_service_port_has_no_endpoint(planner: Planner, slices: list[dict[str, Any]], why: str | None) -> None:
    changes = [endpoint_slice(f"web-{number}", "web", **fields) for number, fields in enumerate(slices)]
    planner.update([service("web", ports=[{"name": "http", "port": 80}]), *changes])
    wanted = {} if why is None else {"default/web:http/TCP/IPV4": why}
    assert planner.no_endpoints("default", "web") == wanted
    assert planner.no_endpoints("default", "other") == {}


def test_why_many_service_ports_have_no_endpoint(planner: Planner) -> None:
    """A command asks while the agent serves: the answer costs little, whatever a tenant writes."""
    ports = [{"name": f"p{number}", "port": number} for number in range(1, 1025)]
    other = [{"name": f"q{number}", "port": number} for number in range(1, 1025)]
    changes = [endpoint_slice(f"web-{number}", "web", f"10.0.0.{number}", ports=other) for number in range(1, 200)]
    planner.update([service("web", ports=ports), *changes])
    found = planner.no_endpoints("default", "web")
    assert len(found) == no_endpoints.MOST
    assert found["default/web:p1/TCP/IPV4"].endswith(' and others, but not "p1"/TCP')
