# SPDX-License-Identifier: Apache-2.0
"""Choice of an endpoint: uniform at random, and session affinity with its scope (spec/service-semantics §4)."""

from __future__ import annotations

import sys
import time
from collections import Counter

import pytest

from tests.packet.program_node import ProgramNode, u32

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

#: The clock of last_used. Python has no name for it.
CLOCK_MONOTONIC_COARSE = 6


def chosen(world: ProgramNode, frame: object) -> str:
    """Run one first packet; returns the endpoint's name."""
    result = world.run("tc_ethernet", frame)  # type: ignore[arg-type]
    assert result.skb is not None
    return next(name for (name, _), number in world.backend_ids.items() if number == result.skb.priority & 0xFFFFFF)


def test_the_choice_is_uniform(node: ProgramNode) -> None:
    """Chi-square test of 3 000 packets over the tags of 3 endpoints."""
    node.load()
    node.service(["remote", "local", "outside"])
    frame = bytes(node.tcp("pod", "cluster_ip", 80))
    tags: Counter[int] = Counter()
    for _ in range(3000):
        result = node.run("tc_ethernet", frame)
        assert result.skb is not None
        tags[result.skb.priority] += 1
    assert len(tags) == 3
    chi_square = sum((n - 1000) ** 2 / 1000 for n in tags.values())
    assert chi_square < 27.7, tags  # 2 degrees of freedom: exceeded once in a million runs


def test_a_second_run_on_a_packet_keeps_the_first_choice(node: ProgramNode) -> None:
    """While the agent moves the program to the head of the chain, it is attached twice for a moment."""
    node.load()
    node.service(["remote", "local", "outside"])
    frame = bytes(node.tcp("pod", "cluster_ip", 80))
    for _ in range(50):
        first = node.run("tc_ethernet", frame).skb
        assert first is not None
        assert first.priority
        again = node.run("tc_ethernet", frame, priority=first.priority).skb
        assert again is not None
        assert again.priority == first.priority


ENDPOINTS = ["remote", "local", "outside"]


def test_affinity_holds_for_every_address_of_the_service_port(world: ProgramNode) -> None:
    world.service(ENDPOINTS, affinity_seconds=100)
    tags = set()
    for name, port in [("cluster_ip", 80), ("vip", 80), ("external_ip", 80), ("node", 30080)] * 5:
        result = world.run("tc_ethernet", world.tcp("client", name, port))
        assert result.skb is not None
        tags.add(result.skb.priority)
    assert len(tags) == 1


def test_affinity_is_by_client_and_by_service(world: ProgramNode) -> None:
    world.service(ENDPOINTS, affinity_seconds=100)
    tags = set()
    for i in range(40):
        frame = bytearray(bytes(world.tcp("client", "vip", 80)))
        frame[14 + (15 if world.family == 4 else 23)] = i
        result = world.run("tc_ethernet", bytes(frame))
        assert result.skb is not None
        tags.add(result.skb.priority)
    assert len(tags) == 3
    assert len(list(world.object.maps["affinities"].items())) == 40


def clients(world: ProgramNode, service: int) -> set[bytes]:
    """The clients that the map remembers for a service."""
    layout = world.object.btf.struct("affinity_key")
    keys = [layout.unpack(key) for key, _ in world.object.maps["affinities"].items()]
    return {bytes(key["client"]) for key in keys if key["service"] == service}


def come(world: ProgramNode, port: int, number: int) -> str:
    """Connect one of many clients to the VIP; returns the endpoint's name."""
    frame = bytearray(bytes(world.tcp("client", "vip", port)))
    at = 14 + (14 if world.family == 4 else 22)
    frame[at : at + 2] = number.to_bytes(2, "big")
    return chosen(world, bytes(frame))


