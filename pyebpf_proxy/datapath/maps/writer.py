# SPDX-License-Identifier: Apache-2.0
"""Writes service ports into the maps, so that no packet sees a partial change.

Order of a round (each step in batches, over all service ports of the round):

1. write names, backends, endpoints, slots, source ranges, configurations: nothing refers to them yet;
2. delete old frontends of service ports with a new configuration: no old address may lead to it;
3. ``services[id]`` = the new configuration's id, one aligned store each;
4. write new frontends; steps 3 and 4 come last for service ports that another one takes an address over from, so that
   the address never leads to their new endpoints. Only if two exchange addresses, it may for a moment;
   then delete the other old frontends (a port that moves to another service is always served), and set removed services
   to 0;
5. after a grace period, delete entries without references.

After a kill at any point, the next start finds entries without references (``adopt.py``).
"""

from __future__ import annotations

import errno as errors
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from pyebpf_proxy.common.cycles import without_cycle_search
from pyebpf_proxy.common.threads import in_thread
from pyebpf_proxy.datapath.connections.conntrack_counts import Route
from pyebpf_proxy.datapath.loader import grace, ordering
from pyebpf_proxy.datapath.loader.libbpf import BpfError
from pyebpf_proxy.datapath.loader.programs import Loaded
from pyebpf_proxy.datapath.maps.adopt import adopt
from pyebpf_proxy.datapath.maps.affinity import Affinities
from pyebpf_proxy.datapath.maps.changes import Change, Garbage, MapFullError, Problem
from pyebpf_proxy.datapath.maps.hints import Hints
from pyebpf_proxy.datapath.maps.layouts import FrontendAddress, Layouts
from pyebpf_proxy.datapath.maps.mirror import Mirror
from pyebpf_proxy.datapath.maps.read_back import ReadBack
from pyebpf_proxy.services.model import IPFamily, ServicePort, ServicePortName, with_removals

MAPS = (
    *("service_names", "backends4", "backends6", "endpoints4", "endpoints6", "source_ranges4", "source_ranges6"),
    *("service_configs", "frontends4", "frontends6"),
)
_BEFORE_FLIP = MAPS[:8]
#: So long after lists were moved in vain to make room for a longer one (seconds), none are moved.
VAIN_SECONDS = 10.0
#: Into empty maps this many service ports are written at a time.
PART = 1000
_MAP_FULL = {errors.E2BIG, errors.ENOSPC, errors.ENOMEM}

BackendsCallback = Callable[[Mapping[int, tuple[bytes, int]], Iterable[int]], None]
FrontendsCallback = Callable[[Iterable[FrontendAddress], Iterable[FrontendAddress]], None]


