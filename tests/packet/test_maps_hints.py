# SPDX-License-Identifier: Apache-2.0
"""Hints on real maps: every entry has its bit. All other tests of this folder show that the programs check the same
bit: without it they find no entry.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import pytest

from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.loader.programs import Loaded
from pyebpf_proxy.datapath.maps.hints import AddressHints
from pyebpf_proxy.datapath.maps.writer import Writer
from tests.packet.service_plans import second_plan

pytestmark = pytest.mark.needs_bpf

HINTED = ("frontends4", "frontends6", "endpoints4", "endpoints6")


def bit_of(address: bytes, port: int) -> int:
    """A second implementation of bpf/hints.h."""
    words = [int.from_bytes(address[at : at + 4], sys.byteorder) for at in range(0, len(address), 4)]
    mixed = words[0] ^ port
    for word, factor in zip(words[1:], (0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F), strict=False):
        mixed ^= word * factor
    return (mixed * 0x9E3779B1 & 0xFFFFFFFF) >> 12


def bits_set(loaded: Loaded) -> set[int]:
    words = loaded.maps["address_hints"].mmap().cast("Q")
    return {64 * index + bit for index, word in enumerate(words) if word for bit in range(64) if word >> bit & 1}


def bits_of(loaded: Loaded, name: str, keys: Iterable[bytes]) -> set[int]:
    layout = loaded.tc.btf.struct(f"{name[:-2]}{name[-1]}_key")
    found: list[dict[str, Any]] = [dict(layout.unpack(key)) for key in keys]
    return {bit_of(fields["address"], fields["port"]) for fields in found}


def wanted(loaded: Loaded) -> set[int]:
    return {bit for name in HINTED for bit in bits_of(loaded, name, (key for key, _ in loaded.maps[name].items()))}


class Watched:
    """A map that checks that each entry has its bit when it is written."""

    def __init__(self, table: Map, loaded: Loaded) -> None:
        self._table, self._loaded = table, loaded
        self.written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def update_batch(self, keys: bytes | memoryview, values: bytes | memoryview) -> None:
        size = self._table.key_size
        found = [bytes(keys[at : at + size]) for at in range(0, len(keys), size)]
        assert bits_of(self._loaded, self._table.name, found) <= bits_set(self._loaded)
        self.written += len(found)
        self._table.update_batch(keys, values)


def test_a_bit_is_there_before_its_entry(loaded: Loaded) -> None:
    watched = {name: Watched(loaded.maps[name], loaded) for name in HINTED}
    loaded.maps.update(watched)  # type: ignore[arg-type]
    Writer(loaded).apply(second_plan())
    assert sum(each.written for each in watched.values()) >= 5
    assert bits_set(loaded) == wanted(loaded), "and no other bits"


def test_bits_that_are_missing_are_there_after_a_start(loaded: Loaded, writer: Writer) -> None:
    """As after an agent that wrote no hints."""
    writer.apply(second_plan())
    words = loaded.maps["address_hints"].mmap()
    words[:] = bytes(len(words))
    Writer(loaded)
    assert bits_set(loaded) == wanted(loaded) != set()


def test_a_word_that_has_the_bit_is_not_written(loaded: Loaded) -> None:
    """A program may be setting another bit of it."""
    hints = AddressHints(loaded.maps["address_hints"], loaded.tc.btf)
    key = loaded.tc.btf.struct("endpoint4_key").pack(address=bytes((10, 0, 0, 1)), port=80, protocol=6)
    written: list[int] = []

    class Words(list[int]):
        def __setitem__(self, at: Any, word: Any) -> None:
            written.append(at)
            super().__setitem__(at, word)

    hints._words = Words(hints._words)  # type: ignore[assignment]
    for _ in range(2):
        hints.add_all("endpoints4", key)
    assert len(written) <= 1
    written.clear()
    hints.add_all("endpoints4", key)
    assert written == []
