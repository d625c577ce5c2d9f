# SPDX-License-Identifier: Apache-2.0
"""Which health check node ports exist and what they count, from objects (spec/service-semantics §11.1)."""

from __future__ import annotations

import pytest

from pyebpf_proxy.kube.objects import (
    Endpoint,
    EndpointConditions,
    EndpointPort,
    EndpointSlice,
    ObjectMeta,
    Service,
    ServicePort,
    ServiceSpec,
)
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.services.endpoints import MOST_ENDPOINTS
from pyebpf_proxy.services.health_checks import HealthCheck, HealthCheckName
from pyebpf_proxy.services.model import IPFamily
from pyebpf_proxy.services.planner import Planner, PlanSettings

V4 = HealthCheckName("ns", "s", IPFamily.IPV4)
V6 = HealthCheckName("ns", "s", IPFamily.IPV6)


def service(
    gone: bool = False, families: tuple[str, ...] = ("IPv4",), created: str | None = None, **spec: object
) -> Change:
    ips = {"IPv4": "10.96.0.9", "IPv6": "fd00::9"}
    settings: dict[str, object] = {
        "type": "LoadBalancer",
        "external_traffic_policy": "Local",
        "health_check_node_port": 31000,
        "ip_families": families,
        "cluster_ip": ips[families[0]],
        "cluster_ips": tuple(ips[family] for family in families),
        "ports": (ServicePort("p", "TCP", 80, 30080), ServicePort("q", "UDP", 81, 30081)),
    }
    made = Service(ObjectMeta("s", "ns", creation_timestamp=created), ServiceSpec(**settings | spec))  # type: ignore[arg-type]
    return Change("Service", "ns", "s", None if gone else made)


def endpoint(address: str, node: str = "here", **conditions: bool) -> Endpoint:
    return Endpoint((address,), EndpointConditions(**conditions), node)


def endpoints(
    *members: Endpoint, name: str = "s-1", gone: bool = False, family: str = "IPv4", ports: int = 1
) -> Change:
    made = EndpointSlice(
        ObjectMeta(name, "ns", labels={"kubernetes.io/service-name": "s"}),
        address_type=family,
        endpoints=members,
        ports=tuple(EndpointPort(f"p{number}", "TCP", 80 + number) for number in range(ports)),
    )
    return Change("EndpointSlice", "ns", name, None if gone else made)


@pytest.fixture
def planner() -> Planner:
    return Planner(PlanSettings(node_name="here"))


def test_a_port_exists_without_endpoints_and_follows_the_service(planner: Planner) -> None:
    planner.update([service()])
    assert planner.health_checks == {V4: HealthCheck(31000, 0)}
    planner.update([service(health_check_node_port=31001)])
    assert planner.health_checks == {V4: HealthCheck(31001, 0)}
    planner.update([service(families=("IPv6", "IPv4"))])
    assert planner.health_checks == {V4: HealthCheck(31000, 0), V6: HealthCheck(31000, 0)}
    created = "2026-01-01T00:00:00Z"
    planner.update([service(created=created)])
    assert planner.health_checks == {V4: HealthCheck(31000, 0, created)}
    planner.update([service(gone=True)])
    assert planner.health_checks == {}


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "NodePort"},
        {"external_traffic_policy": "Cluster"},
        {"external_traffic_policy": None},
        {"health_check_node_port": 0},
        {"health_check_node_port": None},
        {"health_check_node_port": -1},
        {"health_check_node_port": 65536},
        {"cluster_ip": "None", "cluster_ips": ("None",)},
        {"ports": ()},
    ],
)
def test_services_without_a_health_check(planner: Planner, spec: dict[str, object]) -> None:
    planner.update([service(), endpoints(endpoint("10.1.0.1"))])
    planner.update([service(**spec)])
    assert planner.health_checks == {}


@pytest.mark.parametrize(
    ("members", "count"),
    [
        ([endpoint("10.1.0.1"), endpoint("10.1.0.2"), endpoint("10.1.9.1", "there")], 2),
        ([endpoint("10.1.0.1"), endpoint("10.1.0.1")], 1),
        ([endpoint("10.1.0.1"), endpoint("10.1.0.1", ready=False, serving=False)], 0),
        ([endpoint("10.1.0.1", ready=False, serving=False), endpoint("10.1.0.1")], 1),
        ([endpoint("10.1.0.1"), endpoint("10.1.0.1", ready=False, serving=True, terminating=True)], 1),
        ([endpoint("10.1.0.1", ready=False, serving=True, terminating=True), endpoint("10.1.0.1")], 1),
        ([endpoint("10.1.0.1", ready=False, serving=True, terminating=True)], 0),
        ([endpoint("10.1.0.1", ready=False, serving=False)], 0),
        ([endpoint("10.1.0.1", ready=True)], 1),
        ([], 0),
    ],
)
def test_which_endpoints_are_counted(planner: Planner, members: list[Endpoint], count: int) -> None:
    planner.update([endpoints(*members, ports=2), service()])
    assert planner.health_checks == {V4: HealthCheck(31000, count)}


def test_an_address_in_two_slices_counts_once_per_family(planner: Planner) -> None:
    planner.update([service(families=("IPv4", "IPv6"))])
    planner.update([endpoints(endpoint("10.1.0.1")), endpoints(endpoint("10.1.0.1"), endpoint("10.1.0.2"), name="s-2")])
    planner.update([endpoints(endpoint("fd00:1::1"), name="s-6", family="IPv6")])
    assert planner.health_checks == {V4: HealthCheck(31000, 2), V6: HealthCheck(31000, 1)}
    planner.update([endpoints(name="s-2", gone=True)])
    assert planner.health_checks == {V4: HealthCheck(31000, 1), V6: HealthCheck(31000, 1)}
    planner.update([endpoints(endpoint("10.1.0.1"), ports=0)])
    assert planner.health_checks[V4].local == 0


def test_more_endpoints_than_a_service_may_have_are_not_counted(planner: Planner) -> None:
    """A thousand slices of a thousand endpoints took a second for each change of one of them."""
    each = 1000
    slices = [
        endpoints(*(endpoint(f"10.{part}.{i >> 8}.{i & 255}") for i in range(each)), name=f"s-{part:02}")
        for part in range(MOST_ENDPOINTS // each + 2)
    ]
    planner.update([service(), *slices])
    assert planner.health_checks == {V4: HealthCheck(31000, MOST_ENDPOINTS)}
    planner.update([change._replace(object=None) for change in slices[1:]])
    assert planner.health_checks == {V4: HealthCheck(31000, each)}


def test_the_object_stays_the_same_without_a_change(planner: Planner) -> None:
    planner.update([service(), endpoints(endpoint("10.1.0.1"), endpoint("10.1.9.1", "there"))])
    before = planner.health_checks
    planner.update([endpoints(endpoint("10.1.0.1"), endpoint("10.1.9.2", "there"))])
    planner.update([service(session_affinity="ClientIP")])
    assert planner.health_checks is before
    planner.update([endpoints()])
    assert planner.health_checks is not before
    assert before == {V4: HealthCheck(31000, 1)}
