# SPDX-License-Identifier: Apache-2.0
"""Session affinity with thousands of endpoints: it survives changes of the list, without a linear search."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from statistics import median

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether

from pyebpf_proxy.datapath.loader.libbpf import SkBuff
from pyebpf_proxy.datapath.loader.programs import Loaded, Settings, load
from pyebpf_proxy.datapath.maps.writer import Writer
from pyebpf_proxy.services.model import IPFamily, ServicePort
from tests.packet.service_plans import name_of, service

pytestmark = pytest.mark.needs_bpf

ENDPOINTS = 5000
CLIENTS = 300
SIZES = {"slots": 65536, **dict.fromkeys(("backends4", "backends6", "endpoints4", "endpoints6"), 16384)}
NETWORK = {IPFamily.IPV4: "10.1.0.0", IPFamily.IPV6: "fd00:10:1::"}
VIP = {IPFamily.IPV4: "10.96.0.1", IPFamily.IPV6: "fd00:10:96::1"}
SOURCE = {IPFamily.IPV4: "10.200.0.0", IPFamily.IPV6: "fd00:10:200::"}


@pytest.fixture(params=list(IPFamily), ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> IPFamily:
    found: IPFamily = request.param
    return found


@pytest.fixture
def many(bpf_objects: Path) -> Iterator[Loaded]:
    loaded = load(Settings(netns_cookie=1, conntrack_lookup=False), sizes=SIZES, objects=bpf_objects)
    yield loaded
    loaded.close()


def plan(family: IPFamily, numbers: range | list[int]) -> ServicePort:
    """Four endpoints for each address, at these offsets from NETWORK, in the order of their text, as in plans."""
    base = ip_address(NETWORK[family])
    places = [(base + number // 4, 80 + number % 4) for number in numbers]
    texts = sorted(
        f"{address}:{port}" if family is IPFamily.IPV4 else f"[{address}]:{port}" for address, port in places
    )
    return service(name_of("web", family), (VIP[family],), *texts, affinity_seconds=3600)


def frames(family: IPFamily, first: int) -> list[bytes]:
    """First packets of so many clients."""
    base = ip_address(SOURCE[family])
    layer = IP if family is IPFamily.IPV4 else IPv6
    link = Ether(src="02:00:00:00:00:01", dst="00:00:00:00:00:00")
    return [
        bytes(link / layer(src=str(base + first + number), dst=VIP[family]) / TCP(sport=1000, dport=80, flags="S"))
        for number in range(CLIENTS)
    ]


def run(loaded: Loaded, packets: list[bytes]) -> tuple[list[int], float]:
    """The backend of each packet, and the median of its time in ns."""
    program = loaded.tc.programs["tc_ethernet"]
    results = [program.test_run(packet, SkBuff()) for packet in packets]
    tags = [result.skb.priority & 0xFFFFFF for result in results if result.skb is not None]
    assert all(tags), "each packet gets an endpoint"
    return tags, median(result.duration for result in results)


def test_affinity_holds_when_one_endpoint_comes_before_all_others(many: Loaded, family: IPFamily) -> None:
    writer = Writer(many)
    assert not writer.apply({name_of("web", family): plan(family, range(1, ENDPOINTS + 1))})
    clients = frames(family, 0)
    first, _ = run(many, clients)
    assert len(set(first)) > CLIENTS * 0.8
    writer.apply({name_of("web", family): plan(family, range(ENDPOINTS + 1))})
    again, moved = run(many, clients)
    assert again == first, "every position has changed"
    _, new = run(many, frames(family, 10_000))
    # Walking half the list takes some 10 000 ns more than a random choice, a binary search some 500 ns.
    assert moved < new + 4000, (moved, new)


def test_affinity_to_a_removed_endpoint_needs_no_linear_search(many: Loaded, family: IPFamily) -> None:
    writer = Writer(many)
    writer.apply({name_of("web", family): plan(family, range(ENDPOINTS))})
    clients = frames(family, 0)
    first, _ = run(many, clients)
    writer.apply({name_of("web", family): plan(family, range(0, ENDPOINTS, 2))})
    second, took = run(many, clients)
    kept = [a == b for a, b in zip(first, second, strict=True)]
    assert 0.35 < sum(kept) / CLIENTS < 0.65
    third, _ = run(many, clients)
    assert third == second, "a client that got a new endpoint keeps it"
    _, new = run(many, frames(family, 10_000))
    assert took < new + 4000, (took, new)


def test_an_adopted_list_in_another_order_is_rewritten(many: Loaded, family: IPFamily) -> None:
    """Earlier agents sorted the list by text."""
    name = name_of("web", family)
    wanted = plan(family, range(1, 201))
    Writer(many).apply({name: wanted})
    words = many.maps["slots"]
    table = next(
        many.tc.btf.struct("service_config").unpack(value) for _, value in many.maps["service_configs"].items()
    )
    first, count = int(table["first_slot"]), int(table["cluster_count"])
    keys = [number.to_bytes(4, sys.byteorder) for number in range(first, first + count)]
    right = [words.lookup(key) for key in keys]
    for key, value in zip(keys, reversed(right), strict=True):
        words.update(key, value or b"")
    writer = Writer(many)
    writer.apply({name: wanted})
    table = max(
        (many.tc.btf.struct("service_config").unpack(value) for _, value in many.maps["service_configs"].items()),
        key=lambda row: int(row["first_slot"]),
    )
    found = [
        words.lookup(number.to_bytes(4, sys.byteorder))
        for number in range(int(table["first_slot"]), int(table["first_slot"]) + count)
    ]
    assert [value and value[:4] for value in found] == [value and value[:4] for value in right]
    assert writer[name] == wanted
    # The next start has nothing to change.
    before = dict(many.maps["service_configs"].items()).keys()
    Writer(many).apply({name: wanted})
    assert dict(many.maps["service_configs"].items()).keys() == before
