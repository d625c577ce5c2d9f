# SPDX-License-Identifier: Apache-2.0
"""The writer on real maps: what a change leaves in them, and the order of its steps."""

from __future__ import annotations

import asyncio
import errno
import platform
import threading
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import pytest

from pyebpf_proxy.datapath.loader import grace
from pyebpf_proxy.datapath.loader.libbpf import BpfError
from pyebpf_proxy.datapath.loader.programs import Loaded
from pyebpf_proxy.datapath.maps.writer import Writer
from pyebpf_proxy.services.model import (
    FrontendKind,
    IPFamily,
    Protocol,
    ServicePort,
    ServicePortName,
    SourceRange,
)
from tests.packet.service_maps import SIZES, logical, rows, word
from tests.packet.service_plans import (
    endpoints,
    first_plan,
    frontend,
    name_of,
    second_plan,
    service,
    slot_backends,
    watch,
)

pytestmark = pytest.mark.needs_bpf


NODE_PORT = FrontendKind.NODE_PORT


def test_the_maps_hold_everything_of_a_service_port(loaded: Loaded, writer: Writer) -> None:
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
                "10.0.0.1:8080 local",
                "10.0.0.2:8080 remote",
                "172.16.0.1:8080 remote",
            ],
            "local": ["10.0.0.1:8080 local"],
            "flags": ["any_endpoints", "internal_local", "external_local", "source_ranges"],
            "affinity": 10800,
            "ranges": ["0.0.0.0/0", "192.0.2.0/24"],
            "frontends": {"0.0.0.0:30080/TCP": 4, "10.96.0.1:80/TCP": 1, "203.0.113.1:80/TCP": 3},
            "serving": [],
        }
    }


def test_ipv6_and_udp(loaded: Loaded, writer: Writer) -> None:
    dns = name_of("dns", IPFamily.IPV6, Protocol.UDP)
    serving = endpoints("[fd00::1]:53", "[fd00::9]:53")
    writer.apply({dns: service(dns, ("fd00:96::a",), "[fd00::1]:53", serving=serving)})
    entry = logical(loaded, complete=True)["shop/dns:http/UDP/IPv6"]
    assert entry["cluster"] == ["fd00::1:53 remote"]
    assert entry["serving"] == ["fd00::1:53", "fd00::9:53"]
    assert entry["frontends"] == {"fd00:96::a:80/UDP": 1}

    writer.apply({dns: service(dns, ("fd00:96::a",), "[fd00::1]:53", serving=serving[1:])})
    # Not after the grace period: flows to an endpoint that no longer serves are stale now.
    assert logical(loaded)["shop/dns:http/UDP/IPv6"]["serving"] == ["fd00::9:53"]


def test_an_endpoint_of_sctp(loaded: Loaded, writer: Writer) -> None:
    name = name_of("signal", protocol=Protocol.SCTP)
    writer.apply({name: service(name, ("10.96.0.2",), "10.0.0.1:3868")})
    assert logical(loaded)["shop/signal:http/SCTP/IPv4"]["cluster"] == ["10.0.0.1:3868 remote"]


def test_a_change_keeps_the_ids_of_remaining_endpoints(loaded: Loaded, writer: Writer) -> None:
    web = name_of("web")
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80", "10.0.0.2:80")})
    number, (one, two) = writer.service_id(web), slot_backends(loaded, writer, web)
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.2:80", "10.0.0.3:80")})
    assert writer.service_id(web) == number
    assert slot_backends(loaded, writer, web)[0] == two
    writer.collect()
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80", "10.0.0.2:80")})
    back = slot_backends(loaded, writer, web)
    # An endpoint that was removed loses its clients (spec/service-semantics §4.1).
    assert back[1] == two
    assert back[0] != one


def test_an_endpoint_that_returns_before_collection_gets_a_new_id(loaded: Loaded, writer: Writer) -> None:
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
    assert logical(loaded, complete=True)["shop/web:http/TCP/IPv4"]["cluster"][0] == "10.0.0.1:80 remote"