class Writer:
    """Owns the service maps of ``loaded``.

    ``on_backends`` is called with added (id → packed address, port) and removed backends (ids), for added ones before
    packets can choose them; :attr:`netfilter_backends` has all of them for the start. ``on_frontends`` is called in the
    same way with added and removed frontends; :attr:`frontends` has all of them. ``foreign_id``: ids up to this one are
    in use by programs with other maps, and are not given to new backends.

    The constructor adopts the contents of the maps. A BpfError from any call means that the kernel refused something
    that should always work; the pending work is kept, and the next call begins by adopting again.
    """

    def __init__(
        self,
        loaded: Loaded,
        on_backends: BackendsCallback | None = None,
        foreign_id: int = 0,
        on_frontends: FrontendsCallback = lambda added, removed: None,
    ) -> None:
        maps = self._maps = loaded.maps
        self._layouts = Layouts(loaded.tc.btf)
        self._on_backends = on_backends
        self._on_frontends = on_frontends
        self._foreign_id = foreign_id
        self._services = maps["services"].mmap().cast("Q")
        self._slots = maps["slots"].mmap().cast("Q")
        self._hints = Hints(maps, loaded.tc.btf)
        #: Service ports that are not as wanted.
        self.problems: dict[ServicePortName, Problem] = {}
        self._pending: dict[ServicePortName, ServicePort | None] = {}
        self._freed = False
        #: Entries without references, during their grace period.
        self._dying = Garbage()
        self._no_move_before = 0.0
        #: Counts calls that may write.
        self._version = 0
        #: Counts changes in the maps of the endpoints that serve a UDP service port, and what may be one.
        self.udp_moves = 0
        self._read_back = ReadBack(maps, MAPS, self._services, self._slots)
        self._adopt()

    def _adopt(self) -> None:
        maps = self._maps
        capacity = {name: maps[name].max_entries for name in (*MAPS, "services", "slots")}
        self._mirror = Mirror(self._layouts, capacity, self._foreign_id)
        with without_cycle_search():
            repairs = adopt(self._mirror, maps, self._services, self._slots)
        self._garbage = repairs.garbage
        self._affinities = Affinities(
            maps["affinities"], maps["affinity_counts"], self._layouts, self._garbage.affinities
        )
        for name, keys in repairs.deletes.items():
            maps[name].delete_batch(keys)
        for number in repairs.dead_services:
            self._flip(number, 0)
        for name, (keys, values) in repairs.puts.items():
            maps[name].update_batch(keys, values)
        self._hints.rebuild(self._mirror.owners, self._mirror.endpoint_counts)
        self._broken = False
        # The change that was interrupted may have been written.
        self.udp_moves += 1

    @contextmanager
    def _changing(self, todo: Mapping[ServicePortName, ServicePort | None]) -> Iterator[None]:
        """Around a change. If it is interrupted, ``todo`` is pending and the next change adopts the maps again."""
        self._version += 1
        if self._broken:
            self._adopt()
            self._freed = True
        self._broken = True
        try:
            yield
        except BaseException:
            self._pending.update(todo)
            raise
        self._broken = False

    # ---- called by the control plane -----------------------------------------------------------------------

    @property
    def netfilter_backends(self) -> Mapping[int, tuple[bytes, int]]:
        """Every backend that the nft table must have: id → packed address, port."""
        garbage = Garbage()
        garbage.absorb(self._garbage)
        garbage.absorb(self._dying)
        with without_cycle_search():
            return self._mirror.targets(garbage)

    @property
    def frontends(self) -> Iterator[FrontendAddress]:
        """Every frontend in the maps."""
        return self._addresses(self._mirror.owners)

    @property
    def names(self) -> Iterable[ServicePortName]:
        """The service ports in the maps."""
        return self._mirror.records.keys()

    def fill(self) -> Mapping[str, tuple[int, int]]:
        """Used entries and capacity, by map."""
        return self._mirror.fill()

    def __getitem__(self, name: ServicePortName) -> ServicePort:
        """A service port as it is in the maps. Raises KeyError."""
        return self._mirror.records[name].plan

    def service_id(self, name: ServicePortName) -> int:
        """The id of a service port in all maps. Raises KeyError."""
        return self._mirror.records[name].id

    def backends_of(self, routes: Iterable[Route]) -> Iterator[tuple[Route, int]]:
        """Routes of flows, each with the ids of all its backends."""
        return self._mirror.backends_of(routes)

    def has_backend(self, number: int) -> bool:
        """Whether this is a backend id in the maps."""
        return number in self._mirror.backend_ids

    @property
    def has_garbage(self) -> bool:
        """Whether :meth:`collect` has anything to do."""
        return bool(self._garbage)

    def apply(self, delta: Mapping[ServicePortName, ServicePort | None], complete: bool = False) -> list[Problem]:
        """Write changes; None removes a service port. Returns new or changed problems.

        A service port that does not fit keeps its last good state, without the addresses that it should not have any
        more, and is retried when entries were freed.
        ``complete``: there are no others. Those are removed in the same round, so that they keep no address.
        """
        before = dict(self.problems)
        with self._changing(delta), without_cycle_search():
            if self._mirror.records:
                known = (*self._mirror.records, *self._pending) if complete else ()
                todo = with_removals(delta, known)
                # A change needs room for its old and its new entries. One with thousands must not take that of others.
                self._apply(dict(sorted(todo.items(), key=lambda each: _size(each[1]))))
            else:
                # In parts, to save memory. The maps are empty, so no service port can take over another's addresses.
                names = list(delta)
                for start in range(0, max(1, len(names)), PART):
                    self._apply({name: delta[name] for name in names[start : start + PART]})
        return [p for name, p in self.problems.items() if before.get(name) != p]

    def _apply(self, todo: dict[ServicePortName, ServicePort | None]) -> None:
        if self._freed:
            for name in sorted(self._pending):
                todo.setdefault(name, self._pending[name])
        self._freed = False
        failed = self._round(todo)
        if failed and (self._garbage or self._freed):
            # Entries that this round has replaced may free the capacity that a service port lacked.
            self._free_garbage()
            self._freed = False
            failed = self._round({name: todo[name] for name in failed})
        if failed and self._make_room({name: plan for name in failed if (plan := todo[name]) is not None}):
            self._round({name: todo[name] for name in failed})

    def _make_room(self, failed: Mapping[ServicePortName, ServicePort]) -> bool:
        """If the free slots are in ranges that are too short for these service ports, move others' lists away.

        A tenant can let lists come and go until there are only short ranges.
        """
        mirror, ranges = self._mirror, self._mirror.slot_ranges
        length = max((len(plan.cluster) + len(plan.local) for plan in failed.values()), default=0)
        # Lists in the way need other room. A search costs others up to 0.2 s: after a vain one, none for some seconds.
        if not ranges.longest < length <= ranges.available // 2 or time.monotonic() < self._no_move_before:
            return False
        self._no_move_before = time.monotonic() + VAIN_SECONDS
        found = mirror.in_the_way(length)
        if found is None:
            return False
        names, starts = found
        if any(mirror.records[name].dirty for name in names):
            return False  # what is in the maps is not as wanted: it must be written anew, not elsewhere
        kept = [(start, ranges.take_at(start)) for start in starts]
        pending = {name: self._pending[name] for name in names if name in self._pending}
        problems = {name: self.problems[name] for name in names if name in self.problems}
        for name in names:
            mirror.records[name].dirty = True
        for name in self._round({name: mirror.records[name].plan for name in names}):
            mirror.records[name].dirty = False
            del self._pending[name], self.problems[name]
        self._pending.update(pending)
        self.problems.update(problems)
        self._free_garbage()
        self._freed = False
        for start, size in kept:
            ranges.free(start, size)
        if ranges.longest < length:
            return False
        self._no_move_before = 0.0
        return True

    def recount_clients(self) -> None:
        """Keep affinity entries within the shares of their service ports. Some 50 ms for a full map."""
        records = self._mirror.records.values()
        self._affinities.recount({r.id: r.plan.affinity_seconds for r in records if r.plan.affinity_seconds})

    def was_overwritten(self) -> bool:
        """Whether others have written into the maps. :meth:`apply` with everything, and ``complete``, repairs them.

        The next call adopts the contents, as after an interrupted write.
        """
        if not self._broken:
            self._broken = self._read_back.differs(self._mirror, self._version, bool(self._garbage or self._dying))
        return self._broken

    def collect(self) -> None:
        """Wait for a grace period and delete entries without references; then retry what did not fit.

        Blocks for some 10 ms, longer for much garbage: call it soon after a change, not during it.
        """
        if self._garbage:
            with self._changing({}):
                self._free_garbage()
        self._use_freed_room()

    async def collect_async(self) -> None:
        """:meth:`collect`, but other calls may be made (from the same thread) during the grace period.

        Garbage of those calls is collected too.
        """
        while garbage := self._garbage:
            mirror = self._mirror
            self._garbage, self._dying = Garbage(), garbage
            try:
                await in_thread(grace.wait)
            except BaseException:
                if mirror is self._mirror:
                    self._garbage.absorb(garbage)
                raise
            finally:
                self._dying = Garbage()
            with self._changing({}):
                # If the maps were adopted again meanwhile, this garbage was found again.
                if mirror is self._mirror:
                    self._free(garbage)
        self._use_freed_room()

    def _use_freed_room(self) -> None:
        if self._freed and self._pending:
            self.apply({})

    # ---- a round -------------------------------------------------------------------------------------------

    def _round(self, todo: Mapping[ServicePortName, ServicePort | None]) -> list[ServicePortName]:
        """One pass through all steps. Returns the names that did not fit; updates ``problems`` and ``_pending``."""
        changes, failed = self._plan(todo)
        for name in _BEFORE_FLIP:
            self._put(name, changes)
            if name.startswith("backends"):
                self._add_netfilter_backends(changes, 4 if name.endswith("4") else 6)
        for change in changes:
            if change.slots and change.failed is None and change.new is not None:
                self._fill(change.new.first_slot, change.slots)
        reverted = [change for change in changes if change.failed is not None]
        for change in reverted:
            self._mirror.revert(change, self._garbage)
            # At once: the next attempt writes the same keys, and a later deletion would remove those.
            self._delete_serving_keys(change.serving_new, change.name.family)
        done = [change for change in changes if change.failed is None]
        by_family = [(family, [c for c in done if c.name.family is family]) for family in IPFamily]
        for family, concerned in by_family:
            self._delete_frontends([c for c in concerned if c.config_changed], family)
        self._affinities.changing(done)
        # A program that sees a new configuration must not see the former content of its slots.
        ordering.publish()
        for part in _givers_last(done):
            for change in part:
                if change.new is not None and change.config_changed:
                    self._flip(change.new.id, change.new.config_id)
            for family in IPFamily:
                self._put_frontends([c for c in part if c.name.family is family], family)
        for family, concerned in by_family:
            self._delete_frontends([c for c in concerned if not c.config_changed], family)
            self._delete_serving(concerned, family)
        self.udp_moves += any(change.serving_new or change.serving_deletes for change in done)
        for change in done:
            if change.new is None and change.old is not None:
                self._flip(change.old.id, 0)
            self._mirror.commit(change, self._garbage)
            if change.name in failed:
                continue  # only its former addresses were removed
            if change.failed is None and not change.conflicts:
                self._settled(change.name)
            else:
                self._unsettled(change.name, todo, change.failed or "; ".join(change.conflicts))
        self._delete_orphans(reverted)
        for change in reverted:
            self._unsettled(change.name, todo, change.failed or "")
        return [*failed, *(change.name for change in reverted)]

    def _settled(self, name: ServicePortName) -> None:
        self._pending.pop(name, None)
        self.problems.pop(name, None)

    def _unsettled(self, name: ServicePortName, todo: Mapping[ServicePortName, ServicePort | None], text: str) -> None:
        self._pending[name] = todo[name]
        self.problems[name] = Problem(name, text)

    def _plan(
        self,
        todo: Mapping[ServicePortName, ServicePort | None],
    ) -> tuple[list[Change], dict[ServicePortName, None]]:
        mirror = self._mirror
        released: set[bytes] = set()
        for name, wanted in todo.items():
            released |= mirror.released_by(name, wanted)
        changes: list[Change] = []
        failed: dict[ServicePortName, None] = {}
        for name, wanted in todo.items():
            try:
                change = mirror.plan_removal(name) if wanted is None else mirror.plan(name, wanted, released)
            except MapFullError as error:
                failed[name] = None
                self._unsettled(name, todo, str(error))
                change = mirror.plan_release(name, wanted)
            if change is not None:
                changes.append(change)
            elif name not in failed:
                self._settled(name)
        return changes, failed

    def _put(self, name: str, changes: list[Change]) -> None:
        """One map's entries of all changes. A change whose entries do not fit is marked as failed."""
        rows = [(c, c.puts[name]) for c in changes if c.failed is None and name in c.puts]
        for change, _, error in self._update(name, [(c, keys, values) for c, (keys, values) in rows]):
            change.failed = _refusal(name, error)

    def _update(self, name: str, rows: list[tuple[Change, bytes, bytes]]) -> list[tuple[Change, int, BpfError]]:
        """Write batches of entries; returns the changes that failed, after how many of their entries, and why."""
        if not rows:
            return []
        opened = self._maps[name]
        joined = b"".join([row[1] for row in rows])
        self._hints.add(name, joined)
        keys = memoryview(joined)
        values = memoryview(b"".join([row[2] for row in rows]))
        ends = []
        at = 0
        for _, row_keys, _ in rows:
            at += len(row_keys) // opened.key_size
            ends.append(at)
        failures = []
        start, total = 0, at
        while start < total:
            try:
                opened.update_batch(keys[start * opened.key_size :], values[start * opened.value_size :])
                break
            except BpfError as error:
                if error.errno not in _MAP_FULL:
                    raise
                stopped = start + error.done
                which = bisect_right(ends, stopped)
                failures.append((rows[which][0], stopped - (ends[which - 1] if which else 0), error))
                start = ends[which]
        return failures

    def _put_frontends(self, changes: list[Change], family: IPFamily) -> None:
        """Write frontends. Those that the kernel refuses are missing from then on; the rest of the change is valid."""
        name = f"frontends{family.value}"
        rows = [
            (c, b"".join([key for key, _ in c.frontend_puts]), b"".join([value for _, value in c.frontend_puts]))
            for c in changes
            if c.frontend_puts
        ]
        try:
            self._on_frontends(self._addresses(key for c in changes for key, _ in c.frontend_puts), ())
        except OSError as error:
            failures = [(change, 0, str(error)) for change, _, _ in rows]
        else:
            failures = [(c, written, _refusal(name, error)) for c, written, error in self._update(name, rows)]
        missing: list[bytes] = []
        for change, written, text in failures:
            change.failed = text
            keys = [key for key, _ in change.frontend_puts[written:]]
            self._mirror.frontends_missing(change, keys)
            missing += keys
        for key in missing:
            # One that moves from another service port would still belong to that one.
            self._maps[name].delete(key)
        if missing:
            # If this is refused too, the next complete sync removes them.
            with suppress(OSError):
                self._on_frontends((), self._addresses(missing))

    def _delete_frontends(self, changes: list[Change], family: IPFamily) -> None:
        mirror = self._mirror
        gone = [
            key
            for change in changes
            if change.old is not None
            for key in change.frontend_deletes
            if mirror.owners.get(key) == change.old.id
        ]
        if gone:
            self._maps[f"frontends{family.value}"].delete_batch(b"".join(gone))
            self._on_frontends((), self._addresses(gone))
            self._freed = True
        for key in gone:
            mirror.frontend_deleted(key, family)

    def _addresses(self, keys: Iterable[bytes]) -> Iterator[FrontendAddress]:
        return map(self._layouts.frontend_address, keys)

    def _delete_serving(self, changes: list[Change], family: IPFamily) -> None:
        self._delete_serving_keys([key for change in changes for key in change.serving_deletes], family)

    def _delete_serving_keys(self, keys: list[bytes], family: IPFamily) -> None:
        name = f"endpoints{family.value}"
        self._delete(name, keys)
        self._mirror.used[name] -= len(keys)
        self._freed |= bool(keys)

    def _delete_orphans(self, reverted: list[Change]) -> None:
        for change in reverted:
            family = change.name.family
            for key in self._mirror.orphans(change):
                self._maps[f"frontends{family.value}"].delete(key)
                self._on_frontends((), self._addresses([key]))
                self._mirror.frontend_deleted(key, family)

    def _add_netfilter_backends(self, changes: list[Change], family: int) -> None:
        """Add backends to the nft table, before the programs can choose them for a packet."""
        concerned = [c for c in changes if c.targets and c.failed is None and c.name.family.value == family]
        if self._on_backends is None or not concerned:
            return
        added: dict[int, tuple[bytes, int]] = {}
        for change in concerned:
            added.update(change.targets)
        try:
            self._on_backends(added, ())
        except OSError as error:
            for change in concerned:
                change.failed = str(error)

    def _fill(self, first: int, backends: list[int]) -> None:
        shift = self._layouts.word_shift
        self._slots[first : first + len(backends)] = array("Q", [number << shift for number in backends])

    def _flip(self, service: int, config_id: int) -> None:
        self._services[service] = config_id << self._layouts.word_shift

    # ---- garbage -------------------------------------------------------------------------------------------

    def _free_garbage(self) -> None:
        garbage, self._garbage = self._garbage, Garbage()
        if garbage:
            grace.wait()
            self._free(garbage)

    def _free(self, garbage: Garbage) -> None:
        u32 = self._layouts.u32.pack
        mirror = self._mirror
        self._affinities.forget(garbage.affinities)
        self._delete("service_configs", [u32(number) for number in garbage.configs])
        for family in IPFamily:
            self._delete(f"source_ranges{family.value}", garbage.source_ranges[family])
            backends = garbage.backends[family]
            self._delete(f"backends{family.value}", [u32(number) for number, _ in backends])
            counts, ended = mirror.discount_endpoints(backends, family)
            name = f"endpoints{family.value}"
            self._delete(name, [key for key, count in counts.items() if not count])
            if len(counts) > ended:
                shared = [(key, count) for key, count in counts.items() if count]
                self._maps[name].update_batch(
                    b"".join([key for key, _ in shared]), b"".join([mirror.pack_count(count) for _, count in shared])
                )
            if backends and self._on_backends is not None:
                self._on_backends({}, [number for number, _ in backends])
        self._delete("service_names", [u32(number) for number in garbage.services])
        mirror.freed(garbage)
        self._freed = True

    def _delete(self, name: str, keys: list[bytes]) -> None:
        if keys:
            self._maps[name].delete_batch(b"".join(keys))


def _givers_last(changes: list[Change]) -> list[list[Change]]:
    """The changes in two parts, if one takes over an address from another: it must have it before the other one flips.

    Otherwise the address would lead to the other one's new endpoints for a moment.
    """
    owners = {owner for change in changes for _, owner in change.claims}
    givers = [each for each in changes if each.config_changed and each.old is not None and each.old.id in owners]
    if not givers:
        return [changes]
    ids = {id(each) for each in givers}
    return [[each for each in changes if id(each) not in ids], givers]


def _size(plan: ServicePort | None) -> int:
    return 0 if plan is None else len(plan.frontends) + len(plan.source_ranges) + len(plan.cluster) + len(plan.local)


def _refusal(name: str, error: BpfError) -> str:
    return f"map {name} is full" if error.errno != errors.ENOMEM else f"no memory for map {name}"
