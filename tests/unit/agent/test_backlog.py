# SPDX-License-Identifier: Apache-2.0
"""Which changes one sync plans: those of one namespace only for a limited time."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from pyebpf_proxy.agent.backlog import FIRST, LONG_SECONDS, MOST, NAMESPACE_SECONDS, Backlog
from pyebpf_proxy.kube.objects import EndpointSlice, Service
from pyebpf_proxy.kube.source import Change, Kind
from pyebpf_proxy.services.model import Endpoint, IPFamily, Protocol, ServicePort, ServicePortName
from pyebpf_proxy.services.planner import Planner, PlanSettings


class Costs:
    """A clock, and a planner that takes ``seconds`` for each change of namespace ``tenant``."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self._seconds = seconds
        self.backlog = Backlog(lambda: self.now)

    def put(self, namespace: str, number: int, kind: Kind = "Service", first: int = 0) -> None:
        for i in range(first, first + number):
            self.backlog.put(Change(kind, namespace, f"s{i}", None))

    def sync(self) -> list[Change]:
        """What one sync plans."""
        planned = []
        for portion in self.backlog.portions():
            planned += portion
            self.now += self._seconds * sum(change.namespace == "tenant" for change in portion)
        return planned


def test_changes_of_a_namespace_that_take_long_leave_time_for_others() -> None:
    costs = Costs(NAMESPACE_SECONDS)
    costs.put("tenant", 100)
    costs.put("victim", 1)
    costs.put("", 1, "Node")
    planned = costs.sync()
    assert planned[0].kind == "Node"
    assert [change.namespace for change in planned[1:]] == ["tenant"] * FIRST + ["victim"]
    costs.put("victim", 1)
    assert costs.sync()[-1].namespace == "victim", "what has changed meanwhile is in the next sync"
    names = [change.name for _ in range(100) for change in costs.sync()]
    assert names == [f"s{i}" for i in range(2 * FIRST, 100)], "nothing is lost, and the order stays"
    assert not costs.backlog


def test_a_cheap_beginning_does_not_admit_all_the_rest_at_once() -> None:
    costs = Costs(0.0)
    costs.put("tenant", 10_000)
    sizes = [len(portion) for portion in costs.backlog.portions()]
    assert sizes[:3] == [FIRST, 2 * FIRST, 4 * FIRST]
    assert max(sizes) == MOST
    assert sum(sizes) == 10_000


@pytest.mark.parametrize("endpoints", [0, 1000])
def test_changes_that_take_long_to_write_leave_time_for_others(endpoints: int) -> None:
    """They are planned in no time."""
    costs = Costs(0.0)
    costs.put("tenant", 100)
    costs.put("victim", 1)
    cluster = tuple(Endpoint(number.to_bytes(4, "big"), 80, False) for number in range(endpoints))
    names = [ServicePortName("tenant", "s", str(port), Protocol.TCP, IPFamily.IPV4) for port in range(1024)]
    planned: list[Change] = []
    for portion in costs.backlog.portions():
        planned += portion
        costs.backlog.planned({name: ServicePort(name, (), cluster) for name in names * len(portion)})
    tenants = sum(change.namespace == "tenant" for change in planned)
    assert tenants == (FIRST if endpoints else FIRST + 2 * FIRST)
    assert planned[-1].namespace == "victim"
    assert sum(change.namespace == "tenant" for change in costs.sync()) == 100 - tenants, "nothing was written"


def test_a_namespace_that_took_long_waits_for_as_long() -> None:
    costs = Costs(0.0)
    backlog = costs.backlog
    cluster = tuple(Endpoint(number.to_bytes(4, "big"), 80, False) for number in range(9900))

    def sync(seconds: float) -> list[str]:
        planned = []
        for portion in backlog.portions():
            planned += [change.namespace for change in portion]
            for change in portion:
                name = ServicePortName(change.namespace, change.name, "", Protocol.TCP, IPFamily.IPV4)
                backlog.planned({name: ServicePort(name, (), cluster if change.namespace == "tenant" else ())})
        costs.now += seconds
        backlog.took(seconds)
        return planned

    costs.put("tenant", 1)
    costs.put("victim", 1)
    costs.put("", 1, "Node")
    assert sync(1.0) == ["", "tenant", "victim"]
    costs.put("tenant", 1)
    assert backlog.due(costs.now) == pytest.approx(2.0, abs=0.01)
    costs.put("victim", 1)
    assert backlog.due(costs.now) == 1.0, "the victim does not wait"
    assert sync(0.1) == ["victim"]
    assert sync(0.85) == []
    assert backlog, "nothing is lost"
    costs.now += 0.05
    assert sync(LONG_SECONDS) == ["tenant"]
    costs.put("tenant", 1)
    assert sync(0.1) == ["tenant"], "it did not take long"


