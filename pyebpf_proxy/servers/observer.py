# SPDX-License-Identifier: Apache-2.0
"""Turns the reports of the sync loop into metrics and health (spec/metrics §3). No I/O; the clock is a parameter."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Protocol, cast

from pyebpf_proxy.kube.objects import EndpointSlice, Node, Service
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.servers.health import FAMILIES, Health, Moment
from pyebpf_proxy.servers.metrics import Metrics
from pyebpf_proxy.services.endpoints import service_of
from pyebpf_proxy.services.locality import NoLocal
from pyebpf_proxy.services.model import IPFamily, ServicePort, ServicePortName
from pyebpf_proxy.services.nodes import is_eligible

#: At most this many Services over a limit have their own sample.
MOST_OVER_LIMIT = 100
#: Seconds for comparisons of one namespace's Services with those in use, when changes are delivered. The loop waits.
COMPARE_SECONDS = 0.05


class SyncedObjects(Protocol):
    """The interface of ``services.planner.Planner``: the state as of the last sync."""

    def differs(self, namespace: str, name: str, service: Service | None) -> bool:
        """Whether a Service differs from the one in use."""

    def service_of_slice(self, namespace: str, name: str) -> tuple[str, str, str] | None:
        """Namespace and name of the Service of a slice in use, and the slice's addressType."""

    def counts(self) -> Mapping[str, int]:
        """The number of objects in use, by kind."""

    @property
    def over(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """Services over a limit, and what is not served."""

    @property
    def shared(self) -> int:
        """The number of service addresses that are also a Node's."""


class Observer:
    """The ``Observer`` of :class:`pyebpf_proxy.agent.proxy.Proxy`; all methods are called in the syncing thread."""

    def __init__(
        self,
        metrics: Metrics,
        health: Health,
        known: SyncedObjects,
        node_name: str,
        clock: Callable[[], Moment] = Moment.now,
        applied: Callable[[], None] = lambda: None,
        period: Callable[[], None] = lambda: None,
    ) -> None:
        """``applied`` is called after every successful sync, ``period`` every syncPeriod."""
        self._metrics = metrics
        self._health = health
        # As in kube-proxy, a node without IPv6 has one proxy: nothing is counted for the other family.
        self._families = {family: FAMILIES[family] for family in health.families}
        self._tracked = frozenset(self._families.values())
        self._known = known
        self._node_name = node_name
        self._clock = clock
        self._applied = applied
        self._period = period
        self._start = clock().wall
        self._no_local = NoLocal()
        self._pending_services: set[tuple[str, str]] = set()
        # By service and family, the trigger times (ns) of changes that no sync has applied yet; then that by slice.
        self._triggers: dict[tuple[str, str, str], list[int]] = {}
        self._service_of_new: dict[tuple[str, str], tuple[str, str, str]] = {}
        self._eligible = False

    def node_eligible(self) -> bool:
        """Whether this Node may get traffic (spec/service-semantics §11.2). Safe in any thread."""
        return self._eligible

    def changed(self, changes: Sequence[Change], complete: bool = True) -> None:
        """The source has delivered changes. A Service counts for each family, a slice only for its own."""
        metrics = self._metrics
        metrics.source_delivered.set(value=self._clock().wall / 1e9)
        metrics.source_complete.set(value=float(complete or metrics.source_complete.get() == 1))
        services: dict[tuple[str, str], Service | None] = {}
        for kind, namespace, name, value in changes:
            key = (namespace, name)
            if kind == "Service":
                metrics.service_total.add(value=len(self._families))
                services[key] = cast("Service | None", value)
            elif kind == "EndpointSlice":
                self._slice(key, cast("EndpointSlice | None", value))
            elif kind == "Node" and name == self._node_name:
                self._eligible = is_eligible(cast("Node | None", value))
        # A Service of 1024 ports takes 10 ms: of its updates that came together, only the last one is compared.
        spent: defaultdict[str, float] = defaultdict(float)
        for key, service in services.items():
            begin = self._clock().monotonic
            if spent[key[0]] < COMPARE_SECONDS:
                self._service(key, service)
            else:
                self._pending_services.add(key)
            spent[key[0]] += self._clock().monotonic - begin
        metrics.service_pending.set(value=len(self._pending_services))

    def unchanged(self, objects: Sequence[Change]) -> None:
        """Events after which these objects are as before. As in kube-proxy, they count, but are never pending."""
        for change in objects:
            if isinstance(change.object, Service):
                self._metrics.service_total.add(value=len(self._families))
            elif isinstance(change.object, EndpointSlice) and self._is_tracked(change.object):
                self._metrics.endpoint_total.add()

    def queued(self) -> None:
        """A sync has been requested."""
        now = self._clock()
        for family, text in self._families.items():
            self._metrics.last_queued.set(text, value=now.wall / 1e9)
            self._health.queued(family, now)

    def planned(self, delta: Mapping[ServicePortName, ServicePort | None]) -> None:
        """A sync has picked up the changes; ``delta`` is what it has to write."""
        self._pending_services.clear()
        self._metrics.service_pending.set(value=0)
        self._metrics.endpoint_pending.set(value=0)
        self._metrics.synced_ports.add(value=len(delta))
        for kind, count in self._known.counts().items():
            self._metrics.objects.set(kind, value=count)
        self._metrics.overlaps.set(value=self._known.shared)
        over = islice(self._known.over.items(), MOST_OVER_LIMIT)
        self._metrics.over_limit.replace({(*key,): float(len(what)) for key, what in over})
        self._no_local.update(delta)

    def synced(
        self,
        seconds: float,
        ok: bool,
        full: bool,
        problems: int = 0,
        waiting: Collection[tuple[str, str]] = (),
    ) -> None:
        """A sync of both families has ended after ``seconds``. ``problems``: service ports and addresses not served.

        ``waiting``: namespace and name of changed slices that the next sync applies.
        """
        now = self._clock()
        metrics = self._metrics
        for family, text in self._families.items():
            metrics.duration.observe(text, value=seconds)
            (metrics.full_duration if full else metrics.partial_duration).observe(text, value=seconds)
            if ok:
                metrics.last_synced.set(text, value=now.wall / 1e9)
                self._health.updated(family, now)
                for policy, count in self._no_local.counts(family).items():
                    metrics.no_local.set(policy, text, value=count)
        if not ok:
            metrics.failed_syncs.add()
            return
        metrics.problems.set(value=problems)
        self._service_of_new = {key: self._service_of_new[key] for key in waiting if key in self._service_of_new}
        later = set(self._service_of_new.values())
        for service, times in self._triggers.items():
            for trigger in times if service not in later else ():
                metrics.programming.observe(service[2], value=(now.wall - trigger) / 1e9)
        self._triggers = {service: times for service, times in self._triggers.items() if service in later}
        self._applied()

    def period_passed(self) -> None:
        """A syncPeriod has passed, perhaps without a sync."""
        self._period()

    def reconciled(self, family: IPFamily, seconds: float, deleted: int) -> None:
        """The conntrack clean-up of a family has ended. ``deleted``: the number of deleted flows."""
        if family not in self._families:
            return
        self._metrics.reconciled.observe(FAMILIES[family], value=seconds)
        self._metrics.reconciler_deleted.add(FAMILIES[family], value=deleted)

    # ---- changes -----------------------------------------------------------------------------------------------

    def _service(self, key: tuple[str, str], service: Service | None) -> None:
        """Count a changed Service as pending, unless it is again as at the last sync."""
        if self._known.differs(*key, service):
            self._pending_services.add(key)
        else:
            self._pending_services.discard(key)

    def _slice(self, key: tuple[str, str], endpoint_slice: EndpointSlice | None) -> None:
        if endpoint_slice is None:
            service = self._service_of_new.pop(key, None) or self._known.service_of_slice(*key)
            if service is None or service[2] not in self._tracked:
                return
            # The time of a deletion is unknown. As in kube-proxy, pending changes of the service in this family are not
            # measured then.
            self._triggers.pop(service, None)
        else:
            name = service_of(endpoint_slice)
            kind = endpoint_slice.address_type
            if name is None or kind not in self._tracked:
                return
            service = (key[0], name, kind)
            self._service_of_new[key] = service
            trigger = _trigger_time(endpoint_slice)
            if trigger is not None and trigger > self._start:
                self._triggers.setdefault(service, []).append(trigger)
        self._metrics.endpoint_total.add()
        self._metrics.endpoint_pending.add()

    def _is_tracked(self, endpoint_slice: EndpointSlice) -> bool:
        return service_of(endpoint_slice) is not None and endpoint_slice.address_type in self._tracked


def _trigger_time(endpoint_slice: EndpointSlice) -> int | None:
    """The time in the annotation, in nanoseconds since 1970; None if it is absent or malformed."""
    annotations = endpoint_slice.metadata.annotations
    text = annotations.last_change_trigger_time if annotations is not None else None
    if text is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        return None
    return int(moment.timestamp() * 1e6) * 1000
