# SPDX-License-Identifier: Apache-2.0
"""New flows that conntrack itself refused: its per-CPU counters, and the increase in the last minute.

The kernel drops the first packet of such a flow and counts nothing else: no rule and no program sees it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from typing import Any

from pyebpf_proxy.datapath.netlink.messages import attributes
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.uapi import (
    CTA_STATS_CHAIN_TOOLONG,
    CTA_STATS_DROP,
    CTA_STATS_EARLY_DROP,
    CTA_STATS_INSERT_FAILED,
    IPCTNL_MSG_CT_GET_STATS_CPU,
    NETLINK_NETFILTER,
    NFGENMSG,
)

#: Names by attribute, for metrics and ``status``. The kernel adds to ``drop`` also what it adds to ``insert_failed``.
_NAMES = {
    CTA_STATS_INSERT_FAILED: "insert_failed",
    CTA_STATS_DROP: "drop",
    CTA_STATS_EARLY_DROP: "early_drop",
    CTA_STATS_CHAIN_TOOLONG: "chain_toolong",
}
SAMPLE_SECONDS = 5.0
_RECENT_SECONDS = 60.0


def read() -> dict[str, int]:
    """The counters of this network namespace, summed over all CPUs. OSError."""
    found = dict.fromkeys(_NAMES.values(), 0)
    with RequestSocket(NETLINK_NETFILTER) as netlink:
        for message in netlink.dump(IPCTNL_MSG_CT_GET_STATS_CPU, NFGENMSG.pack(0, 0, 0)):
            for kind, begin, end in attributes(message, NFGENMSG.size, len(message)):
                if kind in _NAMES:
                    found[_NAMES[kind]] += int.from_bytes(message[begin:end], "big")
    return found


class ConntrackRefusals:
    """Follows the counters. :meth:`view` is safe in any thread."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, int]]] = deque()

    def sample(self, now: float | None = None) -> None:
        """Read the counters; drop samples that are older than a minute. OSError."""
        moment = time.monotonic() if now is None else now
        self._samples.append((moment, read()))
        while len(self._samples) > 2 and self._samples[1][0] <= moment - _RECENT_SECONDS:
            self._samples.popleft()

    async def run(self) -> None:
        """Sample until cancelled. Does nothing on a kernel without these statistics."""
        while True:
            # A read that fails, for example for want of file descriptors, is repeated.
            with suppress(OSError):
                self.sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    def view(self, now: float | None = None) -> dict[str, Any]:
        """``total``: since the network namespace was made; ``lastMinute``: of these, the recent ones.

        Nothing is called recent if the last minute has no sample.
        """
        samples = list(self._samples)
        if not samples:
            return {}
        try:
            total = read()
        except OSError:
            total = samples[-1][1]
        oldest = (time.monotonic() if now is None else now) - _RECENT_SECONDS - 2 * SAMPLE_SECONDS
        before = next((counters for taken, counters in samples if taken >= oldest), total)
        return {"total": total, "lastMinute": {name: total[name] - before[name] for name in total}}
