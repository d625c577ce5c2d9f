# SPDX-License-Identifier: Apache-2.0
"""The writes for a change, step by step, without a kernel. One line for each map entry."""

from __future__ import annotations

import gc
import random
import sys
from ipaddress import ip_address
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.datapath.maps.changes import Change, Garbage, MapFullError, Record
from pyebpf_proxy.datapath.maps.layouts import Layouts
from pyebpf_proxy.datapath.maps.mirror import Mirror
from pyebpf_proxy.datapath.maps.writer import MAPS
from pyebpf_proxy.services.model import (
    Endpoint,
    Frontend,
    FrontendKind,
    IPFamily,
    Protocol,
    ServicePort,
    ServicePortName,
    SourceRange,
)

WEB = ServicePortName("shop", "web", "http", Protocol.TCP, IPFamily.IPV4)
OTHER = ServicePortName("shop", "other", "", Protocol.TCP, IPFamily.IPV4)
DNS = ServicePortName("kube-system", "dns", "dns", Protocol.UDP, IPFamily.IPV6)


@pytest.fixture(scope="module")
def btf(bpf_objects: Path) -> Btf:
    with Object.open(bpf_objects / "tc.bpf.o") as opened:
        return opened.btf


@pytest.fixture
def mirror(btf: Btf) -> Mirror:
    capacity = dict.fromkeys((*MAPS, "services"), 20) | {"slots": 16}
    return Mirror(Layouts(btf), capacity)


def endpoint(text: str, local: bool = False) -> Endpoint:
    address, _, port = text.rpartition(":")
    return Endpoint(ip_address(address).packed, int(port), local)


def frontend(text: str, kind: FrontendKind = FrontendKind.CLUSTER_IP) -> Frontend:
    address, _, port = text.rpartition(":")
    return Frontend(kind, ip_address(address).packed, int(port))


def plan(name: ServicePortName, frontends: list[str], cluster: list[str], **more: Any) -> ServicePort:
    return ServicePort(
        name,
        tuple(map(frontend, frontends)),
        tuple(map(endpoint, cluster)),
        any_endpoints=bool(cluster),
        **more,
    )


def written(btf: Btf, change: Change | None) -> str:
    """The change as it appears in the maps; zero fields are left out."""
    assert change is not None
    lines = []
    family = change.name.family.value

    def fields(struct_name: str, raw: bytes) -> str:
        parts = []
        for name, value in btf.struct(struct_name).unpack(raw).items():
            if name == "address":
                value = ip_address(value)
            elif isinstance(value, bytes):
                value = value.rstrip(b"\0").decode()
            if value and name != "zero":
                parts.append(f"{name}={value}")
        return " ".join(parts)

    def key(table: str, raw: bytes) -> str:
        if table.startswith(("frontends", "endpoints", "source_ranges")):
            return fields(f"{table[:-2]}{family}_key", raw)
        return str(int.from_bytes(raw, sys.byteorder))

    values = {
        "service_names": "service_name",
        "service_configs": "service_config",
        f"backends{family}": f"backend{family}",
    }
    values[f"endpoints{family}"] = "endpoint"
    for table in MAPS:
        if table not in change.puts:
            continue
        keys, raw = change.puts[table]
        key_size = btf.struct(f"{table[:-2]}{family}_key").size if table[-1] in "46" and "back" not in table else 4
        count = len(keys) // key_size
        value_size = len(raw) // count
        for i in range(count):
            value = raw[i * value_size : (i + 1) * value_size]
            shown = fields(values[table], value) if table in values else ""
            lines.append(f"{table} {key(table, keys[i * key_size : (i + 1) * key_size])} -> {shown}".rstrip("-> "))
    if change.slots and change.new:
        lines.append(f"slots from {change.new.first_slot}: {' '.join(map(str, change.slots))}")
    if change.config_changed:
        lines.append(f"flip to {change.new.config_id if change.new else 0}")
    for raw_key, value in change.frontend_puts:
        lines.append(f"frontend {fields(f'frontend{family}_key', raw_key)} -> {fields('frontend', value)}")
    lines += [f"frontend {fields(f'frontend{family}_key', raw_key)} off" for raw_key in change.frontend_deletes]
    lines += [f"endpoint {fields(f'endpoint{family}_key', raw_key)} off" for raw_key in change.serving_deletes]
    if change.gone:
        lines.append(f"later: backends {' '.join(str(number) for number, _ in change.gone)}")
    return "\n".join(lines)


