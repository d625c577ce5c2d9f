# SPDX-License-Identifier: Apache-2.0
"""EndpointSlices to the endpoint lists of a service port (spec/service-semantics §1.4, §3).

A slice is read once into a :class:`SliceView`: packed addresses, conditions as bits, local or not. The lists of a
service port are then made from the views of its service only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .addresses import format_address, parse_address, unusable_reason
from .model import Endpoint, Family, Protocol

if TYPE_CHECKING:
    from ..kube import objects

SERVICE_NAME_LABEL = "kubernetes.io/service-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"

READY = 1
SERVING = 2
TERMINATING = 4
LOCAL = 8
# A last resort: no endpoint is ready, but this one still serves while it terminates.
FALLBACK = SERVING | TERMINATING

_FAMILIES = {"IPv4": Family.IPV4, "IPv6": Family.IPV6}
_NO_CONDITIONS = READY | SERVING


class Candidate(NamedTuple):
    """One endpoint of a slice. ``text`` is the address as it sorts, before the port: IPv6 in brackets."""

    text: str
    address: bytes
    flags: int
    zones: frozenset[str] | None
    nodes: frozenset[str] | None


class SliceView(NamedTuple):
    """What a slice says: one family, port numbers by (name, protocol), endpoints in the slice's order."""

    family: Family
    ports: dict[tuple[str, Protocol], tuple[int, ...]]
    candidates: tuple[Candidate, ...]


class Lists(NamedTuple):
    """The endpoint lists of one service port (the fields of ``model.ServicePort``)."""

    cluster: tuple[Endpoint, ...]
    local: tuple[Endpoint, ...]
    serving: tuple[Endpoint, ...]
    any_endpoints: bool


NO_LISTS = Lists((), (), (), False)


class Topology(NamedTuple):
    """Where we are: our node's name and the zone of its label ("" if it has none)."""

    node: str
    zone: str


def service_of(endpoint_slice: objects.EndpointSlice) -> str | None:
    """Name of the Service that a slice belongs to; None for a slice that is not used."""
    labels = endpoint_slice.metadata.labels
    if labels is None or HEADLESS_LABEL in labels:
        return None
    return labels.get(SERVICE_NAME_LABEL) or None


def view_slice(endpoint_slice: objects.EndpointSlice, node_name: str) -> SliceView | None:
    """Read a slice; None if its addressType is no IP family. Endpoints that cannot be used are left out."""
    family = _FAMILIES.get(endpoint_slice.address_type or "")
    if family is None:
        return None
    ports: dict[tuple[str, Protocol], tuple[int, ...]] = {}
    for port in endpoint_slice.ports or ():
        protocol = Protocol.__members__.get(port.protocol or "TCP")
        if port.name is None or not port.port or not 0 < port.port <= 65535 or protocol is None:
            continue
        key = (port.name, protocol)
        ports[key] = (*ports.get(key, ()), port.port)

    size = 4 if family is Family.IPV4 else 16
    candidates = []
    for endpoint in endpoint_slice.endpoints or ():
        if not endpoint.addresses:
            continue
        text = endpoint.addresses[0]
        address = parse_address(text)
        if address is None or len(address) != size or unusable_reason(address) is not None:
            continue
        if size == 16:
            text = f"[{format_address(address)}]"
        elif text[0] == "0" or ".0" in text:
            text = format_address(address)  # perhaps leading zeros: they would disturb the order
        conditions = endpoint.conditions
        if conditions is None:
            flags = _NO_CONDITIONS
        else:
            flags = 0 if conditions.ready is False else READY
            if conditions.serving is not False:
                flags |= SERVING
            if conditions.terminating:
                flags |= TERMINATING
        if endpoint.node_name and endpoint.node_name == node_name:
            flags |= LOCAL
        hints = endpoint.hints
        zones = nodes = None
        if hints is not None:
            zones = _names(hints.for_zones)
            nodes = _names(hints.for_nodes)
        candidates.append(Candidate(text, address, flags, zones, nodes))
    return SliceView(family, ports, tuple(candidates))


def _names(hints: Iterable[objects.Hint] | None) -> frozenset[str] | None:
    return frozenset(hint.name for hint in hints) or None if hints else None


class _Known(NamedTuple):
    endpoint: Endpoint
    candidate: Candidate


def merge(views: Iterable[SliceView], port: tuple[str, Protocol]) -> list[_Known]:
    """All endpoints of one service port in one family, each once, in the order of the text ``ip:port``."""
    found: dict[str, _Known] = {}
    for view in views:
        for number in view.ports.get(port, ()):
            suffix = f":{number}"
            for candidate in view.candidates:
                text, address, flags, _, _ = candidate
                key = text + suffix
                earlier = found.get(key)
                # During a hand-over between slices an old terminating copy must not hide a good one.
                if earlier is not None and flags & TERMINATING and not earlier[1][2] & TERMINATING:
                    continue
                found[key] = _Known(Endpoint(address, number, flags & LOCAL != 0), candidate)
    return [found[key] for key in sorted(found)]


def choose_lists(known: Sequence[_Known], topology: Topology, *, cluster: bool, local: bool, serving: bool) -> Lists:
    """The lists of §3. ``cluster``, ``local``, ``serving``: which of them are asked for."""
    if not known:
        return NO_LISTS
    cluster_list: list[Endpoint] = []
    local_list: list[Endpoint] = []
    if cluster:
        ready = [entry for entry in known if entry[1][2] & READY]
        chosen = _nearest(ready, topology) or [entry for entry in known if entry[1][2] & FALLBACK == FALLBACK]
        cluster_list = [entry[0] for entry in chosen]
    if local:
        here = [entry for entry in known if entry[1][2] & LOCAL]
        local_list = [entry[0] for entry in here if entry[1][2] & READY] or [
            entry[0] for entry in here if entry[1][2] & FALLBACK == FALLBACK
        ]
    any_endpoints = bool(cluster_list) or (
        local and any(entry[1][2] & READY or entry[1][2] & FALLBACK == FALLBACK for entry in known)
    )
    serving_list = [entry[0] for entry in known if entry[1][2] & SERVING] if serving else ()
    return Lists(tuple(cluster_list), tuple(local_list), tuple(serving_list), any_endpoints)


def _nearest(ready: list[_Known], topology: Topology) -> list[_Known]:
    """The ready topology filter: by node hints, else by zone hints, else everything (§3)."""
    if not ready or (ready[0][1].zones is None and ready[0][1].nodes is None):
        return ready  # the usual case, without looking at the others: one endpoint without hints is enough
    if all(entry[1].nodes for entry in ready):
        near = [entry for entry in ready if topology.node in (entry[1].nodes or ())]
        if near:
            return near
    if topology.zone and all(entry[1].zones for entry in ready):
        near = [entry for entry in ready if topology.zone in (entry[1].zones or ())]
        if near:
            return near
    return ready
