# SPDX-License-Identifier: Apache-2.0
"""Addresses that two Services claim, or a Service and a Node (docs/objects.md)."""

from __future__ import annotations

import random

import msgspec
import pytest

from pyebpf_proxy.kube.objects import Node
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.services.addresses import parse_address
from pyebpf_proxy.services.disputes import Disputes
from pyebpf_proxy.services.guard import Guard
from pyebpf_proxy.services.losses import LINES, REFUSED, Loss
from pyebpf_proxy.services.model import Frontend, FrontendKind, ServicePort
from pyebpf_proxy.services.overlaps import Overlaps
from pyebpf_proxy.services.planner import Planner, PlanSettings
from pyebpf_proxy.services.shares import Limits
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


def test_the_loser_is_served_when_the_winner_leaves(planner: Planner) -> None:
    a, b = (service(name, f"10.96.0.{i}", externalIPs=["203.0.113.1"]) for i, name in ((1, "a"), (2, "b")))
    planner.update([b])
    assert frontends(planner.get(name_of("b"))) == ["10.96.0.2:80", "203.0.113.1:80"]
    delta = planner.update([a])
    assert frontends(delta[name_of("a")]) == ["10.96.0.1:80", "203.0.113.1:80"]
    assert frontends(delta[name_of("b")]) == ["10.96.0.2:80"]
    (conflict,) = planner.conflicts
    assert str(conflict) == (
        "Service default/b: spec.externalIPs: 203.0.113.1:80/TCP is already used by Service default/a, not served there"
    )
    delta = planner.update([gone(a)])
    assert delta[name_of("a")] is None
    assert frontends(delta[name_of("b")]) == ["10.96.0.2:80", "203.0.113.1:80"]
    assert not planner.conflicts


def test_holders_of_addresses_that_the_cluster_has_allocated_to_others(planner: Planner) -> None:
    ports = [{"port": 80, "nodePort": 30080}]
    external = {"externalIPs": ["203.0.113.1"]}
    planner.update([service("a", "10.96.0.1", ports=ports), service("c", "10.96.0.3", **external)])
    assert not planner.new_holders()
    planner.update([service("d", "10.96.0.4", **external)])
    assert not planner.new_holders(), "users may name any external IP"
    planner.update([service("b", "10.96.0.2", ports=ports)])
    assert planner.new_holders() == {("default", "a")}
    assert not planner.new_holders(), "each is returned once"
    planner.update([service("e", "10.96.0.2")])
    assert planner.new_holders() == {("default", "b")}
    checked = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 30500}
    planner.update([service("f", "10.96.0.6", **checked)])
    assert not planner.new_holders()
    planner.update([service("g", "10.96.0.7", **checked)])
    assert planner.new_holders() == {("default", "f")}


def test_addresses_of_nodes_that_are_not_known_are_like_others() -> None:
    """With an API server, an agent knows its own Node only (docs/objects.md)."""
    planner = Planner(PlanSettings(NODE, check="strict"))
    planner.update([node(NODE, internal_ip="192.0.2.11")])
    planner.update([service("a", "10.96.0.1", externalIPs=["192.0.2.11", "192.0.2.12"], ports=[{"port": 10250}])])
    assert frontends(planner.get(name_of("a"))) == ["10.96.0.1:10250", "192.0.2.12:10250"]


def test_a_slice_does_not_change_the_winner(planner: Planner) -> None:
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
def test_the_older_service_wins(planner: Planner, created_a: str, created_b: str, winner: str) -> None:
    ports = [{"port": 80, "nodePort": 30080}]
    planner.update(
        [
            service("a", "10.96.0.1", created=created_a, ports=ports),
            service("b", "10.96.0.2", created=created_b, ports=ports),
        ]
    )
    (conflict,) = planner.conflicts
    assert conflict.winner.name == winner


