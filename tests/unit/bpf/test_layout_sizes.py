# SPDX-License-Identifier: Apache-2.0
"""A pinned map of another type or with entries of another size stops an agent of the same layout version."""

from __future__ import annotations

import pytest

from pyebpf_proxy.datapath.loader.layout import LAYOUT_VERSION
from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.datapath.loader.programs import OBJECTS

#: The version that RECORDED describes.
RECORDED_VERSION = 5
#: By map: the number of its type (enum bpf_map_type), and the sizes of its keys and values in bytes.
RECORDED = {
    "address_hints": (2, 4, 8),
    "affinities": (9, 20, 16),
    "affinity_counts": (2, 4, 8),
    "backends4": (1, 4, 16),
    "backends6": (1, 4, 28),
    "bridged_flows": (2, 4, 4),
    "bridged_fragments": (9, 40, 4),
    "choices": (1, 4, 4),
    "connected_revnat": (24, 4, 44),
    "connections": (1, 4, 12),
    "counters": (6, 4, 8),
    "decisions": (4, 4, 4),
    "deferred_sockets": (9, 8, 16),
    "devices": (1, 4, 16),
    "dry_results": (2, 4, 8),
    "endpoints4": (1, 12, 4),
    "endpoints6": (1, 24, 4),
    "exchange_heads": (2, 4, 128),
    "exchange_rates": (6, 4, 24),
    "exchange_sweeps": (2, 4, 8),
    "exchanges": (2, 4, 192),
    "excluded_pods": (11, 24, 4),
    "fast_path": (2, 4, 32),
    "flow_drafts": (6, 4, 496),
    "flow_fragments": (9, 40, 84),
    "flow_packet_counts": (2, 4, 8),
    "flows": (1, 40, 136),
    "frontends4": (1, 8, 8),
    "frontends6": (1, 20, 8),
    "handovers": (6, 4, 104),
    "last_refused": (6, 4, 56),
    "localities": (9, 20, 16),
    "locality_sets": (9, 20, 72),
    "node_addresses4": (1, 4, 4),
    "node_addresses6": (1, 16, 4),
    "node_port_hints": (2, 4, 8),
    "permits": (9, 44, 88),
    "pod_sources": (9, 16, 32),
    "promotions": (22, 0, 40),
    "recent_ends": (2, 4, 4),
    "recent_flows": (6, 4, 40),
    "recent_next": (6, 4, 4),
    "recent_refusals": (6, 4, 128),
    "refusals": (10, 8, 8),
    "route_marks": (2, 4, 4),
    "rr_cursor": (2, 4, 4),
    "service_configs": (1, 4, 28),
    "service_names": (1, 4, 196),
    "services": (2, 4, 8),
    "slots": (2, 4, 8),
    "socket_flows": (9, 16, 16),
    "socket_revnat4": (9, 16, 8),
    "socket_revnat6": (9, 32, 20),
    "socket_translations": (24, 4, 264),
    "source_ranges4": (11, 12, 4),
    "source_ranges6": (11, 24, 4),
    "straight_flows": (2, 4, 262144),
    "sweep_results": (2, 4, 16),
    "ticks": (6, 4, 16),
    "tracing": (2, 4, 112),
    "tracked_clients": (2, 4, 65540),
    "udp_filter": (2, 4, 16384),
    "xdp_choices": (9, 40, 8),
    "xdp_devices": (1, 4, 12),
    "young_counts": (1, 4, 4),
}


def shapes(name: str) -> dict[str, tuple[int, int, int]]:
    with Object.open(OBJECTS / f"{name}.bpf.o") as unset:
        return {name: (each.type, each.key_size, each.value_size) for name, each in unset.declared().items()}


@pytest.mark.parametrize("name", ["tc", "tc_without_lookup", "sock", "xdp"])
def test_another_shape_of_a_map_needs_another_layout_version(name: str) -> None:
    """Agents of both versions would refuse the maps of the other one: an upgrade and its rollback would fail.

    If a known map has changed, raise LAYOUT_VERSION and record all maps again. A new map needs only its line here.
    """
    assert RECORDED_VERSION == LAYOUT_VERSION
    found = shapes(name)
    assert found == {each: RECORDED.get(each) for each in found}


def test_no_recorded_map_is_gone() -> None:
    """A map that comes back later must have the same shape, or another version."""
    objects = [shapes(name) for name in ("tc", "tc_without_lookup", "sock", "xdp")]
    assert {each for found in objects for each in found} == RECORDED.keys()
