# SPDX-License-Identifier: Apache-2.0
"""The map ``young_counts``: how many young flows packets of each device have open, for its quota (bpf/young.h).

The programs add a device with its first young flow, and never remove one. Every pod has a new ifindex, so the map would
fill up, and devices that are not in it have no quota. A flow of a device that is gone may end after its count has been
deleted: the programs lower no count that is not there. If another device has got the number meanwhile, its count is too
low for as long.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Container

from pyebpf_proxy.datapath.loader.libbpf import Map


def delete_gone(counts: Map, gone: Collection[int]) -> None:
    """These devices (ifindexes) are gone. BpfError."""
    for index in gone:
        counts.delete(index.to_bytes(4, sys.byteorder))


def keep_only(counts: Map, present: Container[int]) -> None:
    """Only these devices (ifindexes) exist, or have young flows: others went while no agent ran. BpfError."""
    known = [int.from_bytes(key, sys.byteorder) for key, _ in counts.items()]
    delete_gone(counts, [index for index in known if index not in present])