def test_a_recreated_service_is_younger(planner: Planner) -> None:
    old = service("b", "10.96.0.2", created="2024-01-01T00:00:00Z", externalIPs=["203.0.113.1"])
    planner.update([service("a", created="2024-02-01T00:00:00Z", externalIPs=["203.0.113.1"]), old])
    new = service("b", "10.96.0.2", created="2024-03-01T00:00:00Z", externalIPs=["203.0.113.1"])
    delta = planner.update([new])
    assert frontends(delta[name_of("a")]) == ["10.96.0.1:80", "203.0.113.1:80"]
    assert frontends(delta[name_of("b")]) == ["10.96.0.2:80"]


def test_an_address_that_a_node_has_too_is_logged_and_served(planner: Planner) -> None:
    balancer = {"loadBalancer": {"ingress": [{"ip": "192.0.2.9"}]}}
    planner.update([service("web", ports=[{"port": 80, "nodePort": 30080}], status=balancer)])
    assert planner.overlaps == frozenset()
    assert planner.update([node("node-2", internal_ip="192.0.2.9")]) == {}
    (overlap,) = planner.overlaps
    assert str(overlap) == (
        "Service default/web: status.loadBalancer.ingress: 192.0.2.9:80/TCP is an address of Node node-2:"
        " processes that listen there are unreachable"
    )
    assert frontends(planner.get(name_of("web"))) == ["10.96.0.1:80", "192.0.2.9:80", "0.0.0.0:30080"]
    delta = planner.update([service("more", "10.96.0.9", externalIPs=["192.0.2.9"], ports=[{"port": 81}])])
    assert frontends(delta[name_of("more")]) == ["10.96.0.9:81", "192.0.2.9:81"]
    assert len(planner.overlaps) == 2
    planner.update([gone(service("web"))])
    assert [overlap.name.name for overlap in planner.overlaps] == ["more"]
    planner.update([node("node-2", internal_ip="192.0.2.10")])
    assert planner.overlaps == frozenset()


# ---- the kind of an address decides before the age ------------------------------------------------------------------

OLD, YOUNG = "2024-01-01T00:00:00Z", "2025-01-01T00:00:00Z"


def elsewhere(change: Change, namespace: str = "tenant") -> Change:
    """The same object in another namespace."""
    return change._replace(namespace=namespace)


def balancer(*addresses: str) -> dict[str, object]:
    return {"loadBalancer": {"ingress": [{"ip": address} for address in addresses]}}


def test_an_older_external_ip_does_not_take_a_cluster_ip(planner: Planner) -> None:
    """Kinds of addresses are ranked before ages (finding S1)."""
    thief = elsewhere(service("thief", "10.96.0.66", created=OLD, externalIPs=["10.96.0.10"], ports=[{"port": 53}]))
    planner.update([thief])
    delta = planner.update([service("dns", "10.96.0.10", created=YOUNG, ports=[{"port": 53}])])
    assert frontends(delta[name_of("dns")]) == ["10.96.0.10:53"]
    (theft,) = planner.conflicts
    assert str(theft) == (
        "Service tenant/thief: spec.externalIPs: 10.96.0.10:53/TCP is already used by Service default/dns,"
        " not served there"
    )
    # Nor if it is created again.
    delta = planner.update([gone(thief), thief])
    assert name_of("dns") not in delta
    assert planner.conflicts == {theft}


@pytest.mark.parametrize("others", [{"status": balancer("203.0.113.9")}, {"externalIPs": ["203.0.113.9"]}])
def test_a_vip_has_precedence_over_an_external_ip(planner: Planner, others: dict[str, object]) -> None:
    planner.update([elsewhere(service("thief", "10.96.0.66", created=OLD, externalIPs=["203.0.113.9"]))])
    planner.update([service("web", created=YOUNG, **others)])
    (conflict,) = planner.conflicts
    assert conflict.name.name == ("thief" if "status" in others else "web")


