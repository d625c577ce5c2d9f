# SPDX-License-Identifier: Apache-2.0
"""Replaces maps of a former run that have another size, with all their entries.

Meanwhile there are two more folders next to the folder of the pins (``maps``):

1. ``maps-resized``: the new maps, created and pinned there when the new programs are loaded. Entries are copied.
   Up to here nothing has changed; the next start discards what a killed start left there.
2. Each old pin gets a second name in ``maps-former``, then the new one is renamed over it. This is atomic: there is
   always a pin. After a kill between two maps, the next start finds some new and some old, with the same contents.
3. The old programs continue with the old maps, and write to them (affinity, sockets), until the new programs are
   attached. Then the entries written meanwhile are copied, and ``maps-former`` is removed. After a kill before that,
   the next start does it.

The service maps refer to each other by ids, and the writer changes them before the new programs are attached. So if one
of them gets another size, all of them are replaced: the old programs keep a set that fits together.

The flow table is not copied here. Just before the new programs are attached, the old one in ``maps-former`` is drained
and its flows are taken over (maps/former_flows.py). Whatever starts next does so again as long as it is there.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import BpfError, Map
from pyebpf_proxy.datapath.maps.layouts import Layouts

#: What the writer fills (maps/writer.py).
SERVICE_MAPS = frozenset(
    (
        *("services", "slots", "service_configs", "service_names"),
        *(f"{name}{family}" for name in ("frontends", "backends", "endpoints", "source_ranges") for family in (4, 6)),
    )
)
_BPF_NOEXIST = 1
_ARRAY, _PERCPU_ARRAY, _LRU_HASH = 2, 6, 9
#: Maps that running programs write to: the last entries of the old ones are copied, too.
WRITTEN_BY_PROGRAMS = (
    *("affinities", "socket_revnat4", "socket_revnat6", "socket_flows", "bridged_fragments"),
    *("choices", "localities", "locality_sets"),
    *("pod_sources", "deferred_sockets"),
)
#: Values of these maps begin with the time of their last use.
_WITH_TIME = ("affinities", "socket_flows", "localities", "locality_sets", "pod_sources")
#: Arrays that may be truncated: counters, and round-robin positions of lists that no longer exist.
_MAY_BE_CUT = ("counters", "last_refused", "recent_refusals", "rr_cursor", "affinity_counts")


def former_pins(pins: Path, name: str) -> list[Path]:
    """Where the maps are pinned that the map ``name`` in ``pins`` has replaced. The first is the attached programs'."""
    folder = _former(pins)
    found = list(folder.glob(f"{name}-*")) if folder.is_dir() else []
    numbers = {path: path.name.removeprefix(f"{name}-") for path in found}
    return sorted((path for path in found if numbers[path].isdecimal()), key=lambda path: int(numbers[path]))


def _former(pins: Path) -> Path:
    return pins.with_name(f"{pins.name}-former")


class Resize:
    """The change of sizes of the maps pinned in ``pins``."""

    def __init__(self, pins: Path) -> None:
        self.pins = pins
        self.made = pins.with_name(f"{pins.name}-resized")
        self.former = _former(pins)

    def begin(self) -> None:
        """Prepare for new maps; leftovers of an interrupted start are discarded."""
        self.abandon()
        self.made.mkdir(mode=0o700)

    def renewed(self, sizes: Mapping[str, int]) -> frozenset[str]:
        """The maps to replace though they may have the wanted size. ``sizes``: that of each map. BpfError."""
        with _opened(self.pins, SERVICE_MAPS) as old:
            changed = any(each.max_entries != sizes.get(name, each.max_entries) for name, each in old.items())
        # After a kill while the pins were replaced, the attached programs use some of these maps and not others.
        attached = {name: (*former_pins(self.pins, name), self.pins / name)[0] for name in old}
        shared = [path.stat().st_ino == (self.pins / name).stat().st_ino for name, path in attached.items()]
        return SERVICE_MAPS if changed or (any(shared) and not all(shared)) else frozenset()

    def abandon(self) -> None:
        """Discard the new maps; the active ones are unchanged."""
        _remove(self.made)

    def take_over(self, maps: Mapping[str, Map], btf: Btf) -> dict[str, tuple[int, int]]:
        """Fill the new maps and replace the old pins: old and new size of each.

        Raises FatalError if the entries of one do not fit, BpfError if the kernel refuses something; then nothing has
        changed.
        """
        sizes: dict[str, tuple[int, int]] = {}
        with _opened(self.made) as new, _opened(self.pins) as old:
            for name in sorted(new):
                sizes[name] = old[name].max_entries, new[name].max_entries
                _copy(old[name], new[name], old, btf)
        for name in sizes:
            self._swap(name)
        self.abandon()
        sizes = {name: (before, after) for name, (before, after) in sizes.items() if before != after}
        # A former start was killed after it had replaced pins and before it ended.
        self._bring_over(maps, btf)
        return sizes

    def finish(self, maps: Mapping[str, Map], btf: Btf) -> None:
        """The new programs are attached: copies what the old ones wrote until then."""
        if self.former.is_dir():
            self._bring_over(maps, btf)
            _remove(self.former)

    def _swap(self, name: str) -> None:
        self.former.mkdir(mode=0o700, exist_ok=True)
        # Earlier starts may also have stopped here, so each former map gets its own name.
        taken = {entry.name for entry in self.former.iterdir()}
        number = next(n for n in range(len(taken) + 1) if f"{name}-{n}" not in taken)
        os.link(self.pins / name, self.former / f"{name}-{number}")
        os.rename(self.made / name, self.pins / name)

    def _bring_over(self, maps: Mapping[str, Map], btf: Btf) -> None:
        if not self.former.is_dir():
            return
        with _opened(self.former) as former:
            for pin, old in former.items():
                name = pin.rpartition("-")[0]
                if name in WRITTEN_BY_PROGRAMS and name in maps:
                    rows = list(old.items())
                    if name == "affinities":
                        rows = _fitting_affinities(rows, maps[name], maps, btf)
                    merge(rows, maps[name], name in _WITH_TIME)


