# SPDX-License-Identifier: Apache-2.0
"""Full maps, conflicting addresses and names that are too long affect one service port only."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable, Mapping

import msgspec
import pytest

from pyebpf_proxy.datapath.loader.libbpf import BpfError
from pyebpf_proxy.datapath.loader.programs import Loaded
from pyebpf_proxy.datapath.maps.writer import Writer
from pyebpf_proxy.kube.objects import Service
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.services.model import (
    FrontendKind,
    Protocol,
    ServicePort,
    ServicePortName,
    SourceRange,
)
from pyebpf_proxy.services.planner import Planner, PlanSettings
from pyebpf_proxy.services.shares import Limits
from tests.packet.service_maps import SIZES, logical
from tests.packet.service_plans import (
    endpoints,
    frontend,
    name_of,
    service,
)

pytestmark = pytest.mark.needs_bpf


def tenants_service(namespace: str, name: str, second: int, **spec: object) -> Change:
    """A Service with a ClusterIP of its own."""
    address = f"10.96.{second}.{1 + int(name[1:])}"
    document = {
        "metadata": {"name": name, "namespace": namespace, "creationTimestamp": f"2026-01-01T00:00:{second:02}Z"},
        "spec": {"clusterIP": address, **spec},
    }
    return Change("Service", namespace, name, msgspec.convert(document, Service))


def test_a_full_backend_map_affects_only_services_that_do_not_fit(loaded: Loaded, writer: Writer) -> None:
    size = SIZES["backends4"]
    big, small, more = name_of("big"), name_of("small"), name_of("more")
    many = [f"10.0.{i >> 8}.{i & 255}:80" for i in range(1, size - 1)]
    assert writer.apply({big: service(big, ("10.96.0.1",), *many)}) == []
    first = service(small, ("10.96.0.2",), "10.1.0.1:80")
    assert writer.apply({small: first}) == []
    grown = service(small, ("10.96.0.2",), "10.1.0.1:80", "10.1.0.2:80", "10.1.0.3:80")
    (problem,) = writer.apply(
        {small: grown, more: service(more, ("10.96.0.3",), "10.1.0.9:80", frontends=(frontend("10.96.0.3"),))}
    )
    assert problem.name == small
    assert problem.text == f"map backends4 is full ({size} of {size} entries used, 2 needed)"
    served = logical(loaded, complete=True)
    assert served["shop/small:http/TCP/IPv4"]["cluster"] == ["10.1.0.1:80 remote"], (
        "the last complete version stays active"
    )
    assert served["shop/more:http/TCP/IPv4"]["cluster"] == ["10.1.0.9:80 remote"], "other service ports are served"
    assert writer.apply({}) == [], "reported once"
    assert set(writer.problems) == {small}, "and the problem is kept"

    assert writer.apply({big: service(big, ("10.96.0.1",), *many[:10])}) == []
    writer.collect()
    writer.collect()  # collects what the second attempt replaced
    assert len(logical(loaded, complete=True)["shop/small:http/TCP/IPv4"]["cluster"]) == 3, "the freed space is used"
    assert writer.problems == {}


def test_a_change_may_use_the_space_that_it_frees(loaded: Loaded, writer: Writer) -> None:
    size = SIZES["backends4"]
    one, two = name_of("one"), name_of("two")
    writer.apply({one: service(one, ("10.96.0.1",), *[f"10.0.{i >> 8}.{i & 255}:80" for i in range(1, size)])})
    delta = {two: service(two, ("10.96.0.1",), *[f"10.1.{i >> 8}.{i & 255}:80" for i in range(1, size)]), one: None}
    assert writer.apply(delta) == []
    assert writer.problems == {}
    writer.collect()
    assert list(logical(loaded, complete=True)) == ["shop/two:http/TCP/IPv4"]


def test_s2_the_last_entries_are_reserved_for_cluster_ips(loaded: Loaded, writer: Writer) -> None:
    """External addresses of several namespaces fill the map up to an eighth, and use the space that others free."""
    size = SIZES["frontends4"]
    capacity = size - size // 8
    greedy, dns = name_of("greedy"), name_of("dns")
    many = tuple(frontend("203.0.113.1", 1 + i, FrontendKind.EXTERNAL_IP) for i in range(size))
    (problem,) = writer.apply({greedy: service(greedy, (), frontends=(frontend("10.96.0.1"), *many))})
    left_out = size - (capacity - 1)
    assert problem.text == f"map frontends4 is full: {left_out} addresses other than the ClusterIP are not served"
    more = tuple(frontend(f"10.96.1.{i}") for i in range(size // 8))
    assert writer.apply({dns: service(dns, (), frontends=more)}) == []
    served = logical(loaded, complete=True)
    assert len(served["shop/dns:http/TCP/IPv4"]["frontends"]) == size // 8
    assert len(served["shop/greedy:http/TCP/IPv4"]["frontends"]) == capacity
    assert writer.apply({greedy: service(greedy, (), frontends=(frontend("10.96.0.1"), *many[:10]))}) == []
    assert writer.problems == {}
    assert len(logical(loaded, complete=True)["shop/greedy:http/TCP/IPv4"]["frontends"]) == 11


def test_s2_one_namespace_leaves_room_for_the_node_ports_of_others(loaded: Loaded, writer: Writer) -> None:
    """What is reserved for ClusterIPs is not all that is reserved for other namespaces."""
    limits = Limits.of_maps(SIZES)
    planner = Planner(PlanSettings("node-1", limits=limits))
    greedy = [f"203.0.113.{i}" for i in range(1, 101)]
    planner.update(
        tenants_service("tenant", f"s{i}", 1, externalIPs=greedy, ports=[{"port": 80 + i}]) for i in range(6)
    )
    writer.apply({name: planner.get(name) for name in planner.names})
    assert writer.fill()["frontends4"][0] > limits.frontends[0] - 101, "the namespace has used up its share"
    few = SIZES["frontends4"] // 8 // 2 - 6
    others = [
        tenants_service("other", f"o{i}", 9, type="NodePort", ports=[{"port": 80, "nodePort": 30000 + i}])
        for i in range(few)
    ]
    assert writer.apply(planner.update(others)) == []
    served = logical(loaded, complete=True)
    assert all(len(served[f"other/o{i}:/TCP/IPv4"]["frontends"]) == 2 for i in range(few))


def test_others_fit_though_a_tenant_exchanges_all_of_its_addresses(loaded: Loaded, writer: Writer) -> None:
    """In the round the old and the new addresses count. The tenant is in the order of names, and so first."""
    size = SIZES["frontends4"]
    big, small = name_of("a-big"), name_of("small")

    def plan(name: ServicePortName, cluster_ip: str, others: Iterable[str]) -> ServicePort:
        external = tuple(frontend(address, kind=FrontendKind.LOAD_BALANCER) for address in others)
        return service(name, (), "10.0.0.2:80", frontends=(frontend(cluster_ip), *external))

    def addresses(network: int) -> list[str]:
        return [f"10.{network}.{number >> 8}.{number & 255}" for number in range(size // 2 - 33)]

    before = {big: plan(big, "10.96.0.1", addresses(200)), small: plan(small, "10.96.0.2", ())}
    assert writer.apply(before) == []
    writer.apply({big: plan(big, "10.96.0.1", addresses(201)), small: plan(small, "10.96.0.2", ("203.0.113.7",))})
    assert small not in writer.problems
    assert "203.0.113.7:80/TCP" in logical(loaded, complete=True)["shop/small:http/TCP/IPv4"]["frontends"]


def test_short_free_ranges_do_not_keep_a_long_list_out(loaded: Loaded, writer: Writer) -> None:
    """A tenant lets every other list go: half of the slots are free, and no range has more than 8."""
    names = [name_of(f"s{i:03}") for i in range(SIZES["slots"] // 8)]
    lists = {
        name: service(name, (f"10.96.3.{i}",), *(f"10.3.{i}.{k}:80 local" for k in range(4)))
        for i, name in enumerate(names)
    }
    assert writer.apply(lists) == []
    assert writer.apply(dict.fromkeys(names[::2])) == []
    writer.collect()
    web = name_of("web")
    wanted = service(web, ("10.96.0.9",), *(f"10.4.0.{k}:80" for k in range(100)))
    before = logical(loaded, complete=True)
    assert writer.apply({web: wanted}) == []
    assert writer.problems == {}
    writer.collect()
    served = logical(loaded, complete=True)
    assert len(served.pop("shop/web:http/TCP/IPv4")["cluster"]) == 100
    assert served == before, "the others are as before"
    assert Writer(loaded).fill()["slots"] == writer.fill()["slots"], "none is lost"


def test_lists_that_find_no_other_room_stay_as_they_are(loaded: Loaded, writer: Writer) -> None:
    """Each free range has 100 slots, each list in between 156."""
    for i in range(4):
        for kind, count in (("gone", 50), ("stay", 78)):
            name = name_of(f"{kind}{i}")
            assert writer.apply({name: service(name, (), *(f"10.3.{i}.{k}:{count} local" for k in range(count)))}) == []
    assert writer.apply({name_of(f"gone{i}"): None for i in range(4)}) == []
    writer.collect()
    before, fill = logical(loaded, complete=True), writer.fill()
    web = name_of("web")
    (problem,) = writer.apply({web: service(web, (), *(f"10.4.0.{k}:80 local" for k in range(100)))})
    assert str(problem) == f"{web}: map slots has no free range of 200 entries (400 of 1024 are free)"
    assert set(writer.problems) == {web}
    writer.collect()
    assert logical(loaded, complete=True) == before
    assert writer.fill() == fill
    assert writer.apply({name_of("stay0"): None}) == []
    writer.collect()
    assert writer.problems == {}, "there is room now"


def test_lists_that_must_be_written_anew_are_not_moved(loaded: Loaded, writer: Writer) -> None:
    """Their content may be damaged, and a move in vain would take them for repaired."""
    names = [name_of(f"s{i:03}") for i in range(SIZES["slots"] // 8)]
    lists = {name: service(name, (), *(f"10.3.{i}.{k}:80 local" for k in range(4))) for i, name in enumerate(names)}
    assert writer.apply(lists) == []
    assert writer.apply(dict.fromkeys(names[::2])) == []
    writer.collect()
    for record in writer._mirror.records.values():
        record.dirty = True
    web = name_of("web")
    wanted = service(web, (), *(f"10.4.0.{k}:80" for k in range(100)))
    assert [problem.name for problem in writer.apply({web: wanted})] == [web]
    assert all(record.dirty for record in writer._mirror.records.values())
    writer._no_move_before = 0.0
    assert writer.apply({name: lists[name] for name in names[1::2]} | {web: wanted}) == []
    assert not any(record.dirty for record in writer._mirror.records.values())


@pytest.mark.parametrize(
    ("table", "plans", "text"),
    [
        ("service_configs", {}, "map service_configs is full"),
        (
            "slots",
            {"cluster": 600, "local": True},
            "map slots has no free range of 1200 entries (1024 of 1024 are free)",
        ),
        ("frontends4", {"frontends": 513}, "map frontends4 is full (0 of 512 entries used, 513 needed)"),
        ("source_ranges4", {"ranges": 257}, "map source_ranges4 is full (0 of 256 entries used, 257 needed)"),
        ("endpoints4", {"serving": 513}, "map endpoints4 is full (0 of 512 entries used, 514 needed)"),
    ],
)
def test_every_map_may_be_full(loaded: Loaded, writer: Writer, table: str, plans: dict[str, int], text: str) -> None:
    if table == "service_configs":
        # There are as many service_configs as services, so old versions that are not yet collected fill the map.
        names = [name_of(f"s{i}") for i in range(SIZES["service_configs"] - 1)]
        assert writer.apply({n: service(n, ()) for n in names}) == []
        (problem,) = writer.apply({name_of("one-more"): service(name_of("one-more"), ())})
        assert problem.text == "map services is full (256 entries)"
        return
    web, other = name_of("web", protocol=Protocol.UDP), name_of("other")
    many = endpoints(
        *(f"10.2.{i >> 8}.{i & 255}:80 local" for i in range(plans.get("cluster", plans.get("serving", 1))))
    )
    plan = service(
        web,
        (),
        frontends=tuple(frontend("10.96.0.1", 1 + i) for i in range(plans.get("frontends", 0))),
        cluster=many if "cluster" in plans else many[:1],
        local=many if "local" in plans else (),
        serving=many if "serving" in plans else (),
        source_ranges=tuple(SourceRange(bytes((10, i >> 8, i & 255, 0)), 24) for i in range(plans.get("ranges", 0))),
    )
    if table == "slots":
        # Backends are checked first: free some, so that slots are what is missing.
        plan = service(web, (), cluster=many[:500] + many[:500], local=many[:200])
    problems = writer.apply({web: plan, other: service(other, ("10.96.0.2",), "10.0.0.1:80")})
    assert [str(p) for p in problems] == [f"shop/web:http/UDP/IPV4: {text}"]
    assert list(logical(loaded, complete=True)) == ["shop/other:http/TCP/IPv4"]


@pytest.mark.parametrize(
    "full", ["backends4", "endpoints4", "service_configs", "source_ranges4", "frontends4", "service_names"]
)
def test_a_map_that_the_kernel_reports_as_full(loaded: Loaded, writer: Writer, full: str) -> None:
    """Entries of other programs: the writer learns of them only from the kernel."""
    web, dns = name_of("web"), name_of("dns", protocol=Protocol.UDP)
    ranges = (SourceRange(bytes(4), 0), SourceRange(b"\x0a" + bytes(3), 8))
    old = service(web, ("10.96.0.1",), "10.0.0.1:80")
    writer.apply({web: old})
    before = logical(loaded, complete=True)
    table = loaded.maps[full]
    foreign = []
    for i in range(table.max_entries + 1):
        key = (0xFFFF0000 + i).to_bytes(4, sys.byteorder).rjust(table.key_size, b"\xfe")
        if full == "source_ranges4":
            key = (64).to_bytes(4, sys.byteorder) + b"\xfe\xfe" + i.to_bytes(2, "big") + b"\xfe" * 4
        try:
            table.update(key, b"\xfe" * table.value_size)
        except BpfError as error:
            if error.errno not in (errno.E2BIG, errno.ENOSPC):
                raise
            break
        foreign.append(key)
    changed = service(web, ("10.96.0.1", "10.96.0.8"), "10.0.0.1:80", "10.0.0.2:80", source_ranges=ranges)
    new = service(dns, ("10.96.0.2",), "10.0.0.1:53", serving=endpoints("10.0.0.1:53"), source_ranges=ranges)
    problems = writer.apply({web: changed, dns: new})
    refused = {web, dns} if full != "service_names" else {dns}
    assert {p.name for p in problems} == refused
    assert {p.text for p in problems} == {f"map {full} is full"}
    for key in foreign:
        table.delete(key)
    writer.collect()
    if full not in ("frontends4", "service_names"):
        assert writer.problems == {}, "the writer tries again: undoing the partial change freed space"
    writer.apply({web: changed, dns: new})
    assert writer.problems == {}
    writer.collect()
    after = logical(loaded, complete=True)
    assert after.pop("shop/dns:http/UDP/IPv4")["frontends"] == {"10.96.0.2:80/UDP": 1}
    assert len(after["shop/web:http/TCP/IPv4"]["cluster"]) == 2
    assert list(after) == list(before)


def test_an_address_that_another_service_port_has(loaded: Loaded, writer: Writer) -> None:
    one, two = name_of("one"), name_of("two")
    writer.apply({one: service(one, ("10.96.0.1",), "10.0.0.1:80")})
    (problem,) = writer.apply({two: service(two, ("10.96.0.1", "10.96.0.2"), "10.0.0.2:80")})
    assert str(problem) == "shop/two:http/TCP/IPV4: 10.96.0.1:80/TCP belongs to shop/one:http/TCP/IPV4"
    served = logical(loaded, complete=True)
    assert list(served["shop/two:http/TCP/IPv4"]["frontends"]) == ["10.96.0.2:80/TCP"]
    writer.apply({one: None})
    writer.collect()
    served = logical(loaded, complete=True)
    assert list(served["shop/two:http/TCP/IPv4"]["frontends"]) == ["10.96.0.1:80/TCP", "10.96.0.2:80/TCP"]
    assert writer.problems == {}


def test_two_service_ports_claim_an_address_when_it_is_freed(loaded: Loaded, writer: Writer) -> None:
    old, one, two = name_of("old"), name_of("one"), name_of("two")
    writer.apply({old: service(old, ("10.96.0.1",), "10.0.0.1:80")})
    (problem,) = writer.apply({n: service(n, ("10.96.0.1",), "10.0.0.2:80") for n in (one, two)} | {old: None})
    assert str(problem) == "shop/two:http/TCP/IPV4: 10.96.0.1:80/TCP belongs to shop/one:http/TCP/IPV4"
    writer.collect()
    served = logical(loaded, complete=True)
    assert {name: list(entry["frontends"]) for name, entry in served.items()} == {
        "shop/one:http/TCP/IPv4": ["10.96.0.1:80/TCP"],
        "shop/two:http/TCP/IPv4": [],
    }


def test_an_address_comes_back_from_a_service_port_that_it_was_given_to(loaded: Loaded, writer: Writer) -> None:
    """The change that gave it away did not fit. Without that change the address is served as before."""
    giver, taker = name_of("giver"), name_of("taker")
    small = service(giver, ("10.96.0.1", "203.0.113.1"), "10.0.0.1:80")
    before = {giver: small, taker: service(taker, ("10.96.0.2",), "10.0.0.2:80")}
    writer.apply(before)
    expected = logical(loaded, complete=True)
    many = [f"10.0.{1 + i // 250}.{1 + i % 250}:80" for i in range(SIZES["backends4"])]
    with_it = service(taker, ("10.96.0.2", "203.0.113.1"), "10.0.0.2:80")
    (problem,) = writer.apply({giver: service(giver, ("10.96.0.1",), *many), taker: with_it})
    assert problem.name == giver
    served = logical(loaded, complete=True)
    assert list(served["shop/giver:http/TCP/IPv4"]["frontends"]) == ["10.96.0.1:80/TCP"]
    assert list(served["shop/taker:http/TCP/IPv4"]["frontends"]) == ["10.96.0.2:80/TCP", "203.0.113.1:80/TCP"]
    assert writer.apply(before) == []
    writer.collect()
    assert logical(loaded, complete=True) == expected
    assert writer.problems == {}


@pytest.mark.parametrize("later", [False, True])
def test_a_service_port_that_does_not_fit_keeps_no_address_of_another(
    loaded: Loaded, writer: Writer, later: bool
) -> None:
    """A tenant's Service frees its NodePort, but its many new endpoints do not fit, as long as the tenant likes."""
    tenant, victim = name_of("tenant"), name_of("victim")
    node_port = frontend("0.0.0.0", 30080, FrontendKind.NODE_PORT)
    writer.apply({tenant: service(tenant, (), "10.0.0.1:80", frontends=(frontend("10.96.0.1"), node_port))})
    many = [f"10.0.{1 + i // 250}.{1 + i % 250}:80" for i in range(SIZES["backends4"])]
    freed = {tenant: service(tenant, (), *many, frontends=(frontend("10.96.0.1"),))}
    taken = {victim: service(victim, (), "10.0.0.2:80", frontends=(frontend("10.96.0.2"), node_port))}
    if later:
        (problem,) = writer.apply(freed)
        assert list(logical(loaded, complete=True)["shop/tenant:http/TCP/IPv4"]["frontends"]) == ["10.96.0.1:80/TCP"]
        assert writer.apply(taken) == []
    else:
        (problem,) = writer.apply(freed | taken)
    assert problem.name == tenant
    assert set(writer.problems) == {tenant}
    writer.collect()
    served = logical(loaded, complete=True)
    assert list(served["shop/victim:http/TCP/IPv4"]["frontends"]) == ["0.0.0.0:30080/TCP", "10.96.0.2:80/TCP"]
    tenants = served["shop/tenant:http/TCP/IPv4"]
    assert (list(tenants["frontends"]), tenants["cluster"]) == (["10.96.0.1:80/TCP"], ["10.0.0.1:80 remote"])
    assert not writer._read_back.differs(writer._mirror, writer._version, False)
    small = service(tenant, (), "10.0.0.3:80", frontends=(frontend("10.96.0.1"),))
    assert writer.apply({tenant: small}) == []
    assert writer.problems == {}
    writer.collect()
    assert logical(loaded, complete=True)["shop/tenant:http/TCP/IPv4"]["cluster"] == ["10.0.0.3:80 remote"]


