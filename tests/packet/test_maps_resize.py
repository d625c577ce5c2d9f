# SPDX-License-Identifier: Apache-2.0
"""A start with other map sizes keeps all entries, also after a kill at any point."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.config.datapath_model import Maps, Size
from pyebpf_proxy.datapath.loader.abilities import STORAGE_MAPS
from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import Map, Object
from pyebpf_proxy.datapath.loader.programs import Loaded, Settings, load
from pyebpf_proxy.datapath.maps.resize import SERVICE_MAPS, Resize, merge
from pyebpf_proxy.datapath.maps.writer import MAPS, Writer
from pyebpf_proxy.services.model import ServicePort
from tests.packet.service_maps import SIZES, logical
from tests.packet.service_plans import first_plan, name_of, slot_backends

pytestmark = pytest.mark.needs_bpf

#: LRU maps reserve entries for each CPU: small ones would evict entries.
CAPACITIES = SIZES | dict.fromkeys(("affinities", "socket_revnat4", "socket_revnat6", "socket_flows"), 1024)


@pytest.fixture
def pins(bpffs: Path) -> Path:
    return bpffs / "instance" / "maps"


def u32(number: int) -> bytes:
    return number.to_bytes(4, sys.byteorder)


def start(pins: Path, sizes: dict[str, int], objects: Path) -> Loaded:
    return load(Settings(netns_cookie=1), pin_dir=pins, sizes=sizes, objects=objects)


def client(number: int, service: int = 1) -> bytes:
    return u32(service) + bytes((10, 9, number >> 8, number & 255)) + bytes(12)


def affinity(btf: Btf, backend: int, last_used: int) -> bytes:
    return btf.struct("affinity").pack(last_used=last_used, backend=backend)


def pinned(pins: Path) -> dict[str, tuple[int, int]]:
    """The inode of each pin, which stays with its map, and the map's size."""
    found = {}
    for pin in pins.iterdir():
        table = Map.open_pinned(pin)
        found[pin.name] = pin.stat().st_ino, table.max_entries
        table.close()
    return found


def leftovers(pins: Path) -> list[str]:
    return sorted(path.name for path in pins.parent.iterdir() if path != pins)


