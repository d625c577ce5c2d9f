# SPDX-License-Identifier: Apache-2.0
"""After a kill, damage or an error, the next start or the next call repairs the maps."""

from __future__ import annotations

import errno as errors
import sys
import time
from collections.abc import Callable
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pyebpf_proxy.datapath.loader.libbpf import BpfError
from pyebpf_proxy.datapath.loader.programs import Loaded
from pyebpf_proxy.datapath.maps import read_back
from pyebpf_proxy.datapath.maps.adopt import adopt
from pyebpf_proxy.datapath.maps.writer import MAPS, Writer
from pyebpf_proxy.services.model import (
    Endpoint,
    IPFamily,
    Protocol,
    ServicePort,
    ServicePortName,
    SourceRange,
)
from tests.packet.service_maps import logical, rows, wipe, word
from tests.packet.service_plans import (
    Killed,
    change_everything,
    first_plan,
    frontend,
    kill_at,
    name_of,
    second_plan,
    service,
    slot_backends,
    watch,
)

pytestmark = pytest.mark.needs_bpf


@pytest.mark.parametrize("memory", ["affinities", "socket_flows"])
def test_an_id_in_a_clients_affinity_is_not_used_again(loaded: Loaded, writer: Writer, memory: str) -> None:
    web = name_of("web")
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80", "10.0.0.2:80")})
    (old, _) = slot_backends(loaded, writer, web)
    table = loaded.maps[memory]
    remembered = loaded.tc.btf.struct("affinity").pack(last_used=1, backend=old + 100)
    table.update(bytes(table.key_size), remembered)
    writer.apply({}, complete=True)
    writer.collect()
    again = Writer(loaded)
    again.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80")})
    assert slot_backends(loaded, again, web)[0] == old + 101


def test_an_entry_that_no_packet_can_find_is_removed(loaded: Loaded, writer: Writer) -> None:
    """Its key is that of a frontend or an endpoint, but for the last byte, which is zero in every packet's key."""
    dns = name_of("dns", protocol=Protocol.UDP)
    writer.apply({dns: service(dns, ("10.96.0.10",), "10.0.0.1:53")})
    before = logical(loaded, complete=True)
    for table in ("frontends4", "endpoints4"):
        for key, value in [*loaded.maps[table].items()]:
            loaded.maps[table].update(key[:-1] + b"\2", value)
        assert overwritten(writer), table
        writer.apply({dns: service(dns, ("10.96.0.10",), "10.0.0.1:53")}, complete=True)
        assert logical(loaded, complete=True) == before
        assert [key for key, _ in loaded.maps[table].items() if key[-1]] == []
        assert not overwritten(writer)


def test_a_serving_endpoint_of_a_tcp_port_is_removed(loaded: Loaded, writer: Writer) -> None:
    """Only UDP ports have these entries. It would stay for ever: the plan of a TCP port never names it."""
    web = name_of("web")
    plan = {web: service(web, ("10.96.0.1",), "10.0.0.1:80")}
    writer.apply(plan)
    before = logical(loaded, complete=True)
    key = loaded.tc.btf.struct("endpoint4_key").pack(
        service=writer.service_id(web), address=bytes([10, 0, 0, 9]), port=53, protocol=Protocol.UDP
    )
    loaded.maps["endpoints4"].update(key, bytes(4))
    assert overwritten(writer)
    writer.apply(plan, complete=True)
    assert loaded.maps["endpoints4"].lookup(key) is None
    assert logical(loaded, complete=True) == before


def test_an_adopted_plan_is_not_kept_twice(loaded: Loaded, writer: Writer) -> None:
    web = name_of("web")
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80", "10.0.0.2:80 local")})
    ids = slot_backends(loaded, writer, web)
    again = Writer(loaded)
    plan = service(web, ("10.96.0.1",), "10.0.0.1:80", "10.0.0.2:80 local")
    assert again[web] == plan
    again.apply({web: plan})
    assert again[web] is plan
    assert slot_backends(loaded, again, web) == ids
    assert not again.has_garbage


