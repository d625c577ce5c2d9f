# SPDX-License-Identifier: Apache-2.0
"""A part of the service maps: the entries of a few services."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator
from struct import Struct

from pyebpf_proxy.see.maps import U32, Pinned, Row
from pyebpf_proxy.services.model import Protocol

_SLOT = Struct("=II")


class PartialMaps:
    """The maps for :func:`state.read` with the entries of a few services, looked up one by one.

    ``whole``: maps that are read completely. Other maps, for example those of addresses and ranges, appear empty.
    """

    def __init__(self, maps: Pinned, configs: dict[int, int], whole: Container[str] = ()) -> None:
        """``configs``: ids of the active configurations, by service id."""
        self._maps = maps
        self._configs = configs
        self._whole = whole
        self._ids: set[int] = set()
        self.packer = maps.packer

    def words(self, name: str) -> list[int]:
        """The words of an array. In ``services``, those of all other services are zero."""
        words = self._maps.words(name)
        if name != "services":
            return words
        return [word if number in self._configs else 0 for number, word in enumerate(words)]

    def rows(self, name: str, key: Struct, value: Struct) -> Iterator[tuple[Row, Row]]:
        """Entries of these services."""
        if name in self._whole:
            return self._maps.rows(name, key, value)
        if name == "service_configs":
            return self._config_rows(value)
        if name == "service_names":
            return self._looked_up(name, self._configs, value)
        return self._looked_up(name, self._ids, value) if name.startswith("backends") else iter(())

    def _config_rows(self, value: Struct) -> Iterator[tuple[Row, Row]]:
        slots = self._maps.words("slots")
        for row in self._looked_up("service_configs", self._configs.values(), value):
            _, first, cluster, local, *_ = row[1]
            self._ids |= {halves(word)[0] for word in slots[first : first + cluster + local]}
            yield row

    def _looked_up(self, name: str, numbers: Iterable[int], value: Struct) -> Iterator[tuple[Row, Row]]:
        opened = self._maps.map(name)
        for number in numbers:
            found = opened.lookup(U32.pack(number)) if number else None
            if found is not None:
                yield (number,), value.unpack(found)


def halves(word: int) -> tuple[int, int]:
    """The two 32-bit halves of a word; the first is at the lower address."""
    first, second = _SLOT.unpack(word.to_bytes(8, sys.byteorder))
    return first, second


def reached(maps: Pinned, address: bytes, protocol: Protocol) -> PartialMaps:
    """The services with this frontend address or a NodePort, and every frontend. Raises SeeError."""
    family = 4 if len(address) == 4 else 6
    key = maps.packer(f"frontend{family}_key", "address", "port", "protocol")
    value = maps.packer("frontend", "service", "kind")
    rows = maps.rows(f"frontends{family}", key, value)
    numbers = {number for (at, _, _), (number, _) in rows if at == address or not any(at)}
    words = maps.words("services")
    whole = {"frontends4", "frontends6", "source_ranges4", "source_ranges6"}
    # Serving endpoints are recorded for UDP only.
    whole |= {"endpoints4", "endpoints6"} if protocol is Protocol.UDP else set()
    active = [number for number in numbers if number < len(words) and words[number]]
    return PartialMaps(maps, {number: halves(words[number])[0] for number in active}, whole)


class DestinationLookup:
    """Looks up the service of a destination."""

    def __init__(self, maps: Pinned) -> None:
        self._maps = maps
        self._value = maps.packer("frontend", "service")
        self._keys = {
            4 + 12 * i: maps.packer(f"frontend{4 + 2 * i}_key", "address", "port", "protocol") for i in (0, 1)
        }

    def service(self, address: bytes, port: int, protocol: int) -> int:
        """The id of the service with this frontend or NodePort; 0 if there is none."""
        key = self._keys[len(address)]
        frontends = self._maps.map("frontends4" if len(address) == 4 else "frontends6")
        for each in (address, bytes(len(address))):
            found = frontends.lookup(key.pack(each, port, protocol))
            if found is not None:
                return int(self._value.unpack(found)[0])
        return 0
