# SPDX-License-Identifier: Apache-2.0
"""Information about loaded maps and programs, whichever process loaded them: their types and constants.

Needs CAP_SYS_ADMIN: objects are opened by their ids (bpf(2), BPF_*_GET_FD_BY_ID).
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from pyebpf_proxy.datapath.loader import _libbpf
from pyebpf_proxy.datapath.loader._libbpf import captured, checked, checked_pointer, ffi
from pyebpf_proxy.datapath.loader.btf import Btf

_MAPS_MAX = 256
_ZERO = bytes(4)


class ProgramInfo(NamedTuple):
    """A loaded program. ``map_ids``: the maps that it uses."""

    id: int
    name: str
    map_ids: frozenset[int]


class MapInfo(NamedTuple):
    """A map in the kernel. ``btf_id``: its BTF; 0: none."""

    id: int
    name: str
    key_size: int
    value_size: int
    max_entries: int
    btf_id: int


def map_info(fd: int) -> MapInfo:
    """Information about an open map. BpfError."""
    info = _info(fd, "map_info", "map")
    name = ffi.string(info.name).decode()
    return MapInfo(info.id, name, info.key_size, info.value_size, info.max_entries, info.btf_id)


def program_info(number: int) -> ProgramInfo:
    """The program with this id. BpfError (ENOENT: it is gone)."""
    with captured():
        fd = checked(_libbpf.lib().bpf_prog_get_fd_by_id(number), f"program {number}")
    try:
        ids = ffi.new("uint32_t[]", _MAPS_MAX)
        arguments = {"nr_map_ids": _MAPS_MAX, "map_ids": int(ffi.cast("uintptr_t", ids))}
        info = _info(fd, "program_info", f"program {number}", arguments)
        used = frozenset(ids[i] for i in range(min(info.nr_map_ids, _MAPS_MAX)))
        return ProgramInfo(info.id, ffi.string(info.name).decode(), used)
    finally:
        os.close(fd)


def types(btf_id: int) -> Btf:
    """The types with this id. BpfError, ValueError."""
    library = _libbpf.lib()
    with captured():
        pointer = checked_pointer(library.btf__load_from_kernel_by_id(btf_id), f"types {btf_id}")
    try:
        size = ffi.new("uint32_t *")
        raw = library.btf__raw_data(pointer, size)
        return Btf(bytes(ffi.buffer(raw, size[0])), f"types {btf_id} of the kernel")
    finally:
        library.btf__free(pointer)


def constants(program: ProgramInfo, variable: str) -> tuple[Btf, bytes] | None:
    """A constant (.rodata) that the program was loaded with, and the BTF to read it; None: it has none."""
    for number in program.map_ids:
        with captured():
            fd = checked(_libbpf.lib().bpf_map_get_fd_by_id(number), f"map {number}")
        try:
            info = map_info(fd)
            if not info.name.endswith(".rodata") or not info.btf_id:
                continue
            btf = types(info.btf_id)
            offset, size = btf.variable(".rodata", variable)
            value = ffi.new("char[]", info.value_size)
            checked(_libbpf.lib().bpf_map_lookup_elem(fd, _ZERO, value), f"constants of program {program.id}")
            return btf, bytes(ffi.buffer(value, info.value_size))[offset : offset + size]
        finally:
            os.close(fd)
    return None


def _info(fd: int, struct: str, what: str, arguments: dict[str, int] | None = None) -> Any:
    info = ffi.new(f"struct {struct} *", arguments or {})
    size = ffi.new("uint32_t *", ffi.sizeof(f"struct {struct}"))
    checked(_libbpf.lib().bpf_obj_get_info_by_fd(fd, info, size), f"read the info of {what}")
    return info
