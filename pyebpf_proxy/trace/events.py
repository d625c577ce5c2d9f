# SPDX-License-Identifier: Apache-2.0
"""From the programs' events (struct decision of bpf/trace_maps.h) to views. Pure, but for the names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from struct import Struct
from typing import Literal, NamedTuple

from pyebpf_proxy.see import model
from pyebpf_proxy.services.addresses import format_address_port
from pyebpf_proxy.services.model import Protocol

Lane = Literal["direct", "netfilter", "socket", ""]
Verdict = Literal["served", "refused", "dropped", "replaced"]
Place = tuple[bytes, int]

#: Fields of struct decision, in the order of :class:`Event`.
FIELDS = (
    *("when", "source", "destination", "endpoint", "source_port", "destination_port", "endpoint_port"),
    *("protocol", "ipv6", "device", "service", "backend", "reason", "process", "masquerade", "hook", "command"),
)
_HOOKS: Mapping[int, Literal["tc", "xdp", "socket"]] = {1: "tc", 2: "xdp", 3: "socket"}
_DIRECT = ("new_flow_direct", "insert_race", "drop_conntrack_full", "drop_insert_failed", "drop_nat_failed")


class Event(NamedTuple):
    """One decision. ``when``: seconds since boot. ``endpoint``: None if none was chosen."""

    when: float
    source: Place
    destination: Place
    endpoint: Place | None
    protocol: Protocol
    device: int
    service: int
    backend: int
    reason: str
    process: int
    command: str
    masquerade: bool
    hook: int


def decode(raw: bytes, layout: Struct, reasons: Mapping[int, str]) -> Event:
    """``reasons``: their names, in lower case, by number. What is behind the struct is padding."""
    when, source, destination, endpoint, *rest = layout.unpack_from(raw)
    source_port, destination_port, endpoint_port, protocol, ipv6, device, service, backend, *more = rest
    reason, process, masquerade, hook, command = more
    size = 16 if ipv6 else 4
    return Event(
        when / 1e9,
        (source[:size], source_port),
        (destination[:size], destination_port),
        (endpoint[:size], endpoint_port) if backend else None,
        Protocol(protocol),
        device,
        service,
        backend,
        reasons.get(reason, f"reason {reason}"),
        process,
        command.partition(b"\0")[0].decode(errors="replace"),
        bool(masquerade),
        hook,
    )


def lane_of(reason: str) -> Lane:
    """The lane that a decision with this reason is for."""
    if reason in _DIRECT:
        return "direct"
    if reason.startswith("lane_"):
        return "netfilter"
    return "socket" if reason.endswith("_socket") else ""


def verdict_of(reason: str) -> Verdict:
    """What became of the packet, or of the flow that it met."""
    if reason.startswith("reject_"):
        return "refused"
    if reason.endswith("_replaced"):
        return "replaced"
    return "dropped" if reason.startswith("drop_") or reason == "table_missing" else "served"


def utc(seconds: float) -> str:
    """A time (``time.time``) as scripts read it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Names(NamedTuple):
    """Who is asked for names. ``masqueraded_as``: "" where nobody knows."""

    service: Callable[[Event], str]
    device: Callable[[int], str]
    pod: Callable[[bytes], str]
    masqueraded_as: Callable[[Event], str]


def view(event: Event, names: Names, booted: float) -> model.Decision:
    """One decision with its names. ``booted``: when (``time.time``) this machine was booted."""
    return model.Decision(
        time=utc(booted + event.when),
        hook=_HOOKS.get(event.hook, "tc"),
        device=names.device(event.device) if event.device else "",
        process=event.command,
        pid=event.process,
        protocol=event.protocol.name,
        source=format_address_port(*event.source),
        source_name=names.pod(event.source[0]),
        destination=format_address_port(*event.destination),
        service=names.service(event),
        endpoint=format_address_port(*event.endpoint) if event.endpoint is not None else "",
        endpoint_name=names.pod(event.endpoint[0]) if event.endpoint is not None else "",
        backend=event.backend,
        lane=lane_of(event.reason),
        masquerade=event.masquerade,
        masqueraded_as=names.masqueraded_as(event) if event.masquerade else "",
        verdict=verdict_of(event.reason),
        reason=event.reason,
    )
