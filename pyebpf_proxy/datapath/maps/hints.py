# SPDX-License-Identifier: Apache-2.0
"""Bitmaps that save most packets a map lookup: a port may be a NodePort, an address and port may belong to a service.

A bit is set before its entry is written. A bit that is set needlessly costs a lookup; a missing one breaks a service.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from struct import Struct

from pyebpf_proxy.common.bpf_constants import ADDRESS_HINT_BITS
from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.services.model import IPFamily

# The hash of bpf/hints.h
_SPREAD = 0x9E3779B1
_MIX = (0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)


class Hints:
    """Writes ``node_port_hints`` and ``address_hints``; knows by name the maps that they are for."""

    def __init__(self, maps: Mapping[str, Map], btf: Btf) -> None:
        self._sizes = {name: maps[name].key_size for name in ("frontends4", "frontends6")}
        self._node_ports = NodePortHints(maps["node_port_hints"], btf)
        self._addresses = AddressHints(maps["address_hints"], btf)

    def rebuild(self, frontends: Iterable[bytes], endpoints: Iterable[bytes]) -> None:
        """Exactly these keys exist."""
        self._node_ports.rebuild(frontends)
        self._addresses.add(frontends)
        self._addresses.add(endpoints)

    def add(self, name: str, keys: bytes) -> None:
        """Set the bits of these concatenated keys; must be called before they are written to the map with that name."""
        if name in self._sizes:
            size = self._sizes[name]
            self._node_ports.add(keys[at : at + size] for at in range(0, len(keys), size))
        if name.startswith(("frontends", "endpoints")):
            self._addresses.add_all(name, keys)


class NodePortHints:
    """One bit for each port number. Keys are those of the maps ``frontends4`` and ``frontends6``.

    Only :meth:`rebuild` clears bits, at the start.
    """

    def __init__(self, hints: Map, btf: Btf) -> None:
        self._words = hints.mmap().cast("Q")
        self._fields = {}
        for family in IPFamily:
            layout = btf.struct(f"frontend{family.value}_key")
            self._fields[layout.size] = layout.packer("address", "port")

    def rebuild(self, keys: Iterable[bytes]) -> None:
        """Set the bits of these frontends, and clear all others."""
        words = [0] * len(self._words)
        for port in self._ports(keys):
            words[port // 64] |= 1 << port % 64
        for index, word in enumerate(words):
            if self._words[index] != word:
                self._words[index] = word

    def add(self, keys: Iterable[bytes]) -> None:
        """Set the bits of these frontends; must be called before they are written."""
        for port in self._ports(keys):
            self._words[port // 64] |= 1 << port % 64

    def _ports(self, keys: Iterable[bytes]) -> Iterable[int]:
        for key in keys:
            address, port = self._fields[len(key)].unpack(key)
            if not any(address):
                yield port


class AddressHints:
    """One bit for each address and port, by a hash. Keys are those of the maps ``frontends*`` and ``endpoints*``.

    Bits are never cleared, because the programs also set some, for entries of the flow table. The map lives until the
    node reboots. With 200 000 of its million bits set, every fifth other packet costs a needless lookup.
    """

    def __init__(self, hints: Map, btf: Btf) -> None:
        self._words = hints.mmap().cast("Q")
        if len(self._words) != 1 << ADDRESS_HINT_BITS - 6:
            raise ValueError(f"map {hints.name} has {len(self._words)} words instead of {1 << ADDRESS_HINT_BITS - 6}")
        self._fields: dict[str, Struct] = {}
        for family in IPFamily:
            for name in ("frontend", "endpoint"):
                layout = btf.struct(f"{name}{family.value}_key")
                address, port = layout.fields["address"].offset, layout.fields["port"].offset
                words = 1 if family == 4 else 4
                if port != address + 4 * words:
                    raise ValueError(f"struct {name}{family.value}_key has no port behind its address")
                self._fields[f"{name}s{family.value}"] = Struct(f"={address}x{words}IH{layout.size - port - 2}x")
        self._names = {fields.size: name for name, fields in self._fields.items()}

    def add(self, keys: Iterable[bytes]) -> None:
        """Add keys of any of the maps."""
        found: dict[int, list[bytes]] = {}
        for key in keys:
            found.setdefault(len(key), []).append(key)
        for size, some in found.items():
            self.add_all(self._names[size], b"".join(some))

    def add_all(self, name: str, keys: bytes) -> None:
        """Add concatenated keys of the map with that name."""
        if name.endswith("4"):
            for address, port in self._fields[name].iter_unpack(keys):
                self._set((address ^ port) * _SPREAD >> 32 - ADDRESS_HINT_BITS & (1 << ADDRESS_HINT_BITS) - 1)
            return
        second, third, fourth = _MIX
        for a, b, c, d, port in self._fields[name].iter_unpack(keys):
            mixed = a ^ port ^ b * second ^ c * third ^ d * fourth
            self._set(mixed * _SPREAD >> 32 - ADDRESS_HINT_BITS & (1 << ADDRESS_HINT_BITS) - 1)

    def _set(self, bit: int) -> None:
        at, mask = bit >> 6, 1 << (bit & 63)
        # The word is not written if it has the bit: a program may be setting another one.
        if not self._words[at] & mask:
            self._words[at] |= mask
