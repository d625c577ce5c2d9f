# SPDX-License-Identifier: Apache-2.0
"""A service port in the maps, one change of it, and what changes leave behind. Only data."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from pyebpf_proxy.services.model import Endpoint, IPFamily, ServicePort, ServicePortName


class MapFullError(Exception):
    """A change does not fit. The text names what is full; nothing was changed."""


class Problem(NamedTuple):
    """A service port that is not in the maps as wanted. Its last good state is."""

    name: ServicePortName
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


_NONE: Mapping[Endpoint, int] = {}


class Record:
    """A service port that is in the maps. ``plan`` has only the frontends that it really owns."""

    __slots__ = ("_numbers", "config_id", "dirty", "first_slot", "id", "left", "length", "plan")

    def __init__(self, number: int, plan: ServicePort) -> None:
        self.id = number
        self.plan = plan
        self.config_id = 0
        self.first_slot = 0
        self.length = 0
        self._numbers = array("I")
        #: Endpoints that have left the lists and still serve (UDP), with their ids: sockets keep them.
        self.left: Mapping[Endpoint, int] = _NONE
        #: Adopted from inconsistent maps: rewritten with the next change.
        self.dirty = False

    @property
    def backends(self) -> dict[Endpoint, int]:
        """The id of every endpoint in the plan's lists or in ``left``. Built on each access, see ``set_backends``."""
        return dict(self.numbered())

    def numbered(self) -> Iterator[tuple[Endpoint, int]]:
        """Every endpoint in the plan's lists or in ``left``, once, with its id."""
        return chain(zip(self._endpoints(), self._numbers, strict=True), self.left.items())

    def set_backends(self, numbers: Mapping[Endpoint, int]) -> None:
        """``numbers`` has the id of every endpoint in the plan's lists.

        Only the ids are kept, in the order of the lists: a hundred thousand dictionary entries would take 10 MB.
        """
        self._numbers = array("I", map(numbers.__getitem__, self._endpoints()))

    def keep_backends(self, other: Record) -> None:
        """The same lists as ``other``, with the same ids."""
        self._numbers = other._numbers
        self.left = other.left

    def _endpoints(self) -> dict[Endpoint, None]:
        return dict.fromkeys((*self.plan.cluster, *self.plan.local))


def still_serving(
    left: Mapping[Endpoint, int], wanted: ServicePort, serving: frozenset[tuple[bytes, int]]
) -> Mapping[Endpoint, int]:
    """Of these endpoints, which are in no list, those that serve: sockets may keep them (service-semantics §10)."""
    if not left or not serving:
        return {}
    listed = {(e.address, e.port) for e in (*wanted.cluster, *wanted.local)}
    return {e: n for e, n in left.items() if (e.address, e.port) in serving and (e.address, e.port) not in listed}


def slot_order(endpoint: Endpoint) -> tuple[bytes, int]:
    """The order of endpoints in each list of map ``slots``, for the programs' binary search (bpf/slots.h)."""
    return endpoint.address, endpoint.port


@dataclass
class Garbage:
    """Entries without references; they may be deleted when no program can be reading them."""

    configs: list[int] = field(default_factory=list)
    services: list[int] = field(default_factory=list)
    slots: list[tuple[int, int]] = field(default_factory=list)
    #: Service ports whose affinity was switched off, to delete their clients.
    affinities: list[int] = field(default_factory=list)
    # By family: concatenated keys; backends with the key of their service-0 endpoint entry.
    source_ranges: dict[IPFamily, list[bytes]] = field(default_factory=lambda: {f: [] for f in IPFamily})
    backends: dict[IPFamily, list[tuple[int, bytes]]] = field(default_factory=lambda: {f: [] for f in IPFamily})

    def __bool__(self) -> bool:
        lists = [self.configs, self.services, self.slots, self.affinities]
        lists += [*self.source_ranges.values(), *self.backends.values()]
        return any(lists)

    def absorb(self, other: Garbage) -> None:
        """Add the contents of ``other``."""
        self.configs += other.configs
        self.services += other.services
        self.slots += other.slots
        self.affinities += other.affinities
        for family in IPFamily:
            self.source_ranges[family] += other.source_ranges[family]
            self.backends[family] += other.backends[family]


class Change:
    """The change of one service port from its old to its new state."""

    __slots__ = (
        "claims",
        "config_changed",
        "conflicts",
        "failed",
        "fresh",
        "frontend_deletes",
        "frontend_puts",
        "gone",
        "name",
        "new",
        "old",
        "puts",
        "serving_deletes",
        "serving_new",
        "slots",
        "targets",
    )

    def __init__(self, name: ServicePortName, old: Record | None, new: Record | None) -> None:
        self.name = name
        self.old = old
        self.new = new
        self.config_changed = False
        #: By map: keys and values to write before the flip.
        self.puts: dict[str, tuple[bytes, bytes]] = {}
        self.slots: list[int] = []
        self.frontend_puts: list[tuple[bytes, bytes]] = []
        self.frontend_deletes: list[bytes] = []
        self.claims: list[tuple[bytes, int | None]] = []
        #: Frontends that another service port owns, as text.
        self.conflicts: list[str] = []
        self.serving_new: list[bytes] = []
        self.serving_deletes: list[bytes] = []
        self.fresh: list[tuple[int, bytes]] = []
        self.gone: list[tuple[int, bytes]] = []
        #: Backends that the nft table must have before a packet can carry these ids.
        self.targets: dict[int, tuple[bytes, int]] = {}
        self.failed: str | None = None

    @property
    def unbinds(self) -> bool:
        """Whether the change ends session affinity."""
        old, new = self.old, self.new
        return old is not None and new is not None and old.plan.affinity_seconds > 0 == new.plan.affinity_seconds
