# SPDX-License-Identifier: Apache-2.0
"""Session affinity: removes the entries of service ports without it, and limits each service port to its share.

Switching session affinity off removes its entries (spec/service-semantics §13). The entries are stored under the id of
the service port, which stays the same. So they are deleted once no program can be writing them any more, and in any
case before affinity is switched on again.

The programs count the clients that they add. They cannot know which clients have expired: those are deleted here, and
the rest is counted again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.maps.changes import Change
from pyebpf_proxy.datapath.maps.layouts import Layouts

#: The maximum share of one service port is the map's size divided by this.
PARTS = 4


class Affinities:
    """The affinity entries of clients. ``off``: service ports without affinity that still have entries."""

    def __init__(self, affinities: Map, counts: Map, layouts: Layouts, off: Iterable[int] = ()) -> None:
        self._map = affinities
        self._u32 = layouts.u32
        self._affinity = layouts.affinity
        self._off = set(off)
        self._counts = counts.mmap().cast("Q")
        self._counts[0] = self.share = max(1, affinities.max_entries // PARTS)
        self._counted = False

    def recount(self, seconds: Mapping[int, int]) -> None:
        """Delete clients that have expired, if a service port comes near its share.

        ``seconds``: the affinity timeout, by the ids of the service ports that have affinity.
        """
        counts = self._counts
        if self._counted and not any(2 * counts[number] >= self.share for number in seconds):
            return
        self._counted = True
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        keys, values = self._map.dump()
        size = self._map.key_size
        numbers = [number for (number,) in self._u32.iter_unpack(b"".join(_heads(keys, size)))]
        used = [row[0] for row in self._affinity.iter_unpack(values)]
        gone = [
            at
            for at, (number, last) in enumerate(zip(numbers, used, strict=True))
            if last + seconds.get(number, 0) * 1_000_000_000 < now
        ]
        self._map.delete_batch(b"".join([keys[at * size : (at + 1) * size] for at in gone]))
        left = Counter(numbers)
        left.subtract(Counter([numbers[at] for at in gone]))
        for number in {*left, *seconds}:
            if 0 < number < len(counts):
                counts[number] = left[number]

    def changing(self, changes: Iterable[Change]) -> None:
        """These changes are about to become active: service ports that get affinity start without entries."""
        for change in changes:
            if change.new is not None and change.new.plan.affinity_seconds:
                self.forget([change.new.id])
            elif change.new is not None and change.unbinds:
                self._off.add(change.new.id)

    def forget(self, services: Iterable[int]) -> None:
        """Delete the clients of these service ports whose affinity is still off."""
        numbers = {self._u32.pack(number) for number in self._off.intersection(services)}
        self._off.difference_update(services)
        if not numbers:
            return
        # Reads the whole map: up to 65536 entries, some 10 ms, and only after affinity was switched off.
        keys, _ = self._map.dump()
        size = self._map.key_size
        starts = range(0, len(keys), size)
        self._map.delete_batch(b"".join([keys[at : at + size] for at in starts if keys[at : at + 4] in numbers]))
        for (number,) in map(self._u32.unpack, numbers):
            self._counts[number] = 0


def _heads(keys: bytes, size: int) -> list[bytes]:
    """The first word of every key: the id of its service port."""
    return [keys[at : at + 4] for at in range(0, len(keys), size)]
