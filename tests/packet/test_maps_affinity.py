# SPDX-License-Identifier: Apache-2.0
"""Remembered clients: kept with the service port, forgotten when affinity is turned off (service-semantics §13)."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from pyebpf_proxy.datapath.loader.programs import Loaded
from pyebpf_proxy.datapath.maps.writer import Writer
from pyebpf_proxy.services.model import ServicePort, ServicePortName
from tests.packet.service_maps import SIZES
from tests.packet.service_plans import name_of, service, slot_backends

pytestmark = pytest.mark.needs_bpf

WEB, SHOP = name_of("web"), name_of("shop")


def plan(name: ServicePortName, seconds: int, *more: str) -> ServicePort:
    address = "10.96.0.1" if name == WEB else "10.96.0.2"
    return service(name, (address,), "10.0.0.1:80", "10.0.0.2:80", *more, affinity_seconds=seconds)


def bind(loaded: Loaded, writer: Writer, name: ServicePortName, clients: int, last_used: int = 1) -> None:
    """Enter so many clients for the first endpoint, as the programs do."""
    table = loaded.maps["affinities"]
    backend = slot_backends(loaded, writer, name)[0]
    value = loaded.tc.btf.struct("affinity").pack(last_used=last_used, backend=backend)
    pack = loaded.tc.btf.struct("affinity_key").pack
    for client in range(clients):
        table.update(pack(service=writer.service_id(name), client=client.to_bytes(4, "big") + bytes(12)), value)


def bound(loaded: Loaded, writer: Writer, name: ServicePortName) -> int:
    """How many clients the service port has."""
    number = writer.service_id(name)
    layout = loaded.tc.btf.struct("affinity_key")
    return sum(layout.unpack(key)["service"] == number for key, _ in loaded.maps["affinities"].items())


@pytest.fixture
def busy(loaded: Loaded, writer: Writer) -> Writer:
    """Two service ports with affinity, and their clients."""
    writer.apply({name: plan(name, 100) for name in (WEB, SHOP)})
    for name in (WEB, SHOP):
        bind(loaded, writer, name, 10)
    return writer


def test_changes_of_the_service_keep_the_clients(loaded: Loaded, busy: Writer) -> None:
    busy.apply({WEB: plan(WEB, 100, "10.0.0.3:80")})
    busy.apply({WEB: plan(WEB, 50)})
    busy.collect()
    assert bound(loaded, busy, WEB) == 10


def test_turning_affinity_off_forgets_the_clients_of_this_service_only(loaded: Loaded, busy: Writer) -> None:
    busy.apply({WEB: plan(WEB, 0)})
    assert bound(loaded, busy, WEB) == 10, "a program may still write"
    busy.collect()
    assert (bound(loaded, busy, WEB), bound(loaded, busy, SHOP)) == (0, 10)


def test_turning_affinity_on_again_begins_without_clients(loaded: Loaded, busy: Writer) -> None:
    """Clients that are remembered from then on survive the clean-up that was due before."""
    busy.apply({WEB: plan(WEB, 0)})
    busy.apply({WEB: plan(WEB, 100)})
    assert bound(loaded, busy, WEB) == 0
    bind(loaded, busy, WEB, 3)
    busy.collect()
    assert (bound(loaded, busy, WEB), bound(loaded, busy, SHOP)) == (3, 10)


def test_turning_affinity_on_again_during_the_grace_period(loaded: Loaded, busy: Writer) -> None:
    async def turn() -> None:
        busy.apply({WEB: plan(WEB, 0)})
        collecting = asyncio.create_task(busy.collect_async())
        await asyncio.sleep(0)
        busy.apply({WEB: plan(WEB, 100)})
        bind(loaded, busy, WEB, 3)
        await collecting

    asyncio.run(turn())
    assert bound(loaded, busy, WEB) == 3


def test_clients_are_forgotten_before_the_new_version_is_active(
    loaded: Loaded, busy: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipped = []
    flip = Writer._flip

    def look(writer: Writer, service_id: int, table: int) -> None:
        flipped.append(bound(loaded, busy, WEB))
        flip(writer, service_id, table)

    monkeypatch.setattr(Writer, "_flip", look)
    busy.apply({WEB: plan(WEB, 0)})
    busy.apply({WEB: plan(WEB, 100)})
    assert flipped == [10, 0]


def test_killed_before_the_clients_were_forgotten(loaded: Loaded, busy: Writer) -> None:
    """The next start finds affinity off, and deletes the remaining clients."""
    busy.apply({WEB: plan(WEB, 0)})
    again = Writer(loaded)
    again.apply({name: plan(name, seconds) for name, seconds in ((WEB, 0), (SHOP, 100))})
    again.collect()
    assert (bound(loaded, again, WEB), bound(loaded, again, SHOP)) == (0, 10)


def counts(loaded: Loaded, writer: Writer) -> dict[ServicePortName, int]:
    """The numbers that the programs use for the limit."""
    table = loaded.maps["affinity_counts"]
    numbers = {name: writer.service_id(name).to_bytes(4, sys.byteorder) for name in (WEB, SHOP)}
    return {name: int.from_bytes(table.lookup(key) or b"", sys.byteorder) for name, key in numbers.items()}


def test_d15_a_service_port_has_a_quarter_of_the_map(loaded: Loaded, busy: Writer) -> None:
    """So the clients of one service cannot fill the whole map (finding D15)."""
    most = int.from_bytes(loaded.maps["affinity_counts"].lookup(bytes(4)) or b"", sys.byteorder)
    assert most == SIZES["affinities"] // 4


def test_d15_clients_without_recent_connections_make_room(loaded: Loaded, busy: Writer) -> None:
    """The programs only add clients. When half of a share is used, clients that stayed away are deleted."""
    busy.recount_clients()
    assert counts(loaded, busy) == {WEB: 0, SHOP: 0}, "last seen in the first second after boot"
    assert (bound(loaded, busy, WEB), bound(loaded, busy, SHOP)) == (0, 0)
    bind(loaded, busy, WEB, 10)
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    bind(loaded, busy, SHOP, 10, now - 99 * 10**9)
    busy.recount_clients()
    assert (bound(loaded, busy, WEB), bound(loaded, busy, SHOP)) == (10, 10), "no service port is near its share"
    key = busy.service_id(WEB).to_bytes(4, sys.byteorder)
    loaded.maps["affinity_counts"].update(key, (SIZES["affinities"] // 8).to_bytes(8, sys.byteorder))
    busy.recount_clients()
    assert counts(loaded, busy) == {WEB: 0, SHOP: 10}
    assert (bound(loaded, busy, WEB), bound(loaded, busy, SHOP)) == (0, 10)


def test_d15_affinity_that_is_switched_off_gives_its_share_back(loaded: Loaded, busy: Writer) -> None:
    key = busy.service_id(WEB).to_bytes(4, sys.byteorder)
    loaded.maps["affinity_counts"].update(key, (64).to_bytes(8, sys.byteorder))
    busy.apply({WEB: plan(WEB, 0)})
    busy.collect()
    assert counts(loaded, busy)[WEB] == 0


def test_a_restart_keeps_all_other_clients(loaded: Loaded, busy: Writer) -> None:
    again = Writer(loaded)
    again.apply({name: plan(name, 100) for name in (WEB, SHOP)})
    again.collect()
    assert (bound(loaded, again, WEB), bound(loaded, again, SHOP)) == (10, 10)
