# SPDX-License-Identifier: Apache-2.0
"""The schedulers of mode ipvs (docs/ipvs-mode.md): which endpoint the first packet of each flow gets."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable
from ipaddress import ip_address

import pytest

from pyebpf_proxy.datapath.loader.programs import SCHEDULERS
from tests.packet.program_node import ProgramNode

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

PODS = [f"pod{i}" for i in range(1, 13)]
# Chi-square of 12 endpoints, 11 degrees of freedom: exceeded once in a million runs.
UNLIKELY = 49.3


def load(world: ProgramNode, scheduler: str) -> ProgramNode:
    """The tag shows the chosen endpoint."""
    world.load(scheduler=SCHEDULERS[scheduler])  # type: ignore[index]
    return world


def choose(world: ProgramNode, frame: bytes) -> str:
    """The name of the endpoint that the frame gets."""
    result = world.run("tc_ethernet", frame)
    assert result.skb is not None
    number = result.skb.priority & 0xFFFFFF
    return next(name for (name, _), known in world.backend_ids.items() if known == number)


def asks(world: ProgramNode, name: str = "vip", count: int = 1) -> list[str]:
    return [choose(world, bytes(world.tcp("client", name, 80, sport=30_000 + i))) for i in range(count)]


def clients(world: ProgramNode, count: int, name: str = "vip", sport: int = 40_000) -> list[bytes]:
    """First packets from so many different source addresses."""
    template = bytes(world.tcp("client", name, 80, sport=sport))
    at, first = (26, "198.51.100.0") if world.family == 4 else (22, "2001:db8:7::")
    size = 4 if world.family == 4 else 16
    base = int(ip_address(first))
    return [template[:at] + (base + i).to_bytes(size, "big") + template[at + size :] for i in range(count)]


def counted(world: ProgramNode, name: str, active: int, inactive: int = 0, choices: int = 0) -> None:
    """Write the counts of an endpoint of service 1, as the control plane would."""
    layout = world.object.btf.struct("connections")
    key = world.backend_ids[name, 1].to_bytes(4, sys.byteorder)
    world.object.maps["connections"].update(key, layout.pack(active=active, inactive=inactive, choices=choices))


def chi_square(chosen: Iterable[str]) -> float:
    counts = Counter(chosen)
    expected = counts.total() / len(PODS)
    return sum((counts[name] - expected) ** 2 / expected for name in PODS)


# ---- rr --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rr", "wrr"])
def test_rr_takes_the_endpoints_in_turn(node: ProgramNode, name: str) -> None:
    load(node, name).service(PODS[:5])
    chosen = asks(node, count=50)
    assert set(chosen[:5]) == set(PODS[:5])
    assert chosen == chosen[:5] * 10


def test_rr_keeps_a_turn_per_list_and_service(node: ProgramNode) -> None:
    """A client with policy Local and a pod use two lists, each with its own turn."""
    load(node, "rr").service(["pod1", "pod2", "pod3"], ["pod4", "pod5"], external_local=1)
    local, cluster = [], []
    for _ in range(6):
        local += asks(node)
        cluster.append(choose(node, bytes(node.tcp("pod", "cluster_ip", 80))))
        cluster.append(choose(node, bytes(node.tcp("pod", "cluster_ip", 80))))
    assert Counter(local) == {"pod4": 3, "pod5": 3}
    assert local == local[:2] * 3
    assert Counter(cluster) == dict.fromkeys(["pod1", "pod2", "pod3"], 4)


def test_rr_continues_when_the_list_changes(node: ProgramNode) -> None:
    load(node, "rr").service(PODS[:4])
    asks(node, count=3)
    node.service(PODS[:3])
    assert Counter(asks(node, count=9)) == dict.fromkeys(PODS[:3], 3)


# ---- hashes ------------------------------------------------------------------------------------------


def test_sh_keeps_a_source_and_spreads_sources(node: ProgramNode) -> None:
    load(node, "sh").service(PODS)
    frames = clients(node, 1200)
    first = [choose(node, frame) for frame in frames]
    assert [choose(node, frame) for frame in clients(node, 1200, "external_ip", 41_000)] == first
    assert chi_square(first) < UNLIKELY


def test_dh_hashes_only_the_destination(node: ProgramNode) -> None:
    load(node, "dh").service(PODS)
    by_destination = {}
    for name in ("vip", "external_ip", "cluster_ip"):
        chosen = {choose(node, frame) for frame in clients(node, 50, name)}
        assert len(chosen) == 1, name
        by_destination[name] = chosen.pop()
    assert len(set(by_destination.values())) > 1, by_destination


def test_mh_keeps_a_client_and_spreads_clients(node: ProgramNode) -> None:
    """A client is an address and a port: kube-proxy sets this option of IPVS."""
    load(node, "mh").service(PODS)
    frames = clients(node, 1200)
    first = [choose(node, frame) for frame in frames]
    assert [choose(node, frame) for frame in frames] == first
    assert chi_square(first) < UNLIKELY
    assert chi_square(asks(node, count=1200)) < UNLIKELY


def test_mh_moves_only_the_clients_of_an_endpoint_that_goes(node: ProgramNode) -> None:
    """For any order of the list and any ids of the endpoints."""
    load(node, "mh").service(PODS)
    frames = clients(node, 1000)
    before = [choose(node, frame) for frame in frames]
    node.service([*reversed(PODS[1:])])
    after = [choose(node, frame) for frame in frames]
    moved = {was for was, now in zip(before, after, strict=True) if was != now}
    assert moved == {PODS[0]}
    assert len({now for was, now in zip(before, after, strict=True) if was != now}) > 5


def test_mh_survives_a_restart(node: ProgramNode) -> None:
    load(node, "mh").service(PODS)
    frames = clients(node, 100)
    before = [choose(node, frame) for frame in frames]
    load(node, "mh").service(PODS)
    assert [choose(node, frame) for frame in frames] == before


# ---- by connections ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lc", "wlc", "sed", "nq"])
def test_the_least_loaded_endpoint_is_chosen_first(node: ProgramNode, name: str) -> None:
    load(node, name).service(PODS[:3])
    for pod, active in zip(PODS, (5, 1, 3), strict=False):
        counted(node, pod, active)
    assert asks(node, count=2) == ["pod2", "pod2"]
    assert Counter(asks(node, count=4)) == {"pod2": 2, "pod3": 2}
    assert Counter(asks(node, count=6)) == dict.fromkeys(PODS[:3], 2)


def test_lc_takes_inactive_connections_for_a_256th(node: ProgramNode) -> None:
    load(node, "lc").service(PODS[:2])
    counted(node, "pod1", 1, 0)
    counted(node, "pod2", 0, 255)
    assert asks(node) == ["pod2"]
    counted(node, "pod2", 0, 257, choices=1)
    assert asks(node) == ["pod1"]


@pytest.mark.parametrize("name", ["sed", "nq"])
def test_an_idle_endpoint_comes_first(node: ProgramNode, name: str) -> None:
    """An endpoint without active connections, however many are ending."""
    load(node, name).service(PODS[:3])
    for pod, load_ in zip(PODS, ((1, 0), (0, 10_000), (1, 0)), strict=False):
        counted(node, pod, *load_)
    assert asks(node) == ["pod2"]


def test_equally_loaded_endpoints_take_turns(node: ProgramNode) -> None:
    load(node, "lc").service(PODS)
    first = set()
    for _ in range(64):
        first.update(asks(node))
        for pod in PODS:
            key = node.backend_ids[pod, 1].to_bytes(4, sys.byteorder)
            node.object.maps["choices"].delete(key)
    assert len(first) > 4


def test_counted_choices_are_not_added_again(node: ProgramNode) -> None:
    """A count includes the choices before it; later ones are added."""
    load(node, "lc").service(PODS[:2])
    assert Counter(asks(node, count=10)) == {"pod1": 5, "pod2": 5}
    counted(node, "pod1", 0, choices=5)
    counted(node, "pod2", 3, choices=4)
    assert asks(node, count=4) == ["pod1"] * 4
    assert sorted(asks(node, count=2)) == ["pod1", "pod2"]


def test_a_count_from_before_a_reset_does_no_harm(node: ProgramNode) -> None:
    """`connections` has more choices than `choices`: 0 are added, not four billion."""
    load(node, "lc").service(PODS[:2])
    counted(node, "pod1", 0, choices=1000)
    counted(node, "pod2", 3)
    assert asks(node, count=2) == ["pod1", "pod1"]


def test_affinity_overrides_every_scheduler(node: ProgramNode) -> None:
    for name in SCHEDULERS:
        load(node, name).service(PODS[:4], affinity_seconds=100)
        (first,) = asks(node)
        if "connections" in node.object.maps:
            counted(node, first, 1000)
        assert set(asks(node, count=8)) == {first}, name
        if "choices" in node.object.maps:
            key = node.backend_ids[first, 1].to_bytes(4, sys.byteorder)
            assert node.object.maps["choices"].lookup(key) == (9).to_bytes(4, sys.byteorder)


# ---- locality ----------------------------------------------------------------------------------------


def test_lblc_keeps_an_endpoint_until_it_is_overloaded_and_another_is_idle(node: ProgramNode) -> None:
    load(node, "lblc").service(PODS[:3])
    first, second, third = asks(node, count=3)
    assert first == second
    assert third != first
    # From now on the address has this endpoint. The other one is idle until it gets its own.
    assert asks(node) == [third]
    (other,) = {*PODS[:3]} - {first, third}
    assert asks(node) == [other]
    # No endpoint is idle any more: the address keeps this one, even if it is overloaded.
    assert set(asks(node, count=5)) == {other}


def test_lblc_keeps_an_endpoint_per_address(node: ProgramNode) -> None:
    load(node, "lblc").service(PODS[:2])
    counted(node, "pod1", 1)
    assert asks(node, "vip") == ["pod2"]
    counted(node, "pod2", 2, choices=1)
    assert asks(node, "external_ip") == ["pod1"]
    assert asks(node, "vip") == ["pod2"]


def test_lblc_replaces_a_removed_endpoint(node: ProgramNode) -> None:
    load(node, "lblc").service(PODS[:3])
    (first,) = asks(node)
    node.service([pod for pod in PODS[:3] if pod != first])
    assert first not in asks(node, count=2)


def test_lblc_finds_an_endpoint_that_moved_within_its_list(node: ProgramNode) -> None:
    """The remembered position is a hint."""
    load(node, "lblc").service(PODS[:3])
    (first,) = asks(node)
    localities = node.object.maps["localities"]
    layout = node.object.btf.struct("affinity")
    ((key, value),) = localities.items()
    for asked, position in enumerate((0, 1, 2, 3, 4_000_000_000), start=1):
        counted(node, first, 0, choices=asked)
        localities.update(key, layout.pack(**{**layout.unpack(value), "position": position}))
        assert asks(node) == [first]


def members(world: ProgramNode) -> set[int]:
    ((_, raw),) = world.object.maps["locality_sets"].items()
    return {int.from_bytes(raw[at : at + 4], sys.byteorder) for at in range(8, len(raw), 4)} - {0}


def test_lblcr_extends_the_set_of_an_address(node: ProgramNode) -> None:
    load(node, "lblcr").service(PODS[:3])
    a, again, b = asks(node, count=3)
    assert a == again
    assert b != a
    assert members(node) == {node.backend_ids[a, 1], node.backend_ids[b, 1]}
    assert asks(node) == [b]  # the less loaded one of the set
    (c,) = asks(node)  # both have two connections, the third has none
    assert {a, b, c} == {*PODS[:3]}
    assert len(members(node)) == 3
    assert asks(node) == [c]
    assert Counter(asks(node, count=6)) == dict.fromkeys(PODS[:3], 2)


def test_lblcr_shrinks_the_set_after_a_day(node: ProgramNode) -> None:
    load(node, "lblcr").service(PODS[:3])
    asks(node, count=3)
    counted(node, "pod3", 1)
    for pod, active in zip(PODS, (9, 3, 1), strict=False):
        counted(node, pod, active, choices=10)
    sets = node.object.maps["locality_sets"]
    layout = node.object.btf.struct("server_set")
    ((key, raw),) = sets.items()
    everybody = [node.backend_ids[pod, 1] for pod in PODS[:3]]
    raw = bytearray(raw)
    for i, number in enumerate(everybody):
        raw[8 + 4 * i : 12 + 4 * i] = number.to_bytes(4, sys.byteorder)
    assert layout.size == len(raw)
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    for minutes, left in ((24 * 60 - 1, everybody), (24 * 60 + 1, everybody[1:])):
        # If the machine has been up for less than a day, the number wraps. Adding a day gives the right time.
        raw[:8] = ((now - minutes * 60 * 10**9) % 2**64).to_bytes(8, sys.byteorder)
        sets.update(key, bytes(raw))
        assert asks(node) == ["pod3"]
        assert members(node) == set(left)


# ---- nothing for the others --------------------------------------------------------------------------


def test_other_modes_have_no_scheduler_maps(node: ProgramNode) -> None:
    """The maps do not exist, so the verifier accepts no access to them."""
    node.load(scheduler=0)
    assert not {"rr_cursor", "connections", "choices", "localities", "locality_sets"} & node.object.maps.keys()
    node.load(scheduler=SCHEDULERS["rr"])
    assert "rr_cursor" in node.object.maps
    assert "connections" not in node.object.maps