def commit(mirror: Mirror, change: Change | None) -> Garbage:
    """What the writer does with the mirror after success."""
    assert change is not None
    garbage = Garbage()
    for key in change.frontend_deletes:
        if change.old and mirror.owners.get(key) == change.old.id:
            mirror.frontend_deleted(key, change.name.family)
    mirror.commit(change, garbage)
    return garbage


def expect(text: str) -> str:
    return dedent(text).strip()


def test_a_new_service_port(btf: Btf, mirror: Mirror) -> None:
    wanted = ServicePort(
        WEB,
        (frontend("10.96.0.1:80"), frontend("0.0.0.0:30080", FrontendKind.NODE_PORT)),
        (endpoint("10.0.0.1:8080", True), endpoint("172.16.0.1:8080")),
        (endpoint("10.0.0.1:8080", True),),
        any_endpoints=True,
        external_local=True,
        source_ranges=(SourceRange(b"\xc0\x00\x02\x00", 24),),
    )
    assert written(btf, mirror.plan(WEB, wanted, set())) == expect(
        """
        service_names 1 -> namespace_name=shop name=web port=http family=4 protocol=6
        backends4 1 -> address=10.0.0.1 port=8080 protocol=6 service=1 local=1
        backends4 2 -> address=172.16.0.1 port=8080 protocol=6 service=1
        endpoints4 address=10.0.0.1 port=8080 protocol=6 -> backends=1
        endpoints4 address=172.16.0.1 port=8080 protocol=6 -> backends=1
        source_ranges4 prefix_length=56 config=1 address=192.0.2.0
        service_configs 1 -> service=1 cluster_count=2 local_count=1 any_endpoints=1 external_local=1 source_ranges=1
        slots from 0: 1 2 1
        flip to 1
        frontend address=10.96.0.1 port=80 protocol=6 -> service=1 kind=1
        frontend address=0.0.0.0 port=30080 protocol=6 -> service=1 kind=4
        """
    )


def test_an_endpoint_replaced(btf: Btf, mirror: Mirror) -> None:
    commit(mirror, mirror.plan(WEB, plan(WEB, ["10.96.0.1:80"], ["10.0.0.1:80", "10.0.0.2:80"]), set()))
    change = mirror.plan(WEB, plan(WEB, ["10.96.0.1:80"], ["10.0.0.2:80", "10.0.0.3:80"]), set())
    assert written(btf, change) == expect(
        """
        backends4 3 -> address=10.0.0.3 port=80 protocol=6 service=1
        endpoints4 address=10.0.0.3 port=80 protocol=6 -> backends=1
        service_configs 2 -> service=1 first_slot=2 cluster_count=2 any_endpoints=1
        slots from 2: 2 3
        flip to 2
        later: backends 1
        """
    )
    garbage = commit(mirror, change)
    assert (garbage.configs, garbage.slots, garbage.services) == ([1], [(0, 2)], [])


def test_an_endpoint_that_another_service_port_has_too(btf: Btf, mirror: Mirror) -> None:
    commit(mirror, mirror.plan(WEB, plan(WEB, [], ["10.0.0.1:80"]), set()))
    text = written(btf, mirror.plan(OTHER, plan(OTHER, [], ["10.0.0.1:80"]), set()))
    assert "endpoints4 address=10.0.0.1 port=80 protocol=6 -> backends=2" in text
    assert "backends4 2 -> address=10.0.0.1 port=80 protocol=6 service=2" in text


def test_only_addresses(btf: Btf, mirror: Mirror) -> None:
    commit(mirror, mirror.plan(WEB, plan(WEB, ["10.96.0.1:80", "10.96.0.2:80"], ["10.0.0.1:80"]), set()))
    change = mirror.plan(WEB, plan(WEB, ["10.96.0.2:80", "10.96.0.3:80"], ["10.0.0.1:80"]), set())
    assert written(btf, change) == expect(
        """
        frontend address=10.96.0.3 port=80 protocol=6 -> service=1 kind=1
        frontend address=10.96.0.1 port=80 protocol=6 off
        """
    )
    assert not commit(mirror, change)


