# SPDX-License-Identifier: Apache-2.0
"""Writes the ranges of ``socketLBExclude`` into the map that tc checks when it learns a pod's source."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from pyebpf_proxy.config.addresses import Network
from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import Map

_FAMILY_BITS = 32


def write(target: Map, btf: Btf, ranges: Iterable[Network]) -> None:
    """Make ``target`` (``excluded_pods``) contain exactly ``ranges``. BpfError if they do not fit.

    A pod that was learned before is excluded when it is learned again, within a minute.
    """
    key = btf.struct("excluded_pods_key")
    wanted = {
        key.pack(
            prefix_length=_FAMILY_BITS + network.prefixlen,
            family=network.version,
            address=network.network_address.packed.ljust(16, b"\0"),
        )
        for network in ranges
    }
    present = {key for key, _ in target.items()}
    for new in wanted - present:
        target.update(new, struct.pack("=I", 1))
    for old in present - wanted:
        target.delete(old)