def test_a_serving_endpoint_stays_though_an_earlier_attempt_was_refused(loaded: Loaded) -> None:
    """What the earlier attempt had written is removed at once, not after the later one has written the same."""
    refused = False

    def update(added: Mapping[int, tuple[bytes, int]], removed: Iterable[int]) -> None:
        if refused and added:
            raise OSError(errno.ENOBUFS, "no buffer space")

    dns = name_of("dns", protocol=Protocol.UDP)
    writer = Writer(loaded, update)
    small, large = (
        service(dns, ("10.96.0.2",), *places, serving=endpoints(*places))
        for places in (["10.0.0.1:53"], ["10.0.0.1:53", "10.0.0.2:53"])
    )
    writer.apply({dns: small})
    writer.collect()
    refused = True
    (problem,) = writer.apply({dns: large})
    assert problem.text.endswith("no buffer space")
    refused = False
    assert writer.apply({dns: large}) == []
    writer.collect()
    assert logical(loaded, complete=True)["shop/dns:http/UDP/IPv4"]["serving"] == ["10.0.0.1:53", "10.0.0.2:53"]
    assert not writer._read_back.differs(writer._mirror, writer._version, False)


def test_a_name_that_is_too_long(loaded: Loaded, writer: Writer) -> None:
    long = name_of("x" * 64)
    (problem,) = writer.apply({long: service(long, ())})
    assert problem.text == "a part of the name is longer than 63 bytes"
    assert logical(loaded, complete=True) == {}