def test_endpoints_that_serve(btf: Btf, mirror: Mirror) -> None:
    serving = (endpoint("fd00::1:53"), endpoint("fd00::2:53"))
    change = mirror.plan(DNS, plan(DNS, [], ["fd00::1:53"], serving=serving[:1]), set())
    assert "endpoints6 service=1 address=fd00::1 port=53 protocol=17 -> backends=1" in written(btf, change)
    commit(mirror, change)
    change = mirror.plan(DNS, plan(DNS, [], ["fd00::1:53"], serving=serving[1:]), set())
    assert written(btf, change) == expect(
        """
        endpoints6 service=1 address=fd00::2 port=53 protocol=17 -> backends=1
        endpoint service=1 address=fd00::1 port=53 protocol=17 off
        """
    )


def test_an_endpoint_that_leaves_its_list_stays_while_it_serves(btf: Btf, mirror: Mirror) -> None:
    """A UDP socket keeps it (service-semantics §10). Its id ends with its service, not with its place in a list."""
    both = (endpoint("fd00::1:53"), endpoint("fd00::2:53"))
    commit(mirror, mirror.plan(DNS, plan(DNS, [], ["fd00::1:53", "fd00::2:53"], serving=both), set()))
    change = mirror.plan(DNS, plan(DNS, [], ["fd00::2:53"], serving=both), set())
    assert "later" not in written(btf, change)
    commit(mirror, change)
    assert set(mirror.records[DNS].backends.values()) == {1, 2}
    # Back in the list it has the same id.
    change = mirror.plan(DNS, plan(DNS, [], ["fd00::1:53", "fd00::2:53"], serving=both), set())
    assert change is not None
    assert sorted(change.slots) == [1, 2]
    commit(mirror, change)
    commit(mirror, mirror.plan(DNS, plan(DNS, [], ["fd00::2:53"], serving=both), set()))
    change = mirror.plan(DNS, plan(DNS, [], ["fd00::2:53"], serving=both[1:]), set())
    assert "later: backends 1" in written(btf, change)
    garbage = commit(mirror, change)
    assert [number for number, _ in garbage.backends[IPFamily.IPV6]] == [1]
    assert set(mirror.records[DNS].backends.values()) == {2}


def test_nothing(mirror: Mirror) -> None:
    wanted = plan(WEB, ["10.96.0.1:80"], ["10.0.0.1:80"])
    commit(mirror, mirror.plan(WEB, wanted, set()))
    assert mirror.plan(WEB, plan(WEB, ["10.96.0.1:80"], ["10.0.0.1:80"]), set()) is None
    assert mirror.plan_removal(OTHER) is None


def test_removal(btf: Btf, mirror: Mirror) -> None:
    commit(mirror, mirror.plan(WEB, plan(WEB, ["10.96.0.1:80"], ["10.0.0.1:80"]), set()))
    change = mirror.plan_removal(WEB)
    assert written(btf, change) == expect(
        """
        flip to 0
        frontend address=10.96.0.1 port=80 protocol=6 off
        later: backends 1
        """
    )
    garbage = commit(mirror, change)
    assert (garbage.configs, garbage.slots, garbage.services) == ([1], [(0, 1)], [1])
    mirror.discount_endpoints(garbage.backends[IPFamily.IPV4], IPFamily.IPV4)
    mirror.freed(garbage)
    assert not any(mirror.used.values())
    assert mirror.slot_ranges.available == 16


def test_an_address_moves_to_another_service_port(btf: Btf, mirror: Mirror) -> None:
    commit(mirror, mirror.plan(WEB, plan(WEB, ["10.96.0.1:80"], []), set()))
    released = mirror.released_by(WEB, None)
    there = mirror.plan(OTHER, plan(OTHER, ["10.96.0.1:80"], []), released)
    assert "frontend address=10.96.0.1 port=80 protocol=6 -> service=2 kind=1" in written(btf, there)
    away = mirror.plan_removal(WEB)
    assert away is not None
    assert away.frontend_deletes == []


def test_no_room_changes_nothing(mirror: Mirror) -> None:
    commit(mirror, mirror.plan(WEB, plan(WEB, ["10.96.0.1:80"], ["10.0.0.1:80"]), set()))
    before = dict(mirror.used), dict(mirror.owners), dict(mirror.endpoint_counts), mirror.backend_ids.available
    for wanted, text in (
        (plan(OTHER, [], [f"10.0.1.{i}:80" for i in range(20)]), r"map backends4 is full \(1 of 20 .* 20 needed\)"),
        (plan(OTHER, [f"10.96.1.{i}:80" for i in range(20)], []), r"map frontends4 is full \(1 of 20 .* 20 needed\)"),
        (plan(OTHER, [], [f"10.0.1.{i}:80" for i in range(16)]), r"slots has no free range of 16 .*15 of 16 are free"),
    ):
        with pytest.raises(MapFullError, match=text):
            mirror.plan(OTHER, wanted, set())
        assert before == (
            dict(mirror.used),
            dict(mirror.owners),
            dict(mirror.endpoint_counts),
            mirror.backend_ids.available,
        )