def test_nothing_is_written_without_a_change(loaded: Loaded, writer: Writer) -> None:
    web = name_of("web")
    plan = service(web, ("10.96.0.1",), "10.0.0.1:80")
    writer.apply({web: plan})
    before = {name: loaded.maps[name].dump() for name in SIZES}
    assert writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80")}) == []
    assert not writer.has_garbage
    assert {name: loaded.maps[name].dump() for name in SIZES} == before


def test_a_new_frontend_does_not_change_the_service_config(loaded: Loaded, writer: Writer) -> None:
    web = name_of("web")
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80")})
    table = word(loaded, "services", writer.service_id(web))
    writer.apply({web: service(web, ("10.96.0.2",), "10.0.0.1:80")})
    assert word(loaded, "services", writer.service_id(web)) == table
    assert list(logical(loaded, complete=True)["shop/web:http/TCP/IPv4"]["frontends"]) == ["10.96.0.2:80/TCP"]


def test_the_old_version_stays_complete_until_it_is_collected(loaded: Loaded, writer: Writer) -> None:
    web = name_of("web")
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80", "10.0.0.2:80")})
    old_id = word(loaded, "services", writer.service_id(web))
    old = rows(loaded, "service_configs")[old_id]
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.3:80")})
    # A program that read the old version's number just before the flip continues with it.
    assert rows(loaded, "service_configs")[old_id] == old
    backends = rows(loaded, "backends4")
    seen = [backends[word(loaded, "slots", old["first_slot"] + i)]["address"][3] for i in range(2)]
    assert seen == [1, 2]
    writer.collect()
    assert old_id not in rows(loaded, "service_configs")
    logical(loaded, complete=True)


