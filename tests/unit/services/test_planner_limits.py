# SPDX-License-Identifier: Apache-2.0
"""The limits of one Service: what exceeds them is logged, the rest is served, and others are unaffected
(docs/objects.md).
"""

from __future__ import annotations

import random
import time
import tracemalloc
from ipaddress import ip_address
from typing import Any

import msgspec
import pytest

from pyebpf_proxy.kube.objects import EndpointSlice
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.services import endpoints
from pyebpf_proxy.services import frontends as reading
from pyebpf_proxy.services.frontends import MOST_EXTERNAL, MOST_PORTS, MOST_RANGES, MOST_READ
from pyebpf_proxy.services.losses import OVER_LIMIT
from pyebpf_proxy.services.model import FrontendKind
from pyebpf_proxy.services.planner import Planner, PlanSettings
from tests.support.cpu_time import cpu_limit
from tests.unit.services.planned import NODE, cluster, endpoint_slice, frontends, name_of, node, service


@pytest.fixture
def planner() -> Planner:
    return Planner(PlanSettings(NODE))


def ports(count: int) -> list[dict[str, object]]:
    return [{"port": number, "name": f"p{number}", "nodePort": 20000 + number} for number in range(1, count + 1)]


def addresses(count: int, first: str = "203.0.112.0") -> list[str]:
    return [str(ip_address(first) + number) for number in range(count)]


def messages(planner: Planner) -> list[str]:
    problems, _ = planner.new_messages()
    assert {output.reason for output in problems} <= {OVER_LIMIT}
    return [output.text for output in problems]


BOTH = {"clusterIPs": ["10.96.0.1", "fd00:96::1"], "ipFamilies": ["IPv4", "IPv6"]}
VIPS = {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}, {"ip": "2001:db8::1"}]}}
MANY = 10 * MOST_READ
FOUR = [f"10.{number >> 8}.{number & 255}.0" for number in range(MANY)]
SIX = [f"2001:db8:{number:x}::" for number in range(MANY)]