def test_a_service_with_a_new_kind_of_address_is_ranked_again(planner: Planner) -> None:
    young = service("young", created=YOUNG, externalIPs=["203.0.113.9"])
    planner.update([service("old", "10.96.0.2", created=OLD, externalIPs=["203.0.113.9"]), young])
    delta = planner.update([service("young", created=YOUNG, status=balancer("203.0.113.9"))])
    assert frontends(delta[name_of("old")]) == ["10.96.0.2:80"]
    delta = planner.update([young])
    assert frontends(delta[name_of("old")]) == ["10.96.0.2:80", "203.0.113.9:80"]


# ---- what is the cluster's own --------------------------------------------------------------------------------------

NODE_IP = "192.0.2.9"
AT_NODE = "10.96.0.66:30080", f"{NODE_IP}:30080"
HTTP = [{"port": 80, "nodePort": 30080}]


def thief(**spec: object) -> Change:
    return elsewhere(service("thief", "10.96.0.66", created=OLD, **{"ports": [{"port": 30080}], **spec}))


THIEF = name_of("thief")._replace(namespace="tenant")


@pytest.mark.parametrize("how", [{"externalIPs": [NODE_IP]}, {"status": balancer(NODE_IP)}])
@pytest.mark.parametrize("order", ["thief, service, node", "node, service, thief", "service, node, thief", "at once"])
def test_a_node_port_of_another_namespace_stays(planner: Planner, how: dict[str, object], order: str) -> None:
    changes = {"thief": thief(**how), "service": service("web", ports=HTTP), "node": node(NODE, internal_ip=NODE_IP)}
    for each in [changes.values()] if order == "at once" else [[changes[which]] for which in order.split(", ")]:
        planner.update(each)
    assert frontends(planner.get(THIEF)) == [AT_NODE[0]]
    (refused,) = planner.conflicts
    assert str(refused).endswith(
        f": {NODE_IP}:30080/TCP is NodePort 30080/TCP of Service default/web on Node {NODE}: refused, not served there"
    )
    # The conflict ends: the NodePort is removed, returns, and the Node gets another address.
    delta = planner.update([gone(changes["service"])])
    assert frontends(delta[THIEF]) == [*AT_NODE]
    assert not planner.conflicts
    delta = planner.update([changes["service"]])
    assert frontends(delta[THIEF]) == [AT_NODE[0]]
    delta = planner.update([node(NODE, internal_ip="192.0.2.10")])
    assert frontends(delta[THIEF]) == [*AT_NODE]
    assert planner.lost == 0


def test_a_tenant_may_name_its_own_node_ports_and_other_ports_of_a_node(planner: Planner) -> None:
    """As kube-proxy's recordings show (tests/flows: external-ip-at-a-node-port, -of-the-node)."""
    planner.update([node(NODE, internal_ip=NODE_IP), service("web", ports=HTTP)])
    delta = planner.update([thief(externalIPs=[NODE_IP])._replace(namespace="default")])
    assert frontends(delta[name_of("thief")]) == [*AT_NODE]
    delta = planner.update([thief(externalIPs=[NODE_IP], ports=[{"port": 30081}, {"port": 30080, "protocol": "UDP"}])])
    assert len(delta) == 2
    assert not planner.conflicts


