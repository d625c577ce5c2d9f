# SPDX-License-Identifier: Apache-2.0
"""Plans the entries that must be written for a wanted service port. No kernel access.

The writer (``writer.py``) carries a :class:`Change` out in this order: first ``puts`` and the slots, then the flip of
``services[id]``, then frontends; entries without references are deleted after a grace period.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pyebpf_proxy.datapath.maps.changes import Change, MapFullError, Record, slot_order, still_serving
from pyebpf_proxy.datapath.maps.state import State
from pyebpf_proxy.services.addresses import format_address_port
from pyebpf_proxy.services.model import Endpoint, FrontendKind, ServicePort, ServicePortName
from pyebpf_proxy.services.shares import RESERVED


class Mirror(State):
    """The state of the maps, and the planning of changes to it."""

    def in_the_way(self, length: int) -> tuple[list[ServicePortName], list[int]] | None:
        """Of all stretches of ``length`` slots the one with the fewest in use; None if there is no such stretch.

        The result: the service ports whose lists are in it, the longest first, and the starts of its free ranges.
        """
        parts: list[tuple[int, int, ServicePortName | None]] = [(*each, None) for each in self.slot_ranges.all_free()]
        parts += [(r.first_slot, r.first_slot + r.length, name) for name, r in self.records.items() if r.length]
        parts.sort(key=lambda part: part[0])
        first = used = 0
        best: tuple[int, int, int] | None = None
        for i, (start, end, name) in enumerate(parts):
            if i and parts[i - 1][1] != start:
                first, used = i, 0  # what is between them is not free yet
            used += end - start if name is not None else 0
            while end - parts[first][1] >= length:
                used -= parts[first][1] - parts[first][0] if parts[first][2] is not None else 0
                first += 1
            if end - parts[first][0] >= length and (best is None or used < best[0]):
                best = used, first, i + 1
        if best is None:
            return None
        stretch = parts[best[1] : best[2]]
        names = [name for _, _, name in stretch if name is not None]
        names.sort(key=lambda name: -self.records[name].length)
        return names, [start for start, _, name in stretch if name is None]

    def released_by(self, name: ServicePortName, new: ServicePort | None) -> set[bytes]:
        """Keys of frontends that this change releases, so that another service port of the round may claim them."""
        old = self.records.get(name)
        if old is None or (new is not None and new.frontends == old.plan.frontends):
            return set()
        keep = set() if new is None else {self.layouts.pack_frontend(name, f) for f in new.frontends}
        return {key for key in self._own_frontends(old) if key not in keep}

    def plan_removal(self, name: ServicePortName) -> Change | None:
        """The change that removes a service port; None if it does not exist."""
        old = self.records.get(name)
        if old is None:
            return None
        change = Change(name, old, None)
        change.config_changed = True
        change.frontend_deletes = self._own_frontends(old)
        change.serving_deletes = self._serving(name, old.id, old.plan)
        change.gone = [(number, self._endpoint_key(name, e)) for e, number in old.backends.items()]
        return change

    def plan_release(self, name: ServicePortName, wanted: ServicePort | None) -> Change | None:
        """The change that only removes addresses that ``wanted`` does not have; None if there are none. It always fits.

        For a service port that keeps its last good state: another one may have these addresses by now.
        """
        old = self.records.get(name)
        if old is None or old.dirty or wanted is None:
            return None
        keep = {self.layouts.pack_frontend(name, f) for f in wanted.frontends}
        kept = tuple(f for f in old.plan.frontends if self.layouts.pack_frontend(name, f) in keep)
        if len(kept) == len(old.plan.frontends):
            return None
        return self.plan(name, msgspec.structs.replace(old.plan, frontends=kept), set())

    def plan(self, name: ServicePortName, wanted: ServicePort, released: set[bytes]) -> Change | None:
        """The change that brings the maps to ``wanted``; None if they match already.

        Allocates ids, slots and frontends at once: :meth:`commit` or :meth:`revert` must follow. Raises MapFullError.
        """
        old = self.records.get(name)
        config_changed = old is None or old.dirty or config_fields(old.plan) != config_fields(wanted)
        serving = self._serving_pairs(wanted)
        old_serving = self._serving_pairs(old.plan) if old is not None else frozenset()
        serving_changed = serving != old_serving
        if not config_changed and not serving_changed and old is not None and old.plan.frontends == wanted.frontends:
            # An adopted plan is an equal copy: keep only one of them.
            old.plan = wanted
            return None

        packed_name = b""
        if old is None:
            try:
                packed_name = self.layouts.pack_name(name)
            except ValueError as error:
                raise MapFullError(str(error)) from None
            self._check("service_names", 1)
            if not self.service_ids.available:
                raise MapFullError(f"map services is full ({self.capacity['services']} entries)")
        had = old.backends if old is not None and config_changed else {}
        fresh = self._fresh_endpoints(had, wanted) if config_changed else []
        pack = self.layouts.endpoint_key[name.family].pack
        fresh_keys = [pack(0, e.address, e.port, name.protocol) for e in fresh]
        self._check_capacity(name, wanted, config_changed, fresh_keys, len(serving - old_serving))
        grants, conflicts = self._grants(name, old, wanted, released)
        slot_count = len(wanted.cluster) + len(wanted.local)
        first_slot = self.slot_ranges.take(slot_count) if config_changed else 0
        if first_slot is None:
            raise MapFullError(
                f"map slots has no free range of {slot_count} entries"
                f" ({self.slot_ranges.available} of {self.capacity['slots']} are free)"
            )

        # Nothing below this line can fail.
        new = Record(old.id if old is not None else self.service_ids.take(1)[0], wanted)
        change = Change(name, old, new)
        change.conflicts = conflicts
        change.config_changed = config_changed
        if old is None:
            change.puts["service_names"] = (self.layouts.u32.pack(new.id), packed_name)
            self.names[new.id] = name
            self.used["service_names"] += 1
        if config_changed:
            new.first_slot, new.length = first_slot, slot_count
            self._plan_backends(change, new, had, fresh, fresh_keys, serving)
            self._plan_config(change, new)
        elif old is not None:
            new.config_id, new.first_slot, new.length = old.config_id, old.first_slot, old.length
            new.keep_backends(old)
            kept = still_serving(old.left, wanted, serving)
            change.gone = [(number, self._endpoint_key(name, e)) for e, number in old.left.items() if e not in kept]
            new.left = kept
        if serving_changed:
            self._plan_serving(change, new)
        self._plan_frontends(change, new, grants)
        released.difference_update(grants)
        return change

    def _check(self, name: str, more: int) -> None:
        if self.used[name] + more > self.capacity[name]:
            raise MapFullError(
                f"map {name} is full ({self.used[name]} of {self.capacity[name]} entries used, {more} needed)"
            )

    def _check_capacity(
        self, name: ServicePortName, wanted: ServicePort, config_changed: bool, fresh_keys: list[bytes], serving: int
    ) -> None:
        family = name.family.value
        if config_changed:
            self._check("service_configs", 1)
            self._check(f"backends{family}", len(fresh_keys))
            self._check(f"source_ranges{family}", len(wanted.source_ranges))
            if len(fresh_keys) > self.backend_ids.available:
                raise MapFullError(f"no ids for {len(fresh_keys)} more backends")
        counts = self.endpoint_counts
        unseen = len([key for key in fresh_keys if key not in counts])
        self._check(f"endpoints{family}", unseen + serving)

    def _grants(
        self, name: ServicePortName, old: Record | None, wanted: ServicePort, released: set[bytes]
    ) -> tuple[dict[bytes, int], list[str]]:
        """The frontends that the service port gets (key -> kind), and text about those that others own."""
        grants: dict[bytes, int] = {}
        conflicts = []
        new = left_out = 0
        own = old.id if old is not None else 0
        map_name = f"frontends{name.family.value}"
        # The rest is reserved for ClusterIPs, without which Services of the cluster do not work.
        external_capacity = self.capacity[map_name] - self.capacity[map_name] // RESERVED
        for frontend in wanted.frontends:
            key = self.layouts.pack_frontend(name, frontend)
            owner = self.owners.get(key)
            if owner is not None and owner != own and key not in released:
                where = format_address_port(frontend.address, frontend.port)
                conflicts.append(f"{where}/{name.protocol.name} belongs to {self.names[owner]}")
                continue
            if owner is None and key not in grants:
                if frontend.kind is not FrontendKind.CLUSTER_IP and self.used[map_name] + new >= external_capacity:
                    left_out += 1
                    continue
                new += 1
            grants.setdefault(key, frontend.kind)
        if left_out:
            conflicts.append(f"map {map_name} is full: {left_out} addresses other than the ClusterIP are not served")
        self._check(map_name, new)
        return grants, conflicts

    @staticmethod
    def _fresh_endpoints(had: Mapping[Endpoint, int], wanted: ServicePort) -> list[Endpoint]:
        endpoints = dict.fromkeys((*wanted.cluster, *wanted.local))
        if not had:
            return list(endpoints)
        return [e for e in endpoints if e not in had]

    def _plan_backends(
        self,
        change: Change,
        new: Record,
        had: Mapping[Endpoint, int],
        fresh: list[Endpoint],
        fresh_keys: list[bytes],
        serving: frozenset[tuple[bytes, int]],
    ) -> None:
        name, wanted = change.name, new.plan
        family, protocol = name.family, name.protocol
        ids = self.backend_ids.take(len(fresh))
        change.fresh = list(zip(ids, fresh_keys, strict=True))
        backends = dict(zip(fresh, ids, strict=True))
        if had:
            # Endpoints that are not fresh are kept.
            backends = {**had, **backends}
            there = {*wanted.cluster, *wanted.local}
            new.left = still_serving({e: n for e, n in had.items() if e not in there}, wanted, serving)
            change.gone = [
                (number, self._endpoint_key(name, e))
                for e, number in had.items()
                if (e not in there and e not in new.left) or backends[e] != number
            ]
        new.set_backends(backends)
        change.slots = [backends[e] for e in sorted(wanted.cluster, key=slot_order)]
        change.slots += [backends[e] for e in sorted(wanted.local, key=slot_order)]
        if not fresh:
            return
        pack = self.layouts.backend[family].pack
        service = new.id
        values = []
        for (number, _), endpoint in zip(change.fresh, fresh, strict=True):
            address, port = endpoint.address, endpoint.port
            change.targets[number] = (address, port)
            values.append(pack(address, port, protocol, service, endpoint.local))
        u32 = self.layouts.u32.pack
        change.puts[f"backends{family.value}"] = (b"".join(map(u32, ids)), b"".join(values))
        self.used[f"backends{family.value}"] += len(fresh)
        counts = self.endpoint_counts
        before = len(counts)
        ones = dict.fromkeys(fresh_keys, 1)
        if len(ones) == len(fresh_keys) and counts.keys().isdisjoint(ones):
            # None of the addresses was in use. This is so at a start, except for endpoints of several services.
            counts.update(ones)
            packed_counts = self.pack_count(1) * len(ones)
        else:
            for key in fresh_keys:
                counts[key] = counts.get(key, 0) + 1
            packed_counts = b"".join([self.pack_count(counts[key]) for key in fresh_keys])
        change.puts[f"endpoints{family.value}"] = (b"".join(fresh_keys), packed_counts)
        self.used[f"endpoints{family.value}"] += len(counts) - before

    def _plan_config(self, change: Change, new: Record) -> None:
        wanted, family = new.plan, change.name.family
        new.config_id = self.config_ids.take(1)[0]
        row = self.layouts.service_config.pack(
            new.id,
            new.first_slot,
            len(wanted.cluster),
            len(wanted.local),
            wanted.affinity_seconds,
            wanted.any_endpoints,
            wanted.internal_local,
            wanted.external_local,
            bool(wanted.source_ranges),
            wanted.vip_source_allowed,
        )
        change.puts["service_configs"] = (self.layouts.u32.pack(new.config_id), row)
        self.used["service_configs"] += 1
        if wanted.source_ranges:
            keys = self._range_keys(family, new)
            change.puts[f"source_ranges{family.value}"] = (b"".join(keys), self.layouts.u32.pack(1) * len(keys))
            self.used[f"source_ranges{family.value}"] += len(keys)

    def _plan_serving(self, change: Change, new: Record) -> None:
        name = change.name
        before = set(self._serving(name, new.id, change.old.plan)) if change.old is not None else set()
        now = self._serving(name, new.id, new.plan)
        change.serving_new = [key for key in now if key not in before]
        change.serving_deletes = list(before.difference(now))
        map_name = f"endpoints{name.family.value}"
        keys, values = change.puts.get(map_name, (b"", b""))
        if change.serving_new:
            added = b"".join(change.serving_new)
            change.puts[map_name] = keys + added, values + self.pack_count(1) * len(change.serving_new)
            self.used[map_name] += len(change.serving_new)

    def _plan_frontends(self, change: Change, new: Record, grants: dict[bytes, int]) -> None:
        name, old = change.name, change.old
        pack = self.layouts.frontend.pack
        had = (
            {}
            if old is None
            else {
                key: f.kind
                for f in old.plan.frontends
                if self.owners.get(key := self.layouts.pack_frontend(name, f)) == new.id
            }
        )
        for key, kind in grants.items():
            if had.get(key) != kind:
                change.frontend_puts.append((key, pack(new.id, kind)))
            owner = self.owners.get(key)
            if owner != new.id:
                change.claims.append((key, owner))
                self.owners[key] = new.id
                self.used[f"frontends{name.family.value}"] += owner is None
        change.frontend_deletes = [key for key in had if key not in grants]
        if change.conflicts:
            kept = tuple(f for f in new.plan.frontends if self.layouts.pack_frontend(name, f) in grants)
            new.plan = msgspec.structs.replace(new.plan, frontends=kept)


def config_fields(plan: ServicePort) -> tuple[object, ...]:
    """What a configuration and its slots and source ranges hold."""
    return (
        plan.cluster,
        plan.local,
        plan.any_endpoints,
        plan.internal_local,
        plan.external_local,
        plan.affinity_seconds,
        frozenset(plan.source_ranges),
        plan.vip_source_allowed,
    )