@pytest.mark.parametrize("texts", [FOUR, SIX, [text for pair in zip(FOUR, SIX, strict=True) for text in pair]])
def test_a_list_that_is_far_too_long_is_not_read_to_its_end(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    """A Service of 1.5 MB with 90 000 ranges took 0.5 s with every change."""
    calls = []
    for name in ("parse_address", "parse_prefix"):
        real = getattr(reading, name)
        monkeypatch.setattr(reading, name, lambda text, real=real: calls.append(text) or real(text))
    ranges = [f"{text}/64" if ":" in text else f"{text}/24" for text in texts]
    big = service("big", **BOTH, externalIPs=texts, loadBalancerSourceRanges=ranges, status=VIPS)
    planner.update([big])
    # Twice: to count what it needs, and to plan it.
    families = len({":" in text for text in texts})
    assert len(calls) < 2 * 2 * families * MOST_READ + 50
    assert [text.split(": ")[2].split(" are ")[0] for text in sorted(messages(planner)) if "IPv4" in text] == (
        ["at least 4096 IPv4 addresses for 1 ports", "at least 4096 IPv4 ranges"] if texts[0] == FOUR[0] else []
    )


def test_skipping_the_rest_of_a_list_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if families alternate, or an IPv4 address is written as an IPv6 address."""
    monkeypatch.setattr(reading, "MOST_EXTERNAL", 8)
    monkeypatch.setattr(reading, "MOST_RANGES", 5)
    draw = random.Random(4096)

    def texts(length: int) -> list[str]:
        found = []
        forms = draw.sample(range(7), draw.randrange(1, 8))
        for _ in range(draw.choice((3, 60))):
            number = draw.randrange(30)
            form, prefix = (
                (f"10.0.{number}.1", 24),
                (f"010.0.{number}.001", 24),
                (f"2001:db8:{number:x}::ffff:1", 48),
                (f"::ffff:10.0.{number}.1", draw.choice((90, 120))),
                (f"0:0::00:0FFFF:0a00:{number:x}01", draw.choice((90, 120))),
                (f"ffff:{number}", 8),
                (f"127.0.0.{number}", 8),
            )[draw.choice(forms)]
            found.append(f"{draw.choice((' ', ''))}{form}/{prefix}" if length else form)
        return found

    for _ in range(500):
        vips = {"loadBalancer": {"ingress": [{"ip": text} for text in texts(0)[:12]]}}
        lists = [texts(length) for length in (0, 1)]
        _, _, _, found = service("a", **BOTH, externalIPs=lists[0], loadBalancerSourceRanges=lists[1], status=vips)
        assert found is not None
        results = []
        for most in (10, MANY):
            monkeypatch.setattr(reading, "MOST_READ", most)
            listed = reading.read_listed(found)
            ports = reading.service_ports("default", "a", found, listed, {})
            over = [each.partition(":")[0] for each in reading.over_limits(found, listed)]
            results.append((ports, reading.need(found, listed), over))
        assert results[0] == results[1]


def test_addresses_times_ports_are_bounded_and_cluster_ips_stay(planner: Planner) -> None:
    """A Service of 11 KB that would have 65 792 frontends (finding S2)."""
    status = {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}}
    big = service("big", ports=ports(256), externalIPs=addresses(256), status=status)
    delta = planner.update([big])
    kinds = [frontend.kind for port in delta.values() if port is not None for frontend in port.frontends]
    assert [kinds.count(kind) for kind in FrontendKind] == [256, 7 * 256, 256, 256]
    assert MOST_EXTERNAL // 256 == 8
    assert messages(planner) == [
        "Service default/big: spec.externalIPs: 257 IPv4 addresses for 256 ports are more than 8:"
        " load balancers' first, then the first 8 are served"
    ]
    assert planner.over.keys() == {("default", "big")}
    planner.update([service("big", ports=ports(256), externalIPs=addresses(7), status=status)])
    assert not planner.over
    assert messages(planner) == []
    planner.update([big])
    assert len(messages(planner)) == 1


def test_ports_are_bounded(planner: Planner) -> None:
    delta = planner.update([service("big", ports=ports(MOST_PORTS + 10))])
    assert len(delta) == MOST_PORTS
    assert messages(planner) == [
        f"Service default/big: spec.ports: {MOST_PORTS + 10} are more than {MOST_PORTS}:"
        f" the first {MOST_PORTS} are served"
    ]


def test_source_ranges_are_compared_with_the_nodes_address_once_for_all_ports(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1024 ports with 1024 ranges each took a second with every change, in which no other change was received."""
    compared: list[object] = []
    contains = reading.contains

    def counted(prefix: Any, address: bytes) -> bool:
        compared.append(prefix)
        return contains(prefix, address)

    monkeypatch.setattr(reading, "contains", counted)
    ranges = [f"{address}/32" for address in addresses(100)]
    planner.update([node(NODE, internal_ip="192.0.2.1")])
    big = service("big", **BOTH, ports=ports(50), loadBalancerSourceRanges=ranges, status=VIPS)
    planner.update([big])
    assert planner.differs("default", "big", service("big", **BOTH, ports=ports(49), status=VIPS).object)
    assert 100 <= len(compared) <= 200


def test_source_ranges_are_bounded_and_the_rest_allows_no_client(planner: Planner) -> None:
    ranges = [f"{address}/32" for address in addresses(MOST_RANGES + 5, "10.0.0.0")]
    status = {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}}
    delta = planner.update([service("big", loadBalancerSourceRanges=ranges, status=status)])
    port = delta[name_of("big")]
    assert port is not None
    assert len(port.source_ranges) == MOST_RANGES
    assert messages(planner) == [
        f"Service default/big: spec.loadBalancerSourceRanges: {MOST_RANGES + 5} IPv4 ranges are more than"
        f" {MOST_RANGES}: sources in the others are not accepted"
    ]


def wide_slice(name: str, of: str, first: str, count: int, numbers: list[dict[str, object]]) -> Change:
    document = {
        "metadata": {"name": name, "labels": {endpoints.SERVICE_NAME_LABEL: of}},
        "addressType": "IPv4",
        "ports": [{"name": port["name"], "port": 8080} for port in numbers],
        "endpoints": [{"addresses": [address]} for address in addresses(count, first)],
    }
    return Change("EndpointSlice", "default", name, msgspec.convert(document, EndpointSlice))


def test_endpoints_times_ports_are_bounded(planner: Planner) -> None:
    """1000 ports and 1000 endpoints would be a million: the first ports are served completely, one more partly."""
    many = ports(1000)
    planner.update([service("good", "10.96.0.2"), endpoint_slice("good-1", "good", "10.244.9.9")])
    delta = planner.update(
        [service("big", ports=many), *(wide_slice(f"big-{i}", "big", f"10.244.{4 * i}.0", 500, many) for i in (0, 1))]
    )
    sizes = [len(port.cluster) for port in delta.values() if port is not None]
    assert sizes == [*[1000] * 32, endpoints.MOST_ENDPOINTS - 32_000, *[0] * 967]
    assert messages(planner) == [
        "Service default/big: 1000000 IPv4 endpoints, counted by port, are more than 32768: the first are served"
    ]
    assert cluster(planner.get(name_of("good"))) == ["10.244.9.9:8080"]


