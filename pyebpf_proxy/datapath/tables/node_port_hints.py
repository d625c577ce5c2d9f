# SPDX-License-Identifier: Apache-2.0
"""One bit for each port number: is it anybody's NodePort? Saves most packets a second look into the frontends.

A bit is set before the frontend is there. It is cleared by :meth:`NodePortHints.rebuild` only, at a start: one that
is set for nothing costs a lookup, one that is missing would cost the service.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.services.model import Family


class NodePortHints:
    """Writes the map ``node_port_hints`` through mmap. Keys are those of the maps ``frontends4`` and ``frontends6``."""

    def __init__(self, hints: Map, btf: Btf) -> None:
        self._words = hints.mmap().cast("Q")
        self._fields = {}
        for family in Family:
            layout = btf.struct(f"frontend{family.value}_key")
            self._fields[layout.size] = layout.packer("address", "port")

    def rebuild(self, keys: Iterable[bytes]) -> None:
        """Exactly these frontends and no others exist."""
        words = [0] * len(self._words)
        for port in self._ports(keys):
            words[port // 64] |= 1 << port % 64
        for index, word in enumerate(words):
            if self._words[index] != word:
                self._words[index] = word

    def add(self, keys: Iterable[bytes]) -> None:
        """These frontends are about to be written."""
        for port in self._ports(keys):
            self._words[port // 64] |= 1 << port % 64

    def _ports(self, keys: Iterable[bytes]) -> Iterable[int]:
        for key in keys:
            address, port = self._fields[len(key)].unpack(key)
            if not any(address):
                yield port
