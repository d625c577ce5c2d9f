# SPDX-License-Identifier: Apache-2.0
"""Converts the service maps to service ports with their frontends, policies and endpoints.

This module makes no system calls. The maps are not read atomically: a service that changes meanwhile may refer to a
configuration that did not exist when they were read. Then everything is read again. Remaining inconsistencies are
reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any
from typing import Protocol as Interface

import msgspec

from pyebpf_proxy.common.cycles import without_cycle_search
from pyebpf_proxy.services.addresses import format_address_port
from pyebpf_proxy.services.model import (
    Endpoint,
    Frontend,
    FrontendKind,
    IPFamily,
    Protocol,
    ServicePort,
    ServicePortName,
    SourceRange,
)

_ATTEMPTS = 3
# Dictionaries instead of the enum classes: calling these for every row would take a fifth of the time.
_PROTOCOLS = {member.value: member for member in Protocol}
_FAMILIES = {member.value: member for member in IPFamily}
_KINDS = {member.value: member for member in FrontendKind}
_WORD = 0xFFFFFFFF


class Rows(Interface):
    """The part of ``maps.Pinned`` that this module uses."""

    def packer(self, struct: str, *fields: str) -> Struct: ...

    def rows(self, name: str, key: Struct, value: Struct) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]: ...

    def words(self, name: str) -> list[int]: ...


class Backend(msgspec.Struct, frozen=True, gc=False):
    """One backend of one service port, as the maps have it."""

    id: int
    family: IPFamily
    address: bytes
    port: int
    protocol: Protocol
    service: int
    local: bool

    @property
    def text(self) -> str:
        """``address:port``."""
        return format_address_port(self.address, self.port)


class Service(msgspec.Struct, gc=False):
    """One active service port. ``cluster``, ``local``: backend ids. ``serving``: addresses and ports, UDP only."""

    id: int
    name: ServicePortName
    config: int
    first_slot: int
    affinity_seconds: int
    any_endpoints: bool
    internal_local: bool
    external_local: bool
    has_ranges: bool
    vip_source_allowed: bool
    cluster: tuple[int, ...] = ()
    local: tuple[int, ...] = ()
    frontends: list[Frontend] = []
    serving: set[tuple[bytes, int]] = set()
    ranges: list[SourceRange] = []

    @property
    def backends(self) -> tuple[int, ...]:
        """Ids of all backends, each once."""
        return tuple(dict.fromkeys((*self.cluster, *self.local)))


class State(msgspec.Struct):
    """All services. ``problems``: inconsistencies, as text."""

    services: dict[int, Service] = {}
    backends: dict[int, Backend] = {}
    problems: list[str] = []
    frontends: dict[tuple[bytes, int, int], tuple[int, FrontendKind]] = {}

    @property
    def by_name(self) -> dict[ServicePortName, Service]:
        """Service ports by name, sorted by name."""
        return {service.name: service for service in sorted(self.services.values(), key=lambda s: s.name)}

    def endpoints(self, service: Service) -> list[Backend]:
        """Every existing backend of a service port, sorted by text."""
        found = [self.backends[number] for number in service.backends if number in self.backends]
        return sorted(found, key=lambda backend: backend.text)

    def plan(self, service: Service) -> ServicePort:
        """The service port in the planner's form, for comparison."""

        def those(ids: tuple[int, ...]) -> tuple[Endpoint, ...]:
            known = (self.backends[number] for number in ids if number in self.backends)
            return tuple(Endpoint(b.address, b.port, b.local) for b in known)

        return ServicePort(
            name=service.name,
            frontends=tuple(sorted(service.frontends)),
            cluster=those(service.cluster),
            local=those(service.local),
            any_endpoints=service.any_endpoints,
            internal_local=service.internal_local,
            external_local=service.external_local,
            affinity_seconds=service.affinity_seconds,
            source_ranges=tuple(sorted(service.ranges)),
            vip_source_allowed=service.vip_source_allowed,
        )


def read(maps: Rows) -> State:
    """The contents of the service maps. SeeError if they cannot be read."""
    for _ in range(_ATTEMPTS):
        with without_cycle_search():
            state = _Reading(maps).state
        if not state.problems:
            break
    return state


