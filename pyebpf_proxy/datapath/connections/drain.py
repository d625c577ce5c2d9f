# SPDX-License-Identifier: Apache-2.0
"""Drains the fast path: promotes every young flow, so that no connection is lost when the programs are removed.

Needs only the pins and no running agent: ``--cleanup``, an agent whose fast path is off, and an agent with another
layout, or with another size of the flow table, drain the flows of a former run.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.datapath.connections.promotion import promoter
from pyebpf_proxy.datapath.loader import kernel_objects, tcx
from pyebpf_proxy.datapath.loader._libbpf import lib
from pyebpf_proxy.datapath.loader.btf import Btf, StaleObjectError
from pyebpf_proxy.datapath.loader.libbpf import BpfError, Map, Object, Program
from pyebpf_proxy.datapath.loader.programs import OBJECTS
from pyebpf_proxy.datapath.maps.resize import former_pins

#: Folder of pinned programs, next to that of the maps.
PROGRAMS = "programs"
_PROGRAMS = ("sweep_flows", "promote_flow")
#: A pin that is about to replace another one. bpffs allows no dot in a name.
_FRESH = "-fresh"
_MAPS = ("flows", "fast_path", "promotions", "sweep_results")
#: Draining waits no longer than this for flows without a reply: such a flow loses nothing if it is not promoted.
DRAIN_SECONDS = 3.0
_ZERO = bytes(4)
_log = Logger("datapath")


class _Pinned(Program):
    """A pinned program, opened by its pin."""

    def __init__(self, path: Path) -> None:
        # It belongs to no object: there are only a descriptor and a name.
        self.name = path.name
        self._lib = lib()
        self._fd = tcx.open_pinned(path)

    @property
    def fd(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


def pin_programs(programs: Mapping[str, Program], pins: Path) -> None:
    """Pin the programs for draining below ``pins``, replacing those of a former run. BpfError, OSError."""
    folder = pins / PROGRAMS
    folder.mkdir(parents=True, exist_ok=True)
    for name in _PROGRAMS:
        if name in programs:
            # Renamed: an agent that is killed here leaves the former program, and the next one can still drain.
            fresh = folder / (name + _FRESH)
            fresh.unlink(missing_ok=True)
            tcx.pin(programs[name].fd, fresh)
            fresh.rename(folder / name)


def unpin_programs(pins: Path) -> None:
    """Remove the pins of :func:`pin_programs`, which keep the flow table in memory. OSError."""
    folder = pins / PROGRAMS
    if folder.is_dir():
        for name in _PROGRAMS:
            (folder / name).unlink(missing_ok=True)
            (folder / (name + _FRESH)).unlink(missing_ok=True)
        folder.rmdir()


def drain(pins: Path, seconds: float = DRAIN_SECONDS) -> int:
    """Stop new young flows; promote those of the pinned flow table.

    ``pins``: the folder of one layout version. Returns how many young flows are left after ``seconds`` at most: those
    without a reply, and those that conntrack had no space for. 0 also if there is nothing to drain. Errors are logged,
    since only flows of a few seconds are at stake: the caller continues.
    """
    try:
        return _drain(pins, seconds)
    except (OSError, FatalError) as error:
        _log.error("the fast path could not be drained, young flows end", pins=pins, error=str(error))
        return 0


def _drain(pins: Path, seconds: float) -> int:
    places = {name: pins / "maps" / name for name in _MAPS}
    # While its size changes, the programs of the former run still use the flow table that has been replaced.
    places["flows"] = [*former_pins(pins / "maps", "flows"), places["flows"]][0]
    paths = [*places.values(), *(pins / PROGRAMS / name for name in _PROGRAMS)]
    if not all(path.exists() for path in paths):
        return 0
    with ExitStack() as stack:
        maps = {name: Map.open_pinned(path) for name, path in places.items()}
        for each in maps.values():
            stack.callback(each.close)
        programs = {name: _Pinned(pins / PROGRAMS / name) for name in _PROGRAMS}
        for program in programs.values():
            stack.callback(program.close)
        try:
            btf = types_of(maps["flows"], maps["fast_path"])
            word = btf.struct("fast_path")
            fields = word.unpack(maps["fast_path"].lookup(_ZERO) or bytes(word.size))
            drains = word.pack(**{**fields, "draining": 1})
            found = promoter(maps, programs, btf)
        except (StaleObjectError, ValueError) as error:
            _log.warning(
                "the flow table of another version cannot be read: its young flows will end",
                pins=pins,
                error=str(error),
            )
            return 0
        maps["fast_path"].update(_ZERO, drains)
        left = found.drain(seconds)
        if found.statistics.promoted or left:
            _log.info("the fast path is drained", promoted=found.statistics.promoted, left=left)
        return left


def types_of(flows: Map, fast_path: Map) -> Btf:
    """The types of the maps' own version; without CAP_SYS_ADMIN this version's, if the sizes of both are the same.

    ValueError if they are not. BpfError.
    """
    try:
        number = kernel_objects.map_info(flows.fd).btf_id
        if number:
            return kernel_objects.types(number)
    except BpfError as error:
        if error.errno != errno.EPERM:
            raise
    with Object.open(OBJECTS / "tc.bpf.o") as unset:
        btf = unset.btf
    if (flows.value_size, fast_path.value_size) != (btf.struct("flow").size, btf.struct("fast_path").size):
        raise ValueError("their layout is unknown")
    return btf