def test_processors_that_reorder_stores_see_the_slots_before_the_configuration(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are stores through mmap: without a barrier, arm64 may show the new configuration with a former service's
    slots.
    """
    steps: list[str] = []
    monkeypatch.setattr(grace, "barrier", lambda: steps.append("barrier") is None)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    web = name_of("web")
    writer = watch(loaded, steps.append)
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80")})
    del steps[:]
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80", "10.0.0.2:80")})
    assert [step for step in steps if step in ("slots", "barrier", "services")] == [
        *("slots", "slots"),
        "barrier",
        "services",
    ]


def test_nothing_is_removed_before_the_grace_period(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    writer = watch(loaded, steps.append)
    writer.apply(first_plan())
    writer.apply(dict.fromkeys(first_plan()))
    del steps[:]
    monkeypatch.setattr(grace, "wait", lambda: steps.append("grace"))
    writer.collect()
    assert steps[0] == "grace"
    assert {"service_configs", "backends4", "backends6", "endpoints4", "source_ranges6", "service_names"} <= set(
        steps[1:]
    )


def test_collection_during_changes(loaded: Loaded, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    def together(meanwhile: Any) -> None:
        """Call ``meanwhile`` in the middle of the grace period."""

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
    together(lambda task: writer.apply(second_plan(), complete=True))
    writer.collect()
    expected = logical(loaded, complete=True)
    # What a concurrent change replaces does not wait for the next change.
    writer.apply(first_plan())
    together(lambda task: writer.apply(second_plan(), complete=True))
    assert not writer.has_garbage
    assert logical(loaded, complete=True) == expected
    # A cancelled collection forgets nothing.
    writer.apply(first_plan())
    together(lambda task: task.cancel())
    assert writer.has_garbage
    writer.apply(second_plan(), complete=True)
    writer.collect()
    assert logical(loaded, complete=True) == expected
    # After an error during the collection the writer adopts again, and removes nothing twice.
    writer.apply(first_plan())

    def fail(_: Any) -> None:
        real = writer._mirror.plan_removal
        writer._mirror.plan_removal = lambda name: 1 / 0  # type: ignore[assignment, return-value]
        with pytest.raises(ZeroDivisionError):
            writer.apply(second_plan(), complete=True)
        writer._mirror.plan_removal = real  # type: ignore[method-assign]
        writer.apply(second_plan())

    together(fail)
    writer.apply(second_plan(), complete=True)
    writer.collect()
    assert logical(loaded, complete=True) == expected


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
    names = [name_of("web"), name_of("dns", IPFamily.IPV6, Protocol.UDP)]
    plans = {
        names[0]: service(names[0], ("10.96.0.1",), "10.0.0.1:80", source_ranges=(SourceRange(bytes(4), 0),)),
        names[1]: service(names[1], ("fd00:96::1",), "[fd00::1]:53", serving=endpoints("[fd00::1]:53")),
    }
    writer.apply(plans)
    writer.apply({names[0]: plans[names[0]]}, complete=True)
    assert list(logical(loaded)) == ["shop/web:http/TCP/IPv4"]
    writer.apply({}, complete=True)
    assert logical(loaded) == {}
    assert rows(loaded, "frontends4") == rows(loaded, "frontends6") == {}
    writer.collect()
    assert all(rows(loaded, name) == {} for name in SIZES if name not in ("services", "slots"))
    assert {name: used for name, (used, _) in writer.fill().items() if used} == {}


@pytest.mark.parametrize("taker", ["existing", "new"])
def test_an_address_that_moves_never_leads_to_the_new_endpoints_of_its_former_service(
    loaded: Loaded, writer: Writer, taker: str
) -> None:
    """Both Services get other endpoints in the same update, as no version of the objects says."""
    blue, green = name_of("blue"), name_of("green")
    before = {blue: service(blue, ("10.96.0.1", "203.0.113.1"), "10.0.0.1:80")}
    if taker == "existing":
        before[green] = service(green, ("10.96.0.2",), "10.0.0.2:80")
    writer.apply(before)
    del writer
    seen: set[str] = set()

    def look(_: object) -> None:
        for entry in logical(loaded).values():
            if "203.0.113.1:80/TCP" in entry["frontends"]:
                seen.update(entry["cluster"])

    moving = watch(loaded, look)
    moving.apply(
        {
            blue: service(blue, ("10.96.0.1",), "10.0.0.11:80"),
            green: service(green, ("10.96.0.2", "203.0.113.1"), "10.0.0.12:80"),
        }
    )
    look(None)
    assert seen == {"10.0.0.1:80 remote", "10.0.0.12:80 remote"}


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


def test_a_new_address_is_written_before_the_old_one_is_removed(loaded: Loaded, writer: Writer) -> None:
    web = name_of("web")
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80")})

    def look(_: str) -> None:
        assert rows(loaded, "frontends4")

    changing = watch(loaded, look)
    changing.apply({web: service(web, ("10.96.0.2",), "10.0.0.1:80")})
    assert list(logical(loaded, complete=True)["shop/web:http/TCP/IPv4"]["frontends"]) == ["10.96.0.2:80/TCP"]


def test_no_address_leads_to_the_endpoints_of_another_version(loaded: Loaded, writer: Writer) -> None:
    """10.96.0.1 never belongs to 10.0.0.2, nor 10.96.0.2 to 10.0.0.1. Their shared address always leads to a
    service.
    """
    web = name_of("web")
    versions = {
        "10.96.0.1": service(web, ("10.96.0.1", "10.96.0.9"), "10.0.0.1:80"),
        "10.96.0.2": service(web, ("10.96.0.2", "10.96.0.9"), "10.0.0.2:80"),
    }
    writer.apply({web: versions["10.96.0.1"]})
    tables = {"10.96.0.1": word(loaded, "services", writer.service_id(web))}
    seen = []

    def look(_: str) -> None:
        found = rows(loaded, "frontends4")
        in_force = word(loaded, "services", writer.service_id(web))
        addresses = {str(ip_address(key[0])) for key in found}
        seen.append((in_force == tables["10.96.0.1"], addresses))

    changing = watch(loaded, look)
    changing.apply({web: versions["10.96.0.2"]})
    look("")
    for old, addresses in seen:
        assert {"10.96.0.9"} <= addresses <= {"10.96.0.9", "10.96.0.1" if old else "10.96.0.2"}, seen
    assert {old for old, _ in seen} == {True, False}
    assert seen[-1] == (False, {"10.96.0.2", "10.96.0.9"})


class Netfilter:
    def __init__(self, loaded: Loaded | None = None) -> None:
        self.loaded = loaded
        self.elements: dict[int, tuple[bytes, int]] = {}
        self.refuse = False

    def __call__(self, added: Any, removed: Any) -> None:
        if self.refuse and added:
            raise OSError(errno.ENOMEM, "nft: no memory")
        if self.loaded is not None:
            in_use = {word(self.loaded, "slots", i) for i in range(SIZES["slots"])}
            assert not in_use & set(added), "reported before a packet can get it"
        self.elements.update(added)
        for number in removed:
            self.elements.pop(number, None)


def test_netfilter_backends_are_reported_in_time(loaded: Loaded) -> None:
    """Every backend is reported: netfilter leaves a packet untranslated if it does not know the tag (finding D6)."""
    table = Netfilter(loaded)
    writer = Writer(loaded, table)
    web, api = name_of("web"), name_of("api")
    writer.apply(
        {
            web: service(web, ("10.96.0.1",), "10.0.0.1:80"),
            api: service(api, ("10.96.0.2",), "172.16.0.1:6443"),
        }
    )
    (kept,), (number,) = (slot_backends(loaded, writer, name) for name in (web, api))
    both = {kept: (ip_address("10.0.0.1").packed, 80), number: (ip_address("172.16.0.1").packed, 6443)}
    assert table.elements == both == writer.netfilter_backends
    assert Writer(loaded).netfilter_backends == both, "adopted backends are known too"
    writer.apply({api: None})
    assert table.elements == both == writer.netfilter_backends, "packets in netfilter still need it"
    writer.collect()
    assert table.elements == {kept: both[kept]} == writer.netfilter_backends

    table.refuse = True
    problems = writer.apply({api: service(api, ("10.96.0.2",), "172.16.0.1:6443"), web: None})
    assert [p.name for p in problems] == [api]
    assert "nft: no memory" in problems[0].text
    assert logical(loaded) == {}
    table.refuse = False
    writer.collect()
    assert list(logical(loaded, complete=True)) == ["shop/api:http/TCP/IPv4"]
    assert list(table.elements.values()) == [(ip_address("172.16.0.1").packed, 6443)]


def test_frontends_are_reported_in_time(loaded: Loaded) -> None:
    """Before the programs find them, and after: netfilter leaves packets to other addresses as they are."""
    known: set[tuple[str, int, int]] = set()
    refuse = False

    def report(added: Any, removed: Any) -> None:
        if refuse:
            raise OSError(errno.ENOMEM, "nft: no memory")
        for plans, change in ((removed, known.discard), (added, known.add)):
            for address, port, protocol in plans:
                change((str(ip_address(address)), port, protocol))
        found = {str(ip_address(key[:4])) for key, _ in loaded.maps["frontends4"].items()}
        assert found <= {address for address, _, _ in known}

    writer = Writer(loaded, on_frontends=report)
    web, api = name_of("web"), name_of("api")
    writer.apply({web: service(web, ("10.96.0.1", "192.0.2.1"), "10.0.0.1:80")})
    assert known == {("10.96.0.1", 80, 6), ("192.0.2.1", 80, 6)}
    assert {str(ip_address(address)) for address, _, _ in writer.frontends} == {"10.96.0.1", "192.0.2.1"}
    # One address moves to another Service, and one is no longer served.
    writer.apply({web: service(web, ("10.96.0.3",), "10.0.0.1:80"), api: service(api, ("192.0.2.1",), "10.0.0.2:80")})
    assert known == {("10.96.0.3", 80, 6), ("192.0.2.1", 80, 6)}
    writer.apply({api: None})
    assert known == {("10.96.0.3", 80, 6)}
    refuse = True
    (problem,) = writer.apply({api: service(api, ("192.0.2.1",), "10.0.0.2:80")})
    assert (problem.name, "nft: no memory" in problem.text) == (api, True)
    assert [key for key, _ in loaded.maps["frontends4"].items() if key[:4] == ip_address("192.0.2.1").packed] == []
    refuse = False
    writer.apply({api: service(api, ("192.0.2.1",), "10.0.0.2:80")})
    assert ("192.0.2.1", 80, 6) in known
    assert not writer.problems


def test_a_refused_frontend_does_not_stay_with_its_former_service(loaded: Loaded) -> None:
    refuse = False
    known: set[str] = set()

    def report(added: Any, removed: Any) -> None:
        added = {str(ip_address(address)) for address, _, _ in added}
        if refuse and added:
            raise OSError(errno.ENOMEM, "nft: no memory")
        known.difference_update(str(ip_address(address)) for address, _, _ in removed)
        known.update(added)

    def owners() -> dict[str, Any]:
        return {str(ip_address(key[:4])): value for key, value in loaded.maps["frontends4"].items()}

    writer = Writer(loaded, on_frontends=report)
    web, api = name_of("web"), name_of("api")
    writer.apply({web: service(web, ("10.96.0.1", "192.0.2.1"), "10.0.0.1:80")})
    before = owners()
    moved = {web: service(web, ("10.96.0.1",), "10.0.0.1:80"), api: service(api, ("192.0.2.1",), "10.0.0.2:80")}
    refuse = True
    (problem,) = writer.apply(moved)
    assert problem.name == api
    assert owners() == {"10.96.0.1": before["10.96.0.1"]}
    assert known == {"10.96.0.1"}
    assert not writer.was_overwritten()
    refuse = False
    writer.apply(moved)
    assert not writer.problems
    after = owners()
    assert after.keys() == before.keys()
    assert after["192.0.2.1"] != before["192.0.2.1"]


def test_frontends_that_the_map_refuses_are_withdrawn(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nft set has only frontends that the map has: others are no addresses of a service, also one that moved."""
    known: set[str] = set()

    def report(added: Any, removed: Any) -> None:
        for addresses, change in ((removed, known.discard), (added, known.add)):
            for address, _, _ in addresses:
                change(str(ip_address(address)))

    writer = Writer(loaded, on_frontends=report)
    web, api = name_of("web"), name_of("api")
    writer.apply({web: service(web, ("10.96.0.1", "192.0.2.1"), "10.0.0.1:80")})
    moved = {
        web: service(web, ("10.96.0.1",), "10.0.0.1:80"),
        api: service(api, ("192.0.2.1", "192.0.2.2"), "10.0.0.2:80"),
    }
    opened = loaded.maps["frontends4"]

    def no_memory(keys: Any, values: Any, flags: int = 0) -> None:
        raise BpfError("map frontends4", errno.ENOMEM)

    with monkeypatch.context() as patched:
        patched.setattr(opened, "update_batch", no_memory)
        (problem,) = writer.apply(moved)
    assert problem.name == api
    in_map = {str(ip_address(key[:4])) for key, _ in opened.items()}
    assert in_map == {str(ip_address(address)) for address, _, _ in writer.frontends} == {"10.96.0.1"}
    assert known == in_map
    assert not writer.was_overwritten()
    writer.apply(moved)
    assert known == {"10.96.0.1", "192.0.2.1", "192.0.2.2"}
    assert not writer.problems


def test_ids_that_drained_programs_use_are_not_given_to_new_backends(loaded: Loaded) -> None:
    web = name_of("web")
    writer = Writer(loaded, foreign_id=5000)
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80")})
    (kept,) = slot_backends(loaded, writer, web)
    assert kept > 5000
    again = Writer(loaded, foreign_id=7)
    again.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80", "10.0.0.2:80")})
    assert min(slot_backends(loaded, again, web)) == kept


def test_the_flag_that_vips_may_be_sources(loaded: Loaded, writer: Writer) -> None:
    """As in the plan, also if nothing else differs, and also if an earlier run has written the old value."""
    web = name_of("web")

    def plan(allowed: bool) -> dict[ServicePortName, ServicePort]:
        ranges = (SourceRange(b"\xc0\xa8\x00\x00", 16),)
        port = service(web, ("10.96.0.1",), "10.0.0.1:80", source_ranges=ranges, vip_source_allowed=allowed)
        return {web: port}

    def written() -> bool:
        return "vip_source_allowed" in logical(loaded)["shop/web:http/TCP/IPv4"]["flags"]

    for allowed in (True, False, True):
        writer.apply(plan(allowed))
        assert written() is allowed
    for allowed in (False, True):
        adopted = Writer(loaded)
        adopted.apply(plan(allowed))
        assert written() is allowed
        adopted.collect()
    tables = rows(loaded, "service_configs")
    Writer(loaded).apply(plan(True))
    assert rows(loaded, "service_configs") == tables
    logical(loaded, complete=True)