def read_names(maps: Rows) -> tuple[dict[int, ServicePortName], list[str]]:
    """The names of service ports by id, and as text those that cannot be read. Raises SeeError."""
    layout = maps.packer("service_name", "namespace_name", "name", "port", "family", "protocol")
    names: dict[int, ServicePortName] = {}
    problems = []
    for (number,), (*texts, family, protocol) in maps.rows("service_names", Struct("=I"), layout):
        namespace, name, port = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        try:
            names[number] = ServicePortName(namespace, name, port, _PROTOCOLS[protocol], _FAMILIES[family])
        except KeyError:
            problems.append(f"service {number} has an unreadable name")
    return names, problems


class _Reading:
    def __init__(self, maps: Rows) -> None:
        self.maps = maps
        self.state = State()
        active = {number: word & _WORD for number, word in enumerate(maps.words("services")) if word & _WORD}
        slots = maps.words("slots")
        self._services(active, slots)
        self._backends()
        self._frontends()
        self._serving()
        self._ranges()
        self._check()

    def _services(self, active: dict[int, int], slots: list[int]) -> None:
        u32 = Struct("=I")
        names, unreadable = read_names(self.maps)
        self.state.problems += unreadable
        row = self.maps.packer(
            "service_config",
            *("service", "first_slot", "cluster_count", "local_count", "affinity_seconds", "any_endpoints"),
            *("internal_local", "external_local", "source_ranges", "vip_source_allowed"),
        )
        configs: dict[int, tuple[int, ...]] = {}
        for (number,), values in self.maps.rows("service_configs", u32, row):
            configs[number] = values
        for number, config in active.items():
            found, name = configs.get(config), names.get(number)
            if found is None or name is None:
                what = f"refers to configuration {config}, which is missing" if found is None else "has no name"
                self.state.problems.append(f"service {number} {what}")
                continue
            _, first, cluster, local, affinity, *rest = found
            any_endpoints, internal, external, ranges, vips = (bool(each) for each in rest)
            middle, end = first + cluster, first + cluster + local
            self.state.services[number] = Service(
                number,
                name,
                config,
                first,
                affinity,
                any_endpoints,
                internal,
                external,
                ranges,
                vips,
                tuple(word & _WORD for word in slots[first:middle]),
                tuple(word & _WORD for word in slots[middle:end]),
            )

    def _backends(self) -> None:
        u32 = Struct("=I")
        for family in IPFamily:
            layout = self.maps.packer(f"backend{family.value}", "address", "port", "protocol", "service", "local")
            for (number,), (address, port, protocol, service, local) in self.maps.rows(
                f"backends{family.value}", u32, layout
            ):
                if protocol not in _PROTOCOLS:
                    self.state.problems.append(f"backend {number} has the unknown protocol {protocol}")
                    continue
                self.state.backends[number] = Backend(
                    number,
                    family,
                    address,
                    port,
                    _PROTOCOLS[protocol],
                    service,
                    bool(local),
                )

    def _frontends(self) -> None:
        value = self.maps.packer("frontend", "service", "kind")
        for family in IPFamily:
            key = self.maps.packer(f"frontend{family.value}_key", "address", "port", "protocol")
            for (address, port, protocol), (number, kind) in self.maps.rows(f"frontends{family.value}", key, value):
                if kind not in _KINDS or protocol not in _PROTOCOLS:
                    where = format_address_port(address, port)
                    self.state.problems.append(f"frontend {where} has the unknown kind {kind} or protocol {protocol}")
                    continue
                what = _KINDS[kind]
                self.state.frontends[address, port, protocol] = (number, what)
                service = self.state.services.get(number)
                if service is not None:
                    service.frontends.append(Frontend(what, address, port))

    def _serving(self) -> None:
        value = self.maps.packer("endpoint", "backends")
        for family in IPFamily:
            key = self.maps.packer(f"endpoint{family.value}_key", "service", "address", "port", "protocol")
            for (number, address, port, _), _ in self.maps.rows(f"endpoints{family.value}", key, value):
                service = self.state.services.get(number) if number else None
                if service is not None:
                    service.serving.add((address, port))

    def _ranges(self) -> None:
        configs = {service.config: service for service in self.state.services.values() if service.has_ranges}
        if not configs:
            return
        value = Struct("=I")
        for family in IPFamily:
            key = self.maps.packer(f"source_range{family.value}_key", "prefix_length", "config", "address")
            for (length, config, address), _ in self.maps.rows(f"source_ranges{family.value}", key, value):
                if config in configs:
                    configs[config].ranges.append(SourceRange(address, length - 32))

    def _check(self) -> None:
        backends = self.state.backends
        for service in self.state.services.values():
            missing = [number for number in service.backends if number not in backends]
            if missing:
                self.state.problems.append(f"{service.name} refers to backend {missing[0]}, which is missing")