def test_maps_of_other_sizes_hold_all_entries(bpf_objects: Path, pins: Path) -> None:
    web = name_of("web")
    loaded = start(pins, CAPACITIES, bpf_objects)
    Writer(loaded).apply(first_plan())
    expected = logical(loaded, complete=True)
    # A client of a service that does not exist any more. A service without affinity would lose its clients.
    gone = client(1, service=99)
    loaded.maps["affinities"].update(gone, affinity(loaded.tc.btf, 1, 77))
    loaded.maps["counters"].update(
        u32(3), bytes(range(1, 9)) * (len(loaded.maps["counters"].lookup(u32(3)) or b"") // 8)
    )
    counted = loaded.maps["counters"].lookup(u32(3))
    adopted = Writer(loaded)
    number, backends = adopted.service_id(web), slot_backends(loaded, adopted, web)
    del adopted
    loaded.close()
    larger = {name: size * 2 for name, size in CAPACITIES.items()}
    for sizes in (larger, CAPACITIES, CAPACITIES | {"slots": 512, "service_configs": 4096}):
        before = {name: size for name, (_, size) in pinned(pins).items()}
        loaded = start(pins, sizes, bpf_objects)
        changed = {name: (before[name], size) for name, size in sizes.items() if before[name] != size}
        # There are as many service_configs as services.
        if "services" in changed:
            changed["affinity_counts"] = changed["services"]
        assert loaded.resized == changed
        assert {name: loaded.maps[name].max_entries for name in sizes} == sizes
        assert {name: size for name, (_, size) in pinned(pins).items()}.items() >= sizes.items()
        assert logical(loaded, complete=True) == expected
        assert loaded.maps["affinities"].lookup(gone) == affinity(loaded.tc.btf, 1, 77)
        assert loaded.maps["counters"].lookup(u32(3)) == counted
        writer = Writer(loaded)
        assert (writer.service_id(web), slot_backends(loaded, writer, web)) == (number, backends)
        assert writer.apply(first_plan()) == []
        assert not writer.has_garbage
        loaded.attached()
        assert leftovers(pins) == []
        del writer
        loaded.close()


@pytest.mark.parametrize("name", sorted(SERVICE_MAPS))
def test_the_old_programs_keep_service_maps_that_fit_together(bpf_objects: Path, pins: Path, name: str) -> None:
    """Services have changed while no agent ran. The old programs work until the new ones are attached."""
    assert {*MAPS, "services", "slots"} == SERVICE_MAPS
    old = start(pins, CAPACITIES, bpf_objects)
    Writer(old).apply(first_plan())
    before = logical(old)
    loaded = start(pins, CAPACITIES | {name: CAPACITIES[name] * 2}, bpf_objects)
    writer = Writer(loaded)
    changed = {each: change_of(plan) for each, plan in first_plan().items()}
    writer.apply(changed)
    writer.collect()
    assert logical(old) == before
    assert logical(loaded) != before
    loaded.attached()
    assert leftovers(pins) == []
    del writer
    loaded.close()
    old.close()


def change_of(plan: ServicePort) -> ServicePort:
    """Other endpoints: other ids in every map."""
    moved = tuple(msgspec.structs.replace(each, port=each.port + 1) for each in plan.cluster)
    return msgspec.structs.replace(plan, cluster=moved, local=())


def test_an_error_names_the_map_that_is_too_small_and_nothing_changes(bpf_objects: Path, pins: Path) -> None:
    loaded = start(pins, CAPACITIES, bpf_objects)
    for number in range(200):
        loaded.maps["frontends4"].update(bytes((10, 0, 0, number, 80, 0, 6, 0)), bytes(8))
        loaded.maps["socket_revnat4"].update(u32(number) + bytes(12), bytes(8))
    loaded.maps["services"].update(u32(99), u32(1) + bytes(4))
    loaded.close()
    before = pinned(pins)
    for name, size, what in (
        ("frontends4", 100, "has 200 entries"),
        ("services", 99, "uses 100 of its 256 places"),
        ("socket_revnat4", 100, "has 200 entries"),
    ):
        words = f"^map {name} cannot get the size {size}: it {what}; configure a larger size"
        with pytest.raises(FatalError, match=words):
            start(pins, CAPACITIES | {"service_configs": 999, name: size}, bpf_objects)
        assert pinned(pins) == before
        assert leftovers(pins) == []


def test_slots_of_no_active_service_config_need_no_room(bpf_objects: Path, pins: Path) -> None:
    loaded = start(pins, CAPACITIES, bpf_objects)
    loaded.maps["slots"].update(u32(900), u32(5) + bytes(4))
    loaded.close()
    loaded = start(pins, CAPACITIES | {"slots": 512}, bpf_objects)
    assert loaded.resized == {"slots": (1024, 512)}
    loaded.close()


def test_clients_without_a_service_need_no_room(bpf_objects: Path, pins: Path) -> None:
    loaded = start(pins, CAPACITIES | {"affinities": 4096}, bpf_objects)
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    row = loaded.tc.btf.struct("service_config").pack(service=1, affinity_seconds=60)
    loaded.maps["service_configs"].update(u32(1), row)
    for number in range(1500):
        last_used = now if number < 20 else now - 61_000_000_000
        loaded.maps["affinities"].update(client(number), affinity(loaded.tc.btf, number, last_used))
    loaded.close()
    loaded = start(pins, CAPACITIES, bpf_objects)
    loaded.attached()
    assert {key for key, _ in loaded.maps["affinities"].items()} == {client(number) for number in range(20)}
    loaded.close()


def test_entries_that_the_old_programs_write_are_copied(bpf_objects: Path, pins: Path) -> None:
    loaded = start(pins, CAPACITIES, bpf_objects)
    btf = loaded.tc.btf
    old = Map.open_pinned(pins / "affinities")
    for number in (1, 2, 3):
        old.update(client(number), affinity(btf, number, 100))
    loaded.close()
    loaded = start(pins, CAPACITIES | {"affinities": 2048}, bpf_objects)
    assert leftovers(pins) == ["maps-former"]
    old.update(client(1), affinity(btf, 11, 200))  # an old program, later
    old.update(client(4), affinity(btf, 4, 200))
    loaded.maps["affinities"].update(client(2), affinity(btf, 22, 300))  # a new program
    loaded.attached()
    found = {key: btf.struct("affinity").unpack(value)["backend"] for key, value in loaded.maps["affinities"].items()}
    assert found == {client(1): 11, client(2): 22, client(3): 3, client(4): 4}
    assert leftovers(pins) == []
    old.close()
    loaded.close()


def test_entries_that_do_not_fit_into_an_lru_map_are_dropped(bpf_objects: Path) -> None:
    with Object.open(bpf_objects / "tc.bpf.o", max_entries={"choices": 4}, programs=()) as opened:
        choices = opened.load().maps["choices"]
        for number in range(4):
            choices.update(u32(number), u32(1))
        merge([(u32(2), u32(7)), (u32(9), u32(7))], choices, with_time=False)
        assert dict(choices.items()) == {u32(number): u32(1) for number in range(4)}


def _maps_only(pins: Path, sizes: dict[str, int], objects: Path) -> tuple[Object, Resize]:
    """As ``load`` does, without the time of the verifier."""
    resize = Resize(pins)
    resize.begin()
    file, renewed = objects / "tc.bpf.o", resize.renewed(sizes)
    maps = Object.open(file, pins, max_entries=sizes, programs=(), resized=resize.made, renewed=renewed).load()
    resize.take_over(maps.maps, maps.btf)
    return maps, resize


def _dies_at(k: int, work: Callable[[], Any]) -> bool:
    """Run it in a process that ends at the k-th change, as by kill -9. False: there were fewer changes."""
    child = os.fork()
    if child == 0:
        count = itertools.count(1)

        def watched(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **more: Any) -> Any:
                if next(count) == k:
                    os._exit(9)
                return real(*arguments, **more)

            return call

        code = 1
        try:
            for place, name in ((os, "link"), (os, "rename"), (os, "unlink"), (os, "mkdir"), (os, "rmdir")):
                setattr(place, name, watched(getattr(place, name)))
            Map.update_batch = watched(Map.update_batch)  # type: ignore[method-assign]
            Map.update = watched(Map.update)  # type: ignore[method-assign]
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9), "the child failed"
    return code == 9