def kubelet(port: int) -> Change:
    status = {
        "addresses": [{"type": "InternalIP", "address": NODE_IP}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }
    return Change("Node", "", NODE, msgspec.convert({"metadata": {"name": NODE}, "status": status}, Node))


@pytest.mark.parametrize("first", [True, False])
def test_the_cluster_keeps_its_own_ports_and_ranges(planner: Planner, first: bool) -> None:
    ports = [{"port": number, "name": f"p{number}"} for number in (443, 6443, 10250)]
    stolen = thief(externalIPs=[NODE_IP, "203.0.113.6", "10.96.7.7"], ports=ports)
    api = endpoint_slice("kubernetes", "kubernetes", "203.0.113.6", port=6443)
    owners = [kubelet(10250), api, service_cidr("10.96.0.0/16", "fd00:96::/108")]
    for each in ([stolen], owners) if first else (owners, [stolen]):
        planner.update(each)
    assert {(each.claim.port, each.why) for each in planner.conflicts} == {
        *((number, "in the ServiceCIDR 10.96.0.0/16") for number in (443, 6443, 10250)),
        (10250, f"the kubelet of Node {NODE}"),
        (6443, "an API server"),
    }
    port = THIEF._replace(port="p6443")
    assert frontends(planner.get(port)) == ["10.96.0.66:6443", f"{NODE_IP}:6443"]
    planner.update([kubelet(10251), gone(api), gone(owners[2])])
    assert not planner.conflicts


CHECKED = {
    "type": "LoadBalancer",
    "externalTrafficPolicy": "Local",
    "healthCheckNodePort": 30080,
    "status": balancer("203.0.113.80"),
}


@pytest.mark.parametrize("how", [{"externalIPs": [NODE_IP]}, {"status": balancer(NODE_IP)}])
@pytest.mark.parametrize("order", ["thief, service, node", "node, service, thief", "service, node, thief", "at once"])
def test_a_health_check_node_port_of_another_namespace_stays(
    planner: Planner, how: dict[str, object], order: str
) -> None:
    """The load balancer asks there which Nodes get the traffic of a Service: a tenant could answer."""
    changes = {"thief": thief(**how), "service": service("web", **CHECKED), "node": node(NODE, internal_ip=NODE_IP)}
    for each in [changes.values()] if order == "at once" else [[changes[which]] for which in order.split(", ")]:
        planner.update(each)
    assert frontends(planner.get(THIEF)) == [AT_NODE[0]]
    (refused,) = planner.conflicts
    text = f"{NODE_IP}:30080/TCP is the health check node port of Service default/web on Node {NODE}: refused"
    assert text in str(refused)
    # The Service gets another port, the former one again, and is deleted.
    delta = planner.update([service("web", **{**CHECKED, "healthCheckNodePort": 30081})])
    assert frontends(delta[THIEF]) == [*AT_NODE]
    delta = planner.update([changes["service"]])
    assert frontends(delta[THIEF]) == [AT_NODE[0]]
    delta = planner.update([gone(changes["service"])])
    assert frontends(delta[THIEF]) == [*AT_NODE]
    assert not planner.conflicts


def test_a_tenant_may_name_its_own_health_check_node_port_and_other_protocols(planner: Planner) -> None:
    planner.update([node(NODE, internal_ip=NODE_IP), service("web", **CHECKED)])
    planner.update([thief(externalIPs=[NODE_IP])._replace(namespace="default")])
    planner.update([thief(externalIPs=[NODE_IP], ports=[{"port": 30080, "protocol": "UDP"}, {"port": 30081}])])
    assert not planner.conflicts


def test_a_health_check_node_port_that_keeps_its_holders_is_not_checked_again(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [{"port": 30080, "name": "a"}, {"port": 30081, "name": "b"}]
    stolen = thief(externalIPs=[NODE_IP], ports=ports)
    planner.update([node(NODE, internal_ip=NODE_IP), service("web", **CHECKED), stolen])
    monkeypatch.setattr(Disputes, "_review", lambda *_: pytest.fail("checked again"))
    planner.update([service("web", **{**CHECKED, "ports": [{"port": 81}]})])
    assert planner.lost == 1


@pytest.mark.parametrize("how", [{"externalIPs": [NODE_IP]}, {"status": balancer(NODE_IP)}])
def test_the_kubelet_an_api_server_and_healthz_on_a_node_stay(how: dict[str, object]) -> None:
    planner = Planner(PlanSettings(NODE, health_port=10256))
    api = endpoint_slice("kubernetes", "kubernetes", NODE_IP, port=6443)
    ports = [{"port": number, "name": f"p{number}"} for number in (80, 6443, 10250, 10256)]
    planner.update([thief(**how, ports=ports)])
    planner.update([kubelet(10250), api])
    assert {(each.claim.port, each.why) for each in planner.conflicts} == {
        (6443, "an API server"),
        (10250, f"the kubelet of Node {NODE}"),
        (10256, f"the port of /healthz on Node {NODE}"),
    }


def test_the_checks_are_configurable() -> None:
    changes = [node(NODE, internal_ip=NODE_IP), service("web", ports=HTTP), service_cidr("10.96.0.0/16")]
    changes.append(thief(externalIPs=[NODE_IP, "10.96.7.7"], ports=[{"port": 30080}, {"port": 81, "name": "b"}]))
    lost = {}
    for check in ("checked", "strict", "unchecked"):
        planner = Planner(PlanSettings(NODE, check=check))
        planner.update(changes)
        lost[check] = sorted(f"{each.claim}" for each in planner.conflicts)
    in_range = ["10.96.7.7:30080/TCP", "10.96.7.7:81/TCP"]
    assert lost == {
        "checked": [*in_range, f"{NODE_IP}:30080/TCP"],
        "strict": [*in_range, f"{NODE_IP}:30080/TCP", f"{NODE_IP}:81/TCP"],
        "unchecked": [],
    }


# ---- messages -------------------------------------------------------------------------------------------------------


def test_each_conflict_is_logged_once_and_again_when_it_returns(planner: Planner) -> None:
    stolen = thief(externalIPs=[NODE_IP])
    planner.update([node(NODE, internal_ip=NODE_IP), service("web", ports=HTTP), stolen])
    for _ in range(2):
        (refused,), (note,) = planner.new_messages()
        assert (refused.namespace, refused.name, refused.reason) == ("tenant", "thief", REFUSED)
        assert refused.text == "".join(map(str, planner.conflicts))
        assert note.text == "".join(map(str, planner.overlaps))
        assert planner.new_messages() == ([], [])
        planner.update([endpoint_slice("web-1", "web", "10.244.0.1")])
        assert planner.new_messages() == ([], [])
        planner.update([gone(stolen)])
        assert planner.new_messages() == ([], [])
        planner.update([stolen])


def test_many_conflicts_give_few_lines_and_no_work_for_other_changes(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of conflicts are made when conflicts change, not by every sync (finding S6)."""
    made = []
    real = Loss.__str__
    monkeypatch.setattr(Loss, "__str__", lambda loss: made.append(loss) or real(loss))
    addresses = [f"203.0.113.{number}" for number in range(40)]
    ports = [{"port": port, "name": f"p{port}"} for port in range(1, 51)]
    planner.update([service("first", externalIPs=addresses, ports=ports, created=OLD)])
    planner.update([service(name, "10.96.0.9", externalIPs=addresses, ports=ports) for name in ("second", "third")])
    assert planner.lost == 2 * 50 * 40 + 50  # and the ClusterIP that both later ones claim
    lines, _ = planner.new_messages()
    assert len(lines) == 2 * (LINES + 1)
    assert len(made) == 2 * LINES
    assert {line.text for line in lines} >= {
        f"Service default/second: {50 * 40 - LINES} more of its addresses and ports are not served"
    }
    made.clear()
    planner.update([service("good", "10.96.0.200"), endpoint_slice("good-1", "good", "10.244.0.1")])
    assert planner.new_messages() == ([], [])
    assert made == []


# ---- many Services that claim one address ---------------------------------------------------------------------------


def test_one_of_many_claimants_is_ranked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant may let 57 344 Services claim the ClusterIP of another one. With 10 000, each change took 0.1 s."""
    ranked = []
    real = Planner._rank
    monkeypatch.setattr(Planner, "_rank", lambda self, name: ranked.append(name) or real(self, name))
    planner = Planner(PlanSettings(NODE))
    victim = service("victim", "10.96.0.10", created=YOUNG)
    tenants = [elsewhere(service(f"t{i}", f"10.97.1.{i}", externalIPs=["10.96.0.10"])) for i in range(200)]
    planner.update([victim, *tenants[1:]])
    assert planner.lost == 199
    for change in (tenants[0], tenants[7], gone(tenants[9]), victim):
        ranked.clear()
        delta = planner.update([change])
        assert len(ranked) <= 1
        assert not any(name.name == "victim" for name in delta)
    assert planner.lost == 199
    delta = planner.update([gone(victim)])
    assert {name.name for name in delta} == {"victim", "t0"}
    assert {loss.winner.name for loss in planner.conflicts if loss.winner is not None} == {"t0"}


def test_a_node_port_that_keeps_its_holder_is_not_checked_again(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    real = Guard.why_not
    monkeypatch.setattr(
        Guard, "why_not", lambda self, name, frontend: checked.append(name) or real(self, name, frontend)
    )
    web = service("web", ports=HTTP)
    thieves = [
        elsewhere(service(f"t{i}", f"10.97.1.{i}", ports=[{"port": 30080}], externalIPs=[NODE_IP])) for i in range(200)
    ]
    planner.update([node(NODE, internal_ip=NODE_IP), web, *thieves[1:]])
    assert planner.lost == 199
    checked.clear()
    planner.update([web, thieves[0]])
    assert planner.lost == 200
    assert len(checked) < 10


def test_an_address_is_checked_again_if_the_node_port_returns_in_the_same_update() -> None:
    """Between leaving and entering, no Service had the NodePort."""
    here, zero = parse_address(NODE_IP), bytes(4)
    assert here is not None
    web = ServicePort(name_of("web"), (Frontend(FrontendKind.NODE_PORT, zero, 30080),))
    stolen = ServicePort(THIEF, (Frontend(FrontendKind.EXTERNAL_IP, here, 30080),))
    overlaps, wanted = Overlaps(), {web.name: web}
    disputes = Disputes("checked", lambda name: name, wanted, overlaps)
    overlaps.nodes({here: NODE}, [])
    disputes.guard.set_nodes({here: NODE})
    disputes.enter(web)
    disputes.settle(lambda name: None)
    wanted[THIEF] = stolen
    disputes.leave(web)
    disputes.enter(stolen)
    disputes.enter(web)
    overlaps.service(("tenant", "thief"), [stolen])
    disputes.settle(lambda name: None)
    assert disputes.losses.count == 1


@pytest.mark.parametrize("seed", range(8))
def test_the_holders_depend_only_on_the_objects(seed: int) -> None:
    """Whatever came before: a planner that is given all objects at once has the same conflicts."""
    draw = random.Random(seed)
    limits = Limits(ports=12, frontends=(30, 30))
    settings = PlanSettings(NODE, limits=limits, health_port=10256)
    planner = Planner(settings)
    there: dict[tuple[str, str, str], Change] = {}
    for _ in range(120):
        batch = []
        for _ in range(draw.choice((1, 1, 2, 5))):
            if draw.random() < 0.05:
                change = node(NODE, internal_ip=draw.choice((NODE_IP, "192.0.2.10")))
            else:
                number = draw.randrange(8)
                addresses = draw.sample((NODE_IP, "203.0.113.1", "203.0.113.2", "10.96.0.3"), draw.randrange(4))
                where = draw.choice(({"externalIPs": addresses}, {"status": balancer(*addresses)}))
                port = {"port": draw.choice((80, 10256, 30080, 30081)), "nodePort": draw.choice((0, 0, 30080))}
                local = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 30081}
                local = draw.choice(({}, local))
                created = draw.choice((OLD, YOUNG, ""))
                change = service(f"s{number}", f"10.96.0.{number}", created=created, ports=[port], **where, **local)
                change = elsewhere(change, draw.choice(("tenant", "default")))
                if draw.random() < 0.25:
                    change = gone(change)
            batch.append(change)
            there[change[:3]] = change
        planner.update(batch)
        fresh = Planner(settings)
        fresh.update(there.values())
        assert planner.conflicts == fresh.conflicts
        assert {name: planner.get(name) for name in planner.names} == {name: fresh.get(name) for name in fresh.names}
