# SPDX-License-Identifier: Apache-2.0
"""How many connections each endpoint has, for the schedulers of mode ipvs that use it (docs/ipvs-mode.md).

The programs add their choices to ``choices``. This module counts the kernel's connection table repeatedly and writes
the result to ``connections``, with the choices that it includes. Only the programs write ``choices`` and only this
module writes ``connections``, so neither overwrites the other.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.common.threads import in_thread
from pyebpf_proxy.datapath.connections import conntrack_counts
from pyebpf_proxy.datapath.connections.conntrack_counts import Count, Route
from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import Map

#: Minimum seconds from the end of one count to the next.
INTERVAL = 1.0
#: The pause after a count is at least this many times its duration: counting takes at most a tenth of a CPU.
PAUSE_FACTOR = 9

_log = Logger("datapath")


class Connections:
    """Keeps the map ``connections`` up to date.

    ``backends``: from routes of flows to backend ids; ``exists``: whether an id still exists.
    """

    def __init__(
        self,
        maps: Mapping[str, Map],
        btf: Btf,
        backends: Callable[[Iterable[Route]], Iterator[tuple[Route, int]]],
        exists: Callable[[int], bool],
    ) -> None:
        self._connections, self._choices = maps["connections"], maps["choices"]
        self._own = [maps["node_addresses4"], maps["node_addresses6"]]
        self._value = btf.struct("connections").packer("active", "inactive", "choices")
        self._backends = backends
        self._exists = exists
        # The counts of a former run are used until the first count.
        self._written = dict(self._connections.items())
        self._said = ""

    async def run(self) -> None:
        """Count forever. If the kernel refuses it, that is logged once; the last count stays in use."""
        while True:
            begin = time.monotonic()
            try:
                await self.count()
                self._said = ""
            except (OSError, MemoryError) as error:
                if str(error) != self._said:
                    _log.error("connections could not be counted, retrying", error=str(error))
                self._said = str(error)
            await asyncio.sleep(max(INTERVAL, PAUSE_FACTOR * (time.monotonic() - begin)))

    async def count(self) -> None:
        """One count. Raises OSError."""
        # The choices are read first: a flow that is chosen meanwhile may be counted twice until the next count, but is
        # never lost.
        choices = {key: int.from_bytes(value, sys.byteorder) for key, value in self._choices.items()}
        own = {key for of in self._own for key, _ in of.items()}
        self._write(choices, await in_thread(conntrack_counts.count, own))

    def _write(self, choices: Mapping[bytes, int], found: Mapping[Route, Count]) -> None:
        counts: dict[bytes, Count] = {}
        for route, number in self._backends(found):
            key = number.to_bytes(4, sys.byteorder)
            before, more = counts.get(key, Count(0, 0)), found[route]
            counts[key] = Count(before.active + more.active, before.inactive + more.inactive)
        changed: dict[bytes, bytes] = {}
        gone: list[bytes] = []
        for key in choices.keys() | counts.keys() | self._written.keys():
            if not self._exists(int.from_bytes(key, sys.byteorder)):
                gone.append(key)
                continue
            value = self._value.pack(*counts.get(key, Count(0, 0)), choices.get(key, 0))
            if self._written.get(key) != value:
                changed[key] = value
        self._connections.update_batch(b"".join(changed), b"".join(changed.values()))
        self._written.update(changed)
        for key in gone:
            self._written.pop(key, None)
        # The order matters: a count without its choices is too low, choices without a count are used alone.
        self._connections.delete_batch(b"".join(gone))
        self._choices.delete_batch(b"".join(gone))
