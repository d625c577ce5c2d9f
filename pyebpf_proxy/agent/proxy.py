# SPDX-License-Identifier: Apache-2.0
"""The agent's main loop: changes from the source → plan → data plane, in batches, until a signal.

One asyncio loop changes all state, so no locks are needed. The metrics server and the wait for grace periods use
separate threads. Programs stay attached when the agent ends.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from pyebpf_proxy.agent.backlog import Backlog
from pyebpf_proxy.agent.node_life import NodeLife
from pyebpf_proxy.agent.schedule import Schedule
from pyebpf_proxy.common import memory
from pyebpf_proxy.common.cycles import without_cycle_search
from pyebpf_proxy.common.errors import DatapathError, FatalError
from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.common.process_age import process_age
from pyebpf_proxy.common.waiting import wait_briefly
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.repairs import Repair, repairs
from pyebpf_proxy.kube.events import ObjectReference, Recorder
from pyebpf_proxy.kube.source import Batch, Change, Source
from pyebpf_proxy.services.losses import LossMessage
from pyebpf_proxy.services.model import ServicePort, ServicePortName
from pyebpf_proxy.services.node_facts import NodeFacts

#: Removals that need a grace period wait until nothing has changed for this time.
IDLE_SECONDS = 0.2
#: If a sync has not planned all changes, the next one waits so long: the source must be able to deliver others.
LISTEN_SECONDS = 0.01
#: The checks of every syncPeriod are no more frequent than this: a period of 1ms is valid.
LEAST_REFRESH_SECONDS = 0.5
#: How many lines about the Services of one namespace a sync logs: a tenant can change thousands of conflicts at once.
MOST_LINES = 100
#: After a failed removal: the first pause, which doubles up to the last one. A change ends a pause.
COLLECT_AGAIN_SECONDS, COLLECT_AGAIN_MAX_SECONDS = 1.0, 30.0

Delta = Mapping[ServicePortName, ServicePort | None]

_log = Logger("proxy")


class Planner(Protocol):
    """The part of ``services.planner.Planner`` that this module uses."""

    @property
    def lost(self) -> int:
        """How many addresses are not served as their Services specify."""

    @property
    def zone(self) -> str:
        """The zone of this Node: all endpoints are chosen by it."""

    def new_holders(self) -> Collection[tuple[str, str]]:
        """Services that have an address which the cluster has allocated to another one since the last call."""

    def new_messages(self) -> tuple[list[LossMessage], list[LossMessage]]:
        """New problems of these addresses, then new notes on surprising cases; each is returned once."""

    @property
    def names(self) -> Iterable[ServicePortName]:
        """Every service port that exists now."""

    def get(self, name: ServicePortName) -> ServicePort | None: ...

    def oldest_first(self) -> Iterable[ServicePortName]:
        """Every service port that exists now; the first ones have priority if the maps are too small."""

    def update(self, changes: Iterable[Change]) -> Delta: ...


class Datapath(Protocol):
    """The part of ``datapath.Datapath`` that this module uses."""

    def start(self, facts: NodeFacts, wanted: Delta) -> Collection[str]:
        """Load, adopt existing state, write ``wanted``, remove everything else, attach. The result: problems."""

    def apply(self, delta: Delta, complete: bool = False) -> Collection[str]:
        """Write the difference, or everything if ``complete``. The result: what could not be written."""

    def node_changed(self, facts: NodeFacts) -> None:
        """The Nodes have changed."""

    def refresh(self) -> bool:
        """Restore what other programs may have changed. True: everything must be applied again."""

    async def collect(self) -> None:
        """Wait for the grace period, then remove entries that no program reads any more."""


class Observer(Protocol):
    """The part of ``servers.observer.Observer`` that this module uses."""

    def changed(self, changes: Sequence[Change], complete: bool) -> None: ...
    def unchanged(self, objects: Sequence[Change]) -> None: ...
    def queued(self) -> None: ...
    def planned(self, delta: Delta) -> None: ...
    def synced(
        self, seconds: float, ok: bool, full: bool, problems: int, waiting: Collection[tuple[str, str]]
    ) -> None: ...
    def period_passed(self) -> None: ...


class Proxy:
    """One agent. ``run`` returns after SIGTERM or SIGINT; FatalError if it cannot continue."""

    def __init__(
        self,
        effective: Effective,
        source: Source,
        planner: Planner,
        datapath: Datapath,
        metrics: Observer,
        facts: Callable[[], NodeFacts],
        check: Callable[[NodeFacts], None] = lambda facts: None,
        guards: Iterable[Callable[[], Awaitable[None]]] = (),
        once: bool = False,
        events: Recorder | None = None,
    ) -> None:
        """``facts`` returns the planner's current values of the Nodes; ``check`` checks them before the start.

        ``guards`` run concurrently; one that raises ends the agent. ``once``: return after the first sync.
        ``events``: the recorder of Warning events about Services.
        """
        self._source = source
        self._planner = planner
        self._datapath = datapath
        self._metrics = metrics
        self._read_facts = facts
        self._check = check
        self._life = NodeLife(effective.node_name, needs_pod_cidrs=effective.detect_local_mode == "NodeCIDR")
        self._guards = (self._life.guard, *guards)
        self._once = once
        self._events = events
        self._node_name = effective.node_name
        self._refresh_seconds = max(effective.sync_period, LEAST_REFRESH_SECONDS)
        self._schedule = Schedule(effective.min_sync_period, effective.sync_period)
        self._backlog = Backlog(time.monotonic)
        #: The plan of the objects that the source delivers before the first sync, and their number.
        self._planned: dict[ServicePortName, ServicePort | None] = {}
        self._planned_objects = 0
        self._failed = False
        self._facts: NodeFacts | None = None
        self._complete = False
        self._running = False
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._logged: frozenset[str] = frozenset()
        self._collecting: asyncio.Task[None] | None = None
        #: Set by a sync: there is more to remove.
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Follow the source until a signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        source = asyncio.create_task(self._source.run(self.deliver), name="source")
        follow = asyncio.create_task(self._follow(), name="sync")
        refresh = asyncio.create_task(self._refresh_periodically(), name="refresh")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        guards = [asyncio.ensure_future(guard()) for guard in self._guards]
        try:
            done, _ = await asyncio.wait({source, follow, refresh, stop, *guards}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                task.result()
                raise FatalError(f"internal error: {task} ended unexpectedly")
        finally:
            tasks = [task for task in (source, follow, refresh, stop, *guards, self._collecting) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def deliver(self, batch: Batch) -> None:
        """The source's callback: store the changes, request a sync."""
        for change in self._life.take(batch.changes):
            self._backlog.put(change)
        if batch.complete and not self._complete:
            self._complete = True
            self._life.listed()
        self._metrics.changed(batch.changes, self._complete)
        if batch.unchanged:
            self._metrics.unchanged(batch.unchanged)
        if not self._running:
            self._plan_ahead()
        # Nothing is programmed before everything has been listed once (spec/service-semantics §1.5).
        if self._complete and self._life.ready and (batch.changes or not self._running):
            self._metrics.queued()
            self._schedule.request(time.monotonic())
            self._wake.set()

    def _plan_ahead(self) -> None:
        """Plan before everything is listed: the plan of an object takes less memory than the object."""
        changes = self._backlog.all()
        with without_cycle_search():
            self._planned.update(self._planner.update(changes))
        self._planned_objects += len(changes)

    async def _follow(self) -> None:
        while True:
            delay = self._schedule.delay(time.monotonic())
            if delay is None or delay > 0:
                try:
                    async with asyncio.timeout(delay):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                continue
            self._sync()
            # Yield to signals and events, even if syncs follow each other without a pause.
            await asyncio.sleep(0)

    def _sync(self) -> None:
        begin = time.monotonic()
        wanted = self._schedule.started(begin)
        ok = True
        full = not (wanted and self._running) or self._failed
        zone = self._planner.zone
        problems: Collection[str] = ()
        try:
            problems = self._program(full=not wanted) if self._running else self._begin()
        except DatapathError as error:
            if not self._running:
                raise FatalError(str(error)) from error
            ok = False
            _log.error("sync failed, will retry", error=str(error))
        else:
            self._log_datapath_problems(problems)
            self._log_planner_messages()
        self._failed = not ok
        end = time.monotonic()
        # A change of the zone affects every Service, and counts as a full sync (spec/service-semantics §1.5).
        full |= self._planner.zone != zone
        problems_now = len(problems) + self._planner.lost
        self._metrics.synced(end - begin, ok, full, problems_now, self._backlog.slices() if self._backlog else ())
        self._schedule.finished(end, ok)
        self._backlog.took(end - begin)
        if ok and self._backlog:
            self._metrics.queued()
            self._schedule.resume(self._backlog.due(end + LISTEN_SECONDS))
        if self._once:
            self._stop.set()
            return
        self._changed.set()
        if self._collecting is None:
            self._collecting = asyncio.create_task(self._collect(), name="collect")

    def _program(self, full: bool) -> Collection[str]:
        delta: dict[ServicePortName, ServicePort | None] = {}
        for changes in self._backlog.portions():
            planned = self._planner.update(changes)
            self._backlog.planned(planned)
            # Otherwise its holder could keep an address that the cluster has given to another Service.
            self._backlog.hurry(self._planner.new_holders())
            delta.update(planned)
        self._metrics.planned(delta)
        unapplied = self._apply_facts()
        if full:
            self._datapath.refresh()
        if full or self._failed:
            # What a failed sync has written is unknown: compare everything again.
            delta = {name: self._planner.get(name) for name in self._planner.names}
        problems = self._datapath.apply(delta, full or self._failed)
        problems = [*problems, *unapplied]
        if delta:
            _log.info("synced", service_ports=len(delta), problems=len(problems) or None)
        return problems

    def _apply_facts(self) -> Collection[str]:
        """Apply new facts about the Nodes. The result: problems. Services must change even if these facts cannot."""
        facts = self._read_facts()
        if facts == self._facts:
            return ()
        try:
            self._datapath.node_changed(facts)
        except DatapathError as error:
            return [f"a change of Nodes or ServiceCIDRs is not applied, will retry: {error}"]
        self._facts = facts
        return ()

    def _begin(self) -> Collection[str]:
        """The first sync: write everything, then attach."""
        with without_cycle_search():
            problems = self._start()
            # Most objects that exist now stay. Without this, each garbage collection scans them all again.
            gc.freeze()
        memory.give_back()
        return problems

    def _start(self) -> Collection[str]:
        # The oldest come first: if the maps are too small for all, these get the entries.
        planned = ((name, self._planned.get(name)) for name in self._planner.oldest_first())
        wanted = {name: port for name, port in planned if port is not None}
        self._planned.clear()
        self._metrics.planned(wanted)
        facts = self._read_facts()
        if not facts.node_ips:
            _log.warning(
                "no address of this Node is known: its Node object does not exist or has no address;"
                " set hostnameOverride if the Node has another name",
                node=self._node_name,
            )
        self._check(facts)
        problems = self._datapath.start(facts, wanted)
        self._running = True
        self._facts = facts
        if self._once:
            return problems  # nothing is served
        _log.info(
            "ready",
            objects=self._planned_objects,
            service_ports=len(wanted),
            problems=len(problems) or None,
            seconds=round(process_age(), 3),
        )
        return problems

    def _log_datapath_problems(self, problems: Collection[str]) -> None:
        """Log each problem once, and again if it recurs after it was resolved."""
        for problem in problems:
            if problem not in self._logged:
                _log.error(problem)
        self._logged = frozenset(problems)

    def _log_planner_messages(self) -> None:
        """Log the planner's new problems and notes about Services."""
        problems, notes = self._planner.new_messages()
        _log_lines(problems, _log.error, "more Services are not served as they specify")
        for message in problems:
            if message.reason and self._events is not None:
                about = ObjectReference("Service", message.namespace, message.name)
                self._events.event(about, "Warning", message.reason, "Serve", message.text)
        _log_lines(notes, _log.info, "more service addresses are also those of a Node")

    async def _refresh_periodically(self) -> None:
        """Check the nftables table and the maps every syncPeriod: a firewall reload may have removed the table."""
        while True:
            await asyncio.sleep(self._refresh_seconds)
            if self._running:
                self._metrics.period_passed()
                if self._read_facts() != self._facts:
                    # The last sync could not apply them.
                    self._request()
                try:
                    overwritten = self._datapath.refresh()
                except DatapathError as error:
                    _log.error("changes by other programs could not be reverted", error=str(error))
                    continue
                if overwritten and not self._failed:
                    _log.error("another program has changed the service maps; comparing them with all Services")
                    repairs.note(Repair.MAP)
                    self._failed = True
                    self._request()

    def _request(self) -> None:
        self._schedule.request(time.monotonic())
        self._wake.set()

    async def _collect(self) -> None:
        pause = COLLECT_AGAIN_SECONDS
        try:
            while self._changed.is_set():
                await asyncio.sleep(IDLE_SECONDS)
                self._changed.clear()
                try:
                    await self._datapath.collect()
                except DatapathError as error:
                    _log.error("old entries could not be removed, will retry", error=str(error))
                    await wait_briefly(self._changed, pause)
                    self._changed.set()
                    pause = min(2 * pause, COLLECT_AGAIN_MAX_SECONDS)
        finally:
            self._collecting = None

    def _signalled(self, number: signal.Signals) -> None:
        _log.info("stopped; attached programs continue without the agent", signal=number.name)
        self._stop.set()


def _log_lines(messages: Iterable[LossMessage], write: Callable[..., None], more: str) -> None:
    """Write the first lines of each namespace, and ``more`` with the number of the others."""
    written: Counter[str] = Counter()
    for message in messages:
        written[message.namespace] += 1
        if written[message.namespace] <= MOST_LINES:
            write(message.text)
    for namespace, number in written.items():
        if number > MOST_LINES:
            write(more, namespace=namespace, lines=number - MOST_LINES)
