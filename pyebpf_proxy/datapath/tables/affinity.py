# SPDX-License-Identifier: Apache-2.0
"""Session affinity that is switched off is forgotten; switched on again, it begins anew (service-semantics §13)."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.tables.changes import Change


def forget(affinities: Map, done: Iterable[Change]) -> None:
    """Take away what the programs remember of service ports whose changes have switched affinity off.

    A service port that is gone needs no look at all entries: its endpoints' numbers are not used again soon.
    """
    services = {
        change.old.id.to_bytes(4, sys.byteorder)
        for change in done
        if change.old is not None and change.new is not None
        if change.old.plan.affinity_seconds and not change.new.plan.affinity_seconds
    }
    if services:
        keys, _ = affinities.dump()
        size = affinities.key_size
        found = (keys[at : at + size] for at in range(0, len(keys), size))
        affinities.delete_batch(b"".join(key for key in found if key[:4] in services))
