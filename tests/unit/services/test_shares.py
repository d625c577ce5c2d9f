# SPDX-License-Identifier: Apache-2.0
"""The limits of all Services of a namespace together: an eighth of every map stays for others (docs/objects.md)."""

from __future__ import annotations

import random
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Any

import pytest

from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.services import endpoints, frontends
from pyebpf_proxy.services.losses import OVER_LIMIT
from pyebpf_proxy.services.model import IPFamily, Protocol, ServicePort, ServicePortName
from pyebpf_proxy.services.planner import Planner, PlanSettings
from pyebpf_proxy.services.shares import Limits
from tests.unit.services.planned import NODE, endpoint_slice, gone, service

SMALL = Limits(ports=14, frontends=(28, 28), ranges=(7, 7), endpoints=(14, 14))
VIP = {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}}


@pytest.fixture
def planner() -> Planner:
    return Planner(PlanSettings(NODE, limits=SMALL))


def ports(count: int, protocol: str = "TCP") -> list[dict[str, object]]:
    return [{"port": number, "name": f"p{number}", "protocol": protocol} for number in range(1, count + 1)]


def aged(name: str, year: int, count: int = 1, namespace: str = "tenant", **fields: Any) -> Change:
    ip, created = fields.pop("ip", "10.96.0.1"), f"{year}-01-01T00:00:00Z"
    change = service(name, ip, created=created, ports=ports(count), **fields)
    return change._replace(namespace=namespace)


def of(planner: Planner, name: str, namespace: str = "tenant") -> list[ServicePort]:
    found = [each for each in planner.names if (each.namespace, each.name) == (namespace, name)]
    return [port for each in found if (port := planner.get(each)) is not None]


def externals(count: int) -> list[str]:
    return [str(ip_address("203.0.113.0") + number) for number in range(count)]


def test_s2_a_namespace_with_many_services_leaves_room_for_others(planner: Planner) -> None:
    """Each Service is within its own bounds; together they would fill the maps."""
    planner.update([aged(f"s{i:02}", 2000 + i, 4, ip=f"10.96.1.{i}") for i in range(10)])
    assert [len(of(planner, f"s{i:02}")) for i in range(10)] == [4, 4, 4, 0, 0, 0, 0, 0, 0, 0]
    problems, _ = planner.new_messages()
    assert {output.reason for output in problems} == {OVER_LIMIT}
    assert min(output.text for output in problems) == (
        "Service tenant/s03: spec.ports: older Services of namespace tenant have the 14 service ports"
        " that one namespace may have: it is not served"
    )
    assert set(planner.over) == {("tenant", f"s{i:02}") for i in range(3, 10)}
    planner.update([aged("dns", 2030, 4, namespace="kube-system", ip="10.96.2.1")])
    assert len(of(planner, "dns", "kube-system")) == 4


