# SPDX-License-Identifier: Apache-2.0
"""The contents of the service maps as the control plane knows them. No kernel access; planning is in ``mirror.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from pyebpf_proxy.datapath.connections.conntrack_counts import Route
from pyebpf_proxy.datapath.maps.changes import Change, Garbage, Record
from pyebpf_proxy.datapath.maps.ids import Ids
from pyebpf_proxy.datapath.maps.layouts import Layouts
from pyebpf_proxy.datapath.maps.ranges import Ranges
from pyebpf_proxy.services.addresses import family_of
from pyebpf_proxy.services.model import Endpoint, IPFamily, Protocol, ServicePort, ServicePortName

#: Backend ids use 24 bits of skb->priority.
BACKEND_IDS = 1 << 24
CONFIG_IDS = 1 << 32


class State:
    """Counters, allocators and records. ``capacity``: max_entries by map."""

    def __init__(self, layouts: Layouts, capacity: Mapping[str, int], foreign_id: int = 0) -> None:
        self.layouts = layouts
        self.capacity = dict(capacity)
        self.used = dict.fromkeys(capacity, 0)
        #: Backend ids up to this one may be in packets, and refer to other maps.
        self.foreign_id = foreign_id
        self.records: dict[ServicePortName, Record] = {}
        self.owners: dict[bytes, int] = {}
        self.names: dict[int, ServicePortName] = {}
        self.endpoint_counts: dict[bytes, int] = {}
        self.service_ids = Ids(min(capacity["services"], 1 << 32))
        self.config_ids = Ids(CONFIG_IDS)
        self.backend_ids = Ids(BACKEND_IDS)
        self.slot_ranges = Ranges(capacity["slots"])
        self._counts = [layouts.endpoint.pack(i) for i in range(64)]

    def fill(self) -> dict[str, tuple[int, int]]:
        """Used entries and capacity, by map."""
        used = self.used | {
            "services": self.capacity["services"] - 1 - self.service_ids.available,
            "slots": self.capacity["slots"] - self.slot_ranges.available,
        }
        return {name: (used[name], capacity) for name, capacity in self.capacity.items()}

    # ---- after the maps were written -----------------------------------------------------------------------

    def commit(self, change: Change, garbage: Garbage) -> None:
        """Record that the change is in the maps. Entries that it replaced go to ``garbage``."""
        name, old, new = change.name, change.old, change.new
        family = name.family
        if new is not None:
            self.records[name] = new
        else:
            del self.records[name]
        self._disown(change)
        if old is None:
            return
        garbage.backends[family] += change.gone
        if change.config_changed:
            garbage.configs.append(old.config_id)
            garbage.slots.append((old.first_slot, old.length))
            garbage.source_ranges[family] += self._range_keys(family, old)
        if new is None:
            garbage.services.append(old.id)
        if change.unbinds:
            garbage.affinities.append(old.id)

    def _disown(self, change: Change) -> None:
        """Frontends that a change has taken over are no longer those of a service port whose own change did not fit."""
        taken: dict[int, set[bytes]] = {}
        for key, owner in change.claims:
            if owner is not None:
                taken.setdefault(owner, set()).add(key)
        for owner, keys in taken.items():
            name = self.names.get(owner)
            record = self.records.get(name) if name is not None else None
            if name is None or record is None or record.id != owner:
                continue
            kept = tuple(f for f in record.plan.frontends if self.layouts.pack_frontend(name, f) not in keys)
            if len(kept) < len(record.plan.frontends):
                record.plan = msgspec.structs.replace(record.plan, frontends=kept)

    def revert(self, change: Change, garbage: Garbage) -> None:
        """Record that the change was not written, or only in part. What may exist of it goes to ``garbage``."""
        name, new = change.name, change.new
        if new is None:
            return
        family = name.family
        for key, owner in change.claims:
            if owner is None:
                self.frontend_deleted(key, family)
            else:
                self.owners[key] = owner
        garbage.backends[family] += change.fresh
        if change.config_changed:
            garbage.configs.append(new.config_id)
            garbage.slots.append((new.first_slot, new.length))
            garbage.source_ranges[family] += self._range_keys(family, new)
        if change.old is None:
            garbage.services.append(new.id)

    def orphans(self, change: Change) -> list[bytes]:
        """Keys that a reverted change was to take over from a service port that has released them meanwhile."""
        result = []
        for key, owner in change.claims:
            if owner is not None and self.owners.get(key) == owner:
                record = self.records.get(self.names[owner])
                if record is None or record.id != owner or key not in self._own_frontends(record):
                    result.append(key)
        return result

    def frontends_missing(self, change: Change, keys: list[bytes]) -> None:
        """Record that these frontends of an applied change could not be written."""
        new, name = change.new, change.name
        if new is None:
            return
        missing = set(keys)
        for key in missing:
            if self.owners.get(key) == new.id:
                self.frontend_deleted(key, name.family)
        kept = tuple(f for f in new.plan.frontends if self.layouts.pack_frontend(name, f) not in missing)
        new.plan = msgspec.structs.replace(new.plan, frontends=kept)

    def frontend_deleted(self, key: bytes, family: IPFamily) -> None:
        del self.owners[key]
        self.used[f"frontends{family.value}"] -= 1

    def freed(self, garbage: Garbage) -> None:
        """The garbage is deleted: its capacity, slots and ids may be reused."""
        used = self.used
        used["service_configs"] -= len(garbage.configs)
        used["service_names"] -= len(garbage.services)
        self.config_ids.free(garbage.configs)
        self.service_ids.free(garbage.services)
        for number in garbage.services:
            self.names.pop(number, None)
        for first, length in garbage.slots:
            self.slot_ranges.free(first, length)
        for family in IPFamily:
            used[f"source_ranges{family.value}"] -= len(garbage.source_ranges[family])
            used[f"backends{family.value}"] -= len(garbage.backends[family])
            ids = [number for number, _ in garbage.backends[family]]
            self.backend_ids.free(ids)

    def discount_endpoints(self, backends: list[tuple[int, bytes]], family: IPFamily) -> tuple[dict[bytes, int], int]:
        """For removed backends: new counts of their service-0 endpoint entries (0: delete), and how many are 0."""
        counts = self.endpoint_counts
        changed: dict[bytes, int] = {}
        for _, key in backends:
            counts[key] -= 1
            changed[key] = counts[key]
        ended = [key for key, count in changed.items() if count == 0]
        for key in ended:
            del counts[key]
        self.used[f"endpoints{family.value}"] -= len(ended)
        return changed, len(ended)

    def targets(self, garbage: Garbage) -> dict[int, tuple[bytes, int]]:
        """Address and port of every backend id that a packet may carry: those in use, and garbage."""
        found = {n: (e.address, e.port) for record in self.records.values() for e, n in record.numbered()}
        for family in IPFamily:
            unpack = self.layouts.endpoint_key[family].unpack
            for number, key in garbage.backends[family]:
                _, address, port, _ = unpack(key)
                found[number] = address, port
        return found

    def backends_of(self, routes: Iterable[Route]) -> Iterator[tuple[Route, int]]:
        """The backend ids of each route; none for a route of no service.

        A node's socket was translated before it sent packets, so its service is unknown: the flow counts for every
        backend with that address.
        """
        direct: dict[tuple[int, bytes, int], Route] = {}
        backends: dict[int, Mapping[Endpoint, int]] = {}
        for route in routes:
            protocol, address, port, endpoint, endpoint_port = route
            if (address, port) == (endpoint, endpoint_port):
                direct[protocol, address, port] = route
                continue
            key = self.layouts.frontend_key[family_of(address)]
            owner = self.owners.get(key.pack(address, port, protocol))
            if owner is None:
                owner = self.owners.get(key.pack(bytes(len(address)), port, protocol))
            if owner is None:
                continue
            if owner not in backends:
                record = self.records.get(self.names[owner])
                backends[owner] = record.backends if record is not None else {}
            for local in (False, True):
                number = backends[owner].get(Endpoint(endpoint, endpoint_port, local))
                if number:
                    yield route, number
        if not direct:
            return
        for name, record in self.records.items():
            for e, number in record.backends.items():
                found = direct.get((name.protocol, e.address, e.port))
                if found is not None:
                    yield found, number

    # ---- helpers -------------------------------------------------------------------------------------------

    def pack_count(self, count: int) -> bytes:
        return self._counts[count] if count < len(self._counts) else self.layouts.endpoint.pack(count)

    def _endpoint_key(self, name: ServicePortName, e: Endpoint) -> bytes:
        return self.layouts.endpoint_key[name.family].pack(0, e.address, e.port, name.protocol)

    def _own_frontends(self, record: Record) -> list[bytes]:
        keys = dict.fromkeys(self.layouts.pack_frontend(record.plan.name, f) for f in record.plan.frontends)
        return [key for key in keys if self.owners.get(key) == record.id]

    @staticmethod
    def _serving_pairs(plan: ServicePort) -> frozenset[tuple[bytes, int]]:
        if plan.name.protocol is not Protocol.UDP:
            return frozenset()
        return frozenset((e.address, e.port) for e in plan.serving)

    def _serving(self, name: ServicePortName, service: int, plan: ServicePort) -> list[bytes]:
        pack = self.layouts.endpoint_key[name.family].pack
        return sorted(pack(service, address, port, name.protocol) for address, port in self._serving_pairs(plan))

    def _range_keys(self, family: IPFamily, record: Record) -> list[bytes]:
        pack = self.layouts.source_range_key[family].pack
        # 32: the prefix includes the configuration's id.
        return list(
            dict.fromkeys(pack(32 + r.prefix_length, record.config_id, r.address) for r in record.plan.source_ranges)
        )
