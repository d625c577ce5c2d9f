# SPDX-License-Identifier: Apache-2.0
"""A BPF queue map (BPF_MAP_TYPE_QUEUE): values without keys, each taken once."""

from __future__ import annotations

import errno

from pyebpf_proxy.datapath.loader import _libbpf
from pyebpf_proxy.datapath.loader._libbpf import checked, ffi
from pyebpf_proxy.datapath.loader.libbpf import Map


class Queue:
    """The receiving end of a queue map."""

    def __init__(self, table: Map) -> None:
        self._map = table
        self._lib = _libbpf.lib()

    def pop(self) -> list[bytes]:
        """All values, the oldest first; if some are added meanwhile, no more than there is room for. BpfError."""
        value = ffi.new("char[]", self._map.value_size)
        values: list[bytes] = []
        while len(values) < self._map.max_entries:
            result = self._lib.bpf_map_lookup_and_delete_elem(self._map.fd, ffi.NULL, value)
            if result == -errno.ENOENT:
                break
            checked(result, f"take from map {self._map.name}")
            values.append(bytes(ffi.buffer(value)))
        return values
