# SPDX-License-Identifier: Apache-2.0
"""The state of the fast path, as the programs go by it (bpf/flow_maps.h)."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pyebpf_proxy.see import model
from pyebpf_proxy.see.maps import U32, Pinned

_OPEN = "reason_unspecified"


def read(maps: Pinned, counts: Mapping[str, int]) -> model.FastPathView | None:
    """What there is; None where there is no flow cache. ``counts``: of every reason. SeeError."""
    if not {"fast_path", "flows"} <= maps.names:
        return None
    value = maps.map("fast_path").lookup(U32.pack(0))
    layout = maps.packer("fast_path", "alive_until", "generation", "closed4", "closed6")
    alive_until, _, *closed = layout.unpack(value or bytes(layout.size))
    words = {number: name.lower() for name, number in maps.enum("reason").items()}
    closed4, closed6 = (words.get(each, str(each)).replace(_OPEN, "") for each in closed)
    room = maps.map("flows").max_entries
    return model.FastPathView(
        watched=alive_until > time.clock_gettime_ns(time.CLOCK_MONOTONIC),
        closed4=closed4,
        closed6=closed6,
        used=max(0, min(counts["flow_learned"] - counts["flow_forgotten"], room)),
        room=room,
        hits=counts["flow_hit"],
        misses=counts["flow_miss"],
    )


def text(view: model.FastPathView) -> str:
    """For people."""
    parts = [f"{view.used} of {view.room} entries, {view.hits} packets"]
    if not view.watched:
        parts.append("rests: nobody watches routes and rules, so every packet goes by the kernel")
    closed = [(family, why) for family, why in (("IPv4", view.closed4), ("IPv6", view.closed6)) if why]
    parts += [f"closed for {family}: {why}" for family, why in closed]
    return ", ".join(parts)
