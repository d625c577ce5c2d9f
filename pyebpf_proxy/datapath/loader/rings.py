# SPDX-License-Identifier: Apache-2.0
"""Events that programs write into a map of ring buffers (BPF_MAP_TYPE_PERF_EVENT_ARRAY), one ring per CPU."""

from __future__ import annotations

import mmap
from typing import Any, Self

from pyebpf_proxy.datapath.loader import _libbpf
from pyebpf_proxy.datapath.loader._libbpf import captured, checked_pointer, ffi
from pyebpf_proxy.datapath.loader._map import Map


def pages(size: int) -> int:
    """The pages of a ring of at least ``size`` bytes: a power of two. A page may have 64 KiB on arm64."""
    return 1 << max(0, -(-size // mmap.PAGESIZE) - 1).bit_length()


class Rings:
    """This process's rings in ``events``, until :meth:`close` or until the process ends.

    ``size``: bytes of each ring, rounded up to a power of two of pages. BpfError if the kernel refuses.
    """

    def __init__(self, events: Map, size: int) -> None:
        self._lib = _libbpf.lib()
        self._found: list[bytes] = []
        # cffi frees a callback without a reference
        self._callback = ffi.callback("sample_fn", self._take)
        with captured():
            made = self._lib.perf_buffer__new(events.fd, pages(size), self._callback, ffi.NULL, ffi.NULL, ffi.NULL)
            self._pointer = checked_pointer(made, f"rings of {events.name}")

    def _take(self, _context: Any, _cpu: int, data: Any, size: int) -> None:
        self._found.append(bytes(ffi.buffer(data, size)))

    @property
    def fd(self) -> int:
        """For poll(): readable while there are events."""
        return int(self._lib.perf_buffer__epoll_fd(self._pointer))

    def read(self) -> list[bytes]:
        """All available events, CPU by CPU. Each may be followed by a few bytes of padding."""
        self._lib.perf_buffer__consume(self._pointer)
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        """Release the rings."""
        if self._pointer is not None:
            self._lib.perf_buffer__free(self._pointer)
            self._pointer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
