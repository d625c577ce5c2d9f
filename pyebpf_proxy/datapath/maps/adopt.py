# SPDX-License-Identifier: Apache-2.0
"""Reads the pinned maps back: entries in use stay as they are, leftovers of an interrupted write are found.

Nothing inconsistent is trusted. The chain is service_names → services → configurations → slots → backends; entries
that the chain does not reach are garbage. A service port whose chain is broken is marked, and written anew when the
source names it again. The last byte of a key of frontends and endpoints is zero (bpf/service_maps.h): an entry with
another one is never found by a packet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from struct import Struct
from typing import NamedTuple

import msgspec

from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.maps.changes import Garbage, Record, slot_order, still_serving
from pyebpf_proxy.datapath.maps.ids import Ids
from pyebpf_proxy.datapath.maps.ranges import Ranges
from pyebpf_proxy.datapath.maps.state import BACKEND_IDS, CONFIG_IDS, State
from pyebpf_proxy.services.addresses import format_address_port
from pyebpf_proxy.services.model import (
    Endpoint,
    Frontend,
    IPFamily,
    Protocol,
    ServicePort,
    ServicePortName,
    SourceRange,
)


class Repairs(NamedTuple):
    """Entries to write at once so that the maps match the mirror. Keys and values by map."""

    garbage: Garbage
    puts: dict[str, tuple[bytes, bytes]]
    deletes: dict[str, bytes]
    dead_services: list[int]


class _Backend(msgspec.Struct, frozen=True, gc=False):
    endpoint: Endpoint
    protocol: int
    service: int
    family: IPFamily


def _by_text(endpoints: list[Endpoint]) -> tuple[Endpoint, ...]:
    """In the order of a plan's lists (services/model.py)."""
    if len(endpoints) < 2:
        return tuple(endpoints)
    return tuple(sorted(endpoints, key=lambda e: format_address_port(e.address, e.port)))


