# SPDX-License-Identifier: Apache-2.0
"""The writer on real maps: what a change leaves in them, in which order, and what happens when they are full."""

from __future__ import annotations

import asyncio
import errno
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from service_maps import SIZES, logical, rows, wipe, word

from pyebpf_proxy.datapath import grace
from pyebpf_proxy.datapath import maps as maps_module
from pyebpf_proxy.datapath.libbpf import BpfError
from pyebpf_proxy.datapath.maps import Writer
from pyebpf_proxy.datapath.programs import Loaded, Settings, load
from pyebpf_proxy.services.model import (
    Endpoint,
    Family,
    Frontend,
    FrontendKind,
    Protocol,
    ServicePort,
    ServicePortName,
    SourceRange,
)

pytestmark = pytest.mark.needs_bpf

CLUSTER_IP, NODE_PORT = FrontendKind.CLUSTER_IP, FrontendKind.NODE_PORT


@pytest.fixture(scope="module")
def kernel(bpf_objects: Path) -> Iterator[Loaded]:
    loaded = load(Settings(netns_cookie=1), sizes=SIZES, objects=bpf_objects)
    yield loaded
    loaded.close()


@pytest.fixture
def loaded(kernel: Loaded) -> Iterator[Loaded]:
    wipe(kernel)
    real = dict(kernel.maps)
    yield kernel
    kernel.maps.update(real)


def in_pods(family: Family, address: bytes) -> bool:
    return address[0] in (10, 0xFD)


@pytest.fixture
def writer(loaded: Loaded) -> Writer:
    return Writer(loaded, in_pods)


def name_of(name: str, family: Family = Family.IPV4, protocol: Protocol = Protocol.TCP) -> ServicePortName:
    return ServicePortName("shop", name, "http", protocol, family)


def endpoints(*texts: str) -> tuple[Endpoint, ...]:
    """ "10.0.0.1:80" or, on this node, "10.0.0.1:80 local"."""
    result = []
    for item in texts:
        where, _, place = item.partition(" ")
        address, _, port = where.rpartition(":")
        result.append(Endpoint(ip_address(address.strip("[]")).packed, int(port), place == "local"))
    return tuple(result)


def frontend(address: str, port: int = 80, kind: FrontendKind = CLUSTER_IP) -> Frontend:
    return Frontend(kind, ip_address(address).packed, port)


def service(name: ServicePortName, addresses: tuple[str, ...], *items: str, **more: Any) -> ServicePort:
    cluster = endpoints(*items)
    defaults: dict[str, Any] = {
        "cluster": cluster,
        "local": tuple(e for e in cluster if e.local),
        "any_endpoints": bool(cluster),
        "frontends": tuple(frontend(a) for a in addresses),
    }
    return ServicePort(name, **{**defaults, **more})


def slot_backends(loaded: Loaded, writer: Writer, name: ServicePortName) -> list[int]:
    table = rows(loaded, "tables")[word(loaded, "services", writer.service_id(name))]
    count = table["cluster_count"] + table["local_count"]
    return [word(loaded, "slots", table["first_slot"] + i) for i in range(count)]


def test_everything_of_a_service_port_is_in_the_maps(loaded: Loaded, writer: Writer) -> None:
    web = name_of("web")
    plan = service(
        web,
        ("10.96.0.1",),
        "10.0.0.1:8080 local",
        "10.0.0.2:8080",
        "172.16.0.1:8080",
        internal_local=True,
        external_local=True,
        affinity_seconds=10800,
        source_ranges=(SourceRange(b"\xc0\x00\x02\x00", 24), SourceRange(bytes(4), 0)),
        frontends=(
            frontend("10.96.0.1"),
            frontend("203.0.113.1", 80, FrontendKind.LOAD_BALANCER),
            frontend("0.0.0.0", 30080, NODE_PORT),
        ),
    )
    assert writer.apply({web: plan}) == []
    assert logical(loaded, complete=True) == {
        "shop/web:http/TCP/IPv4": {
            "cluster": [
                "10.0.0.1:8080 local direct",
                "10.0.0.2:8080 remote direct",
                "172.16.0.1:8080 remote netfilter",
            ],
            "local": ["10.0.0.1:8080 local direct"],
            "flags": ["any_endpoints", "internal_local", "external_local", "source_ranges"],
            "affinity": 10800,
            "ranges": ["0.0.0.0/0", "192.0.2.0/24"],
            "frontends": {"0.0.0.0:30080/TCP": 4, "10.96.0.1:80/TCP": 1, "203.0.113.1:80/TCP": 3},
            "serving": [],
        }
    }


