# SPDX-License-Identifier: Apache-2.0
"""Samples counters in the maps: new flows from the slots, refusals by service and reason.

The maps are read completely once; after that, only the control plane's changes are read. A sample of ten thousand idle
services costs two memory copies.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

from pyebpf_proxy.datapath.loader.reasons import reasons
from pyebpf_proxy.see import state
from pyebpf_proxy.see.maps import U32, Pinned
from pyebpf_proxy.see.partial_maps import PartialMaps, halves
from pyebpf_proxy.see.state import Backend, Service
from pyebpf_proxy.see.top.meter import Amount, Meter, Place

_SLOT = struct.Struct("=II")
_WORD = 0xFFFFFFFF


class Sample(NamedTuple):
    """``flows`` and ``refused`` since the last sample; ``amounts`` since the meter started, None without a meter."""

    flows: dict[int, dict[int, int]]
    refused: dict[tuple[int, str], int]
    amounts: dict[Place, Amount] | None


class ServiceCounters:
    """The active services, and their counts since the last :meth:`sample`. Raises SeeError, as ``maps`` does."""

    def __init__(self, maps: Pinned, meter: Meter | None = None) -> None:
        self._maps = maps
        self.meter = meter
        found = state.read(maps)
        self.services: dict[int, Service] = found.services
        self.backends: dict[int, Backend] = found.backends
        self._reasons = {number: name.lower() for name, number in maps.enum("drop_reason").items()}
        self._key = maps.packer("refusal_key", "service", "reason")
        self._words = maps.map("services").mmap()
        self._slots = maps.map("slots").mmap()
        self._in_force = bytes(self._words)
        self._chosen = bytes(self._slots)
        self._refused = dict(self._refusals())
        self._xdp = self._xdp_count()
        #: Packets that XDP has sent since the last sample. The meter does not see them.
        self.sent_by_xdp = 0

    def sample(self) -> Sample:
        """The counts since the last sample, or since this object was created."""
        if self.meter is not None:
            self.meter.follow()
        now, chosen = bytes(self._words), bytes(self._slots)
        flows: dict[int, dict[int, int]] = {}
        for number, service in self.services.items():
            first, last = 8 * service.first_slot, 8 * (service.first_slot + len(service.cluster) + len(service.local))
            if chosen[first:last] != self._chosen[first:last]:
                _add(flows.setdefault(number, {}), chosen[first:last], self._chosen[first:last])
        if now != self._in_force:
            for number in self._changed(now):
                service = self.services[number]
                first = 8 * service.first_slot
                last = first + 8 * (len(service.cluster) + len(service.local))
                _add(flows.setdefault(number, {}), chosen[first:last], b"")
            self._in_force = now
        self._chosen = chosen
        last, self._xdp = self._xdp, self._xdp_count()
        self.sent_by_xdp = self._xdp - last
        before, self._refused = self._refused, dict(self._refusals())
        refused = {key: count - _since(before.get(key, 0), count) for key, count in self._refused.items()}
        return Sample(
            {number: counts for number, counts in flows.items() if any(counts.values())},
            {key: count for key, count in refused.items() if count},
            None if self.meter is None else dict(self.meter.read()),
        )

    def _xdp_count(self) -> int:
        # Not a reason for a drop: it is in another enum.
        number = reasons(self._maps.enum).get("xdp_flow_hit")
        values = self._maps.map("counters").lookup_cpus(U32.pack(number)) if number is not None else None
        return sum(int.from_bytes(value, sys.byteorder) for value in values or ())

    def _refusals(self) -> Iterator[tuple[tuple[int, str], int]]:
        if "refusals" not in self._maps.names:
            return
        for key, value in self._maps.map("refusals").items():
            service, reason = self._key.unpack(key)
            counts = struct.unpack(f"={len(value) // 8}Q", value)
            yield (service, self._reasons.get(reason, str(reason))), sum(counts)

    def _changed(self, now: bytes) -> list[int]:
        """Update ``services``; the result: ids of those with a new list."""
        new, old = memoryview(now).cast("Q"), memoryview(self._in_force).cast("Q")
        step = 512
        numbers = [
            number
            for begin in range(0, len(new), step)
            if now[8 * begin : 8 * (begin + step)] != self._in_force[8 * begin : 8 * (begin + step)]
            for number in range(begin, min(begin + step, len(new)))
            if new[number] != old[number]
        ]
        found = state.read(PartialMaps(self._maps, {number: halves(new[number])[0] for number in numbers}))
        self.backends.update(found.backends)
        for number in numbers:
            self.services.pop(number, None)
        self.services.update(found.services)
        return list(found.services)


def _since(before: int, now: int) -> int:
    """The value to subtract from the current one: the previous value, or 0 if the counter was reset."""
    return before if now >= before else 0


def _add(counts: dict[int, int], now: bytes, before: bytes) -> None:
    """Add by backend how often these slots were selected since ``before``, which is empty for new slots."""
    earlier = _SLOT.iter_unpack(before) if before else repeat((0, 0))
    for (backend, chosen), (was, until) in zip(_SLOT.iter_unpack(now), earlier, strict=False):
        # The slot now belongs to another backend: the last counts of the old list are lost.
        if backend and (not before or was == backend) and chosen != until:
            counts[backend] = counts.get(backend, 0) + (chosen - until & _WORD)
