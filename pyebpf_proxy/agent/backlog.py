# SPDX-License-Identifier: Apache-2.0
"""The changes that are not planned yet, and how much of them one sync plans.

A tenant may change all Services of a namespace again and again: the most expensive ones take seconds, to plan and to
write. So a sync plans changes of one namespace only for a limited time, and up to a number of map entries. The next
sync plans the rest, and what others have changed meanwhile. One object alone may cost more. Then the namespace waits
for as long as it took, and others' changes come first.

A Service's change that may free an address does not wait as soon as the cluster has given this address to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from pyebpf_proxy.kube.objects import EndpointSlice, Service
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.services.model import ServicePort, ServicePortName

#: How long a sync plans changes of one namespace (seconds).
NAMESPACE_SECONDS = 0.2
#: How much a sync writes for one namespace (:func:`weight`), about: 0.15 s.
NAMESPACE_WEIGHT = 2000
#: A namespace waits after a sync in which it took longer (seconds).
LONG_SECONDS = 0.3
#: How many changes are planned between two looks at the clock: at first, then twice as many each time, and at most. It
#: takes less time to plan all changed slices of a Service together. Fewer if they have this weight (:func:`_expected`).
FIRST, MOST, MOST_WEIGHT = 1, 8, 256
#: An endpoint, frontend or source range costs this part of a service port.
_PART = 1 / 32


class Backlog:
    """Of each object the last change. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        #: Of what the present sync has planned, by namespace, and the namespace that is being planned.
        self._weights: dict[str, float] = {}
        self._current = ""
        #: Until when a namespace waits.
        self._waits: dict[str, float] = {}
        #: Services whose changes the present sync plans in any case.
        self._urgent: set[tuple[str, str]] = set()
        #: By namespace, then by kind and name. Of a thousand updates of one object, one is planned.
        self._of: dict[str, dict[tuple[str, str], Change]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def put(self, change: Change) -> None:
        """Add a change, or replace the earlier one of the same object."""
        self._of.setdefault(change.namespace, {})[change.kind, change.name] = change

    def all(self) -> list[Change]:
        """Take everything."""
        every, self._of = self._of, {}
        return [change for changes in every.values() for change in changes.values()]

    def portions(self) -> Iterator[list[Change]]:
        """Take what one sync plans. Each portion must be planned before the next one is taken (:meth:`planned`)."""
        self._weights = {}
        # Nodes and ServiceCIDRs have no namespace, and are no tenant's.
        if cluster := self._of.pop("", None):
            yield list(cluster.values())
        now = self._clock()
        for namespace in [each for each in self._of if self._waits.get(each, now) <= now]:
            changes = list(self._of.pop(namespace, {}).values())
            begin, start, size = self._clock(), 0, FIRST
            self._start(namespace)
            while start < len(changes) and self._has_room(begin):
                end = self._end(changes, start, size)
                yield changes[start:end]
                start, size = end, min(2 * size, MOST)
            for change in changes[start:]:
                self.put(change)
            yield from self._hurried()

    def hurry(self, services: Iterable[tuple[str, str]]) -> None:
        """Plan the changes of these Services in the present sync, if there are any. While portions are taken."""
        self._urgent.update(services)

    def planned(self, delta: Mapping[ServicePortName, ServicePort | None]) -> None:
        """Call it with the changed service ports of each portion."""
        if self._current in self._weights:
            self._weights[self._current] += weight(delta)

    def took(self, seconds: float) -> None:
        """Call it at the end of a sync, with its duration."""
        now, total = self._clock(), sum(self._weights.values())
        self._waits = {namespace: until for namespace, until in self._waits.items() if until > now}
        for namespace, part in self._weights.items():
            share = seconds * part / total if total else 0.0
            if share > LONG_SECONDS:
                self._waits[namespace] = now + share

    def due(self, earliest: float) -> float:
        """When the next sync has something to plan: ``earliest`` or later."""
        return max(earliest, min((self._waits.get(namespace, earliest) for namespace in self._of), default=earliest))

    def _start(self, namespace: str) -> None:
        self._current = namespace
        self._weights.setdefault(namespace, 0.0)

    def _hurried(self) -> Iterator[list[Change]]:
        """What :meth:`hurry` demands; the plan of one may demand another."""
        while self._urgent:
            namespace, name = self._urgent.pop()
            changes = self._of.get(namespace, {})
            change = changes.pop(("Service", name), None)
            if change is None:
                continue
            if not changes:
                del self._of[namespace]
            self._start(namespace)
            yield [change]

    def _has_room(self, begin: float) -> bool:
        return self._weights[self._current] < NAMESPACE_WEIGHT and self._clock() - begin < NAMESPACE_SECONDS

    @staticmethod
    def _end(changes: list[Change], start: int, size: int) -> int:
        """Where the portion ends that begins at ``start`` and has ``size`` changes or fewer."""
        expected, end = 0.0, start
        while end < len(changes) and end - start < size and expected < MOST_WEIGHT:
            expected += _expected(changes[end])
            end += 1
        return end

    def slices(self) -> set[tuple[str, str]]:
        """Namespace and name of every EndpointSlice that has changed."""
        return {
            (namespace, name)
            for namespace, changes in self._of.items()
            for kind, name in changes
            if kind == "EndpointSlice"
        }


def weight(delta: Mapping[ServicePortName, ServicePort | None]) -> float:
    """How much it costs to write these changes; 1: a service port without endpoints."""
    lists = sum(
        len(port.frontends) + len(port.cluster) + len(port.local) + len(port.source_ranges)
        for port in delta.values()
        if port is not None
    )
    return len(delta) + lists * _PART


def _expected(change: Change) -> float:
    """What :func:`weight` may become by this change, as far as the object tells. Of a deletion nothing is known."""
    if isinstance(change.object, Service):
        return len(change.object.spec.ports or ())
    if isinstance(change.object, EndpointSlice):
        return len(change.object.ports or ()) * (1 + len(change.object.endpoints or ()) * _PART)
    return MOST_WEIGHT / MOST