def test_ipv6_and_udp(loaded: Loaded, writer: Writer) -> None:
    dns = name_of("dns", Family.IPV6, Protocol.UDP)
    serving = endpoints("[fd00::1]:53", "[fd00::9]:53")
    writer.apply({dns: service(dns, ("fd00:96::a",), "[fd00::1]:53", serving=serving)})
    entry = logical(loaded, complete=True)["shop/dns:http/UDP/IPv6"]
    assert entry["cluster"] == ["fd00::1:53 remote direct"]
    assert entry["serving"] == ["fd00::1:53", "fd00::9:53"]
    assert entry["frontends"] == {"fd00:96::a:80/UDP": 1}

    writer.apply({dns: service(dns, ("fd00:96::a",), "[fd00::1]:53", serving=serving[1:])})
    # At once, not after the grace period: flows to an endpoint that no longer serves are stale now.
    assert logical(loaded)["shop/dns:http/UDP/IPv6"]["serving"] == ["fd00::9:53"]


def test_sctp_takes_the_netfilter_lane(loaded: Loaded, writer: Writer) -> None:
    name = name_of("signal", protocol=Protocol.SCTP)
    writer.apply({name: service(name, ("10.96.0.2",), "10.0.0.1:3868")})
    assert logical(loaded)["shop/signal:http/SCTP/IPv4"]["cluster"] == ["10.0.0.1:3868 remote netfilter"]


def test_a_change_keeps_the_ids_of_what_stays(loaded: Loaded, writer: Writer) -> None:
    web = name_of("web")
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80", "10.0.0.2:80")})
    number, (one, two) = writer.service_id(web), slot_backends(loaded, writer, web)
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.2:80", "10.0.0.3:80")})
    assert writer.service_id(web) == number
    assert slot_backends(loaded, writer, web)[0] == two
    writer.collect()
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80", "10.0.0.2:80")})
    back = slot_backends(loaded, writer, web)
    # Affinity to an endpoint that was away is lost (spec/service-semantics §4.1).
    assert back[1] == two
    assert back[0] != one


def test_an_endpoint_that_returns_before_its_old_self_is_collected_is_a_new_one(loaded: Loaded, writer: Writer) -> None:
    web = name_of("web")
    full = service(web, ("10.96.0.1",), "10.0.0.1:80", "10.0.0.2:80")
    writer.apply({web: full})
    before = slot_backends(loaded, writer, web)
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.2:80")})
    writer.apply({web: full})
    after = slot_backends(loaded, writer, web)
    assert after[0] not in before
    assert after[1] == before[1]
    writer.collect()
    assert logical(loaded, complete=True)["shop/web:http/TCP/IPv4"]["cluster"][0] == "10.0.0.1:80 remote direct"


def test_nothing_is_written_where_nothing_changed(loaded: Loaded, writer: Writer) -> None:
    web = name_of("web")
    plan = service(web, ("10.96.0.1",), "10.0.0.1:80")
    writer.apply({web: plan})
    before = {name: loaded.maps[name].dump() for name in SIZES}
    assert writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80")}) == []
    assert not writer.has_garbage
    assert {name: loaded.maps[name].dump() for name in SIZES} == before


def test_a_new_frontend_leaves_the_table_alone(loaded: Loaded, writer: Writer) -> None:
    web = name_of("web")
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80")})
    table = word(loaded, "services", writer.service_id(web))
    writer.apply({web: service(web, ("10.96.0.2",), "10.0.0.1:80")})
    assert word(loaded, "services", writer.service_id(web)) == table
    assert list(logical(loaded, complete=True)["shop/web:http/TCP/IPv4"]["frontends"]) == ["10.96.0.2:80/TCP"]