def test_killed_at_any_operation_the_next_start_repairs_it(loaded: Loaded) -> None:
    real = dict(loaded.maps)
    fresh = Writer(loaded)
    fresh.apply(second_plan())
    expected = logical(loaded, complete=True)
    k = operations = 0
    while not operations:
        k += 1
        loaded.maps.update(real)
        wipe(loaded)
        before = Writer(loaded)
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
        # Every active version is complete, and every address that is wanted before and after leads to a service.
        served = logical(loaded)
        assert {f for entry in served.values() for f in entry["frontends"]} >= {"10.96.0.1:80/TCP", "10.96.0.2:80/UDP"}
        again = Writer(loaded)
        assert logical(loaded).keys() == served.keys()
        change_everything(again)
        assert logical(loaded, complete=True) == expected, f"killed at operation {k}"
        assert again.service_id(name_of("web")) == number
        assert slot_backends(loaded, again, name_of("web"))[0] == kept
        assert not again.problems
        used = {name: pair[0] for name, pair in again.fill().items()}
        assert used == {name: pair[0] for name, pair in fresh.fill().items()}, f"leak after operation {k}"
    assert operations > 40


NAMES = [
    name_of("a"),
    name_of("b", protocol=Protocol.UDP),
    name_of("c", IPFamily.IPV6),
    name_of("d", IPFamily.IPV6, Protocol.UDP),
    name_of("e"),
]


some_endpoints = st.lists(st.integers(1, 5), unique=True, max_size=4).map(sorted)


