# SPDX-License-Identifier: Apache-2.0
"""Checks that the maps still hold what the agent has written: other privileged programs may have written there, too."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping

from pyebpf_proxy.common import memory
from pyebpf_proxy.common.cycles import without_cycle_search
from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.maps.adopt import adopt
from pyebpf_proxy.datapath.maps.changes import Record
from pyebpf_proxy.datapath.maps.mirror import Mirror, config_fields

#: At most this share of the time is spent on digests, and on readings: 1/1000. Only CPU time counts: on a busy machine,
#: a reading that was interrupted would otherwise postpone the next one, by up to an hour.
_SHARE = 1000
#: Seconds of CPU time, and of pause. A hundred thousand endpoints are read in 0.6 s, which takes 50 MB, and nothing
#: else happens meanwhile. After such a reading there is none for an hour.
_LONG, _LONG_PAUSE = 0.1, 3600.0


class ReadBack:
    """Compares the maps with the mirror. ``names``: those that only the agent writes.

    A digest of the maps tells whether anything has changed. Only if it has, or the agent has written since, the maps
    are read as a start reads them, and the result is compared.
    """

    def __init__(self, maps: Mapping[str, Map], names: Iterable[str], services: memoryview, slots: memoryview) -> None:
        self._maps = maps
        self._names = tuple(names)
        self._services = services
        self._slots = slots
        self._known: tuple[int, bytes] | None = None
        self._digest_after = self._read_after = 0.0

    def differs(self, mirror: Mirror, version: int, leaving: bool) -> bool:
        """Whether the maps differ from the mirror. False without a look, if the last one was too short a time ago.

        ``version`` changes with everything that the agent writes. ``leaving``: entries without references are expected.
        """
        if time.monotonic() < self._digest_after:
            return False
        begin = time.thread_time()
        seen = version, self._digest()
        now = time.monotonic()
        self._digest_after = now + _SHARE * (time.thread_time() - begin)
        damaged = self._known is not None and self._known[0] == version and self._known != seen
        if seen == self._known or (now < self._read_after and not damaged):
            return False
        begin = time.thread_time()
        different = damaged or self._compare(mirror, leaving)
        spent = time.thread_time() - begin
        # While entries are being removed, unknown ones are not noticed: look again later.
        self._known = None if different or leaving else seen
        is_long = spent > _LONG
        self._read_after = time.monotonic() + (_LONG_PAUSE if is_long else _SHARE * spent)
        if is_long:
            memory.give_back()
        return different

    def _digest(self) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for name in self._names:
            for part in self._maps[name].dump():
                digest.update(part)
        digest.update(self._services)
        # Without the second half of each word, where the programs count.
        digest.update(self._slots.cast("B").cast("I")[::2].tobytes())
        return digest.digest()

    def _compare(self, mirror: Mirror, leaving: bool) -> bool:
        fresh = Mirror(mirror.layouts, mirror.capacity)
        with without_cycle_search():
            repairs = adopt(fresh, self._maps, self._services, self._slots)
        if repairs.puts or repairs.deletes or repairs.dead_services or (repairs.garbage and not leaving):
            return True
        if fresh.owners != mirror.owners or fresh.records.keys() != mirror.records.keys():
            return True
        return any(_differ(record, fresh.records[name]) for name, record in mirror.records.items())


def _differ(known: Record, found: Record) -> bool:
    if (known.id, known.config_id, known.length, found.dirty) != (found.id, found.config_id, found.length, False):
        return True
    if known.length and known.first_slot != found.first_slot:
        return True
    if known.backends != found.backends:
        return True
    written, read = known.plan, found.plan
    return (
        config_fields(written) != config_fields(read)
        or set(written.frontends) != set(read.frontends)
        or {(e.address, e.port) for e in written.serving} != {(e.address, e.port) for e in read.serving}
    )
