# SPDX-License-Identifier: Apache-2.0
"""Addresses that two Services name, or a Service and a Node (docs/objects.md)."""

from __future__ import annotations

import pytest

from pyebpf_proxy.services.planner import Planner, PlanSettings

from .planned import NODE, cluster, endpoint_slice, frontends, gone, name_of, node, service


@pytest.fixture
def planner() -> Planner:
    return Planner(PlanSettings(NODE))


def test_the_loser_is_served_when_the_winner_leaves(planner: Planner) -> None:
    a, b = (service(name, f"10.96.0.{i}", externalIPs=["203.0.113.1"]) for i, name in ((1, "a"), (2, "b")))
    planner.update([b])
    assert frontends(planner.get(name_of("b"))) == ["10.96.0.2:80", "203.0.113.1:80"]
    delta = planner.update([a])
    assert frontends(delta[name_of("a")]) == ["10.96.0.1:80", "203.0.113.1:80"]
    assert frontends(delta[name_of("b")]) == ["10.96.0.2:80"]
    (conflict,) = planner.conflicts
    assert str(conflict) == (
        "Service default/b: spec.externalIPs: 203.0.113.1:80/TCP is that of Service default/a already,"
        " is not served there"
    )
    delta = planner.update([gone(a)])
    assert delta[name_of("a")] is None
    assert frontends(delta[name_of("b")]) == ["10.96.0.2:80", "203.0.113.1:80"]
    assert not planner.conflicts


def test_a_slice_of_the_loser_does_not_win(planner: Planner) -> None:
    planner.update([service(name, f"10.96.0.{i}", externalIPs=["203.0.113.1"]) for i, name in ((1, "a"), (2, "b"))])
    delta = planner.update([endpoint_slice("b-1", "b", "10.244.1.1")])
    assert frontends(delta[name_of("b")]) == ["10.96.0.2:80"]
    assert cluster(delta[name_of("b")]) == ["10.244.1.1:8080"]


@pytest.mark.parametrize(
    ("created_a", "created_b", "winner"),
    [
        ("", "", "a"),
        ("2024-01-02T00:00:00Z", "2024-01-01T00:00:00Z", "b"),
        ("2024-01-01T00:00:00Z", "2024-01-01T00:00:00Z", "a"),
        ("", "2024-01-01T00:00:00Z", "b"),
        ("2024-01-01T01:30:00+02:00", "2024-01-01T00:00:00Z", "a"),
        ("2024-01-02", "2024-01-01T00:00:00Z", "b"),
        ("yesterday", "2024-01-01T00:00:00Z", "b"),
    ],
)
def test_the_older_wins(planner: Planner, created_a: str, created_b: str, winner: str) -> None:
    ports = [{"port": 80, "nodePort": 30080}]
    planner.update(
        [
            service("a", "10.96.0.1", created=created_a, ports=ports),
            service("b", "10.96.0.2", created=created_b, ports=ports),
        ]
    )
    (conflict,) = planner.conflicts
    assert conflict.winner.name == winner


def test_a_service_made_anew_is_younger(planner: Planner) -> None:
    old = service("b", "10.96.0.2", created="2024-01-01T00:00:00Z", externalIPs=["203.0.113.1"])
    planner.update([service("a", created="2024-02-01T00:00:00Z", externalIPs=["203.0.113.1"]), old])
    new = service("b", "10.96.0.2", created="2024-03-01T00:00:00Z", externalIPs=["203.0.113.1"])
    delta = planner.update([new])
    assert frontends(delta[name_of("a")]) == ["10.96.0.1:80", "203.0.113.1:80"]
    assert frontends(delta[name_of("b")]) == ["10.96.0.2:80"]


def test_an_address_that_is_a_nodes_too_is_told_and_served(planner: Planner) -> None:
    balancer = {"loadBalancer": {"ingress": [{"ip": "192.0.2.9"}]}}
    planner.update([service("web", ports=[{"port": 80, "nodePort": 30080}], status=balancer)])
    assert planner.overlaps == frozenset()
    assert planner.update([node("node-2", internal_ip="192.0.2.9")]) == {}
    (overlap,) = planner.overlaps
    assert str(overlap) == (
        "Service default/web: status.loadBalancer.ingress: 192.0.2.9:80/TCP is an address of Node node-2:"
        " what listens there itself is not reached"
    )
    assert frontends(planner.get(name_of("web"))) == ["10.96.0.1:80", "192.0.2.9:80", "0.0.0.0:30080"]
    delta = planner.update([service("more", "10.96.0.9", externalIPs=["192.0.2.9"], ports=[{"port": 81}])])
    assert frontends(delta[name_of("more")]) == ["10.96.0.9:81", "192.0.2.9:81"]
    assert len(planner.overlaps) == 2
    planner.update([gone(service("web"))])
    assert [overlap.name.name for overlap in planner.overlaps] == ["more"]
    planner.update([node("node-2", internal_ip="192.0.2.10")])
    assert planner.overlaps == frozenset()
