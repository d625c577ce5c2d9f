# SPDX-License-Identifier: Apache-2.0
"""Health check node ports, and how many local endpoints each reports (spec/service-semantics §11.1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from pyebpf_proxy.services.endpoints import LOCAL, MOST_ENDPOINTS, READY, TERMINATING, SliceView
from pyebpf_proxy.services.model import IPFamily, ServicePort

if TYPE_CHECKING:
    from pyebpf_proxy.kube import objects


class HealthCheckName(NamedTuple):
    """One listener: a Service in one of its families."""

    namespace: str
    name: str
    family: IPFamily


class HealthCheck(NamedTuple):
    """The port to listen on, the number of distinct addresses of local ready endpoints, and the Service's age."""

    port: int
    local: int
    created: str = ""


class Touched(NamedTuple):
    """A Service that may have changed. ``port``: :func:`health_check_port`; ``created``: its creationTimestamp."""

    key: tuple[str, str]
    port: int
    created: str
    ports: Sequence[ServicePort]
    slices: Mapping[str, SliceView]


class HealthChecks:
    """All health checks, updated incrementally. ``wanted`` is replaced when it changes, never modified."""

    def __init__(self) -> None:
        self.wanted: dict[HealthCheckName, HealthCheck] = {}

    def update(self, touched: Iterable[Touched]) -> None:
        """Update Services that may have changed."""
        changes: dict[HealthCheckName, HealthCheck | None] = {}
        for key, number, created, ports, slices in touched:
            families = {port.name.family for port in ports} if number else set()
            for family in IPFamily:
                name = HealthCheckName(*key, family)
                wanted = HealthCheck(number, _count(family, slices), created) if family in families else None
                if wanted != self.wanted.get(name):
                    changes[name] = wanted
        if changes:
            merged: dict[HealthCheckName, HealthCheck | None] = {**self.wanted, **changes}
            self.wanted = {name: check for name, check in merged.items() if check is not None}


def holders(wanted: Mapping[HealthCheckName, HealthCheck]) -> dict[tuple[IPFamily, int], HealthCheckName]:
    """By family and port, who listens there: the oldest Service, then the first by name, as for other addresses."""
    found: dict[tuple[IPFamily, int], HealthCheckName] = {}
    for name in sorted(wanted, key=lambda name: (wanted[name].created or "~", name)):
        found.setdefault((name.family, wanted[name].port), name)
    return found


def health_check_port(service: objects.Service) -> int:
    """The Service's health check node port; 0 if it does not use one, or one that is not a port."""
    if service.spec.type != "LoadBalancer" or service.spec.external_traffic_policy != "Local":
        return 0
    number = service.spec.health_check_node_port or 0
    return number if 0 < number <= 65535 else 0


def _count(family: IPFamily, slices: Mapping[str, SliceView]) -> int:
    # The caches of endpoints.py share equal ports. Of duplicates, the same one counts as for packets (§1.4).
    found: dict[int, dict[bytes, int]] = {}
    # A tenant may write a thousand slices with a thousand endpoints each: counting them all would take a second.
    left = MOST_ENDPOINTS
    for name in sorted(slices):
        view = slices[name]
        if view.family is not family or not view.ports:
            continue
        known = found.setdefault(id(view.ports), {})
        number, left = left, max(0, left - len(view.flags))
        for address, flags, _ in islice(view.members(), number):
            if not flags & TERMINATING or address not in known:
                known[address] = flags
    both = LOCAL | READY
    return len({address for known in found.values() for address, flags in known.items() if flags & both == both})