def test_s2_objects_without_room_are_not_built(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(*arguments: Any) -> Iterable[ServicePort]:
        made.append(arguments[1])
        return iter(())

    planner.update([aged("first", 2000, 14)])
    monkeypatch.setattr(frontends, "_ports_of_family", counted)
    planner.update([aged("second", 2001, 14), aged("other", 2001, namespace="other")])
    assert made == ["other"]


def test_s2_older_services_come_first_and_room_that_is_freed_is_used(planner: Planner) -> None:
    planner.update([aged("young", 2020, 10, ip="10.96.0.2")])
    delta = planner.update([aged("old", 2010, 10, ip="10.96.0.3")])
    assert (len(of(planner, "old")), len(of(planner, "young"))) == (10, 0)
    assert len([name for name, port in delta.items() if port is None]) == 10
    delta = planner.update([gone(aged("old", 2010, 10))])
    assert (len(of(planner, "old")), len(of(planner, "young"))) == (0, 10)
    assert len([name for name, port in delta.items() if port is not None]) == 10
    assert not planner.over


def test_s2_cluster_ips_come_before_all_other_addresses(planner: Planner) -> None:
    """The oldest Service names many external IPs, but the ClusterIPs of younger ones are served."""
    greedy = aged("greedy", 2000, 2, externalIPs=externals(10))
    planner.update([greedy, *(aged(f"s{i}", 2010 + i, 4, ip=f"10.96.1.{i}") for i in range(3))])
    assert [len(port.frontends) for port in of(planner, "greedy")] == [1, 1]
    assert [len(of(planner, f"s{i}")) for i in range(3)] == [4, 4, 4]
    assert planner.over["tenant", "greedy"] == (
        "spec.externalIPs: older Services of namespace tenant have the 28 IPv4 frontends that one namespace may have:"
        " only its ClusterIP is served",
    )
    planner.update([gone(aged("s2", 2012))])
    assert [len(port.frontends) for port in of(planner, "greedy")] == [1, 1]
    planner.update([gone(aged("s1", 2011))])
    assert [len(port.frontends) for port in of(planner, "greedy")] == [11, 11]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_s2_a_vip_without_room_for_its_ranges_is_closed_even_as_an_external_ip(
    planner: Planner, one_by_one: bool
) -> None:
    """Whichever came first: as an external IP, every source could use the address."""
    ranges = [f"10.{i}.0.0/16" for i in range(4)]
    old = aged("old", 2001, status=VIP, loadBalancerSourceRanges=ranges)
    status = {"loadBalancer": {"ingress": [{"ip": "198.51.100.2"}]}}
    named = ["198.51.100.2", "203.0.113.9"]
    young = aged("young", 2002, status=status, loadBalancerSourceRanges=ranges, ip="10.96.0.2", externalIPs=named)
    for changes in ([young], [old]) if one_by_one else ([young, old],):
        planner.update(changes)
    (port,) = of(planner, "young")
    assert [ip_address(frontend.address).compressed for frontend in port.frontends] == ["10.96.0.2", "203.0.113.9"]


def test_s2_ipv4_addresses_in_ipv6_form_count_as_ipv4(planner: Planner) -> None:
    """Counted as IPv6, which these Services do not have, they would fill the maps of IPv4 for all namespaces."""
    mapped = [f"::ffff:{address}" for address in externals(10)]
    planner.update([aged(f"s{i}", 2000 + i, 1, ip=f"10.96.1.{i}", externalIPs=mapped[i:]) for i in range(4)])
    frontends_of_all = sum(len(port.frontends) for i in range(4) for port in of(planner, f"s{i}"))
    assert frontends_of_all <= SMALL.frontends[0]
    ranges = [f"::ffff:10.{i}.0.0/112" for i in range(4)]
    planner.update(
        [
            aged("one", 2011, status=VIP, loadBalancerSourceRanges=ranges, namespace="lb"),
            aged("two", 2012, status=VIP, loadBalancerSourceRanges=ranges, namespace="lb", ip="10.96.0.2"),
        ]
    )
    (one,), (two,) = of(planner, "one", "lb"), of(planner, "two", "lb")
    assert [len(port.source_ranges) for port in (one, two)] == [4, 0]
    assert [len(port.frontends) for port in (one, two)] == [2, 1]


def test_s2_source_ranges_count_by_port_and_a_vip_without_room_is_closed(planner: Planner) -> None:
    """1024 ranges of 1024 ports are a million entries. A VIP whose ranges do not fit is closed."""
    ranges = [f"10.{i}.0.0/16" for i in range(4)]
    one = aged("one", 2001, 1, status=VIP, loadBalancerSourceRanges=ranges)
    two = aged("two", 2002, 1, status=VIP, loadBalancerSourceRanges=ranges, ip="10.96.0.2")
    planner.update([one, two])
    (first,), (second,) = of(planner, "one"), of(planner, "two")
    assert [len(port.source_ranges) for port in (first, second)] == [4, 0]
    assert [len(port.frontends) for port in (first, second)] == [2, 1]
    planner.update([gone(one)])
    (second,) = of(planner, "two")
    assert len(second.source_ranges) == 4
    assert len(second.frontends) == 2


def slice_of(name: str, count: int, first: str) -> Change:
    addresses = [str(ip_address(first) + number) for number in range(count)]
    named = [{"name": "p1", "port": 8080, "protocol": "TCP"}]
    return endpoint_slice(f"{name}-1", name, *addresses, ports=named)._replace(namespace="tenant")


def test_s2_endpoints_are_shared_by_age(planner: Planner) -> None:
    planner.update([aged("old", 2001), aged("young", 2002, ip="10.96.0.2"), slice_of("young", 10, "10.0.1.0")])
    assert [len(port.cluster) for port in of(planner, "young")] == [10]
    planner.update([slice_of("old", 9, "10.0.0.0")])
    assert [len(port.cluster) for name in ("old", "young") for port in of(planner, name)] == [9, 5]
    assert planner.over["tenant", "young"] == (
        "10 IPv4 endpoints, counted by port, are more than older Services of namespace tenant leave of 14:"
        " the first are served",
    )
    planner.update([gone(aged("old", 2001))])
    assert [len(port.cluster) for port in of(planner, "young")] == [10]
    assert not planner.over


def test_s2_endpoints_of_udp_count_twice(planner: Planner) -> None:
    """Their map has two entries for each: one by address, one by Service."""
    udp = service("dns", ports=ports(1, "UDP"))._replace(namespace="tenant")
    addresses = [f"10.0.0.{number}" for number in range(1, 11)]
    named = [{"name": "p1", "port": 53, "protocol": "UDP"}]
    planner.update([udp, endpoint_slice("dns-1", "dns", *addresses, ports=named)._replace(namespace="tenant")])
    port = planner.get(ServicePortName("tenant", "dns", "p1", Protocol.UDP, IPFamily.IPV4))
    assert port is not None
    assert len(port.cluster) == len(port.serving) == 7


def test_s2_a_truncated_slice_is_named(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MOST_IN_SLICE", 3)
    planner.update([aged("web", 2001), slice_of("web", 5, "10.0.0.0")])
    problems, _ = planner.new_messages()
    text = "Service tenant/web: EndpointSlice web-1: 5 endpoints are more than 3: the first are served"
    assert [(output.text, output.reason) for output in problems] == [(text, OVER_LIMIT)]
    planner.update([slice_of("web", 6, "10.0.0.0")])
    assert planner.over["tenant", "web"] == ("EndpointSlice web-1: 6 endpoints are more than 3: the first are served",)
    planner.update([slice_of("web", 3, "10.0.0.0")])
    assert not planner.over


def test_s2_limits_follow_the_sizes_of_the_maps() -> None:
    sizes = dict.fromkeys(("services", "service_names"), 65536)
    for family in "46":
        sizes |= {f"frontends{family}": 80, f"source_ranges{family}": 160, f"backends{family}": 800}
        sizes[f"endpoints{family}"] = 1600
    assert Limits.of_maps(sizes) == Limits(57344, (60, 60), (140, 140), (700, 700))


def _drawn(rng: random.Random) -> Change:
    name = rng.choice("abcde")
    namespace = rng.choice(("tenant", "other"))
    if rng.random() < 0.3:
        change = slice_of(name, rng.randint(0, 9), "10.0.0.0")
    else:
        fields: dict[str, Any] = {}
        if rng.random() < 0.5:
            fields = {"status": VIP, "loadBalancerSourceRanges": [f"10.{i}.0.0/16" for i in range(rng.randint(0, 5))]}
        if rng.random() < 0.5:
            fields["externalIPs"] = externals(rng.randint(0, 5))
        ip = f"10.96.{ord(name)}.{len(namespace)}"
        change = aged(name, rng.randint(2000, 2003), rng.randint(0, 7), ip=ip, **fields)
    change = change._replace(namespace=namespace)
    return gone(change) if rng.random() < 0.2 else change


def test_s2_the_shares_do_not_depend_on_the_order() -> None:
    """A planner that has seen only the last state serves the same."""
    cut = 0
    for seed in range(100):
        rng = random.Random(seed)
        planner = Planner(PlanSettings(NODE, limits=SMALL))
        state: dict[tuple[str, str, str], Change] = {}
        programmed: dict[ServicePortName, ServicePort | None] = {}
        for _ in range(12):
            batch = [_drawn(rng) for _ in range(rng.randint(1, 4))]
            programmed |= planner.update(batch)
            state |= {(change.kind, change.namespace, change.name): change for change in batch}
            last = [change for change in state.values() if change.object is not None]
            rng.shuffle(last)
            fresh = Planner(PlanSettings(NODE, limits=SMALL))
            wanted = fresh.update(last)
            assert {name: port for name, port in programmed.items() if port is not None} == wanted, seed
            assert planner.over == fresh.over, seed
            cut += len(fresh.over)
    assert cut > 300
