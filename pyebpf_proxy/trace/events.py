# SPDX-License-Identifier: Apache-2.0
"""Decodes the programs' events (struct decision of bpf/trace_maps.h). Only the lookups of names are not pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from struct import Struct
from typing import Literal, NamedTuple

from pyebpf_proxy.see import model
from pyebpf_proxy.see.protocols import place, protocol_name
from pyebpf_proxy.services.addresses import Place, format_address_port

Path = Literal["fast", "netfilter", "socket", ""]
Verdict = Literal["served", "refused", "dropped", "replaced"]

#: Fields of struct decision, in the order of :class:`Event`.
FIELDS = (
    *("when", "source", "destination", "endpoint", "source_port", "destination_port", "endpoint_port"),
    *("protocol", "ipv6", "device", "service", "backend", "reason", "process", "masquerade", "hook", "slow", "command"),
)
_HOOKS: Mapping[int, Literal["tc", "xdp", "socket"]] = {1: "tc", 2: "xdp", 3: "socket"}


class Event(NamedTuple):
    """One decision. ``when``: seconds since boot. ``endpoint`` is None if none was selected.

    ``protocol``: 0 if it is none of Services, as for ICMP to 127.0.0.0/8.
    """

    when: float
    source: Place
    destination: Place
    endpoint: Place | None
    protocol: int
    device: int
    service: int
    backend: int
    reason: str
    process: int
    command: str
    masquerade: bool
    hook: int
    slow: str = ""


def decode(raw: bytes, layout: Struct, reasons: Mapping[int, str]) -> Event:
    """Decode an event. ``reasons``: names in lower case, by number. Bytes after the struct are padding."""
    when, source, destination, endpoint, *rest = layout.unpack_from(raw)
    source_port, destination_port, endpoint_port, protocol, ipv6, device, service, backend, *more = rest
    reason, process, masquerade, hook, slow, command = more
    size = 16 if ipv6 else 4
    return Event(
        when / 1e9,
        (source[:size], source_port),
        (destination[:size], destination_port),
        (endpoint[:size], endpoint_port) if backend else None,
        protocol,
        device,
        service,
        backend,
        reasons.get(reason, f"reason {reason}"),
        process,
        command.partition(b"\0")[0].decode(errors="replace"),
        bool(masquerade),
        hook,
        reasons.get(slow, "") if slow else "",
    )


def path_of(reason: str) -> Path:
    """The path that a reason means: that of a new flow, or that of a packet that had to take the slow path."""
    if reason in ("new_flow_fast", "drop_rewrite_failed", "drop_awaiting_promotion"):
        return "fast"
    if reason == "new_flow_netfilter" or reason.startswith(("slow_", "stack_")):
        return "netfilter"
    return "socket" if reason.endswith("_socket") else ""


def verdict_of(reason: str) -> Verdict:
    """The verdict on the packet, or on the flow that it matched."""
    if reason.startswith("reject_"):
        return "refused"
    if reason.endswith("_replaced"):
        return "replaced"
    return "dropped" if reason.startswith("drop_") or reason == "service_config_missing" else "served"


def utc(seconds: float) -> str:
    """A time (``time.time``) in ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Names(NamedTuple):
    """Lookups of names. ``masqueraded_as`` returns "" if the address is unknown."""

    service: Callable[[Event], str]
    device: Callable[[int], str]
    pod: Callable[[bytes], str]
    masqueraded_as: Callable[[Event], str]


def view(event: Event, names: Names, booted: float) -> model.Decision:
    """One decision with its names. ``booted``: the boot time (``time.time``)."""
    name = protocol_name(event.protocol)
    return model.Decision(
        time=utc(booted + event.when),
        hook=_HOOKS.get(event.hook, "tc"),
        device=names.device(event.device) if event.device else "",
        process=event.command,
        pid=event.process,
        protocol=name,
        source=place(*event.source, name),
        source_name=names.pod(event.source[0]),
        destination=place(*event.destination, name),
        service=names.service(event),
        endpoint=format_address_port(*event.endpoint) if event.endpoint is not None else "",
        endpoint_name=names.pod(event.endpoint[0]) if event.endpoint is not None else "",
        backend=event.backend,
        path=path_of(event.reason),
        slow=event.slow,
        masquerade=event.masquerade,
        masqueraded_as=names.masqueraded_as(event) if event.masquerade else "",
        verdict=verdict_of(event.reason),
        reason=event.reason,
    )