def test_a_change_that_was_refused_leaves_no_trace(mirror: Mirror) -> None:
    commit(mirror, mirror.plan(WEB, plan(WEB, ["10.96.0.1:80"], ["10.0.0.1:80"]), set()))
    before = dict(mirror.used), dict(mirror.owners), dict(mirror.endpoint_counts), mirror.slot_ranges.available
    wanted = plan(OTHER, ["10.96.0.2:80"], ["10.0.0.1:80", "10.0.0.2:80"], source_ranges=(SourceRange(bytes(4), 0),))
    change = mirror.plan(OTHER, wanted, set())
    assert change is not None
    garbage = Garbage()
    mirror.revert(change, garbage)
    mirror.discount_endpoints(garbage.backends[IPFamily.IPV4], IPFamily.IPV4)
    mirror.freed(garbage)
    after = dict(mirror.used), dict(mirror.owners), dict(mirror.endpoint_counts), mirror.slot_ranges.available
    assert after == before


def test_the_work_does_not_grow_with_the_table(btf: Btf) -> None:
    """Counted in calls, not in time: a change of one service port among 2 or among 2 000."""

    def calls(services: int) -> int:
        capacity = dict.fromkeys((*MAPS, "services"), 65536) | {"slots": 65536}
        mirror = Mirror(Layouts(btf), capacity)
        for i in range(services):
            name = ServicePortName("shop", f"s{i}", "", Protocol.TCP, IPFamily.IPV4)
            address = f"10.{i >> 8}.{i & 255}"
            commit(
                mirror,
                mirror.plan(name, plan(name, [f"10.96.0.1:{1 + i}"], [f"{address}.1:80", f"{address}.2:80"]), set()),
            )
        name = ServicePortName("shop", "s1", "", Protocol.TCP, IPFamily.IPV4)
        wanted = plan(name, ["10.96.0.1:2"], ["10.0.1.1:80", "10.0.1.3:80"])
        count = 0

        def count_one(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        gc.disable()  # its callbacks would count
        sys.setprofile(count_one)
        try:
            garbage = commit(mirror, mirror.plan(name, wanted, mirror.released_by(name, wanted)))
            mirror.discount_endpoints(garbage.backends[IPFamily.IPV4], IPFamily.IPV4)
            mirror.freed(garbage)
        finally:
            sys.setprofile(None)
            gc.enable()
        return count

    assert calls(2000) == calls(2)


@pytest.mark.parametrize("seed", range(50))
def test_the_stretch_of_slots_with_the_fewest_in_use_is_found(btf: Btf, seed: int) -> None:
    """As by trying every start. Lists that are replaced, but not free yet, are in no stretch."""
    rng = random.Random(seed)
    size = 60
    mirror = Mirror(Layouts(btf), dict.fromkeys((*MAPS, "services"), 200) | {"slots": size})
    owners: list[ServicePortName | None] = [None] * size
    lengths: dict[ServicePortName, int] = {}
    replaced: set[int] = set()
    for number in range(25):
        length = rng.randint(1, 6)
        first = mirror.slot_ranges.take(length)
        if first is None:
            continue
        name = WEB._replace(name=f"s{number}")
        chance = rng.random()
        if chance < 0.4:
            mirror.slot_ranges.free(first, length)
        elif chance < 0.5:
            replaced.update(range(first, first + length))
        else:
            record = Record(number, plan(name, [], []))
            record.first_slot, record.length = first, length
            mirror.records[name] = record
            owners[first : first + length] = [name] * length
            lengths[name] = length
    wanted = rng.randint(2, 25)
    costs = []
    for start in range(size - wanted + 1):
        there = range(start, start + wanted)
        if replaced.isdisjoint(there):
            costs.append(sum(lengths[name] for name in {owners[at] for at in there} if name is not None))
    found = mirror.in_the_way(wanted)
    if found is None:
        assert not costs
        return
    names, starts = found
    assert sum(lengths[name] for name in names) == min(costs)
    assert [lengths[name] for name in names] == sorted((lengths[name] for name in names), reverse=True)
    free = sum(mirror.slot_ranges.take_at(start) for start in starts)
    assert free + min(costs) >= wanted