def test_killed_at_any_change_the_next_start_completes_it(bpf_objects: Path, bpffs: Path, tmp_path: Path) -> None:
    smaller = CAPACITIES | {"affinities": 2048, "frontends4": 600, "services": 300}
    other = CAPACITIES | {"affinities": 1024, "frontends4": 700, "services": 400}
    k = 0
    while True:
        k += 1
        pins = bpffs / f"run{k}" / "maps"
        pins.mkdir(parents=True)
        maps, resize = _maps_only(pins, CAPACITIES, bpf_objects)
        resize.finish(maps.maps, maps.btf)
        btf = maps.btf
        old = maps.maps["affinities"]
        old.update(client(1), affinity(btf, 1, 100))
        maps.maps["frontends4"].update(bytes(8), bytes(8))
        maps.maps["services"].update(u32(9), u32(1) + bytes(4))

        over = tmp_path / f"over{k}"

        def change(pins: Path = pins, over: Path = over) -> None:
            opened, resize = _maps_only(pins, smaller, bpf_objects)
            over.touch()
            resize.finish(opened.maps, opened.btf)

        inode = (pins / "affinities").stat().st_ino
        service_maps = {(pins / name).stat().st_ino for name in SERVICE_MAPS}
        died = _dies_at(k, change)
        # While the old programs may run, their map exists somewhere.
        there = any(path.stat().st_ino == inode for path in pins.parent.rglob("affinities*"))
        assert there or over.exists(), f"killed at change {k}"
        old.update(client(2), affinity(btf, 2, 200))
        # The old programs use these. The next start may have the same sizes as the killed one.
        unchanged, resize = _maps_only(pins, smaller, bpf_objects)
        shared = {(pins / name).stat().st_ino for name in SERVICE_MAPS} & service_maps
        assert not shared, f"killed at change {k}: old programs and the new writer would share {len(shared)} maps"
        unchanged.close()
        again, resize = _maps_only(pins, other, bpf_objects)
        if died:
            resize.finish(again.maps, again.btf)
            found = {key for key, _ in again.maps["affinities"].items()}
            assert found == {client(1), *([client(2)] if there else [])}, f"killed at change {k}"
            assert [key for key, _ in again.maps["frontends4"].items()] == [bytes(8)]
            assert again.maps["services"].lookup(u32(9)) == u32(1) + bytes(4)
            assert {n: again.maps[n].max_entries for n in other if n in again.maps}.items() <= other.items()
            assert leftovers(pins) == [], f"killed at change {k}"
        again.close()
        maps.close()
        if not died:
            break
    assert k > 12