@pytest.mark.parametrize(
    ("kind", "ports", "endpoints", "most"),
    [
        ("Service", 1, 0, MOST),
        ("Service", 1024, 0, 1),
        ("EndpointSlice", 1, 1000, MOST),
        ("EndpointSlice", 100, 1000, 1),
    ],
)
def test_a_portion_has_few_changes_that_may_be_large(kind: Kind, ports: int, endpoints: int, most: int) -> None:
    costs = Costs(0.0)
    document = (
        {"spec": {"ports": [{"port": port} for port in range(1, ports + 1)]}}
        if kind == "Service"
        else {
            "addressType": "IPv4",
            "ports": [{"port": port} for port in range(1, ports + 1)],
            "endpoints": [{"addresses": ["192.0.2.1"]}] * endpoints,
        }
    )
    made = msgspec.convert(document, Service if kind == "Service" else EndpointSlice)
    for number in range(50):
        costs.backlog.put(Change(kind, "tenant", f"s{number}", made))
    assert max(len(portion) for portion in costs.backlog.portions()) == most


def test_a_change_that_waits_is_replaced_by_a_later_one_of_the_object() -> None:
    costs = Costs(NAMESPACE_SECONDS)
    costs.put("tenant", FIRST + 1)
    costs.sync()
    costs.put("tenant", 1, first=FIRST)
    assert [change.name for change in costs.sync()] == [f"s{FIRST}"]


@pytest.mark.parametrize("take", [Backlog.all, lambda backlog: [c for part in backlog.portions() for c in part]])
def test_everything_is_taken_once(take: Callable[[Backlog], list[Change]]) -> None:
    costs = Costs(0.0)
    costs.put("tenant", 3, "EndpointSlice")
    costs.put("victim", 2)
    assert costs.backlog.slices() == {("tenant", "s0"), ("tenant", "s1"), ("tenant", "s2")}
    assert len(take(costs.backlog)) == 5
    assert not costs.backlog
    assert costs.backlog.slices() == set()


def test_the_change_of_a_service_is_planned_at_once_if_it_is_demanded() -> None:
    costs = Costs(NAMESPACE_SECONDS)
    backlog = costs.backlog
    costs.put("tenant", 100)
    costs.put("victim", 1)
    costs.put("later", 1)
    planned = []
    for portion in backlog.portions():
        planned += [(change.namespace, change.name) for change in portion]
        costs.now += NAMESPACE_SECONDS
        if portion[0].namespace == "victim":
            backlog.hurry([("tenant", "s99"), ("later", "s0"), ("gone", "s0")])
    assert planned[:2] == [("tenant", "s0"), ("victim", "s0")]
    assert sorted(planned[2:]) == [("later", "s0"), ("tenant", "s99")]
    rest = [change.name for _ in range(99) for change in costs.sync()]
    assert rest == [f"s{number}" for number in range(FIRST, 99)]
    assert not backlog


@pytest.mark.parametrize("later", ["deleted", "another port"])
def test_an_address_that_waits_to_be_freed_goes_to_its_new_service(later: str) -> None:
    """The API server gives away addresses at once. Until the former Service is planned, it must not keep them."""

    def web(name: str, node_port: int, created: str) -> Service:
        port = {"port": 80, "nodePort": node_port}
        document = {"metadata": {"creationTimestamp": created}, "spec": {"clusterIP": "10.96.0.1", "ports": [port]}}
        return msgspec.convert(document, Service)

    costs = Costs(NAMESPACE_SECONDS)
    backlog, planner = costs.backlog, Planner(PlanSettings("node1"))
    planner.update([Change("Service", "tenant", "old", web("old", 30080, "2026-01-01T00:00:00Z"))])
    costs.put("tenant", 100, "EndpointSlice")
    freed = web("old", 30081, "2026-01-01T00:00:00Z") if later != "deleted" else None
    if freed is not None:
        freed.spec.cluster_ip = "10.96.0.2"
    backlog.put(Change("Service", "tenant", "old", freed))
    backlog.put(Change("Service", "victim", "new", web("new", 30080, "2026-02-01T00:00:00Z")))
    for portion in backlog.portions():
        costs.now += NAMESPACE_SECONDS
        backlog.planned(planner.update(portion))
        backlog.hurry(planner.new_holders())
    assert not planner.conflicts
    new = planner.get(ServicePortName("victim", "new", "", Protocol.TCP, IPFamily.IPV4))
    assert new is not None
    assert [frontend.port for frontend in new.frontends] == [80, 30080]
    assert len(backlog.slices()) == 100 - FIRST, "the tenant's other changes still wait"
