# SPDX-License-Identifier: Apache-2.0
"""Reads pinned maps. Their types come from the kernel, so no agent is needed.

Opening types by id requires CAP_SYS_ADMIN, which the agent's own pod lacks. There, the types of this command's object
file are used, and the sizes of the maps must match.

Maps are dumped in batches, not atomically; :mod:`state` checks the consistency.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Any, Self

from pyebpf_proxy.datapath.loader import kernel_objects
from pyebpf_proxy.datapath.loader.btf import Btf, StaleObjectError
from pyebpf_proxy.datapath.loader.layout import LAYOUT_VERSION
from pyebpf_proxy.datapath.loader.libbpf import BpfError, Map, Object
from pyebpf_proxy.datapath.loader.programs import OBJECTS
from pyebpf_proxy.datapath.loader.reasons import reasons
from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.see.answers import OtherLayoutError, SeeError, listed

Row = tuple[Any, ...]


class Pinned:
    """The maps of one instance, as a context manager. Every method raises SeeError if something cannot be read."""

    def __init__(self, directory: Path) -> None:
        if os.geteuid() != 0:
            raise SeeError("not permitted to read the BPF maps: run it as root (sudo)")
        #: The folder with the pins of this layout; it contains ``maps`` and ``links``.
        self.folder = _find(directory)
        #: The run folder of the instance.
        self.directory = directory
        self._maps: dict[str, Map] = {}
        #: The inodes of the pins through which the maps were opened.
        self._pins: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for opened in self._maps.values():
            opened.close()
        self._maps.clear()

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the pinned maps."""
        return frozenset(path.name for path in (self.folder / "maps").iterdir())

    def map(self, name: str) -> Map:
        """A map by name."""
        if name not in self._maps:
            try:
                self._maps[name] = Map.open_pinned(self._pin(name))
                self._pins[name] = self._inode(name)
            except BpfError as error:
                if error.errno == errno.ENOENT:
                    raise SeeError(f"there is no map {name} in {self.folder}/maps: {_HALF}") from None
                raise SeeError(f"map {name}: {error}") from None
        return self._maps[name]

    def check(self) -> None:
        """For commands that run for long: SeeError if an open map is no longer the one that is pinned.

        An agent replaces maps at its start if they get another layout or size. The former ones never change again.
        """
        for name, opened in self._maps.items():
            inode = self._inode(name)
            if inode != self._pins[name] and not self._is_pinned(name, opened):
                raise SeeError(
                    "the maps were replaced or removed, by a new agent or a clean-up: start this command again"
                )
            self._pins[name] = inode

    def _pin(self, name: str) -> Path:
        return self.folder / "maps" / name

    def _inode(self, name: str) -> int:
        """The inode of a map's pin; 0: it has none."""
        try:
            return self._pin(name).stat().st_ino
        except OSError:
            return 0

    def _is_pinned(self, name: str, opened: Map) -> bool:
        """Whether the pin leads to this map. An agent pins its maps again if their pins were removed."""
        try:
            with contextlib.closing(Map.open_pinned(self._pin(name))) as pinned:
                return kernel_objects.map_info(pinned.fd).id == kernel_objects.map_info(opened.fd).id
        except BpfError:
            return False

    @cached_property
    def btf(self) -> Btf:
        """The types of all maps, from the map ``services``."""
        try:
            number = kernel_objects.map_info(self.map("services").fd).btf_id
            if not number:
                raise SeeError(f"the maps in {self.folder} have no type information: {_OTHER}")
            return kernel_objects.types(number)
        except BpfError as error:
            if error.errno != errno.EPERM:
                raise SeeError(f"the types of the maps cannot be read: {error}") from None
            return self._own_types()
        except ValueError as error:
            raise SeeError(f"the types of the maps cannot be read: {error}") from None

    def _own_types(self) -> Btf:
        """The types of this command's objects, if the sizes of the maps match."""
        try:
            with Object.open(OBJECTS / "tc.bpf.o") as unset:
                types, structs = unset.btf, _STRUCTS
                sizes = {name: types.struct(struct).size for name, struct in structs.items()}
        except (BpfError, StaleObjectError) as error:
            raise SeeError(f"the types of the maps cannot be read: {error}") from None
        other = [name for name, size in sizes.items() if name in self.names and self.map(name).value_size != size]
        if other:
            raise SeeError(f"map {other[0]} in {self.folder} has another layout: {_OTHER}")
        return types

    def packer(self, struct: str, *fields: str) -> Struct:
        """The unpacker of these fields of a struct."""
        try:
            return self.btf.struct(struct).packer(*fields)
        except StaleObjectError as error:
            raise SeeError(f"maps of another layout in {self.folder} ({error.what}): {_OTHER}") from None

    def rows(self, name: str, key: Struct, value: Struct) -> Iterator[tuple[Row, Row]]:
        """Every entry of a map."""
        opened = self.map(name)
        if (opened.key_size, opened.value_size) != (key.size, value.size):
            raise SeeError(f"map {name} in {self.folder} has another layout: {_OTHER}")
        try:
            keys, values = opened.dump()
        except BpfError as error:
            raise SeeError(f"map {name}: {error}") from None
        return zip(key.iter_unpack(keys), value.iter_unpack(values), strict=True)

    def words(self, name: str) -> list[int]:
        """The 64-bit words of an array."""
        try:
            return self.map(name).mmap().cast("Q").tolist()
        except BpfError as error:
            raise SeeError(str(error)) from None

    def counts(self) -> dict[str, int]:
        """The counters of every reason (lower case), summed over all CPUs."""
        found = {}
        opened = self.map("counters")
        names = {number: name for name, number in reasons(self.enum).items()}
        for number in range(opened.max_entries):
            values = opened.lookup_cpus(U32.pack(number))
            found[names.get(number, str(number))] = sum(int.from_bytes(value, _ORDER) for value in values or ())
        return found

    def enum(self, name: str) -> dict[str, int]:
        """Names and values of an enum of the programs."""
        try:
            return dict(self.btf.enum(name))
        except StaleObjectError as error:
            raise SeeError(f"maps of another layout in {self.folder} ({error.what}): {_OTHER}") from None