def test_endpoints_of_one_slice_are_bounded(planner: Planner) -> None:
    few = [{"name": ""}]
    planner.update([service("big"), wide_slice("big-1", "big", "10.0.0.0", endpoints.MOST_IN_SLICE + 7, few)])
    assert len(cluster(planner.get(name_of("big")))) == endpoints.MOST_IN_SLICE


def test_a_change_of_a_service_with_many_ports_and_slices_takes_little_time(planner: Planner) -> None:
    """The time grows with the ports of the slices, not with ports times slices, each of which may be a thousand."""
    slices = [
        endpoint_slice(f"s{number}", "many", f"10.1.{number // 250}.{number % 250}", ports=[{"name": "p1", "port": 1}])
        for number in range(1000)
    ]
    planner.update([service("many", ports=ports(MOST_PORTS)), *slices])
    with cpu_limit(0.1):
        delta = planner.update([endpoint_slice("s0", "many", "10.2.0.1", ports=[{"name": "p1", "port": 1}])])
    assert delta.keys() == {name_of("many", "p1")}


def test_slices_that_all_name_many_other_ports_take_bounded_time(planner: Planner) -> None:
    """200 slices, each with another number for each of 1024 ports: those beyond the limit are not read."""

    def numbered(i: int) -> Change:
        each = [{"name": f"p{port}", "port": port + i} for port in range(1, MOST_PORTS + 1)]
        return endpoint_slice(f"s{i:03}", "many", f"10.1.0.{i}", ports=each)

    planner.update([service("many", ports=ports(MOST_PORTS))])
    took: list[float] = []
    for numbers in (range(33), range(33, 200)):
        planner.update(map(numbered, numbers))
        times = []
        for change in range(5):
            address = f"10.2.{len(took)}.{change}"
            before = time.thread_time()
            planner.update([endpoint_slice("s000", "many", address, ports=[{"name": "p1", "port": 1}])])
            times.append(time.thread_time() - before)
        took.append(min(times))
    assert took[1] < 2 * took[0]
    port = planner.get(name_of("many", "p2"))
    assert port is not None
    assert {address.partition(":")[0] for address in cluster(port)} == {f"10.1.0.{i}" for i in range(1, 33)}
    assert messages(planner)[-1] == (
        f"Service default/many: {32 * MOST_PORTS + 1} IPv4 endpoints, counted by port, of only the first slices"
        " are more than 32768: the first are served"
    )


def test_a_slice_with_many_numbers_of_one_port_takes_little_time(planner: Planner) -> None:
    """A file may have them; the API server wants other names."""
    many = endpoint_slice("s", "many", "10.1.0.1", ports=[{"port": 1 + i % 65535} for i in range(90_000)])
    with cpu_limit(2):
        planner.update([many])


def test_former_ports_of_a_slice_take_no_memory(planner: Planner) -> None:
    """The API server accepts 20 000 ports, and a tenant can write others a thousand times."""

    def update(i: int) -> None:
        many = [{"name": f"p{port}-{i}", "port": port} for port in range(1, 1001)]
        planner.update([endpoint_slice("s", "many", "10.1.0.1", ports=many)])

    update(0)
    tracemalloc.start()
    try:
        for i in range(1, 21):
            update(i)
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_equal_ports_of_slices_are_stored_once(planner: Planner) -> None:
    for name in ("a", "b"):
        planner.update([endpoint_slice(name, "web", "10.1.0.1", ports=[{"name": "p", "port": 8000}])])
    a, b = planner._slices.of(("default", "web")).values()
    assert a.ports is b.ports


def test_usual_objects_cause_no_message(planner: Planner) -> None:
    """5000 endpoints, 300 ports with all kinds of addresses (tests/netns/test_lab_bad_input.py)."""
    status = {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}}
    planner.update([service("wide", ports=ports(300), externalIPs=addresses(3), status=status)])
    planner.update([service("deep", "10.96.0.2"), wide_slice("d", "deep", "10.0.0.0", 5000, [{"name": ""}])])
    assert messages(planner) == []
    port = planner.get(name_of("wide", "p300"))
    assert frontends(port)[:2] == ["10.96.0.1:300", "198.51.100.1:300"]
    assert len(cluster(planner.get(name_of("deep")))) == 5000


def test_the_oldest_are_first_when_everything_is_written(planner: Planner) -> None:
    """Maps that are too small for all contain the cluster's own Services, which are the oldest."""
    times = {
        "young": "2025-01-01T00:00:00Z",
        "dns": "2020-01-01T00:00:00Z",
        "ageless": "",
        "web": "2024-01-01T00:00:00Z",
    }
    planner.update([service(name, f"10.96.0.{i}", created=when) for i, (name, when) in enumerate(times.items(), 1)])
    assert [name.name for name in planner.oldest_first()] == ["dns", "web", "young", "ageless"]
