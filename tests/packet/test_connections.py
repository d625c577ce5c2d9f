# SPDX-License-Identifier: Apache-2.0
"""Counting conntrack entries for the schedulers of mode ipvs (docs/ipvs-mode.md); the tests insert the entries."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.connections import conntrack_counts
from pyebpf_proxy.datapath.connections.conntrack_counts import Count, Route
from pyebpf_proxy.datapath.connections.counts import Connections
from pyebpf_proxy.datapath.loader.programs import LEAST_CONNECTIONS, SCHEDULERS, Loaded, Settings, load
from pyebpf_proxy.datapath.maps.writer import Writer
from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.services.model import FrontendKind, IPFamily, Protocol
from tests.packet.program_node import enter_namespace, libc
from tests.packet.service_maps import SIZES, wipe
from tests.packet.service_plans import frontend, name_of, service, slot_backends

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

CLIENT, VIP, POD, NODE = ("192.0.2.9", "203.0.113.20", "10.244.2.5", "10.0.0.1")
CLIENT6, VIP6, POD6 = ("2001:db8::9", "2001:db8:1::20", "fd00:10:244:2::5")


@pytest.fixture
def namespace() -> Iterator[None]:
    """An empty conntrack table."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    assert libc.unshare(0x40000000) == 0
    yield
    enter_namespace(home)
    os.close(home)


@pytest.fixture(scope="module")
def counting(bpf_objects: Path) -> Iterator[Loaded]:
    loaded = load(Settings(netns_cookie=1, scheduler=LEAST_CONNECTIONS), sizes=SIZES, objects=bpf_objects)
    yield loaded
    loaded.close()


def flow(
    source: str, address: str, endpoint: str, sport: int, state: str = "", port: int = 80, target: int = 8080
) -> None:
    """Insert one entry: ``source`` connected to ``address``, ``endpoint`` answers. Without a state it is UDP."""
    protocol = ["-p", "tcp", "--state", state] if state else ["-p", "udp"]
    ports = [
        "--sport",
        str(sport),
        "--dport",
        str(port),
        "--reply-port-src",
        str(target),
        "--reply-port-dst",
        str(sport),
    ]
    addresses = ["-s", source, "-d", address, "--reply-src", endpoint, "--reply-dst", source]
    command = ["conntrack", "-I", *addresses, *protocol, *ports, "-t", "600"]
    subprocess.run(command, check=True, capture_output=True)


def route(address: str, endpoint: str, protocol: int = 6, port: int = 80, target: int = 8080) -> Route:
    return Route(protocol, ip_address(address).packed, port, ip_address(endpoint).packed, target)


def test_states_count_as_active_or_inactive_as_in_ipvs(namespace: None) -> None:
    active = ["SYN_SENT", "SYN_RECV", "ESTABLISHED"]
    inactive = ["FIN_WAIT", "CLOSE_WAIT", "LAST_ACK", "TIME_WAIT", "CLOSE"]
    for number, state in enumerate([*active, *inactive]):
        flow(CLIENT, VIP, POD, 1000 + number, state)
        flow(CLIENT6, VIP6, POD6, 1000 + number, state)
    for number in range(4):
        flow(CLIENT, VIP, POD, 2000 + number)
    assert conntrack_counts.count(set()) == {
        route(VIP, POD): Count(3, 5),
        route(VIP6, POD6): Count(3, 5),
        route(VIP, POD, 17): Count(4, 0),
    }


def test_an_entry_with_other_attributes_is_read(namespace: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for source, address, endpoint in ((CLIENT, VIP, POD), (CLIENT6, VIP6, POD6)):
        flow(source, address, endpoint, 1000, "ESTABLISHED")
        flow(source, address, endpoint, 1001, "TIME_WAIT")
        flow(source, address, endpoint, 1002)
    fast = conntrack_counts.count(set())
    assert len(fast) == 4
    read = []
    slow = conntrack_counts._slow_flow
    monkeypatch.setattr(conntrack_counts, "_slow_flow", lambda message: read.append(message) or slow(message))
    assert conntrack_counts.count(set()) == fast
    assert not read
    monkeypatch.setattr(
        conntrack_counts, "_FAST", {f: (of, reply, first) for f, (of, first, reply) in conntrack_counts._FAST.items()}
    )
    assert conntrack_counts.count(set()) == fast
    assert len(read) == 6


def test_untranslated_flows_count_only_if_they_are_from_the_node(namespace: None) -> None:
    flow(CLIENT, POD, POD, 1000, "ESTABLISHED", port=8080)
    flow(NODE, POD, POD, 1001, "ESTABLISHED", port=8080)
    assert conntrack_counts.count(set()) == {}
    assert conntrack_counts.count({ip_address(NODE).packed}) == {route(POD, POD, port=8080): Count(1, 0)}


def test_a_failed_dump_logs_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uapi, "IPCTNL_MSG_CT_GET", 0x1FF)
    with pytest.raises(conntrack_counts.RefusedError, match=r"^list of connections: "):
        conntrack_counts.count(set())


def test_there_is_room_for_every_backend_and_every_list(counting: Loaded) -> None:
    maps = counting.maps
    assert maps["connections"].max_entries == maps["choices"].max_entries == SIZES["backends4"] + SIZES["backends6"]


