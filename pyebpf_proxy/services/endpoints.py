# SPDX-License-Identifier: Apache-2.0
"""Computes the endpoint lists of a service port from EndpointSlices (spec/service-semantics §1.4, §3).

Each slice is read once into a :class:`SliceView`: packed addresses, and flags for conditions and locality. The lists of
a service port are built only from the views of its Service.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from pyebpf_proxy.services import pods
from pyebpf_proxy.services.addresses import format_address_port, parse_address, unusable_reason
from pyebpf_proxy.services.model import Endpoint, IPFamily, Protocol, ServicePortName

if TYPE_CHECKING:
    from pyebpf_proxy.kube import objects

SERVICE_NAME_LABEL = "kubernetes.io/service-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"

READY = 1
SERVING = 2
TERMINATING = 4
LOCAL = 8
# Endpoints that terminate, but still serve, are used only if no endpoint is ready.
FALLBACK = SERVING | TERMINATING

_FAMILIES = {"IPv4": IPFamily.IPV4, "IPv6": IPFamily.IPV6}
_ADDRESS = {IPFamily.IPV4: Struct("4s"), IPFamily.IPV6: Struct("16s")}
_NO_CONDITIONS = READY | SERVING


class Hints(NamedTuple):
    """Zone and node hints of an endpoint; None if it has no hints of that kind."""

    zones: frozenset[str] | None
    nodes: frozenset[str] | None


NO_HINTS = Hints(None, None)

PortNumbers = Mapping[tuple[str, Protocol], tuple[int, ...]]


class SliceView(msgspec.Struct, frozen=True, gc=False):
    """The content of a slice: its family, port numbers by (name, protocol), endpoints in the slice's order.

    Endpoints are packed to save memory: concatenated addresses, one byte of flags each, and hints only if any endpoint
    has some. ``pods`` has the names, packed by :mod:`pods`.
    """

    family: IPFamily
    ports: PortNumbers
    addresses: bytes
    flags: bytes
    hints: tuple[Hints, ...]
    pods: bytes = b""

    def members(self) -> Iterator[tuple[bytes, int, Hints]]:
        """Packed address, flags and hints of every endpoint."""
        addresses = (address for (address,) in _ADDRESS[self.family].iter_unpack(self.addresses))
        return zip(addresses, self.flags, self.hints or repeat(NO_HINTS))  # noqa: B905 (repeat() is endless)

    def first(self, number: int) -> SliceView:
        """The slice with only its first endpoints and without names of pods."""
        size = _ADDRESS[self.family].size
        return SliceView(
            self.family, self.ports, self.addresses[: number * size], self.flags[:number], self.hints[:number]
        )


class Lists(NamedTuple):
    """The endpoint lists of one service port (the fields of ``model.ServicePort``)."""

    cluster: tuple[Endpoint, ...]
    local: tuple[Endpoint, ...]
    serving: tuple[Endpoint, ...]
    any_endpoints: bool


#: Maximum of endpoints times ports of one Service in a family, so that no Service fills the maps.
MOST_ENDPOINTS = 32768
#: How many ports of its slices are looked up for one Service in a family. Each has an endpoint, so a Service with so
#: many exceeds the limit above.
MOST_SLICE_PORTS = MOST_ENDPOINTS + 1
#: Maximum of endpoints read from one slice; the API server allows 1000.
MOST_IN_SLICE = 10_000

NO_LISTS = Lists((), (), (), False)


class Topology(NamedTuple):
    """The name of this Node, and the zone of its label ("" if it has none)."""

    node: str
    zone: str


def service_of(endpoint_slice: objects.EndpointSlice) -> str | None:
    """Name of the Service of a slice; None for a slice that is not used."""
    labels = endpoint_slice.metadata.labels
    if labels is None or HEADLESS_LABEL in labels:
        return None
    return labels.get(SERVICE_NAME_LABEL) or None


def view_slice(endpoint_slice: objects.EndpointSlice, node_name: str) -> SliceView | None:
    """Read a slice, without unusable endpoints. None if its addressType is not an IP family."""
    family = _FAMILIES.get(endpoint_slice.address_type or "")
    if family is None:
        return None
    ports = []
    for port in endpoint_slice.ports or ():
        protocol = Protocol.__members__.get(port.protocol or "TCP")
        if port.name is None or not port.port or not 0 < port.port <= 65535 or protocol is None:
            continue
        ports.append((port.name, protocol, port.port))

    size = _ADDRESS[family].size
    addresses = []
    flags = bytearray()
    hints = []
    every = list(pods.unpacked(endpoint_slice.pods))
    names = []
    for i, endpoint in enumerate((endpoint_slice.endpoints or ())[:MOST_IN_SLICE]):
        if not endpoint.addresses:
            continue
        address = parse_address(endpoint.addresses[0])
        if address is None or len(address) != size or unusable_reason(address) is not None:
            continue
        addresses.append(address)
        flags.append(_flags(endpoint, node_name))
        if every:
            names.append(every[i])
        hints.append(NO_HINTS if endpoint.hints is None else _hints(endpoint.hints))
    kept = tuple(hints) if any(each is not NO_HINTS for each in hints) else ()
    named = endpoint_slice.pods if len(names) == len(every) else pods.packed(names)
    return SliceView(family, _port_numbers(tuple(ports)), b"".join(addresses), bytes(flags), kept, named)


def _flags(endpoint: objects.Endpoint, node_name: str) -> int:
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
    return flags


def _hints(hints: objects.EndpointHints) -> Hints:
    zones, nodes = (tuple(hint.name for hint in each or ()) for each in (hints.for_zones, hints.for_nodes))
    return _shared_hints(zones, nodes) if zones or nodes else NO_HINTS


# There are few different lists of ports and few zones: each is stored only once.


class _PortNumbers(dict[tuple[str, Protocol], tuple[int, ...]]):
    """A dictionary that can have weak references."""

    __slots__ = ("__weakref__",)


#: Only of slices in use: a slice may have 20 000 ports, which take 6 MB, and other ones with every update.
_known_ports: WeakValueDictionary[tuple[tuple[str, Protocol, int], ...], _PortNumbers] = WeakValueDictionary()


def _port_numbers(ports: tuple[tuple[str, Protocol, int], ...]) -> PortNumbers:
    known = _known_ports.get(ports)
    if known is None:
        numbers: dict[tuple[str, Protocol], list[int]] = {}
        for name, protocol, number in ports:
            numbers.setdefault((name, protocol), []).append(number)
        known = _known_ports[ports] = _PortNumbers((port, tuple(found)) for port, found in numbers.items())
    return known


@lru_cache(maxsize=1024)
def _shared_hints(zones: tuple[str, ...], nodes: tuple[str, ...]) -> Hints:
    return Hints(frozenset(zones) or None, frozenset(nodes) or None)


class SliceEndpoint(NamedTuple):
    """One endpoint of a service port, with flags and hints of its slice."""

    endpoint: Endpoint
    flags: int
    hints: Hints


# Size of a cache for Services with several slices: if one slice changes, the others are not read again. A slice of the
# EndpointSlice controller has up to 100 endpoints, and an endpoint takes about 200 bytes.
_KEPT_SLICES = 64


@lru_cache(maxsize=_KEPT_SLICES)
def _entries(
    family: IPFamily, number: int, addresses: bytes, flags: bytes, hints: tuple[Hints, ...]
) -> dict[str, SliceEndpoint] | None:
    """The endpoints of a slice for one port number, by the text ``ip:port``, sorted. None if a text occurs twice."""
    view = SliceView(family, {}, addresses, flags, hints)
    found = {
        format_address_port(address, number): SliceEndpoint(Endpoint(address, number, flag & LOCAL != 0), flag, hint)
        for address, flag, hint in view.members()
    }
    return {text: found[text] for text in sorted(found)} if len(found) == len(flags) else None


def by_port(
    views: Iterable[SliceView], ports: Collection[ServicePortName]
) -> Mapping[tuple[IPFamily, str, Protocol], list[SliceView]]:
    """The slices with endpoints of each of these service ports of one Service, in their order; others have no entry.

    A Service may have a thousand ports and slices: this looks up each port of a slice once, not each slice for each
    port, and only the first slices with MOST_SLICE_PORTS ports.
    """
    wanted = {(port.port, port.protocol) for port in ports}
    found: dict[tuple[IPFamily, str, Protocol], list[SliceView]] = {}
    left = dict.fromkeys(IPFamily, MOST_SLICE_PORTS)
    for view in views:
        if view.flags and left[view.family] > 0:
            few, many = (view.ports, wanted) if len(view.ports) < len(wanted) else (wanted, view.ports)
            named = [port for port in few if port in many]
            for port in named:
                found.setdefault((view.family, *port), []).append(view)
            left[view.family] -= len(named)
    return found


def count(views: Iterable[SliceView], port: tuple[str, Protocol]) -> int:
    """The number of endpoints of one service port in these slices; duplicates count twice."""
    return sum(len(view.flags) * len(view.ports.get(port, ())) for view in views)


def entries(protocol: Protocol) -> int:
    """The number of map entries of an endpoint: UDP endpoints are also looked up by Service."""
    return 2 if protocol is Protocol.UDP else 1


def merge(views: Sequence[SliceView], port: tuple[str, Protocol], most: int = MOST_ENDPOINTS) -> list[SliceEndpoint]:
    """The endpoints of one service port, without duplicates, in the order of the text ``ip:port``.

    At most ``most`` are returned, from the first slices; the others are not read.
    """
    if count(views, port) <= most:
        return _merge(views, port)
    kept: list[SliceView] = []
    for view in views:
        if most <= 0:
            break
        each = len(view.ports.get(port, ()))
        if not each:
            continue
        members = min(len(view.flags), most // each)
        kept.append(view.first(members))
        most -= members * each
    return _merge(kept, port)


def _merge(views: Sequence[SliceView], port: tuple[str, Protocol]) -> list[SliceEndpoint]:
    """All endpoints of one service port."""
    numbers = [(view, number) for view in views for number in view.ports.get(port, ())]
    if len(numbers) > 1:
        # Faster for the usual case, in which no endpoint is in two slices.
        found: dict[str, SliceEndpoint] = {}
        for view, number in numbers:
            entries = _entries(view.family, number, view.addresses, view.flags, view.hints)
            if entries is None:
                break
            found.update(entries)
        else:
            if len(found) == sum(len(view.flags) for view, _ in numbers):
                return [found[text] for text in sorted(found)]
    return _merge_duplicates(numbers)


def _merge_duplicates(numbers: Iterable[tuple[SliceView, int]]) -> list[SliceEndpoint]:
    found: dict[str, SliceEndpoint] = {}
    for view, number in numbers:
        for address, flags, hints in view.members():
            text = format_address_port(address, number)
            # While an endpoint moves between slices, an old terminating copy must not hide a ready one. Of two
            # terminating copies kube-proxy keeps the first, although service-semantics §3 names the later one.
            if flags & TERMINATING and text in found:
                continue
            found[text] = SliceEndpoint(Endpoint(address, number, flags & LOCAL != 0), flags, hints)
    return [found[text] for text in sorted(found)]


def choose_lists(
    known: Sequence[SliceEndpoint], topology: Topology, *, cluster: bool, local: bool, serving: bool
) -> Lists:
    """The lists of §3. ``cluster``, ``local`` and ``serving`` say which of them are needed."""
    if not known:
        return NO_LISTS
    cluster_list: list[Endpoint] = []
    local_list: list[Endpoint] = []
    if cluster:
        ready = [entry for entry in known if entry.flags & READY]
        chosen = _nearest(ready, topology) or [entry for entry in known if entry.flags & FALLBACK == FALLBACK]
        cluster_list = [entry.endpoint for entry in chosen]
    if local:
        here = [entry for entry in known if entry.flags & LOCAL]
        local_list = [entry.endpoint for entry in here if entry.flags & READY] or [
            entry.endpoint for entry in here if entry.flags & FALLBACK == FALLBACK
        ]
    any_endpoints = bool(cluster_list) or (
        local and any(entry.flags & READY or entry.flags & FALLBACK == FALLBACK for entry in known)
    )
    serving_list = [entry.endpoint for entry in known if entry.flags & SERVING] if serving else ()
    return Lists(tuple(cluster_list), tuple(local_list), tuple(serving_list), any_endpoints)


def _nearest(ready: list[SliceEndpoint], topology: Topology) -> list[SliceEndpoint]:
    """Filter ready endpoints by node hints, else by zone hints; without usable hints, return all (§3)."""
    if not ready or (ready[0].hints.zones is None and ready[0].hints.nodes is None):
        return ready  # the usual case: hints are used only if every endpoint has some
    if all(entry.hints.nodes for entry in ready):
        near = [entry for entry in ready if topology.node in (entry.hints.nodes or ())]
        if near:
            return near
    if topology.zone and all(entry.hints.zones for entry in ready):
        near = [entry for entry in ready if topology.zone in (entry.hints.zones or ())]
        if near:
            return near
    return ready


def cluster_note(known: Sequence[SliceEndpoint], topology: Topology) -> str:
    """Why the cluster list of :func:`choose_lists` is not exactly the ready endpoints, as text; "" if it is."""
    ready = [entry for entry in known if entry.flags & READY]
    if not ready:
        return _fallback_note(known, "on any node")
    if not any(entry.hints.zones or entry.hints.nodes for entry in ready):
        return ""
    near = _nearest(ready, topology)
    if near is not ready:
        # If node hints are usable, every endpoint that they select has this node.
        by_node = all(entry.hints.nodes for entry in ready) and topology.node in (near[0].hints.nodes or ())
        return f"topology hints: only endpoints for {'this node' if by_node else f'zone {topology.zone}'}"
    if all(entry.hints.zones for entry in ready):
        zone = f"no endpoint is for zone {topology.zone}" if topology.zone else "the Node has no zone label"
        return f"topology hints are ignored: {zone}"
    if all(entry.hints.nodes for entry in ready):
        return "topology hints are ignored: no endpoint is for this node, and not all are for a zone"
    bare = next((entry.endpoint for entry in ready if not (entry.hints.zones or entry.hints.nodes)), None)
    if bare is None:
        return "topology hints are ignored: not all are for zones, nor all for nodes"
    return f"topology hints are ignored: {format_address_port(bare.address, bare.port)} has none"


def local_note(known: Sequence[SliceEndpoint]) -> str:
    """The same for the local list."""
    here = [entry for entry in known if entry.flags & LOCAL]
    return "" if any(entry.flags & READY for entry in here) else _fallback_note(here, "on this node")


def _fallback_note(known: Iterable[SliceEndpoint], where: str) -> str:
    if not any(entry.flags & FALLBACK == FALLBACK for entry in known):
        return ""
    return f"no endpoint {where} is ready: those that terminate, but still serve, are used"
