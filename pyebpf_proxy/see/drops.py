# SPDX-License-Identifier: Apache-2.0
"""``drops``: refused and dropped packets by reason, with counts, the latest packet and the meaning."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

from pyebpf_proxy.common.bpf_constants import REFUSED_PERIOD
from pyebpf_proxy.see import model
from pyebpf_proxy.see.answers import NOT_RIGHT, RIGHT
from pyebpf_proxy.see.maps import U32, Pinned
from pyebpf_proxy.see.protocols import OTHER, place, protocol_name
from pyebpf_proxy.see.reasons import MEANINGS, is_refusal
from pyebpf_proxy.see.text import Cell, Terminal, ago, table, terminal, wrapped
from pyebpf_proxy.services.model import Protocol, ServicePortName

#: Drops are reported as current for this time, in seconds.
RECENT = 60.0
#: Counting periods per minute.
_PERIODS = 60 // REFUSED_PERIOD
_NO_ENDPOINTS = frozenset({"reject_no_endpoints", "reject_no_endpoints_socket"})


def read(maps: Pinned) -> list[model.Drop]:
    """Every reason with drops or refusals, the latest first. Raises SeeError."""
    from pyebpf_proxy.see.programs import device_name

    counts = maps.counts()
    newest = {} if "last_refused" not in maps.names else dict(_newest(maps))
    lately = _counts_of_last_minute(maps)
    found = []
    for reason, count in counts.items():
        if not count or not is_refusal(reason):
            continue
        meaning = MEANINGS.get(reason)
        drop = model.Drop(
            reason=reason,
            count=count,
            meaning=meaning.text if meaning is not None else "unknown to this version",
            remedy=meaning.remedy if meaning is not None else "",
        )
        number = maps.enum("drop_reason")[reason.upper()]
        drop.last_minute = lately.get(number, 0) if lately is not None else None
        last = newest.get(number)
        if last is not None:
            when, source, destination, source_port, destination_port, protocol, ipv6, device = last
            size = 16 if ipv6 else 4
            drop.seconds_ago = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - when / 1e9)
            drop.protocol = protocol_name(protocol)
            drop.source = place(source[:size], source_port, drop.protocol)
            drop.destination = place(destination[:size], destination_port, drop.protocol)
            drop.device = device_name(device) if device else ""
        found.append(drop)
    return sorted(found, key=lambda drop: (drop.seconds_ago is None, drop.seconds_ago or 0.0, -drop.count))


def _newest(maps: Pinned) -> Iterator[tuple[int, tuple[int, bytes, bytes, int, int, int, int, int]]]:
    layout = maps.packer(
        "refused",
        *("when", "source", "destination", "source_port", "destination_port", "protocol", "ipv6", "device"),
    )
    opened = maps.map("last_refused")
    for number in range(opened.max_entries):
        rows = [layout.unpack(value) for value in opened.lookup_cpus(U32.pack(number)) or ()]
        last = max(rows, key=lambda row: row[0], default=None)
        if last is not None and last[0]:
            yield number, last


def _counts_of_last_minute(maps: Pinned) -> dict[int, int] | None:
    """Counts of the last minute by reason; None if the maps belong to an agent that does not count them."""
    if "recent_refusals" not in maps.names:
        return None
    opened = maps.map("recent_refusals")
    layout = maps.packer("recent_refusals", "period", "count")
    now = int(time.clock_gettime(time.CLOCK_BOOTTIME)) // REFUSED_PERIOD
    found: dict[int, int] = {}
    for reason in range(opened.max_entries):
        for value in opened.lookup_cpus(U32.pack(reason)) or ():
            periods, counts = (memoryview(half).cast("I") for half in layout.unpack(value))
            within = sum(count for period, count in zip(periods, counts, strict=True) if 0 <= now - period < _PERIODS)
            found[reason] = found.get(reason, 0) + within
    return found


def fill_services(drops: Sequence[model.Drop], maps: Pinned) -> None:
    """Fill in the service port of each latest packet, and why it has no endpoint, if it was refused for that."""
    from pyebpf_proxy.see import no_endpoints
    from pyebpf_proxy.see.partial_maps import DestinationLookup, PartialMaps
    from pyebpf_proxy.see.services import name_text
    from pyebpf_proxy.see.state import read_names
    from pyebpf_proxy.services.addresses import parse_address

    lookup = DestinationLookup(maps)
    refused: dict[str, ServicePortName] = {}
    for drop in drops:
        if not drop.destination or drop.protocol == OTHER:
            continue
        address, _, port = drop.destination.rpartition(":")
        number = lookup.service(parse_address(address.strip("[]")) or b"", int(port), Protocol[drop.protocol])
        names, _ = read_names(PartialMaps(maps, {number: 0}))
        drop.service = name_text(names[number]) if number in names else ""
        if number in names and drop.reason in _NO_ENDPOINTS:
            refused[drop.reason] = names[number]
    why = no_endpoints.reasons(maps.directory, None, refused.values()) if refused else {}
    for drop in drops:
        drop.no_endpoints = why.get(refused[drop.reason], "") if drop.reason in refused else ""


def text(drops: Sequence[model.Drop], terminal: Terminal) -> list[str]:
    """A table of the latest packets, then the meanings of the reasons."""
    if not drops:
        return wrapped(terminal, "no packet was refused or dropped since the maps were created")
    rows: list[list[Cell | str]] = [
        [
            Cell(drop.reason, "red" if _is_recent(drop) else ""),
            str(drop.count),
            minute(drop),
            ago(drop.seconds_ago) if drop.seconds_ago is not None else "",
            f"{sender(drop)} > {drop.destination} {drop.protocol}" if drop.source else "",
            drop.service,
            drop.device or ("a process here" if drop.source else ""),
        ]
        for drop in drops
    ]
    lines = table(terminal, ["REASON", "COUNT", "LAST MINUTE", "LATEST", "PACKET", "SERVICE", "FROM"], rows)
    lines.append("")
    for drop in drops:
        lines += wrapped(terminal, f"{drop.reason}: {drop.meaning}")
        if drop.no_endpoints:
            lines += wrapped(terminal, f"{drop.service}: {drop.no_endpoints}", indent="  ")
        lines += wrapped(terminal, drop.remedy, indent="  ", colour="dim") if drop.remedy else []
    return lines


def sender(drop: model.Drop) -> str:
    """The source of the latest packet, as text. When a socket connects, it has no port yet."""
    return drop.source.removesuffix(":0")


def minute(drop: model.Drop) -> str:
    """The count of the last minute for a table; "" if it is not counted."""
    return str(drop.last_minute) if drop.last_minute is not None else ""


def _is_recent(drop: model.Drop) -> bool:
    return drop.seconds_ago is not None and drop.seconds_ago < RECENT


def recent(drops: Sequence[model.Drop]) -> list[model.Drop]:
    """Reasons with a packet in the last minute."""
    return [drop for drop in drops if _is_recent(drop)]


def run(arguments: argparse.Namespace) -> int:
    """``drops``. Exit status 1: a packet was refused or dropped in the last minute."""
    from pyebpf_proxy.see.output import show

    with Pinned(arguments.directory) as maps:
        found = read(maps)
        fill_services(found, maps)
    show(arguments, model.Drops(drops=found), text(found, terminal()), (drop.reason for drop in found))
    return NOT_RIGHT if recent(found) else RIGHT
