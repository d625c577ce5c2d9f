# SPDX-License-Identifier: Apache-2.0
"""Turns tracing on and off: the lock, the rings, and the map that the programs check.

A killed session leaves nothing behind: its descriptors hold the lock and the rings, and the programs clear the map at
their first decision without a ring.

The events' rings are a BPF_MAP_TYPE_PERF_EVENT_ARRAY, because the kernel removes them with the reader's descriptor. A
BPF_MAP_TYPE_RINGBUF would have to exist always, or a killed reader would leave it behind. Attaching to functions of the
agent's programs (fentry, freplace) would cost nothing while off, but some machines forbid trampolines.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pyebpf_proxy.common.bpf_constants import TRACED_SERVICES
from pyebpf_proxy.datapath.loader import ordering
from pyebpf_proxy.datapath.loader.btf import Layout
from pyebpf_proxy.datapath.loader.libbpf import BpfError, Map
from pyebpf_proxy.datapath.loader.rings import Rings
from pyebpf_proxy.see.answers import SeeError
from pyebpf_proxy.see.maps import Pinned

MAPS = ("tracing", "decisions")
_OLD = "the attached programs cannot report decisions: they are of an older version; restart the agent"
_ORDER = sys.byteorder


class TraceControl:
    """struct tracing of bpf/trace_maps.h, which the programs check before they report."""

    def __init__(self, tracing: Map, layout: Layout) -> None:
        self._layout = layout
        self._raw = tracing.mmap()
        self._lost = self._get("lost")

    def start(self, wanted: Mapping[str, Any]) -> None:
        """Set the filter (fields of the struct) and start tracing, or continue."""
        services = tuple(wanted.get("services", ()))
        self.clear()
        ordering.publish()
        for name in ("reasons", "device", "family", "protocol", "port"):
            self._set(name, wanted.get(name, 0))
        self._set("address", wanted.get("address", bytes(16)))
        numbers = services + (0,) * (TRACED_SERVICES - len(services))
        self._set("services", b"".join(number.to_bytes(4, _ORDER) for number in numbers))
        self._set("service_count", len(services))
        # A program that sees the process must not see a part of the former filter.
        ordering.publish()
        self._set("process", os.getpid())

    def is_active(self) -> bool:
        """Whether the programs still report. They stop as soon as one runs on a CPU without a ring."""
        return self._get("process") == os.getpid()

    def clear(self) -> None:
        """Stop tracing."""
        self._set("process", 0)

    def lost(self) -> int:
        """The number of events lost since the last call."""
        before, self._lost = self._lost, self._get("lost")
        return self._lost - before

    def _get(self, name: str) -> int:
        field = self._layout.fields[name]
        return int.from_bytes(self._raw[field.offset : field.offset + field.size], _ORDER)

    def _set(self, name: str, value: int | bytes) -> None:
        field = self._layout.fields[name]
        raw = value.to_bytes(field.size, _ORDER) if isinstance(value, int) else value
        self._raw[field.offset : field.offset + field.size] = raw


class Session:
    """A tracing session, until :meth:`close`. SeeError if another one is running, or if the programs are too old."""

    def __init__(self, maps: Pinned, ring_size: int) -> None:
        if missing := [name for name in MAPS if name not in maps.names]:
            raise SeeError(f"{_OLD} (there is no map {missing[0]} in {maps.folder}/maps)")
        maps.packer("decision", "when")  # raises an error for a missing layout before anything is changed
        maps.packer("tracing", "process")
        self._lock = _lock(maps.folder / "maps")
        try:
            self.control = TraceControl(maps.map("tracing"), maps.btf.struct("tracing"))
            self.rings = Rings(maps.map("decisions"), ring_size)
        except BpfError as error:
            os.close(self._lock)
            raise SeeError(f"tracing cannot be turned on: {error}") from None

    def close(self) -> None:
        """Stop tracing."""
        self.control.clear()
        self.rings.close()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lock(folder: Path) -> int:
    """Lock the folder of the pins. The programs have one filter, so only one session may run at a time."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise SeeError("another trace is running on this node: stop it first") from None
    return descriptor