def test_the_sizes_of_the_model_are_those_of_the_header(bpf_objects: Path) -> None:
    sizes: dict[str, int] = {}
    for name in ("tc.bpf.o", "sock.bpf.o"):
        with Object.open(bpf_objects / name) as opened:
            sizes |= opened.sizes
    fixed = {"recent_refusals", "refusals", "counters", "last_refused", "dry_results", "node_port_hints", "rr_cursor"}
    fixed |= {"affinity_counts", "bridged_flows"}
    fixed |= {"address_hints", "fast_path", "tracing", "decisions", "xdp_devices", "xdp_choices"} | STORAGE_MAPS
    # Maps of the fast path: fastPathEntries determines `flows`.
    fixed |= {"flows", "flow_drafts", "flow_fragments", "flow_packet_counts", "promotions", "young_counts", "permits"}
    fixed |= {"handovers", "sweep_results", "recent_flows", "recent_next", "recent_ends", "ticks", "tracked_clients"}
    fixed |= {"exchanges", "exchange_heads", "exchange_rates", "exchange_sweeps", "udp_filter", "straight_flows"}
    fixed |= {"route_marks"}
    assert sizes["rr_cursor"] == sizes["slots"]
    assert sizes["affinity_counts"] == sizes["services"]
    assert Maps().model_dump() == {n: size for n, size in sizes.items() if n not in fixed}


def test_the_page_names_the_memory_that_the_kernel_uses(bpf_objects: Path) -> None:
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 4):
        pytest.skip("before Linux 6.4 fdinfo has its own estimate, not what a map takes")
    wrong = {}
    for name in ("tc.bpf.o", "sock.bpf.o"):
        with Object.open(bpf_objects / name, programs=()) as opened:
            opened.load()
            for table in opened.maps.values():
                if table.name not in Maps.model_fields:
                    continue
                extra: Any = Maps.model_fields[table.name].json_schema_extra
                output = Size(*extra["size"]).empty_bytes * table.max_entries
                lines = Path(f"/proc/self/fdinfo/{table.fd}").read_text().splitlines()
                (taken,) = (int(line.split()[1]) for line in lines if line.startswith("memlock:"))
                if not 0.85 * taken <= output + 10_000 <= 1.15 * taken + 20_000:
                    wrong[table.name] = output, taken
    assert wrong == {}
