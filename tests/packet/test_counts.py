# SPDX-License-Identifier: Apache-2.0
"""What is counted for users: new flows, refusals by service and time, packets by the meter (docs/top.md)."""

from __future__ import annotations

import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from scapy.layers.inet import TCP
from scapy.packet import Raw

from pyebpf_proxy.datapath.loader.libbpf import Object, SkBuff
from pyebpf_proxy.datapath.loader.programs import Settings
from tests.packet.program_node import ProgramNode, insert_entry

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

#: In the order of their addresses, as in the slots.
ENDPOINTS = ["local", "remote", "outside"]


def counts(world: ProgramNode, slots: int) -> list[int]:
    """New flows by slot."""
    found = (world.object.maps["slots"].lookup(number.to_bytes(4, sys.byteorder)) for number in range(1, slots + 1))
    return [struct.unpack("=II", value or bytes(8))[1] for value in found]


@pytest.mark.parametrize("affinity", [0, 100])
def test_a_slot_counts_the_flows_that_it_was_chosen_for(node: ProgramNode, affinity: int) -> None:
    node.load()
    node.service(ENDPOINTS, affinity_seconds=affinity)
    frame = bytes(node.tcp("pod", "cluster_ip", 80))
    tags: Counter[int] = Counter()
    for _ in range(60):
        result = node.run("tc_ethernet", frame)
        assert result.skb is not None
        tags[result.skb.priority & 0xFFFFFF] += 1
    assert counts(node, 3) == [tags[node.backend_ids[name, 1]] for name in sorted(ENDPOINTS, key=node.packed)]


def test_only_the_first_packet_is_counted(hooks: ProgramNode) -> None:
    hooks.service(["remote"])
    for flags in ("S", "A", "PA", "FA"):
        hooks.run("tc_ethernet", hooks.tcp("client", "vip", 80, flags=flags))
    assert counts(hooks, 1) == [1]


def test_a_dry_run_counts_nothing(node: ProgramNode) -> None:
    node.forget_flows()
    node.load(dry_run=1, xdp=0)
    node.service(["remote"])
    node.run("tc_ethernet", node.tcp("client", "vip", 80))
    assert node.reasons()["NEW_FLOW_NETFILTER"] == 1
    assert counts(node, 1) == [0]


def test_refusals_are_counted_by_service_and_time(hooks: ProgramNode) -> None:
    hooks.service([], service=3)
    hooks.service([], service=4, local=[], node_port=30081, port=81)
    begun = time.clock_gettime(time.CLOCK_BOOTTIME)
    for port in (80, 80, 81):
        hooks.run("tc_ethernet", hooks.tcp("client", "vip", port))
    ended = time.clock_gettime(time.CLOCK_BOOTTIME)
    reason = hooks.object.btf.enum("drop_reason")["REJECT_NO_ENDPOINTS"]
    found = {
        struct.unpack("=II", key): sum(struct.unpack(f"={len(value) // 8}Q", value))
        for key, value in hooks.object.maps["refusals"].items()
    }
    assert found == {(3, reason): 2, (4, reason): 1}
    total = 0
    for value in hooks.object.maps["recent_refusals"].lookup_cpus(reason.to_bytes(4, sys.byteorder)) or ():
        words = struct.unpack("=32I", value)
        for period, count in zip(words[:16], words[16:], strict=True):
            assert not count or begun // 4 <= period <= ended // 4
            total += count
    assert total == 3


def test_an_old_period_starts_from_zero(world: ProgramNode) -> None:
    world.service([])
    reason = world.object.btf.enum("drop_reason")["REJECT_NO_ENDPOINTS"].to_bytes(4, sys.byteorder)
    lately = world.object.maps["recent_refusals"]
    cpus = len(lately.lookup_cpus(reason) or ())
    # More than a minute ago, in every field.
    lately.update(reason, struct.pack("=32I", *[1] * 16, *[7] * 16) * cpus)
    world.run("tc_ethernet", world.tcp("client", "vip", 80))
    words = [struct.unpack("=32I", value) for value in lately.lookup_cpus(reason) or ()]
    new = [(period, count) for each in words for period, count in zip(each[:16], each[16:], strict=True) if period != 1]
    assert [count for _, count in new] == [1]