class _Adoption:
    def __init__(self, mirror: State, maps: Mapping[str, Map], services: memoryview, slots: memoryview) -> None:
        self.mirror = mirror
        self.layouts = mirror.layouts
        self.maps = maps
        self.slots = slots
        shift = self.layouts.word_shift
        self.active = {i: word >> shift & 0xFFFFFFFF for i, word in enumerate(services.tolist()) if word}
        self.garbage = Garbage()
        self.puts: dict[str, tuple[bytes, bytes]] = {}
        self.deletes: dict[str, list[bytes]] = {}
        self.records: dict[int, Record] = {}
        self.fields: dict[int, tuple[int, ...]] = {}  # by service id: the row of its configuration
        self.frontends: dict[int, list[Frontend]] = {}
        self.config_ids: list[int] = []
        self.ranges: dict[int, list[SourceRange]] = {}
        self.serving: dict[int, list[Endpoint]] = {}
        self.backends: dict[int, _Backend] = {}
        self.twins: dict[int, _Backend] = {}  # IPv6 backends with the id of an IPv4 backend
        self.unlisted: list[tuple[int, _Backend, bytes]] = []  # backends in no list, with their endpoint key
        self.bound: set[bytes] = set()  # ids of services that clients are bound to, packed

    def run(self) -> Repairs:
        names = self._names()
        self._configs(names)
        self._source_ranges()
        self._backends()
        self._endpoints()
        self._frontends(names)
        self._finish(names)
        dead = [number for number in self.active if number not in self.records]
        return Repairs(self.garbage, self.puts, {name: b"".join(keys) for name, keys in self.deletes.items()}, dead)

    def _rows(self, name: str, key: Struct, value: Struct) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], bytes]]:
        """Every entry: key, value, raw key. An iterator, because a list of a hundred thousand takes 35 MB."""
        keys, values = self.maps[name].dump()
        size = key.size
        raw = (keys[i : i + size] for i in range(0, len(keys), size))
        return zip(key.iter_unpack(keys), value.iter_unpack(values), raw, strict=True)

    def _delete(self, name: str, key: bytes) -> None:
        self.deletes.setdefault(name, []).append(key)

    def _names(self) -> dict[int, ServicePortName]:
        """Ids that may be live. If two ids have one name (deleted and created again), the active one counts."""
        names: dict[int, ServicePortName] = {}
        by_name: dict[ServicePortName, int] = {}
        count = 0
        for key, value in self.maps["service_names"].items():
            (number,) = self.layouts.u32.unpack(key)
            count += 1
            try:
                name = self.layouts.unpack_name(value)
            except ValueError:
                name = None
            twin = by_name.get(name) if name is not None else None
            if name is None or number not in self.active or (twin is not None and twin > number):
                self.garbage.services.append(number)
                continue
            if twin is not None:
                del names[twin]
                self.garbage.services.append(twin)
            names[number], by_name[name] = name, number
        self.mirror.used["service_names"] = count
        self.mirror.service_ids = Ids(self.mirror.capacity["services"], {*names, *self.garbage.services})
        return names

    def _configs(self, names: dict[int, ServicePortName]) -> None:
        live: list[tuple[int, int]] = []
        other: list[tuple[int, int]] = []
        taken = []
        for (number,), row, _ in self._rows("service_configs", self.layouts.u32, self.layouts.service_config):
            service, first, cluster, local = row[:4]
            taken.append(number)
            if service in names and self.active.get(service) == number:
                record = Record(service, ServicePort(names[service], ()))
                record.config_id, record.first_slot, record.length = number, first, cluster + local
                self.records[service] = record
                self.fields[service] = row
                live.append((first, cluster + local))
            else:
                self.garbage.configs.append(number)
                other.append((first, cluster + local))
        self.mirror.used["service_configs"] = len(taken)
        self.config_ids = taken
        self.mirror.slot_ranges, fits = Ranges.without(self.mirror.capacity["slots"], live + other)
        for record, fit in zip(self.records.values(), fits, strict=False):
            if not fit:
                record.dirty = True
                record.length = 0
        self.garbage.slots = [r for r, fit in zip(other, fits[len(live) :], strict=True) if fit]
        # It has a name and is active, but its configuration is gone: nothing can be served.
        self.garbage.services += [number for number in names if number not in self.records]

    def _source_ranges(self) -> None:
        configs = {record.config_id: record.plan.name.family for record in self.records.values()}
        newest = 0
        for family in IPFamily:
            name = f"source_ranges{family.value}"
            rows = self._rows(name, self.layouts.source_range_key[family], self.layouts.u32)
            for (length, config, address), _, raw in rows:
                self.mirror.used[name] += 1
                newest = max(newest, config)
                if configs.get(config) is family:
                    self.ranges.setdefault(config, []).append(SourceRange(address, length - 32))  # type: ignore[arg-type]
                else:
                    self.garbage.source_ranges[family].append(raw)
        # Ranges are written before their configuration. If that was never written, another one must not get its ranges.
        self.mirror.config_ids = Ids(CONFIG_IDS, self.config_ids, newest + 1)

    def _backends(self) -> None:
        mirror = self.mirror
        for family in IPFamily:
            name = f"backends{family.value}"
            rows = self._rows(name, self.layouts.u32, self.layouts.backend[family])
            for (number,), (address, port, protocol, service, local), raw in rows:
                if not 0 < number < BACKEND_IDS:
                    # No packet can carry it: in the nft table it would have the key of another backend.
                    self._delete(name, raw)
                    continue
                mirror.used[name] += 1
                endpoint = Endpoint(address, port, bool(local))  # type: ignore[arg-type]
                found = _Backend(endpoint, protocol, service, family)
                if self.backends.setdefault(number, found) is not found:
                    # An id is freed once, for both families. So both are written anew, with other ids.
                    self.twins[number] = found
        shift = self.layouts.word_shift
        reached: set[int] = set()
        for service, record in self.records.items():
            cluster_count = self.fields[service][2]
            owner = service, record.plan.name.family, record.plan.name.protocol
            words = self.slots[record.first_slot : record.first_slot + record.length].tolist()
            listed = []
            numbers: dict[Endpoint, int] = {}
            for word in words:
                number = word >> shift & 0xFFFFFFFF
                backend = self.backends.get(number)
                if (
                    backend is None
                    or number in self.twins
                    or (backend.service, backend.family, backend.protocol) != owner
                ):
                    record.dirty = True
                    continue
                if numbers.setdefault(backend.endpoint, number) != number:
                    # Two backends with one address: the second one has no place in the record.
                    record.dirty = True
                    continue
                reached.add(number)
                listed.append(backend.endpoint)
            split = cluster_count if not record.dirty else len(listed)
            lists = listed[:split], listed[split:]
            # Lists that an earlier agent wrote in another order are rewritten.
            if any(part != sorted(part, key=slot_order) for part in lists):
                record.dirty = True
            record.plan = ServicePort(record.plan.name, (), _by_text(lists[0]), _by_text(lists[1]))
            record.set_backends(numbers)
        for number, backend in chain(self.backends.items(), self.twins.items()):
            key = self._endpoint_key(backend)
            mirror.endpoint_counts[key] = mirror.endpoint_counts.get(key, 0) + 1
            if number not in reached:
                self.unlisted.append((number, backend, key))
        # Ids that a client or a socket remembers must not be reused.
        remembered = max(max(self.backends, default=0), mirror.foreign_id)
        for name in ("affinities", "socket_flows"):
            keys, values = self.maps[name].dump()
            if name == "affinities":
                self.bound = {keys[at : at + 4] for at in range(0, len(keys), self.maps[name].key_size)}
            remembered = max(remembered, max((row[1] for row in self.layouts.affinity.iter_unpack(values)), default=0))
        mirror.backend_ids = Ids(BACKEND_IDS, self.backends, remembered + 1)

    def _endpoint_key(self, backend: _Backend) -> bytes:
        e = backend.endpoint
        return self.layouts.endpoint_key[backend.family].pack(0, e.address, e.port, backend.protocol)

    def _endpoints(self) -> None:
        wanted = self.mirror.endpoint_counts
        for family in IPFamily:
            name = f"endpoints{family.value}"
            rows = self._rows(name, self.layouts.endpoint_key[family], self.layouts.endpoint)
            right = serving = 0
            seen: set[bytes] = set()
            for (service, address, port, protocol), (count,), raw in rows:
                if service == 0:
                    if raw not in wanted:
                        self._delete(name, raw)
                    elif wanted[raw] == count:
                        seen.add(raw)
                elif protocol == Protocol.UDP and self._is_udp(service, family) and not raw[-1]:
                    serving += 1
                    self.serving.setdefault(service, []).append(Endpoint(address, port, False))  # type: ignore[arg-type]
                else:
                    self._delete(name, raw)
            size = self.layouts.endpoint_key[family].size
            missing = [key for key in wanted if len(key) == size and key not in seen]
            right = sum(1 for key in wanted if len(key) == size)
            if missing:
                pack = self.mirror.pack_count
                self.puts[name] = (b"".join(missing), b"".join(pack(wanted[key]) for key in missing))
            self.mirror.used[name] = right + serving

        self._unlisted()

    def _is_udp(self, service: int, family: IPFamily) -> bool:
        """Whether it is a live UDP port of this family: only these have entries for their serving endpoints."""
        record = self.records.get(service)
        return record is not None and (record.plan.name.family, record.plan.name.protocol) == (family, Protocol.UDP)

    def _unlisted(self) -> None:
        """Backends in no list: sockets may keep those that still serve (UDP), the others are garbage."""
        found: dict[int, dict[tuple[bytes, int], tuple[Endpoint, int]]] = {}
        for number, backend, _ in self.unlisted:
            udp = backend.protocol == Protocol.UDP and self._is_udp(backend.service, backend.family)
            if udp and number not in self.twins:
                e = backend.endpoint
                found.setdefault(backend.service, {}).setdefault((e.address, e.port), (e, number))
        kept: set[int] = set()
        for service, places in found.items():
            record = self.records[service]
            serving = frozenset((e.address, e.port) for e in self.serving.get(record.id, ()))
            record.left = still_serving(dict(places.values()), record.plan, serving)
            kept.update(record.left.values())
        for number, backend, key in self.unlisted:
            if number not in kept:
                self.garbage.backends[backend.family].append((number, key))

    def _frontends(self, names: dict[int, ServicePortName]) -> None:
        for family in IPFamily:
            name = f"frontends{family.value}"
            rows = self._rows(name, self.layouts.frontend_key[family], self.layouts.frontend)
            for (_, _, protocol), (service, kind), raw in rows:
                owner = names.get(service)
                if (
                    service not in self.records
                    or owner is None
                    or (family, protocol) != (owner.family, owner.protocol)
                    or raw[-1]
                ):
                    self._delete(name, raw)
                    continue
                try:
                    frontend = self.layouts.unpack_frontend(family, raw, kind)
                except ValueError:
                    self._delete(name, raw)
                    continue
                self.mirror.owners[raw] = service
                self.mirror.used[name] += 1
                self.frontends.setdefault(service, []).append(frontend)

    def _finish(self, names: dict[int, ServicePortName]) -> None:
        for service, record in self.records.items():
            row = self.fields[service]
            record.plan = ServicePort(
                name=names[service],
                frontends=tuple(self.frontends.get(service, ())),
                cluster=record.plan.cluster,
                local=record.plan.local,
                serving=tuple(self.serving.get(service, ())),
                any_endpoints=bool(row[5]),
                internal_local=bool(row[6]),
                external_local=bool(row[7]),
                affinity_seconds=row[4],
                source_ranges=tuple(self.ranges.get(record.config_id, ())),
                vip_source_allowed=bool(row[9]),
            )
            if not row[4] and self.layouts.u32.pack(service) in self.bound:
                self.garbage.affinities.append(service)
            # The flag and the ranges must agree, or the configuration would allow forbidden sources.
            record.dirty |= bool(row[8]) != bool(record.plan.source_ranges)
            self.mirror.records[names[service]] = record
            self.mirror.names[service] = names[service]


def adopt(mirror: State, maps: Mapping[str, Map], services: memoryview, slots: memoryview) -> Repairs:
    """Fill an empty mirror from the maps; returns what must be written and what is garbage."""
    return _Adoption(mirror, maps, services, slots).run()
