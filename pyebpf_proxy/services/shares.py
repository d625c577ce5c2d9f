# SPDX-License-Identifier: Apache-2.0
"""Limits of a namespace, for all its Services together, so that no namespace fills a map (docs/objects.md).

An eighth of every map is reserved for the other namespaces. A Service that does not fit is counted, but not served.
Older Services have priority, and ClusterIPs have priority over other addresses. The result depends only on the
Services, not on the order of their arrival. In a namespace within its limits, a change costs a few additions.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import msgspec

from pyebpf_proxy.services.model import IPFamily

Key = tuple[str, str]
#: Returns the sort key for the key of a Service: the smallest comes first.
Age = Callable[[Key], tuple[str, Key]]
#: A number for each family, IPv4 first.
Pair = tuple[int, int]

#: One part in this many of a map is reserved for the other namespaces.
RESERVED = 8


def share(entries: int) -> int:
    """The part of a map that one namespace may use."""
    return entries - entries // RESERVED


def frontend_share(entries: int) -> int:
    """The part of a map of frontends that one namespace may use.

    The last part of the map is only for ClusterIPs (``maps/mirror.py``). The part before it is reserved here: without
    it, one namespace could leave no room for the NodePorts and load balancers' addresses of all others.
    """
    return share(entries) - entries // RESERVED


class Limits(msgspec.Struct, frozen=True):
    """The limits of a namespace: service ports for both families together, the others for each family.

    ``frontends``: pairs of address and port. ``ranges``: loadBalancerSourceRanges, counted for each service port.
    ``endpoints``: counted for each service port; UDP endpoints count twice, because they have two map entries.
    """

    ports: int = share(65536)
    frontends: Pair = (frontend_share(65536), frontend_share(65536))
    ranges: Pair = (share(65536), share(65536))
    endpoints: Pair = (share(131072), share(131072))

    @classmethod
    def of_maps(cls, sizes: Mapping[str, int]) -> Limits:
        """The limits for maps of these sizes."""

        def both(*names: str) -> Pair:
            four, six = (min(share(sizes[f"{name}{family.value}"]) for name in names) for family in IPFamily)
            return four, six

        return cls(
            share(min(sizes["services"], sizes["service_names"])),
            (frontend_share(sizes["frontends4"]), frontend_share(sizes["frontends6"])),
            both("source_ranges"),
            both("backends", "endpoints"),
        )


class Denied(enum.Flag):
    """The parts of a Service that are not served because older Services of its namespace have used up the limit."""

    NOTHING = 0
    PORTS = enum.auto()
    EXTERNAL4 = enum.auto()
    EXTERNAL6 = enum.auto()
    RANGES4 = enum.auto()
    RANGES6 = enum.auto()

    def external(self, family: IPFamily) -> bool:
        """Whether only the ClusterIP of the family is served."""
        return bool(self & _EXTERNAL[family])

    def ranges(self, family: IPFamily) -> bool:
        """Whether no VIP of the family is served, because its source ranges could not be enforced."""
        return bool(self & _RANGES[family])


_EXTERNAL = {IPFamily.IPV4: Denied.EXTERNAL4, IPFamily.IPV6: Denied.EXTERNAL6}
_RANGES = {IPFamily.IPV4: Denied.RANGES4, IPFamily.IPV6: Denied.RANGES6}


class Need(NamedTuple):
    """Upper bounds of what a Service needs: service ports, frontends besides ClusterIPs, ranges by service port."""

    ports: Pair
    external: Pair
    ranges: Pair


NO_NEED = Need((0, 0), (0, 0), (0, 0))


class Shares:
    """The needs of all Services, and which of them are not met."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._needs: dict[str, dict[Key, Need]] = {}
        self._totals: dict[str, list[int]] = {}
        self._denied: dict[str, dict[Key, Denied]] = {}
        self._touched: set[str] = set()

    def want(self, key: Key, need: Need | None) -> None:
        """Set the needs of a Service; None: it is deleted, or needs nothing."""
        namespace = key[0]
        needs = self._needs.setdefault(namespace, {})
        totals = self._totals.setdefault(namespace, [0] * 6)
        before = needs.pop(key, NO_NEED)
        if need is not None:
            needs[key] = need
        now = need or NO_NEED
        for i, (old, new) in enumerate(zip(_flat(before), _flat(now), strict=True)):
            totals[i] += new - old
        if not needs:
            del self._needs[namespace], self._totals[namespace]
        # This applies even to unchanged needs: it may be a new Service of the same name, with another age.
        if namespace in self._denied or self._is_over(totals):
            self._touched.add(namespace)

    def denied(self, key: Key) -> Denied:
        """The parts of a Service that are not served."""
        return self._denied.get(key[0], {}).get(key, Denied.NOTHING)

    def why(self, key: Key) -> Iterator[str]:
        """The same as messages of the form ``field: what``."""
        denied, limits = self.denied(key), self._limits
        older = f"older Services of namespace {key[0]} have the"
        if denied & Denied.PORTS:
            yield f"spec.ports: {older} {limits.ports} service ports that one namespace may have: it is not served"
        for i, family in enumerate(IPFamily):
            which = f"IPv{family.value}"
            if denied.external(family):
                most = limits.frontends[i]
                what = f"{most} {which} frontends that one namespace may have: only its ClusterIP is served"
                yield f"spec.externalIPs: {older} {what}"
            if denied.ranges(family):
                most = limits.ranges[i]
                what = f"{most} {which} ranges that one namespace may have"
                rest = "its load balancer's addresses are not served"
                yield f"spec.loadBalancerSourceRanges: {older} {what}: {rest}"

    def settle(self, age: Age) -> set[Key]:
        """Recompute the namespaces that changed. Returns the Services whose share changed."""
        changed: set[Key] = set()
        for namespace in self._touched:
            before = self._denied.pop(namespace, {})
            totals = self._totals.get(namespace)
            now = self._give(self._needs[namespace], age) if totals is not None and self._is_over(totals) else {}
            if now:
                self._denied[namespace] = now
            changed |= {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
        self._touched.clear()
        return changed

    def _is_over(self, totals: list[int]) -> bool:
        limits = self._limits
        return totals[0] + totals[1] > limits.ports or any(
            totals[i] + totals[2 + i] > limits.frontends[i] or totals[4 + i] > limits.ranges[i] for i in (0, 1)
        )

    def _give(self, needs: Mapping[Key, Need], age: Age) -> dict[Key, Denied]:
        denied: dict[Key, Denied] = {}
        ports, frontends, ranges = self._limits.ports, list(self._limits.frontends), list(self._limits.ranges)
        served = []
        for key in sorted(needs, key=age):
            four, six = needs[key].ports
            if four + six > ports or four > frontends[0] or six > frontends[1]:
                denied[key] = Denied.PORTS
                continue
            served.append(key)
            ports -= four + six
            frontends[0] -= four
            frontends[1] -= six
        for key in served:
            less = Denied.NOTHING
            for i, family in enumerate(IPFamily):
                if needs[key].external[i] > frontends[i]:
                    less |= _EXTERNAL[family]
                    continue
                frontends[i] -= needs[key].external[i]
                if needs[key].ranges[i] > ranges[i]:
                    less |= _RANGES[family]
                    continue
                ranges[i] -= needs[key].ranges[i]
            if less:
                denied[key] = less
        return denied


def _flat(need: Need) -> tuple[int, ...]:
    return (*need.ports, *need.external, *need.ranges)


class EndpointShares:
    """Endpoints of one family: how many each Service has, and how many it may have."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: dict[str, dict[Key, int]] = {}
        self._totals: dict[str, int] = {}
        self._allowed: dict[str, dict[Key, int]] = {}
        self._touched: set[str] = set()

    @property
    def most(self) -> int:
        """The limit of one namespace."""
        return self._most

    def want(self, key: Key, number: int) -> None:
        """Set the number of a Service's endpoints."""
        namespace = key[0]
        counts = self._counts.setdefault(namespace, {})
        before = counts.pop(key, 0)
        if number:
            counts[key] = number
        total = self._totals[namespace] = self._totals.get(namespace, 0) + number - before
        if not counts:
            del self._counts[namespace], self._totals[namespace]
        if namespace in self._allowed or total > self._most:
            self._touched.add(namespace)

    def allowed(self, key: Key) -> int | None:
        """How many endpoints of a Service are served; None: all."""
        return self._allowed.get(key[0], {}).get(key)

    def settle(self, age: Age) -> Collection[Key]:
        """Recompute the shares. Returns the Services whose share changed."""
        changed: set[Key] = set()
        for namespace in self._touched:
            before = self._allowed.pop(namespace, {})
            now: dict[Key, int] = {}
            left = self._most
            if self._totals.get(namespace, 0) > left:
                counts = self._counts[namespace]
                for key in sorted(counts, key=age):
                    if counts[key] > left:
                        now[key] = left
                    left -= min(left, counts[key])
            if now:
                self._allowed[namespace] = now
            changed |= {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
        self._touched.clear()
        return changed