@pytest.fixture
def meter(world: ProgramNode, bpf_objects: Path) -> Iterator[Object]:
    path = bpf_objects / "meter.bpf.o"
    with Object.open(path) as unset:
        layout = unset.btf.struct("settings")
        wanted = frozenset(unset.sizes)
    known = Settings(netns_cookie=1)
    packed = layout.pack(**{name: getattr(known, name) for name in layout.fields})
    shared = {name: world.object.maps[name] for name in wanted if name in world.object.maps}
    without = wanted - shared.keys() - {"meters", "meter_one_in"}
    with Object.open(path, rodata={"settings": packed}, reuse=shared, without=without) as opened:
        yield opened.load()


def metered(meter: Object) -> dict[tuple[int, int], tuple[int, int]]:
    """Packets and bytes by service and endpoint port."""
    layout = meter.btf.struct("meter_key").packer("service", "port")
    found = {}
    for key, value in meter.maps["meters"].items():
        words = struct.unpack(f"={len(value) // 8}Q", value)
        found[layout.unpack(key)] = sum(words[0::2]), sum(words[1::2])
    return found


def test_the_meter_counts_both_directions_for_the_endpoint(world: ProgramNode, meter: Object) -> None:
    world.service(["remote"])
    look = meter.programs["meter_ethernet"]
    headers = 40 if world.family == 4 else 60
    first = bytes(world.tcp("pod", "cluster_ip", 80))
    context = SkBuff(ifindex=world.devices["nic"])
    assert look.test_run(first, context).retval == -1
    insert_entry(world, "tcp", "pod", "cluster_ip", 40000, 80, "--state", "SYN_SENT", target="remote")
    assert look.test_run(first, context).retval == -1
    # The packet that opens a flow counts for the service, later ones also for the endpoint.
    assert metered(meter) == {(1, 0): (1, headers + 20), (1, 8080): (1, headers + 20)}
    answer = world.tcp("remote", "pod", 40000, sport=8080, flags="SA")
    assert look.test_run(bytes(answer), context).data == bytes(answer)
    assert metered(meter)[1, 8080] == (2, 2 * (headers + 20))


def test_the_meter_counts_the_segments_of_a_large_packet(world: ProgramNode, meter: Object) -> None:
    world.service(["remote"])
    headers = 40 if world.family == 4 else 60
    frame = world.frame("client", "cluster_ip", TCP(sport=40000, dport=80, flags="A"), Raw(b"x" * 3000))
    context = SkBuff(ifindex=world.devices["nic"], gso_segs=3, gso_size=1000)
    meter.programs["meter_ethernet"].test_run(bytes(frame), context)
    assert metered(meter) == {(1, 0): (3, 3000 + 3 * headers)}


def test_the_meter_ignores_packets_of_no_service(world: ProgramNode, meter: Object) -> None:
    world.service(["remote"])
    context = SkBuff(ifindex=world.devices["nic"])
    for frame in (
        world.tcp("client", "elsewhere", 80),
        world.tcp("remote", "client", 40000, sport=8080, flags="SA"),
        world.udp("client", "cluster_ip", 80),
    ):
        assert meter.programs["meter_ethernet"].test_run(bytes(frame), context).retval == -1
    assert metered(meter) == {}


def test_one_of_many_counts_for_all(world: ProgramNode, meter: Object) -> None:
    """One packet in 16 of 4 096 is metered: 256 are expected; 192 to 320 with a probability of 99.99 %."""
    world.service(["remote"])
    meter.maps["meter_one_in"].mmap().cast("Q")[0] = 16
    frame = bytes(world.tcp("client", "cluster_ip", 80, flags="A"))
    meter.programs["meter_ethernet"].test_run(frame, SkBuff(ifindex=world.devices["nic"]), repeat=4096)
    ((packets, _),) = metered(meter).values()
    assert packets % 16 == 0
    assert 192 <= packets // 16 <= 320
