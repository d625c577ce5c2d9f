# SPDX-License-Identifier: Apache-2.0
"""The state of the fast path from the programs' maps (bpf/flow_maps.h), with the causes that the agent reports."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from pyebpf_proxy.see import model
from pyebpf_proxy.see.local import Closed, DataPath
from pyebpf_proxy.see.maps import U32, Pinned
from pyebpf_proxy.see.reasons import SLOW

_OPEN = "not_slow"
_MOST_REASONS = 4
MAPS = {"exchange_sweeps", "fast_path", "flows", "permits", "sweep_results", "young_counts"}


class FastPathState(NamedTuple):
    """The map ``fast_path``. ``alive``: an agent follows rules and routes. ``closed``: reason by family; "" if open."""

    alive: bool
    generation: int
    permit_generation: int
    closed: Mapping[int, str]
    draining: bool


def read_state(maps: Pinned) -> FastPathState | None:
    """Read the map; None without a fast path. Raises SeeError."""
    if not maps.names >= MAPS:
        return None
    fields = ("alive_until", "generation", "permit_generation", "closed4", "closed6", "draining")
    layout = maps.packer("fast_path", *fields)
    value = maps.map("fast_path").lookup(U32.pack(0))
    alive_until, generation, permit_generation, *closed, draining = layout.unpack(value or bytes(layout.size))
    names = {number: name.lower() for name, number in maps.enum("slow_path_reason").items()}
    by_family = {
        family: names.get(each, str(each)).replace(_OPEN, "") for family, each in zip((4, 6), closed, strict=True)
    }
    alive = alive_until > time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return FastPathState(alive, generation, permit_generation, by_family, bool(draining))


def read(maps: Pinned, counts: Mapping[str, int], agent_state: DataPath) -> model.FastPathView | None:
    """The fast path's view, or None without one. ``counts``: by reason. Raises SeeError."""
    found = read_state(maps)
    if found is None:
        return None
    swept = maps.packer("sweep_result", "entries", "young")
    entries, young = swept.unpack(maps.map("sweep_results").lookup(U32.pack(0)) or bytes(swept.size))
    counted = maps.packer("exchange_sweep_result", "used")
    (exchanges,) = counted.unpack(maps.map("exchange_sweeps").lookup(U32.pack(0)) or bytes(counted.size))
    closed = agent_state.get("closed", {})
    promotion = agent_state.get("promotion", {})
    return model.FastPathView(
        watched=found.alive,
        draining=found.draining,
        closed4=found.closed[4],
        closed6=found.closed[6],
        why4=_why(closed, 4, found),
        why6=_why(closed, 6, found),
        rules={f"IPv{family}": text for family, text in agent_state.get("warnings", {}).items()},
        route_marks=_route_marks(maps),
        used=entries,
        capacity=maps.map("flows").max_entries,
        young=young + exchanges,
        exchanges=exchanges,
        permits=_permits(maps, found),
        sent=counts["flow_hit"] + counts["xdp_flow_hit"],
        promoted=counts["flow_promoted"],
        ended=counts["young_ended"],
        failed=promotion.get("failed", {}),
        last_error=promotion.get("lastError", ""),
        new_flows={path: counts[f"new_flow_{path}"] for path in ("fast", "netfilter", "socket")},
        slow={name: count for name, count in counts.items() if name in SLOW and count},
    )


def _why(closed: Mapping[str, Closed], family: int, found: FastPathState) -> str:
    closed_by = closed.get(str(family))
    # The agent's report may be older or newer than the map.
    return closed_by["text"] if closed_by is not None and closed_by["reason"] == found.closed[family] else ""


def _route_marks(maps: Pinned) -> dict[str, int]:
    """The map ``route_marks``; earlier versions do not have it."""
    if "route_marks" not in maps.names:
        return {}
    words = [maps.map("route_marks").lookup(U32.pack(number)) or bytes(4) for number in range(2)]
    return {family: bits for family, word in zip(("IPv4", "IPv6"), words, strict=True) if (bits := U32.unpack(word)[0])}


def _permits(maps: Pinned, found: FastPathState) -> int:
    """How many permits are valid now. A permit lasts about a second."""
    layout = maps.packer("permit", "until", "back_until", "generation")
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    _, values = maps.map("permits").dump()
    return sum(
        until > now and back_until > now and generation == found.permit_generation
        for until, back_until, generation in layout.iter_unpack(values)
    )


def kernel_flows(view: model.FastPathView) -> int:
    """Approximately how many kernel's flows the table has. Every flow has two entries, except exchanges."""
    return max(0, view.used - 2 * (view.young - view.exchanges)) // 2


def closed(view: model.FastPathView) -> dict[str, str]:
    """By family, the reason for which its packets take the slow path, with the cause. Empty: both are open."""
    if not view.watched:
        return dict.fromkeys(("IPv4", "IPv6"), "stack_no_agent, no agent follows rules and routes")
    return view.closed()


def text(view: model.FastPathView) -> list[str]:
    """Lines of text: flows and permits, then what closes the fast path."""
    lines = [
        f"{view.young} young flows, about {kernel_flows(view)} in conntrack, {view.used} of {view.capacity} entries,"
        f" {view.permits} permits; {view.sent} packets sent, {view.promoted} flows promoted"
    ]
    if not view.watched:
        lines.append("closed: no agent follows rules and routes (stack_no_agent)")
    if view.draining:
        lines.append("draining: new flows take the slow path")
    lines += [f"closed for {family}: {cause}" for family, cause in view.closed().items()]
    lines += [f"{family}: packets bypass other rules: {text}" for family, text in view.rules.items()]
    lines += [
        f"{family}: packets with a bit of mark 0x{bits:x} take the slow path: rules restore it from flows, and routes"
        " depend on it (stack_route_mark)"
        for family, bits in view.route_marks.items()
    ]
    if view.failed:
        failed = ", ".join(f"{outcome} {count}" for outcome, count in view.failed.items())
        lines.append(f"not promoted: {failed}" + (f" ({view.last_error})" if view.last_error else ""))
    return lines


def slow_text(view: model.FastPathView) -> str:
    """New flows by path, and the most frequent reasons for the slow path."""
    parts = [f"{path} {count}" for path, count in view.new_flows.items()]
    often = sorted(view.slow.items(), key=lambda entry: -entry[1])[:_MOST_REASONS]
    why = "; slow path: " + ", ".join(f"{name} {count}" for name, count in often) if often else ""
    return ", ".join(parts) + why
