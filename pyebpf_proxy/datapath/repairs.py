# SPDX-License-Identifier: Apache-2.0
"""What other programs have removed or changed in the kernel and the agent has restored: how often, and how recently.

Between the removal and the repair, connections may have failed that no counter of the programs shows.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

_RECENT_SECONDS = 60.0
#: Repairs that are remembered with their time. The totals count all.
_MOST_REMEMBERED = 1024


class Repair(StrEnum):
    """What was restored: label ``object`` of the metric."""

    TC_PROGRAM = "tc_program"
    XDP_PROGRAM = "xdp_program"
    SOCKET_PROGRAM = "socket_program"
    NFTABLES_TABLE = "nftables_table"
    PINS = "pins"
    MAP = "map"
    SETTING = "setting"


class Repairs:
    """Counts repairs. Safe in any thread."""

    def __init__(self) -> None:
        self._total: Counter[Repair] = Counter()
        self._recent: deque[tuple[float, Repair]] = deque(maxlen=_MOST_REMEMBERED)

    def note(self, what: Repair, count: int = 1, now: float | None = None) -> None:
        """The agent has restored ``count`` objects of this kind."""
        self._total[what] += count
        self._recent.extend([(time.monotonic() if now is None else now, what)] * count)

    def view(self, now: float | None = None) -> Mapping[str, Any]:
        """``total``: since the agent's start, every kind; ``lastMinute``: of these, the recent ones, kinds above 0."""
        oldest = (time.monotonic() if now is None else now) - _RECENT_SECONDS
        recent = Counter(str(what) for moment, what in list(self._recent) if moment >= oldest)
        return {"total": {str(kind): self._total[kind] for kind in Repair}, "lastMinute": dict(recent)}


#: Those of this process.
repairs = Repairs()
