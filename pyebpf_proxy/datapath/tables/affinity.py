# SPDX-License-Identifier: Apache-2.0
"""What the programs remember of clients: it ends when affinity is off, and no service port has more than its share.

Session affinity that was switched off is forgotten (spec/service-semantics §13), not only left unasked. What clients
are bound to stands under the number of the service port, and that number stays. So the entries are taken away once no
program can be writing any more; if affinity comes back before that, then before it does.

The programs count the clients that they take in. They cannot know which of them have been away for too long: these
are taken away here, and what is left is counted anew.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.tables.changes import Change
from pyebpf_proxy.datapath.tables.layouts import Layouts

#: One service port has at most one of so many parts of the map.
PARTS = 4


class Memory:
    """What the programs remember of clients. ``off``: service ports without affinity that it holds clients of."""

    def __init__(self, affinities: Map, counts: Map, layouts: Layouts, off: Iterable[int] = ()) -> None:
        self._map = affinities
        self._u32 = layouts.u32
        self._affinity = layouts.affinity
        self._off = set(off)
        self._counts = counts.mmap().cast("Q")
        self._counts[0] = self.share = max(1, affinities.max_entries // PARTS)
        self._counted = False

    def recount(self, seconds: Mapping[int, int]) -> None:
        """Take away clients that were away for too long, if a service port comes near its share.

        ``seconds``: for how long a client may be away, by the numbers of the service ports that have affinity.
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
        """These changes are about to be in force: those who get affinity begin with nothing."""
        for change in changes:
            if change.new is not None and change.new.plan.affinity_seconds:
                self.forget([change.new.id])
            elif change.new is not None and change.unbinds:
                self._off.add(change.new.id)

    def forget(self, services: Iterable[int]) -> None:
        """Take away what is remembered of clients of these, as far as their affinity is off still."""
        numbers = {self._u32.pack(number) for number in self._off.intersection(services)}
        self._off.difference_update(services)
        if not numbers:
            return
        # The whole map is read: up to 65536 entries, some 10 ms, and only after affinity was switched off.
        keys, _ = self._map.dump()
        size = self._map.key_size
        starts = range(0, len(keys), size)
        self._map.delete_batch(b"".join([keys[at : at + size] for at in starts if keys[at : at + 4] in numbers]))
        for (number,) in map(self._u32.unpack, numbers):
            self._counts[number] = 0


def _heads(keys: bytes, size: int) -> list[bytes]:
    """The first word of every key: its service port's number."""
    return [keys[at : at + 4] for at in range(0, len(keys), size)]
