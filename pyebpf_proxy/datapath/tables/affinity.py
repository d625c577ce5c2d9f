# SPDX-License-Identifier: Apache-2.0
"""Session affinity that was switched off is forgotten (spec/service-semantics §13), not only left unasked.

What clients are bound to stands under the number of the service port, and that number stays. So the entries are taken
away once no program can be writing any more; if affinity comes back before that, then before it does.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.tables.changes import Change
from pyebpf_proxy.datapath.tables.layouts import Layouts


class Memory:
    """What the programs remember of clients. ``off``: service ports without affinity that it holds clients of."""

    def __init__(self, affinities: Map, layouts: Layouts, off: Iterable[int] = ()) -> None:
        self._map = affinities
        self._u32 = layouts.u32
        self._off = set(off)

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