U32 = Struct("=I")
#: The values of each of these maps must have the size of this struct.
_STRUCTS = {
    "service_configs": "service_config",
    "backends4": "backend4",
    "frontends4": "frontend",
    "flows": "flow",
    "permits": "permit",
    "fast_path": "fast_path",
    "tracing": "tracing",
    "last_refused": "refused",
}
_ORDER = sys.byteorder
_HALF = "the agent is starting, or a clean-up was incomplete; try again, or run --cleanup and start the agent"
_OTHER = "use the pyebpf-proxy command of the agent's version"


def _find(directory: Path) -> Path:
    """The folder with this layout's pins of the instance."""
    name = mounts.instance_name(directory)
    others: set[str] = set()
    layouts: list[str] = []
    for place in mounts.bpffs_candidates(directory):
        if not mounts.holds_pins(place):
            continue
        every = place / mounts.FOLDER
        wanted = every / name / f"v{LAYOUT_VERSION}"
        if (wanted / "maps").is_dir():
            return wanted
        if every.is_dir():
            layouts += [path.name for path in (every / name).glob("v*")]
            others |= {path.name for path in every.iterdir() if path.name not in (name, mounts.MARK)}
    if waiting := _waiting(directory):
        if layouts:
            raise OtherLayoutError(f"{waiting}; until then, the programs of another version serve it")
        raise SeeError(waiting)
    if layouts:
        raise OtherLayoutError(
            f"the maps of {directory} have layout {listed(layouts)}, this program reads v{LAYOUT_VERSION}: {_OTHER}"
        )
    there = f" (other instances have pins: {listed(sorted(others))})" if others else ""
    raise SeeError(
        f"no maps are pinned for the run folder {directory}{there}: start the agent, or name its run folder with"
        " --directory"
    )


def _waiting(directory: Path) -> str:
    """Says that an agent runs, but has pinned nothing yet, and why if that is known; "" if it does not wait."""
    from pyebpf_proxy.see import local
    from pyebpf_proxy.see.agent import running_agent

    agent = running_agent(directory)
    synced = () if agent is None else local.samples(directory).get(local.SYNCED, ())
    if agent is None or not synced or min(synced):
        return ""
    known = local.state(directory) or local.NOTHING
    why = next(map(local.source_text, known["source"].items()), "its log says what it waits for")
    return f"the agent (process {agent.pid}) has not programmed this node yet: {why}"
