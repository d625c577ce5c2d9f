# SPDX-License-Identifier: Apache-2.0
"""Service ports for the tests of the writer, in a short notation; and a writer that can be watched and killed."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

from pyebpf_proxy.datapath.loader.programs import Loaded
from pyebpf_proxy.datapath.maps import writer
from pyebpf_proxy.datapath.maps.writer import Writer
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
from tests.packet.service_maps import rows, word

CLUSTER_IP = FrontendKind.CLUSTER_IP


def name_of(name: str, family: IPFamily = IPFamily.IPV4, protocol: Protocol = Protocol.TCP) -> ServicePortName:
    return ServicePortName("shop", name, "http", protocol, family)


def endpoints(*texts: str) -> tuple[Endpoint, ...]:
    """ "10.0.0.1:80", or "10.0.0.1:80 local" for an endpoint on this node."""
    result = []
    for item in texts:
        where, _, place = item.partition(" ")
        address, _, port = where.rpartition(":")
        result.append(Endpoint(ip_address(address.strip("[]")).packed, int(port), place == "local"))
    return tuple(result)


def frontend(address: str, port: int = 80, kind: FrontendKind = CLUSTER_IP) -> Frontend:
    return Frontend(kind, ip_address(address).packed, port)


def service(name: ServicePortName, addresses: tuple[str, ...], *items: str, **more: Any) -> ServicePort:
    cluster = endpoints(*items)
    defaults: dict[str, Any] = {
        "cluster": cluster,
        "local": tuple(e for e in cluster if e.local),
        "any_endpoints": bool(cluster),
        "frontends": tuple(frontend(a) for a in addresses),
    }
    return ServicePort(name, **{**defaults, **more})


def slot_backends(loaded: Loaded, writer: Writer, name: ServicePortName) -> list[int]:
    table = rows(loaded, "service_configs")[word(loaded, "services", writer.service_id(name))]
    count = table["cluster_count"] + table["local_count"]
    return [word(loaded, "slots", table["first_slot"] + i) for i in range(count)]


class Watched:
    """A map that reports each change of an entry before it happens."""

    def __init__(self, real: Any, watcher: Any) -> None:
        self._real = real
        self._watcher = watcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def update_batch(self, keys: bytes, values: bytes) -> None:
        for i in range(len(keys) // self._real.key_size):
            key = bytes(keys[i * self._real.key_size : (i + 1) * self._real.key_size])
            value = bytes(values[i * self._real.value_size : (i + 1) * self._real.value_size])
            self._watcher(self._real.name)
            self._real.update(key, value)

    def delete_batch(self, keys: bytes) -> None:
        for i in range(len(keys) // self._real.key_size):
            self._watcher(self._real.name)
            self._real.delete(keys[i * self._real.key_size : (i + 1) * self._real.key_size])


class WatchedWriter(Writer):
    """Also reports each store through mmap."""

    watcher: Any = staticmethod(lambda name: None)

    def _fill(self, first: int, backends: list[int]) -> None:
        for i, backend in enumerate(backends):
            self.watcher("slots")
            super()._fill(first + i, [backend])

    def _flip(self, service: int, config_id: int) -> None:
        self.watcher("services")
        super()._flip(service, config_id)


def watch(loaded: Loaded, watcher: Any) -> Writer:
    for name in writer.MAPS:
        loaded.maps[name] = Watched(loaded.maps[name], watcher)  # type: ignore[assignment]
    WatchedWriter.watcher = staticmethod(watcher)
    return WatchedWriter(loaded)


def first_plan() -> dict[ServicePortName, ServicePort]:
    web, dns, six = name_of("web"), name_of("dns", protocol=Protocol.UDP), name_of("six", IPFamily.IPV6)
    gone = name_of("gone", protocol=Protocol.UDP)
    return {
        web: service(web, ("10.96.0.1", "203.0.113.1"), "10.0.0.1:80 local", "10.0.0.2:80"),
        dns: service(
            dns, ("10.96.0.2",), "10.0.0.1:53", "10.0.0.2:53", serving=endpoints("10.0.0.1:53", "10.0.0.2:53")
        ),
        six: service(six, ("fd00:96::1",), "[fd00::1]:80", source_ranges=(SourceRange(bytes(16), 0),)),
        gone: service(gone, ("10.96.0.9",), "10.0.0.1:53", serving=endpoints("10.0.0.1:53")),
    }


def second_plan() -> dict[ServicePortName, ServicePort]:
    """Adds and removes endpoints and addresses, moves an address, removes a service port and adds one."""
    web, dns, six = name_of("web"), name_of("dns", protocol=Protocol.UDP), name_of("six", IPFamily.IPV6)
    new = name_of("new")
    return {
        web: service(web, ("10.96.0.1",), "10.0.0.2:80", "10.0.0.3:80", "10.0.0.4:80 local", affinity_seconds=60),
        dns: service(
            dns, ("10.96.0.2",), "10.0.0.2:53", "10.0.0.3:53", serving=endpoints("10.0.0.2:53", "10.0.0.3:53")
        ),
        six: service(six, ("fd00:96::2",), "[fd00::1]:80", source_ranges=(SourceRange(b"\x20" + bytes(15), 3),)),
        new: service(new, ("203.0.113.1",), "10.0.0.3:80"),
    }


class Killed(BaseException):
    pass


def kill_at(loaded: Loaded, k: int, after: int = 0) -> Writer:
    """A writer that dies at its k-th operation. If there are fewer, ``done`` is their number."""
    done = [0]

    def count(_: str) -> None:
        done[0] += 1
        if done[0] == k:
            raise Killed

    writer = watch(loaded, count)
    writer.done = done  # type: ignore[attr-defined]
    return writer


def change_everything(writer: Writer) -> None:
    writer.apply(second_plan(), complete=True)
    writer.collect()