@pytest.mark.parametrize("number", sorted(set(SCHEDULERS.values())))
def test_packet_and_socket_programs_load_with_every_scheduler(bpf_objects: Path, number: int) -> None:
    """They must pass the verifier and fit into 512 bytes of stack."""
    loaded = load(Settings(netns_cookie=1, scheduler=number), sizes=SIZES, objects=bpf_objects)
    assert ("rr_cursor" in loaded.maps) == (number == SCHEDULERS["rr"])
    if number == SCHEDULERS["rr"]:
        assert loaded.maps["rr_cursor"].max_entries == SIZES["slots"]
    loaded.close()


def test_a_restart_adopts_the_counts_and_another_scheduler_removes_them(bpf_objects: Path, bpffs: Path) -> None:
    pins = bpffs / "instance" / "maps"

    def start(scheduler: int) -> Loaded:
        return load(Settings(1, scheduler=scheduler), pin_dir=pins, sizes=SIZES, objects=bpf_objects)

    key, value = (5).to_bytes(4, sys.byteorder), (77).to_bytes(4, sys.byteorder)
    for number, (scheduler, name) in enumerate(((LEAST_CONNECTIONS, "choices"), (SCHEDULERS["rr"], "rr_cursor"))):
        first = start(scheduler)
        assert first.maps[name].lookup(key) in (None, bytes(4)), number
        first.maps[name].update(key, value)
        first.close()
        again = start(scheduler)
        assert again.maps[name].lookup(key) == value
        again.attached()
        again.close()
    assert not (pins / "choices").exists()
    random = start(0)
    random.attached()
    random.close()
    assert not {"rr_cursor", "connections", "choices"} & {pin.name for pin in pins.iterdir()}
    fresh = start(LEAST_CONNECTIONS)
    assert fresh.maps["choices"].lookup(key) is None
    fresh.close()


def _number(raw: bytes | None) -> int:
    return int.from_bytes(raw or b"", sys.byteorder)


def test_counts_reach_the_backends_of_the_right_service(namespace: None, counting: Loaded) -> None:
    """By VIP, by NodePort and from the node's own sockets. Two services with the same endpoint have separate counts."""
    wipe(counting)
    writer = Writer(counting)
    web, other = name_of("web"), name_of("other")
    frontends = (frontend(VIP), frontend("0.0.0.0", 30080, FrontendKind.NODE_PORT))
    writer.apply(
        {
            web: service(web, (), f"{POD}:8080", "10.244.1.5:8080 local", frontends=frontends),
            other: service(other, ("10.96.0.7",), f"{POD}:8080"),
        }
    )
    counting.maps["node_addresses4"].update(ip_address(NODE).packed, bytes(4))
    local, remote, others = *slot_backends(counting, writer, web)[:2], slot_backends(counting, writer, other)[0]
    for number in range(3):
        flow(CLIENT, VIP, POD, 1000 + number, "ESTABLISHED")
    flow(CLIENT, NODE, POD, 1100, "TIME_WAIT", port=30080)
    flow(CLIENT, "10.96.0.7", POD, 1200, "ESTABLISHED")
    flow(NODE, "10.244.1.5", "10.244.1.5", 1300, "ESTABLISHED", port=8080)
    flow(CLIENT, "203.0.113.99", POD, 1400, "ESTABLISHED")  # an unused address
    choices, connections = counting.maps["choices"], counting.maps["connections"]
    layout = counting.tc.btf.struct("connections")
    key = {number: number.to_bytes(4, sys.byteorder) for number in (remote, local, others, 9999)}
    choices.update(key[remote], (7).to_bytes(4, sys.byteorder))
    choices.update(key[9999], (3).to_bytes(4, sys.byteorder))  # a backend that does not exist any more

    def found() -> dict[int, dict[str, int | bytes]]:
        return {_number(k): layout.unpack(v) for k, v in connections.items()}

    counter = Connections(counting.maps, counting.tc.btf, writer.backends_of, writer.has_backend)
    asyncio.run(counter.count())
    assert found() == {
        remote: {"active": 3, "inactive": 1, "choices": 7},
        local: {"active": 1, "inactive": 0, "choices": 0},
        others: {"active": 1, "inactive": 0, "choices": 0},
    }
    assert _number(choices.lookup(key[remote])) == 7  # a count of the programs themselves
    assert choices.lookup(key[9999]) is None

    # A restart keeps the counts, and removes them when the flows end. A removed service loses its counts.
    subprocess.run(["conntrack", "-F"], check=True, capture_output=True)
    writer.apply({other: None})
    writer.collect()
    counter = Connections(counting.maps, counting.tc.btf, writer.backends_of, writer.has_backend)
    asyncio.run(counter.count())
    assert found() == {
        remote: {"active": 0, "inactive": 0, "choices": 7},
        local: {"active": 0, "inactive": 0, "choices": 0},
    }


def test_ipv6_nodeports_are_found(namespace: None, counting: Loaded) -> None:
    wipe(counting)
    writer = Writer(counting)
    name = name_of("web", IPFamily.IPV6, Protocol.TCP)
    writer.apply(
        {name: service(name, (), f"[{POD6}]:8080", frontends=(frontend("::", 30080, FrontendKind.NODE_PORT),))}
    )
    flow(CLIENT6, "fd00:10::1", POD6, 1000, "ESTABLISHED", port=30080)
    (backend,) = slot_backends(counting, writer, name)
    found = dict(writer.backends_of(conntrack_counts.count(set())))
    assert found == {route("fd00:10::1", POD6, port=30080): backend}
