# SPDX-License-Identifier: Apache-2.0
"""The changes that are not planned yet, and how much of them one sync plans.

A tenant may change all Services of a namespace again and again: the most expensive ones take seconds. So a sync plans
changes of one namespace only for a limited time. The rest of them is planned by the next sync, which also has what
others have changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pyebpf_proxy.kube.source import Change

#: How long a sync plans changes of one namespace (seconds).
NAMESPACE_SECONDS = 0.2
#: How many changes are planned between two looks at the clock: at first, then twice as many each time, and at most. It
#: takes less time to plan all changed slices of a Service together.
FIRST, MOST = 2, 8


class Backlog:
    """Of each object the last change. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
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
        """Take what one sync plans. Each portion must be planned before the next one is taken."""
        # Nodes and ServiceCIDRs have no namespace, and are no tenant's.
        if cluster := self._of.pop("", None):
            yield list(cluster.values())
        for namespace in list(self._of):
            changes = list(self._of.pop(namespace).values())
            begin, start, size = self._clock(), 0, FIRST
            while start < len(changes) and self._clock() - begin < NAMESPACE_SECONDS:
                yield changes[start : start + size]
                start, size = start + size, min(2 * size, MOST)
            for change in changes[start:]:
                self.put(change)

    def slices(self) -> set[tuple[str, str]]:
        """Namespace and name of every EndpointSlice that has changed."""
        return {
            (namespace, name)
            for namespace, changes in self._of.items()
            for kind, name in changes
            if kind == "EndpointSlice"
        }
