# SPDX-License-Identifier: Apache-2.0
"""The memory of empty maps: most of the 64 MB of docs/performance.md for 100 000 endpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.memory import map_memory
from pyebpf_proxy.datapath.loader.programs import Settings, load

MB = 1e6
CONFIGURATIONS = {
    "fastPath: false": {},
    "defaults": {"fast_path": True},
    "socketLB: all": {"fast_path": True, "pod_sockets": True},
}
#: The limit for the empty maps in MB; measured: 49.0, 59.6 and 60.4. Entries of 10 000 services with 100 000 endpoints
#: add 4.4 MB.
MOST = {"fastPath: false": 50.0, "defaults": 60.5, "socketLB: all": 61.5}


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_empty_maps_of_default_sizes_leave_memory_for_entries(bpf_objects: Path, configuration: str) -> None:
    loaded = load(Settings(netns_cookie=1, **CONFIGURATIONS[configuration]), objects=bpf_objects)  # type: ignore[arg-type]
    try:
        found = map_memory(loaded.maps)
    finally:
        loaded.close()
    assert 10 < sum(found.values()) / MB <= MOST[configuration], dict(sorted(found.items(), key=lambda each: -each[1]))