@pytest.mark.parametrize("scheduler", [0, 1])
def test_d15_clients_of_one_service_evict_none_of_another(world: ProgramNode, scheduler: int) -> None:
    """An attacker may send any number of spoofed sources; the map has room for 128 clients (finding D15)."""
    world.load(scheduler=scheduler)
    world.service(ENDPOINTS, affinity_seconds=100)
    world.service(ENDPOINTS, service=2, port=81, node_port=30081, affinity_seconds=100)
    world.object.maps["affinity_counts"].update(bytes(4), (32).to_bytes(8, sys.byteorder))
    others = [come(world, 81, number) for number in range(20)]
    bound = clients(world, 2)
    for number in range(1000):
        come(world, 80, number)
    assert clients(world, 2) == bound
    assert len(bound) == 20
    assert len(clients(world, 1)) == 32
    assert [come(world, 81, number) for number in range(20)] == others, "its clients keep their endpoints"
    first = [come(world, 80, number) for number in range(32)]
    assert [come(world, 80, number) for number in range(32)] == first, "so do the first clients of the flooded service"
    counts = [int.from_bytes(world.object.maps["affinity_counts"].lookup(u32(n)) or b"", sys.byteorder) for n in (1, 2)]
    assert counts == [32, 20], "known clients are not counted again"


def test_affinity_ends_after_its_time_and_is_refreshed_by_new_connections(world: ProgramNode) -> None:
    world.service(ENDPOINTS[:2], affinity_seconds=60)
    first = chosen(world, world.tcp("pod", "cluster_ip", 80))
    affinities = world.object.maps["affinities"]
    layout = world.object.btf.struct("affinity")
    ((key, value),) = affinities.items()
    fields = layout.unpack(value)
    now = time.clock_gettime_ns(CLOCK_MONOTONIC_COARSE)

    # Just before the timeout: the choice stays, and the timeout starts again.
    affinities.update(key, layout.pack(**{**fields, "last_used": now - 55 * 10**9}))
    assert chosen(world, world.tcp("pod", "cluster_ip", 80)) == first
    ((_, value),) = affinities.items()
    assert layout.unpack(value)["last_used"] >= now

    # After the timeout: any endpoint is possible, and the other one comes within 64 tries.
    seen = set()
    for _ in range(64):
        affinities.update(key, layout.pack(**{**fields, "last_used": now - 61 * 10**9}))
        seen.add(chosen(world, world.tcp("pod", "cluster_ip", 80)))
    assert seen == set(ENDPOINTS[:2])


def test_affinity_to_an_entry_that_another_cpu_wrote_later(node: ProgramNode) -> None:
    """Two connections of a client at once: the entry may be newer than the packet that reads it."""
    node.load()
    node.service(ENDPOINTS, affinity_seconds=60)
    frame = bytes(node.tcp("client", "vip", 80))
    first = node.run("tc_ethernet", frame).skb
    assert first is not None
    affinities = node.object.maps["affinities"]
    layout = node.object.btf.struct("affinity")
    ((key, value),) = affinities.items()
    later = time.clock_gettime_ns(CLOCK_MONOTONIC_COARSE) + 10**9
    for _ in range(24):
        affinities.update(key, layout.pack(**{**layout.unpack(value), "last_used": later}))
        again = node.run("tc_ethernet", frame).skb
        assert again is not None
        assert again.priority == first.priority


def test_affinity_applies_only_within_the_list_that_the_client_may_use(world: ProgramNode) -> None:
    """A pod's connection chose a remote endpoint; the same client as an external one must get a local endpoint."""
    world.load(detector4=0, detector6=0)
    world.service(["remote"], ["local"], affinity_seconds=100, external_local=1)
    tags = []
    for name in ("cluster_ip", "vip", "vip", "cluster_ip"):
        result = world.run("tc_ethernet", world.tcp("client", name, 80))
        assert result.skb is not None
        tags.append(result.skb.priority & 0xFFFFFF)
    remote, local = world.backend_ids["remote", 1], world.backend_ids["local", 1]
    assert tags == [remote, local, local, remote]


def test_affinity_to_an_endpoint_that_moved_within_its_list(world: ProgramNode) -> None:
    """The remembered position is a hint; the list has changed since."""
    world.service(ENDPOINTS, affinity_seconds=100)
    first = world.run("tc_ethernet", world.tcp("client", "vip", 80)).skb
    affinities = world.object.maps["affinities"]
    layout = world.object.btf.struct("affinity")
    ((key, value),) = affinities.items()
    right = layout.unpack(value)["position"]
    for position in (0, 1, 2, 3, 4_000_000_000):
        affinities.update(key, layout.pack(**{**layout.unpack(value), "position": position}))
        again = world.run("tc_ethernet", world.tcp("client", "vip", 80)).skb
        assert first is not None
        assert again is not None
        assert again.priority == first.priority
        ((_, mended),) = affinities.items()
        assert layout.unpack(mended)["position"] == right