def test_the_old_version_stays_whole_until_it_is_collected(loaded: Loaded, writer: Writer) -> None:
    web = name_of("web")
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80", "10.0.0.2:80")})
    old_id = word(loaded, "services", writer.service_id(web))
    old = rows(loaded, "tables")[old_id]
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.3:80")})
    # A program that fetched the old table's number just before the flip goes on with it.
    assert rows(loaded, "tables")[old_id] == old
    backends = rows(loaded, "backends4")
    seen = [backends[word(loaded, "slots", old["first_slot"] + i)]["address"][3] for i in range(2)]
    assert seen == [1, 2]
    writer.collect()
    assert old_id not in rows(loaded, "tables")
    logical(loaded, complete=True)


def test_nothing_is_taken_away_before_the_grace_period(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    writer = watch(loaded, steps.append)
    writer.apply(first_plan())
    writer.apply(dict.fromkeys(first_plan()))
    del steps[:]
    monkeypatch.setattr(grace, "wait", lambda: steps.append("grace"))
    writer.collect()
    assert steps[0] == "grace"
    assert {"tables", "backends4", "backends6", "endpoints4", "source_ranges6", "service_names"} <= set(steps[1:])


def test_collecting_while_changes_go_on(loaded: Loaded, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    def together(meanwhile: Any) -> None:
        """``meanwhile`` is called in the middle of the grace period."""

        async def run() -> None:
            waiting, go = asyncio.Event(), threading.Event()
            loop = asyncio.get_running_loop()

            def wait() -> None:
                loop.call_soon_threadsafe(waiting.set)
                go.wait(10)

            monkeypatch.setattr(grace, "wait", wait)
            collecting = asyncio.create_task(writer.collect_async())
            await waiting.wait()
            monkeypatch.setattr(grace, "wait", lambda: None)
            try:
                meanwhile(collecting)
            finally:
                go.set()
            with suppress(asyncio.CancelledError):
                await collecting

        asyncio.run(run())

    writer.apply(first_plan())
    writer.apply(second_plan())
    together(lambda task: writer.prune(second_plan()))
    writer.collect()
    expected = logical(loaded, complete=True)
    # Cancelled in the middle, it forgets nothing.
    writer.apply(first_plan())
    together(lambda task: task.cancel())
    assert writer.has_garbage
    writer.apply(second_plan())
    writer.prune(second_plan())
    writer.collect()
    assert logical(loaded, complete=True) == expected
    # An error meanwhile makes the writer adopt anew, and nothing is taken away twice.
    writer.apply(first_plan())

    def fail(_: Any) -> None:
        real = writer._mirror.plan_removal
        writer._mirror.plan_removal = lambda name: 1 / 0  # type: ignore[assignment, return-value]
        with pytest.raises(ZeroDivisionError):
            writer.prune(second_plan())
        writer._mirror.plan_removal = real  # type: ignore[method-assign]
        writer.apply(second_plan())

    together(fail)
    writer.prune(second_plan())
    writer.collect()
    assert logical(loaded, complete=True) == expected


@pytest.mark.parametrize("memory", ["affinities", "socket_flows"])
def test_an_id_that_a_client_remembers_does_not_come_back(loaded: Loaded, writer: Writer, memory: str) -> None:
    web = name_of("web")
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80", "10.0.0.2:80")})
    (old, _) = slot_backends(loaded, writer, web)
    table = loaded.maps[memory]
    remembered = loaded.tc.btf.struct("affinity").pack(last_used=1, backend=old + 100)
    table.update(bytes(table.key_size), remembered)
    writer.prune(set())
    writer.collect()
    again = Writer(loaded, in_pods)
    again.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80")})
    assert slot_backends(loaded, again, web)[0] == old + 101


def test_two_service_ports_with_one_endpoint(loaded: Loaded, writer: Writer) -> None:
    web, shop = name_of("web"), name_of("shop")
    writer.apply({n: service(n, (a,), "10.0.0.1:80") for n, a in ((web, "10.96.0.1"), (shop, "10.96.0.2"))})
    assert [v["backends"] for v in rows(loaded, "endpoints4").values()] == [2]
    writer.apply({web: None})
    writer.collect()
    assert [v["backends"] for v in rows(loaded, "endpoints4").values()] == [1]
    writer.apply({shop: None})
    writer.collect()
    assert rows(loaded, "endpoints4") == {}
    assert logical(loaded, complete=True) == {}


def test_a_removed_service_port_leaves_nothing(loaded: Loaded, writer: Writer) -> None:
    names = [name_of("web"), name_of("dns", Family.IPV6, Protocol.UDP)]
    plans = {
        names[0]: service(names[0], ("10.96.0.1",), "10.0.0.1:80", source_ranges=(SourceRange(bytes(4), 0),)),
        names[1]: service(names[1], ("fd00:96::1",), "[fd00::1]:53", serving=endpoints("[fd00::1]:53")),
    }
    writer.apply(plans)
    writer.prune({names[0]})
    assert list(logical(loaded)) == ["shop/web:http/TCP/IPv4"]
    writer.prune(set())
    assert logical(loaded) == {}
    assert rows(loaded, "frontends4") == rows(loaded, "frontends6") == {}
    writer.collect()
    assert all(rows(loaded, name) == {} for name in SIZES if name not in ("services", "slots"))
    assert {name: used for name, (used, _) in writer.room.items() if used} == {}


class Watched:
    """A map that tells what is done to it, one entry at a time, before it happens."""

    def __init__(self, real: Any, watcher: Any) -> None:
        self._real = real
        self._watcher = watcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def update_batch(self, keys: bytes, values: bytes) -> None:
        for i in range(len(keys) // self._real.key_size):
            key = bytes(keys[i * self._real.key_size : (i + 1) * self._real.key_size])
            value = bytes(values[i * self._real.value_size : (i + 1) * self._real.value_size])
            self._watcher(self._real.name)
            self._real.update(key, value)

    def delete_batch(self, keys: bytes) -> None:
        for i in range(len(keys) // self._real.key_size):
            self._watcher(self._real.name)
            self._real.delete(keys[i * self._real.key_size : (i + 1) * self._real.key_size])


class WatchedWriter(Writer):
    """Also the stores through mmap are told one by one."""

    watcher: Any = staticmethod(lambda name: None)

    def _fill(self, first: int, backends: list[int]) -> None:
        for i, backend in enumerate(backends):
            self.watcher("slots")
            super()._fill(first + i, [backend])

    def _flip(self, service: int, table: int) -> None:
        self.watcher("services")
        super()._flip(service, table)


def watch(loaded: Loaded, watcher: Any) -> Writer:
    for name in maps_module.MAPS:
        loaded.maps[name] = Watched(loaded.maps[name], watcher)  # type: ignore[assignment]
    WatchedWriter.watcher = staticmethod(watcher)
    return WatchedWriter(loaded, in_pods)


def test_a_moved_address_is_never_without_a_service(loaded: Loaded, writer: Writer) -> None:
    old, new = name_of("old"), name_of("new")
    writer.apply({old: service(old, ("10.96.0.1",), "10.0.0.1:80")})
    key = (ip_address("10.96.0.1").packed, 80, 6)

    def look(_: str) -> None:
        found = rows(loaded, "frontends4")[key]["service"]
        assert word(loaded, "services", found)

    moving = watch(loaded, look)
    moving.apply({old: None, new: service(new, ("10.96.0.1",), "10.0.0.1:80")})
    assert rows(loaded, "frontends4")[key]["service"] == moving.service_id(new)
    moving.collect()
    assert list(logical(loaded, complete=True)) == ["shop/new:http/TCP/IPv4"]


def test_a_replaced_address_is_there_before_the_old_one_goes(loaded: Loaded, writer: Writer) -> None:
    web = name_of("web")
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80")})

    def look(_: str) -> None:
        assert rows(loaded, "frontends4")

    changing = watch(loaded, look)
    changing.apply({web: service(web, ("10.96.0.2",), "10.0.0.1:80")})
    assert list(logical(loaded, complete=True)["shop/web:http/TCP/IPv4"]["frontends"]) == ["10.96.0.2:80/TCP"]


def first_plan() -> dict[ServicePortName, ServicePort]:
    web, dns, six = name_of("web"), name_of("dns", protocol=Protocol.UDP), name_of("six", Family.IPV6)
    gone = name_of("gone", protocol=Protocol.UDP)
    return {
        web: service(web, ("10.96.0.1", "203.0.113.1"), "10.0.0.1:80 local", "10.0.0.2:80"),
        dns: service(
            dns, ("10.96.0.2",), "10.0.0.1:53", "10.0.0.2:53", serving=endpoints("10.0.0.1:53", "10.0.0.2:53")
        ),
        six: service(six, ("fd00:96::1",), "[fd00::1]:80", source_ranges=(SourceRange(bytes(16), 0),)),
        gone: service(gone, ("10.96.0.9",), "10.0.0.1:53", serving=endpoints("10.0.0.1:53")),
    }


def second_plan() -> dict[ServicePortName, ServicePort]:
    """Endpoints and addresses added and removed, an address moved, a service port gone, another new."""
    web, dns, six = name_of("web"), name_of("dns", protocol=Protocol.UDP), name_of("six", Family.IPV6)
    new = name_of("new")
    return {
        web: service(web, ("10.96.0.1",), "10.0.0.2:80", "10.0.0.3:80", "10.0.0.4:80 local", affinity_seconds=60),
        dns: service(
            dns, ("10.96.0.2",), "10.0.0.2:53", "10.0.0.3:53", serving=endpoints("10.0.0.2:53", "10.0.0.3:53")
        ),
        six: service(six, ("fd00:96::2",), "[fd00::1]:80", source_ranges=(SourceRange(b"\x20" + bytes(15), 3),)),
        new: service(new, ("203.0.113.1",), "10.0.0.3:80"),
    }


class Killed(BaseException):
    pass


def kill_at(loaded: Loaded, k: int, after: int = 0) -> Writer:
    """A writer that dies at its k-th operation (and counts them in ``done`` if it does not)."""
    done = [0]

    def count(_: str) -> None:
        done[0] += 1
        if done[0] == k:
            raise Killed

    writer = watch(loaded, count)
    writer.done = done  # type: ignore[attr-defined]
    return writer


def change_everything(writer: Writer) -> None:
    writer.apply(second_plan())
    writer.prune(second_plan())
    writer.collect()


def test_killed_at_any_operation_the_next_start_repairs_it(loaded: Loaded) -> None:
    real = dict(loaded.maps)
    fresh = Writer(loaded, in_pods)
    fresh.apply(second_plan())
    expected = logical(loaded, complete=True)
    k = operations = 0
    while not operations:
        k += 1
        loaded.maps.update(real)
        wipe(loaded)
        before = Writer(loaded, in_pods)
        before.apply(first_plan())
        number = before.service_id(name_of("web"))
        kept = slot_backends(loaded, before, name_of("web"))[1]
        dying = kill_at(loaded, k)
        try:
            change_everything(dying)
            operations = k
        except Killed:
            pass
        loaded.maps.update(real)
        # Whatever is in force is whole, and every address that is wanted before and after leads somewhere.
        served = logical(loaded)
        assert {f for entry in served.values() for f in entry["frontends"]} >= {"10.96.0.1:80/TCP", "10.96.0.2:80/UDP"}
        again = Writer(loaded, in_pods)
        assert logical(loaded).keys() == served.keys()
        change_everything(again)
        assert logical(loaded, complete=True) == expected, f"killed at operation {k}"
        assert again.service_id(name_of("web")) == number
        assert slot_backends(loaded, again, name_of("web"))[0] == kept
        assert not again.problems
        used = {name: pair[0] for name, pair in again.room.items()}
        assert used == {name: pair[0] for name, pair in fresh.room.items()}, f"leak after operation {k}"
    assert operations > 40


NAMES = [
    name_of("a"),
    name_of("b", protocol=Protocol.UDP),
    name_of("c", Family.IPV6),
    name_of("d", Family.IPV6, Protocol.UDP),
    name_of("e"),
]
some_endpoints = st.lists(st.integers(1, 5), unique=True, max_size=4).map(sorted)


@st.composite
def plans(draw: st.DrawFn) -> dict[ServicePortName, ServicePort]:
    """Any state of five service ports that share endpoints, with each of four addresses given to one of them."""
    owners = draw(st.lists(st.sampled_from(NAMES), min_size=8, max_size=8))
    result = {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        four = name.family is Family.IPV4
        pool = {i: Endpoint(ip_address(f"10.0.0.{i}" if four else f"fd00::{i}").packed, 80, i > 3) for i in range(1, 6)}
        cluster, serving = draw(some_endpoints), draw(some_endpoints)
        mine = range(4) if four else range(4, 8)
        result[name] = ServicePort(
            name,
            tuple(frontend(f"10.96.0.{i}" if four else f"fd00:96::{i}") for i in mine if owners[i] == name),
            tuple(pool[i] for i in cluster),
            tuple(pool[i] for i in cluster if i > 3),
            tuple(pool[i] for i in serving) if name.protocol is Protocol.UDP else (),
            any_endpoints=bool(cluster),
            external_local=draw(st.booleans()),
            affinity_seconds=draw(st.sampled_from((0, 60))),
            source_ranges=(SourceRange(bytes(4 if four else 16), 0),) if draw(st.booleans()) else (),
        )
    return result


@given(steps=st.lists(st.tuples(plans(), st.integers(0, 60), st.booleans()), min_size=1, max_size=6))
@hypothesis_settings(max_examples=30, suppress_health_check=list(HealthCheck))
def test_whatever_happens_the_end_is_what_was_wanted(
    kernel: Loaded, steps: list[tuple[dict[ServicePortName, ServicePort], int, bool]]
) -> None:
    real = dict(kernel.maps)
    wipe(kernel)
    Writer(kernel, in_pods).apply(steps[-1][0])
    expected = logical(kernel, complete=True)
    wipe(kernel)
    try:
        writer = Writer(kernel, in_pods)
        have: set[ServicePortName] = set()
        for wanted, k, collect in steps:
            writer = kill_at(kernel, k) if k else writer
            have |= set(wanted)
            try:
                writer.apply({name: wanted.get(name) for name in have})
                if collect:
                    writer.collect()
            except Killed:
                pass
            if k:
                kernel.maps.update(real)
                writer = Writer(kernel, in_pods)
            logical(kernel)
        writer.apply(steps[-1][0])
        writer.prune(steps[-1][0])
        writer.collect()
        assert logical(kernel, complete=True) == expected
        assert writer.problems == {}
    finally:
        kernel.maps.update(real)


def damage(loaded: Loaded, name: str, change: Callable[[bytes], bytes | None], key: bytes | None = None) -> None:
    """Change or delete an entry (the first one, unless ``key`` says which)."""
    table = loaded.maps[name]
    for found, value in table.items():
        if key in (None, found):
            new = change(value)
            if new is None:
                table.delete(found)
            else:
                table.update(found, new)
            return
    raise AssertionError(f"nothing to damage in {name}")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tables", None),
        ("backends4", None),
        ("backends6", None),
        ("endpoints4", None),
        ("endpoints6", None),
        ("frontends4", None),
        ("service_names", None),
        ("source_ranges6", None),
        ("service_names", lambda value: b"\xff" * len(value)),
        ("frontends4", lambda value: b"\x07" + value[1:]),
        ("frontends4", lambda value: value[:4] + b"\x09" + value[5:]),
        ("endpoints4", lambda value: b"\x63" + value[1:]),
        ("backends4", lambda value: value[:8] + b"\x63" + value[9:]),
        ("tables", lambda value: value[:4] + b"\xff\xff\xff\x00" + value[8:]),
        ("tables", lambda value: value[:4] + b"\x00\x00\x00\x00" + value[8:]),
        ("tables", lambda value: value[:8] + b"\xff\xff\x00\x00" + value[12:]),
    ],
)
def test_maps_that_somebody_damaged(
    loaded: Loaded, writer: Writer, name: str, change: Callable[[bytes], bytes | None] | None
) -> None:
    writer.apply(second_plan())
    expected = logical(loaded, complete=True)
    damage(loaded, name, change or (lambda value: None))
    again = Writer(loaded, in_pods)
    change_everything(again)
    assert logical(loaded, complete=True) == expected
    assert not again.problems
    assert {n: used for n, (used, _) in again.room.items()} == {n: used for n, (used, _) in writer.room.items()}


@pytest.mark.parametrize("array", ["services", "slots"])
def test_arrays_that_somebody_damaged(loaded: Loaded, writer: Writer, array: str) -> None:
    writer.apply(second_plan())
    expected = logical(loaded, complete=True)
    for index in range(8):
        for value in (0, 1, 77):
            loaded.maps[array].update(index.to_bytes(4, sys.byteorder), value.to_bytes(8, sys.byteorder))
            again = Writer(loaded, in_pods)
            change_everything(again)
            assert logical(loaded, complete=True) == expected
            assert not again.problems


def test_an_error_in_the_middle_is_mended_by_the_next_call(loaded: Loaded) -> None:
    real = dict(loaded.maps)
    Writer(loaded, in_pods).apply(second_plan())
    expected = logical(loaded, complete=True)
    for k in range(1, 45, 3):
        loaded.maps.update(real)
        wipe(loaded)
        Writer(loaded, in_pods).apply(first_plan())
        dying = kill_at(loaded, k)
        with pytest.raises(Killed):
            change_everything(dying)
        # The same writer, and it is not told again what it was to do.
        dying.apply({})
        dying.prune(second_plan())
        dying.apply({} if k > 30 else second_plan())
        dying.collect()
        assert logical(loaded, complete=True) == expected


def test_a_full_backend_map_costs_only_what_does_not_fit(loaded: Loaded, writer: Writer) -> None:
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
    assert problem.text == f"map backends4 is full ({size - 1} of {size} entries used, 2 needed)"
    served = logical(loaded, complete=True)
    assert served["shop/small:http/TCP/IPv4"]["cluster"] == ["10.1.0.1:80 remote direct"], "the last good state stays"
    assert served["shop/more:http/TCP/IPv4"]["cluster"] == ["10.1.0.9:80 remote direct"], "others are served"
    assert writer.apply({}) == [], "said once"
    assert set(writer.problems) == {small}, "and remembered"

    assert writer.apply({big: service(big, ("10.96.0.1",), *many[:10])}) == []
    writer.collect()
    writer.collect()  # what the second attempt replaced
    assert len(logical(loaded, complete=True)["shop/small:http/TCP/IPv4"]["cluster"]) == 3, "freed room is used"
    assert writer.problems == {}


def test_a_round_may_use_the_room_that_it_makes(loaded: Loaded, writer: Writer) -> None:
    size = SIZES["backends4"]
    one, two = name_of("one"), name_of("two")
    writer.apply({one: service(one, ("10.96.0.1",), *[f"10.0.{i >> 8}.{i & 255}:80" for i in range(1, size)])})
    delta = {two: service(two, ("10.96.0.1",), *[f"10.1.{i >> 8}.{i & 255}:80" for i in range(1, size)]), one: None}
    assert writer.apply(delta) == []
    assert writer.problems == {}
    writer.collect()
    assert list(logical(loaded, complete=True)) == ["shop/two:http/TCP/IPv4"]


@pytest.mark.parametrize(
    ("table", "plans", "text"),
    [
        ("tables", {}, "map tables is full"),
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
def test_every_map_can_be_full(loaded: Loaded, writer: Writer, table: str, plans: dict[str, int], text: str) -> None:
    if table == "tables":
        # Tables are as many as services here, so the old versions that are not yet collected fill them.
        names = [name_of(f"s{i}") for i in range(SIZES["tables"] - 1)]
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
        # Backends are looked at first; make room there so that the slots are what is short.
        plan = service(web, (), cluster=many[:500] + many[:500], local=many[:200])
    problems = writer.apply({web: plan, other: service(other, ("10.96.0.2",), "10.0.0.1:80")})
    assert [str(p) for p in problems] == [f"shop/web:http/UDP/IPV4: {text}"]
    assert list(logical(loaded, complete=True)) == ["shop/other:http/TCP/IPv4"]


@pytest.mark.parametrize("full", ["backends4", "endpoints4", "tables", "source_ranges4", "frontends4", "service_names"])
def test_a_map_that_the_kernel_calls_full(loaded: Loaded, writer: Writer, full: str) -> None:
    """Somebody else's entries: the writer learns of them only from the kernel."""
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
        assert writer.problems == {}, "tried again by itself: taking the half-written changes away made room"
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


def test_two_that_want_an_address_in_the_round_that_frees_it(loaded: Loaded, writer: Writer) -> None:
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


def test_a_name_that_is_too_long(loaded: Loaded, writer: Writer) -> None:
    long = name_of("x" * 64)
    (problem,) = writer.apply({long: service(long, ())})
    assert problem.text == "a part of the name is longer than 63 bytes"
    assert logical(loaded, complete=True) == {}


class Netfilter:
    def __init__(self, loaded: Loaded | None = None) -> None:
        self.loaded = loaded
        self.elements: dict[int, tuple[bytes, int]] = {}
        self.refuse = False

    def __call__(self, added: Any, removed: Any) -> None:
        if self.refuse:
            raise OSError(errno.ENOMEM, "nft: no memory")
        if self.loaded is not None:
            in_use = {word(self.loaded, "slots", i) for i in range(SIZES["slots"])}
            assert not in_use & set(added), "told before any packet can choose it"
        self.elements.update(added)
        for number in removed:
            del self.elements[number]


def test_netfilter_backends_are_told_in_time(loaded: Loaded) -> None:
    table = Netfilter(loaded)
    writer = Writer(loaded, in_pods, table)
    web, api = name_of("web"), name_of("api")
    writer.apply(
        {
            web: service(web, ("10.96.0.1",), "10.0.0.1:80"),
            api: service(api, ("10.96.0.2",), "172.16.0.1:6443", "10.0.0.1:6443"),
        }
    )
    number = slot_backends(loaded, writer, api)[0]
    assert table.elements == {number: (ip_address("172.16.0.1").packed, 6443)} == writer.netfilter_backends
    writer.apply({api: None})
    assert list(table.elements) == [number], "packets on their way still find it"
    writer.collect()
    assert table.elements == {} == writer.netfilter_backends

    table.refuse = True
    problems = writer.apply({api: service(api, ("10.96.0.2",), "172.16.0.1:6443"), web: None})
    assert [p.name for p in problems] == [api]
    assert "nft: no memory" in problems[0].text
    assert logical(loaded) == {}
    table.refuse = False
    writer.collect()
    assert list(logical(loaded, complete=True)) == ["shop/api:http/TCP/IPv4"]
    assert list(table.elements.values()) == [(ip_address("172.16.0.1").packed, 6443)]


def test_all_backends_are_netfilters_where_there_is_no_other_lane(loaded: Loaded) -> None:
    web = name_of("web")
    Writer(loaded, in_pods).apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80")})
    loaded.lane = "netfilter"
    try:
        writer = Writer(loaded, in_pods)
        number = slot_backends(loaded, writer, web)[0]
        assert writer.netfilter_backends == {number: (ip_address("10.0.0.1").packed, 80)}
        table = Netfilter()
        writer = Writer(loaded, in_pods, table)
        writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80", "10.0.0.2:80")})
        assert list(table.elements.values()) == [(ip_address("10.0.0.2").packed, 80)]
        assert slot_backends(loaded, writer, web)[0] == number, "the lane is not the backend's: it keeps its id"
    finally:
        loaded.lane = "direct"


def test_a_pod_network_that_changes(loaded: Loaded) -> None:
    inside = {10}
    table = Netfilter()
    writer = Writer(loaded, lambda family, address: address[0] in inside, table)
    web = name_of("web")
    plan = service(web, ("10.96.0.1",), "10.0.0.1:80", "172.16.0.1:80")
    writer.apply({web: plan})
    kept = slot_backends(loaded, writer, web)
    inside.update({172})
    writer.relane()
    assert logical(loaded)["shop/web:http/TCP/IPv4"]["cluster"] == [
        "10.0.0.1:80 remote direct",
        "172.16.0.1:80 remote direct",
    ]
    assert slot_backends(loaded, writer, web)[0] == kept[0]
    writer.collect()
    assert table.elements == {}
    logical(loaded, complete=True)

    inside.clear()
    again = Writer(loaded, lambda family, address: False, table)
    again.apply({web: plan})
    again.collect()
    assert all(e.endswith("netfilter") for e in logical(loaded, complete=True)["shop/web:http/TCP/IPv4"]["cluster"])
    assert len(table.elements) == 2
    assert table.elements == again.netfilter_backends


def test_the_node_itself_in_a_source_range(loaded: Loaded) -> None:
    web = name_of("web")
    plan = service(web, ("10.96.0.1",), "10.0.0.1:80", source_ranges=(SourceRange(b"\xc0\xa8\x00\x00", 16),))
    writer = Writer(loaded, in_pods, node_ips={Family.IPV4: ip_address("192.168.7.1").packed})
    writer.apply({web: plan})
    assert "vip_source_allowed" in logical(loaded)["shop/web:http/TCP/IPv4"]["flags"]
    writer.relane({Family.IPV4: ip_address("192.169.7.1").packed})
    assert "vip_source_allowed" not in logical(loaded)["shop/web:http/TCP/IPv4"]["flags"]
    writer.collect()
    logical(loaded, complete=True)