def _copy(old: Map, new: Map, all_old: Mapping[str, Map], btf: Btf) -> None:
    if old.name == "flows":
        return  # Done later, after its young flows are promoted: maps/former_flows.py.
    keys, values = old.dump()
    rows = _rows(old, keys, values)
    if old.type in (_ARRAY, _PERCPU_ARRAY):
        used = _used(old, rows, all_old, btf)
        if used > new.max_entries and old.name not in _MAY_BE_CUT:
            raise _does_not_fit(old, new, f"uses {used} of its {old.max_entries} places")
        rows = rows[: new.max_entries]
    elif old.name == "affinities":
        rows = _fitting_affinities(rows, new, all_old, btf)
    if len(rows) > new.max_entries:
        raise _does_not_fit(old, new, f"has {len(rows)} entries")
    new.update_batch(b"".join([key for key, _ in rows]), b"".join([value for _, value in rows]))
    if new.type == _LRU_HASH and (kept := len(new.dump()[0]) // new.key_size) < len(rows):
        # An LRU map reserves some entries for each CPU.
        raise _does_not_fit(old, new, f"has {len(rows)} entries, of which {kept} were kept")


def _does_not_fit(old: Map, new: Map, what: str) -> FatalError:
    return FatalError(
        f"map {old.name} cannot get the size {new.max_entries}: it {what}; configure a larger size in the file of"
        " --datapath-config, or run pyebpf-proxy --cleanup first"
    )


def _rows(opened: Map, keys: bytes, values: bytes) -> list[tuple[bytes, bytes]]:
    count = len(keys) // opened.key_size
    stored = len(values) // count if count else 0
    size = opened.key_size
    return [(keys[i * size : (i + 1) * size], values[i * stored : (i + 1) * stored]) for i in range(count)]


def _used(opened: Map, rows: list[tuple[bytes, bytes]], maps: Mapping[str, Map], btf: Btf) -> int:
    """How many entries of an array are needed, from its beginning."""
    if opened.name != "slots":
        return max((i + 1 for i, (_, value) in enumerate(rows) if any(value)), default=0)
    # Freed slots are not cleared: only those that an active configuration names are in use.
    layouts = Layouts(btf)
    active = maps["services"].dump()[1]
    words = [active[i : i + 4] for i in range(0, len(active), 8)]
    ends = [0]
    for key, value in maps["service_configs"].items():
        service, first, cluster, local = layouts.service_config.unpack(value)[:4]
        if service < len(words) and words[service] == key:
            ends.append(first + cluster + local)
    return max(ends)


def _fitting_affinities(
    rows: list[tuple[bytes, bytes]], new: Map, maps: Mapping[str, Map], btf: Btf
) -> list[tuple[bytes, bytes]]:
    """The affinity entries of all clients or, if they do not fit, those that have not expired."""
    if len(rows) <= new.max_entries:
        return rows
    layouts = Layouts(btf)
    seconds: dict[bytes, int] = {}
    for row in layouts.service_config.iter_unpack(maps["service_configs"].dump()[1]):
        number = layouts.u32.pack(row[0])
        seconds[number] = max(seconds.get(number, 0), row[4])
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return [
        (key, value)
        for key, value in rows
        if layouts.affinity.unpack(value)[0] + seconds.get(key[:4], 0) * 1_000_000_000 > now
    ]


def merge(rows: list[tuple[bytes, bytes]], new: Map, with_time: bool) -> None:
    """Add entries that ``new`` does not have, or has with an earlier time."""
    present = dict(new.items())
    for key, value in rows:
        found = present.get(key)
        if found is None:
            try:
                new.update(key, value, _BPF_NOEXIST)
            except BpfError as error:
                # A program has written the entry already, or the map is full.
                if error.errno not in (errno.EEXIST, errno.E2BIG):
                    raise
        elif with_time and _time(value) > _time(found):
            new.update(key, value)


def _time(value: bytes) -> int:
    return int.from_bytes(value[:8], sys.byteorder)


@contextmanager
def _opened(folder: Path, names: Container[str] | None = None) -> Iterator[dict[str, Map]]:
    """The maps that are pinned in the folder. ``names``: only these."""
    maps: dict[str, Map] = {}
    try:
        for pin in sorted(folder.iterdir()):
            if names is None or pin.name in names:
                maps[pin.name] = Map.open_pinned(pin)
        yield maps
    finally:
        for opened in maps.values():
            opened.close()


def _remove(folder: Path) -> None:
    if folder.is_dir():
        for pin in folder.iterdir():
            pin.unlink(missing_ok=True)
        folder.rmdir()
