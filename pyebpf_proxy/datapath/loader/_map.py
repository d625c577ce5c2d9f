# SPDX-License-Identifier: Apache-2.0
"""One BPF map: single entries, batches, dumps, memory mapping."""

from __future__ import annotations

import errno as errors
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyebpf_proxy.datapath.loader import _libbpf
from pyebpf_proxy.datapath.loader._libbpf import BpfError, checked, ffi, possible_cpus

_PER_CPU = {5, 6, 10}  # BPF_MAP_TYPE_PERCPU_HASH, _PERCPU_ARRAY, _LRU_PERCPU_HASH
_ENOTSUPP = 524  # internal to the kernel, unknown to libc
_BATCH = 4096


class Map:
    """A BPF map. Keys and values are bytes as in the kernel; layouts come from :mod:`btf`."""

    def __init__(self, fd: int, name: str, kind: int, key_size: int, value_size: int, max_entries: int) -> None:
        self.fd = fd
        self.name = name
        self.type = kind
        self.key_size = key_size
        self.value_size = value_size
        self.max_entries = max_entries
        self._lib = _libbpf.lib()
        self._owned = False
        self._stored = value_size if kind not in _PER_CPU else (value_size + 7 & ~7) * possible_cpus()

    @classmethod
    def open_pinned(cls, path: Path) -> Map:
        """A map by its pin. Raises BpfError (ENOENT if there is no pin)."""
        fd = checked(_libbpf.lib().bpf_obj_get(os.fsencode(path)), f"open pinned map {path}")
        info = ffi.new("struct map_info *")
        size = ffi.new("uint32_t *", ffi.sizeof("struct map_info"))
        try:
            checked(_libbpf.lib().bpf_obj_get_info_by_fd(fd, info, size), f"read the info of map {path}")
        except BpfError:
            os.close(fd)
            raise
        opened = cls(fd, path.name, info.type, info.key_size, info.value_size, info.max_entries)
        opened._owned = True
        return opened

    def close(self) -> None:
        """Close the descriptor of a map opened by its pin; maps of an Object are closed with it."""
        if self._owned:
            os.close(self.fd)
            self._owned = False

    def lookup(self, key: bytes) -> bytes | None:
        """The value (for a per-CPU map: all CPUs' values, see :meth:`lookup_cpus`), or None."""
        value = ffi.new("char[]", self._stored)
        result = self._lib.bpf_map_lookup_elem(self.fd, self._key(key), value)
        if result == -errors.ENOENT:
            return None
        checked(result, f"look up in map {self.name}")
        return bytes(ffi.buffer(value, self._stored))

    def lookup_cpus(self, key: bytes) -> list[bytes] | None:
        """One value for each possible CPU."""
        value = self.lookup(key)
        step = (self.value_size + 7) & ~7
        return value and [value[at : at + self.value_size] for at in range(0, len(value), step)]  # type: ignore[return-value]

    def update(self, key: bytes, value: bytes, flags: int = 0) -> None:
        if len(value) != self._stored:
            raise ValueError(f"map {self.name}: value of {len(value)} bytes instead of {self._stored}")
        checked(
            self._lib.bpf_map_update_elem(self.fd, self._key(key), ffi.from_buffer(value), flags),
            f"write to map {self.name}",
        )

    def delete(self, key: bytes) -> bool:
        """False: there was no such key."""
        result = self._lib.bpf_map_delete_elem(self.fd, self._key(key))
        if result == -errors.ENOENT:
            return False
        checked(result, f"delete from map {self.name}")
        return True

    def update_batch(self, keys: bytes | memoryview, values: bytes | memoryview) -> None:
        """Write many concatenated entries. On failure ``BpfError.done`` is how many were written."""
        total, rest = divmod(len(keys), self.key_size)
        if rest or len(values) != total * self._stored:
            raise ValueError(f"map {self.name}: {len(keys)} bytes of keys and {len(values)} of values do not match")
        if not total:
            return
        count = ffi.new("uint32_t *", total)
        result = self._lib.bpf_map_update_batch(
            self.fd, ffi.from_buffer(keys), ffi.from_buffer(values), count, _libbpf.batch_options()
        )
        if result < 0:
            # EFAULT means that the kernel could not even return the count.
            done = 0 if result == -errors.EFAULT else count[0]
            raise BpfError(f"write {total} entries to map {self.name}", -result, done=done if done < total else 0)

    def delete_batch(self, keys: bytes) -> int:
        """Delete many concatenated keys; returns how many existed. Missing keys are skipped."""
        total, rest = divmod(len(keys), self.key_size)
        if rest:
            raise ValueError(f"map {self.name}: {len(keys)} bytes of keys are no whole number of keys")
        buffer = ffi.from_buffer(keys)
        count = ffi.new("uint32_t *")
        at = deleted = 0
        while at < total:
            count[0] = total - at
            result = self._lib.bpf_map_delete_batch(
                self.fd, buffer + at * self.key_size, count, _libbpf.batch_options()
            )
            if result == 0:
                deleted += total - at
                break
            if result != -errors.ENOENT:
                raise BpfError(f"delete {total} entries from map {self.name}", -result, done=at)
            deleted += count[0]
            at += count[0] + 1
        return deleted

    def dump(self) -> tuple[bytes, bytes]:
        """All keys and all values, concatenated. Not a snapshot if others write meanwhile."""
        step = min(_BATCH, self.max_entries)
        position = ffi.NULL
        following = ffi.new("char[]", max(self.key_size, 4))
        all_keys: list[bytes] = []
        all_values: list[bytes] = []
        while True:
            keys = ffi.new("char[]", step * self.key_size)
            values = ffi.new("char[]", step * self._stored)
            count = ffi.new("uint32_t *", step)
            result = self._lib.bpf_map_lookup_batch(
                self.fd, position, following, keys, values, count, _libbpf.batch_options()
            )
            if result == -errors.ENOSPC:  # one bucket holds more than fits
                step *= 2
                continue
            if result in (-errors.EINVAL, -_ENOTSUPP, -errors.EOPNOTSUPP) and not all_keys:
                return self._dump_singly()
            if result not in (0, -errors.ENOENT):
                raise BpfError(f"read map {self.name}", -result)
            all_keys.append(bytes(ffi.buffer(keys, count[0] * self.key_size)))
            all_values.append(bytes(ffi.buffer(values, count[0] * self._stored)))
            if result:
                return b"".join(all_keys), b"".join(all_values)
            position, following = following, ffi.new("char[]", max(self.key_size, 4))

    def _dump_singly(self) -> tuple[bytes, bytes]:
        keys: list[bytes] = []
        values: list[bytes] = []
        key = ffi.NULL
        following = ffi.new("char[]", self.key_size)
        while True:
            result = self._lib.bpf_map_get_next_key(self.fd, key, following)
            if result == -errors.ENOENT:
                return b"".join(keys), b"".join(values)
            checked(result, f"read map {self.name}")
            raw = bytes(ffi.buffer(following, self.key_size))
            value = self.lookup(raw)
            if value is not None:
                keys.append(raw)
                values.append(value)
            key = ffi.from_buffer(raw)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        keys, values = self.dump()
        for i in range(len(keys) // self.key_size):
            yield (
                keys[i * self.key_size : (i + 1) * self.key_size],
                values[i * self._stored : (i + 1) * self._stored],
            )

    def mmap(self) -> memoryview:
        """The values of a BPF_F_MMAPABLE array, writable."""
        page = mmap.PAGESIZE
        size = (self.value_size + 7 & ~7) * self.max_entries
        try:
            mapped = mmap.mmap(self.fd, (size + page - 1) // page * page, mmap.MAP_SHARED)
        except OSError as error:
            raise BpfError(f"mmap map {self.name}", error.errno or errors.EINVAL) from error
        return memoryview(mapped)[:size]

    def _key(self, key: bytes) -> Any:
        if len(key) != self.key_size:
            raise ValueError(f"map {self.name}: key of {len(key)} bytes instead of {self.key_size}")
        return ffi.from_buffer(key)

    def __repr__(self) -> str:
        return f"<Map {self.name} fd={self.fd} max_entries={self.max_entries}>"