@st.composite
def plans(draw: st.DrawFn) -> dict[ServicePortName, ServicePort]:
    """Any state of five service ports that share endpoints. Each of four addresses belongs to one of them."""
    owners = draw(st.lists(st.sampled_from(NAMES), min_size=8, max_size=8))
    result = {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        four = name.family is IPFamily.IPV4
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
def test_after_any_steps_the_maps_hold_the_last_plan(
    kernel: Loaded, steps: list[tuple[dict[ServicePortName, ServicePort], int, bool]]
) -> None:
    real = dict(kernel.maps)
    wipe(kernel)
    Writer(kernel).apply(steps[-1][0])
    expected = logical(kernel, complete=True)
    wipe(kernel)
    try:
        writer = Writer(kernel)
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
                writer = Writer(kernel)
            logical(kernel)
        writer.apply(steps[-1][0], complete=True)
        writer.collect()
        assert logical(kernel, complete=True) == expected
        assert writer.problems == {}
    finally:
        kernel.maps.update(real)


@pytest.mark.parametrize("new", [name_of("web")._replace(port="https"), name_of("shop")], ids=["port", "service"])
def test_a_service_renamed_without_an_agent_gets_its_address_in_one_step(loaded: Loaded, new: ServicePortName) -> None:
    """The old name does not keep the address, the address always leads to a service, and everything else stays."""
    old, other = name_of("web"), name_of("other")
    kept = service(other, ("10.96.0.2",), "10.0.0.3:80")
    Writer(loaded).apply({old: service(old, ("10.96.0.1",), "10.0.0.1:80"), other: kept})
    seen = []

    def look(_: str) -> None:
        (owner,) = [v["service"] for key, v in rows(loaded, "frontends4").items() if key[0] == b"\x0a\x60\x00\x01"]
        assert word(loaded, "services", owner), "the address leads to an active service"
        seen.append(owner)

    starting = watch(loaded, look)
    assert starting.apply({new: service(new, ("10.96.0.1",), "10.0.0.2:80"), other: kept}, complete=True) == []
    assert starting.problems == {}
    assert len(set(seen)) == 2
    starting.collect()
    served = logical(loaded, complete=True)
    assert [list(entry["frontends"]) for entry in served.values()] == [["10.96.0.2:80/TCP"], ["10.96.0.1:80/TCP"]]


def damage(loaded: Loaded, name: str, change: Callable[[bytes], bytes | None], key: bytes | None = None) -> None:
    """Change or delete an entry (the first one, unless ``key`` is given)."""
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
        ("service_configs", None),
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
        ("service_configs", lambda value: value[:4] + b"\xff\xff\xff\x00" + value[8:]),
        ("service_configs", lambda value: value[:4] + b"\x00\x00\x00\x00" + value[8:]),
        ("service_configs", lambda value: value[:8] + b"\xff\xff\x00\x00" + value[12:]),
    ],
)
def test_damaged_maps(
    loaded: Loaded, writer: Writer, name: str, change: Callable[[bytes], bytes | None] | None
) -> None:
    writer.apply(second_plan())
    expected = logical(loaded, complete=True)
    damage(loaded, name, change or (lambda value: None))
    again = Writer(loaded)
    change_everything(again)
    assert logical(loaded, complete=True) == expected
    assert not again.problems
    assert {n: used for n, (used, _) in again.fill().items()} == {n: used for n, (used, _) in writer.fill().items()}


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("name", [name for name in MAPS if name != "source_ranges4"])
def test_an_entry_with_one_other_bit_anywhere(loaded: Loaded, writer: Writer, name: str, part: str) -> None:
    """Its key or its value may also be those of another entry then. The plan has no IPv4 source ranges."""
    writer.apply(second_plan())
    expected = logical(loaded, complete=True)
    fill = {n: used for n, (used, _) in writer.fill().items()}
    table = loaded.maps[name]
    bits = 8 * (table.key_size if part == "key" else table.value_size)
    for bit in range(0, bits, 1 + bits // 256):
        rows = sorted(table.items())
        key, value = rows[bit % len(rows)]
        changed = bytearray(key if part == "key" else value)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            table.update(bytes(changed) if part == "key" else key, value if part == "key" else bytes(changed))
        except BpfError as error:
            if (name, error.errno) == ("source_ranges6", errors.EINVAL):
                continue  # a prefix that is longer than the key
            raise
        again = Writer(loaded)
        change_everything(again)
        assert logical(loaded, complete=True) == expected, bit
        assert not again.problems
        assert {n: used for n, (used, _) in again.fill().items()} == fill, bit


def test_a_source_range_of_the_other_family_is_removed(loaded: Loaded, writer: Writer) -> None:
    writer.apply(second_plan())
    expected = logical(loaded, complete=True)
    table = loaded.maps["source_ranges6"]
    ((key, value),) = table.items()
    number = writer._mirror.records[name_of("web")].config_id
    table.update(key[:4] + number.to_bytes(4, sys.byteorder) + key[8:], value)
    again = Writer(loaded)
    change_everything(again)
    assert logical(loaded, complete=True) == expected


@pytest.mark.parametrize("array", ["services", "slots"])
def test_damaged_arrays(loaded: Loaded, writer: Writer, array: str) -> None:
    writer.apply(second_plan())
    expected = logical(loaded, complete=True)
    for index in range(8):
        for value in (0, 1, 77):
            loaded.maps[array].update(index.to_bytes(4, sys.byteorder), value.to_bytes(8, sys.byteorder))
            again = Writer(loaded)
            change_everything(again)
            assert logical(loaded, complete=True) == expected
            assert not again.problems


def test_a_backend_that_no_packet_can_name_is_removed(loaded: Loaded, writer: Writer) -> None:
    """The key of its element in the nft table is that of another backend: the table refused it, at each start."""
    web = name_of("web")
    writer.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80")})
    (number,) = slot_backends(loaded, writer, web)
    pack = loaded.tc.btf.struct("backend4").pack
    for wrong in (0, number | 1 << 24, number | 1 << 31):
        loaded.maps["backends4"].update(
            wrong.to_bytes(4, sys.byteorder), pack(address=bytes([10, 0, 0, 9]), port=9, protocol=6, service=1)
        )
    again = Writer(loaded)
    assert again.netfilter_backends == {number: (bytes([10, 0, 0, 1]), 80)}
    assert [key for key, _ in loaded.maps["backends4"].items()] == [number.to_bytes(4, sys.byteorder)]
    again.apply({web: service(web, ("10.96.0.1",), "10.0.0.1:80")})
    assert not again.has_garbage


def test_the_next_call_repairs_a_partial_change(loaded: Loaded) -> None:
    real = dict(loaded.maps)
    Writer(loaded).apply(second_plan())
    expected = logical(loaded, complete=True)
    for k in range(1, 45, 3):
        loaded.maps.update(real)
        wipe(loaded)
        Writer(loaded).apply(first_plan())
        dying = kill_at(loaded, k)
        with pytest.raises(Killed):
            change_everything(dying)
        # The same writer; the plan is not passed again.
        dying.apply({})
        dying.apply({name: None for name in dying.names if name not in second_plan()})
        dying.apply({} if k > 30 else second_plan())
        dying.collect()
        assert logical(loaded, complete=True) == expected


def test_entries_that_other_programs_changed_are_repaired(loaded: Loaded, writer: Writer) -> None:
    writer.apply(second_plan(), complete=True)
    writer.collect()
    expected = logical(loaded, complete=True)
    assert not overwritten(writer)
    for name in ("service_configs", "backends4", "endpoints6", "frontends4", "service_names", "source_ranges6"):
        damage(loaded, name, lambda value: None)
        assert overwritten(writer), name
        change_everything(writer)
        assert logical(loaded, complete=True) == expected
        assert not overwritten(writer), name
        assert not writer.problems
    for array in ("services", "slots"):
        record = writer._mirror.records[name_of("web")]
        index = record.id if array == "services" else record.first_slot
        loaded.maps[array].update(index.to_bytes(4, sys.byteorder), (77).to_bytes(8, sys.byteorder))
        assert overwritten(writer), array
        change_everything(writer)
        assert logical(loaded, complete=True) == expected


def test_the_digest_finds_an_entry_that_another_program_added(loaded: Loaded, writer: Writer) -> None:
    writer.apply(second_plan(), complete=True)
    writer.collect()
    assert not overwritten(writer)
    table = loaded.maps["backends4"]
    key, value = next(table.items())
    other = (4711).to_bytes(4, sys.byteorder)
    table.update(other, value)
    assert overwritten(writer)
    change_everything(writer)
    assert table.lookup(other) is None
    assert table.lookup(key) == value


def test_counters_of_the_programs_are_not_damage(loaded: Loaded, writer: Writer) -> None:
    writer.apply(second_plan(), complete=True)
    writer.collect()
    assert not overwritten(writer)
    slots = loaded.maps["slots"]
    first = (0).to_bytes(4, sys.byteorder)
    slots.update(first, (slots.lookup(first) or bytes(8))[:4] + (9).to_bytes(4, sys.byteorder))
    assert not overwritten(writer)


def test_damage_is_found_soon_on_a_machine_that_runs_others_meanwhile(
    loaded: Loaded, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digest or a reading that was interrupted for seconds is not an expensive one, which would pause the next."""
    now = [time.monotonic()]

    def interrupted(*arguments: Any) -> Any:
        now[0] += 5
        return adopt(*arguments)

    monkeypatch.setattr(read_back, "adopt", interrupted)
    monkeypatch.setattr(read_back, "time", SimpleNamespace(monotonic=lambda: now[0], thread_time=time.thread_time))
    writer.apply(second_plan(), complete=True)
    writer.collect()
    assert not writer.was_overwritten()
    writer.apply(first_plan(), complete=True)
    writer.collect()
    now[0] += 60
    assert not writer.was_overwritten()
    loaded.maps["frontends4"].delete(next(key for key, _ in loaded.maps["frontends4"].items()))
    now[0] += 60
    assert writer.was_overwritten()


def overwritten(writer: Writer) -> bool:
    """What the digest finds since the last time, without a pause in between."""
    writer._read_back._digest_after = writer._read_back._read_after = 0.0
    return writer.was_overwritten()
