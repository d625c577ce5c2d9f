# SPDX-License-Identifier: Apache-2.0
"""How long a process has run."""

from __future__ import annotations

import os
import time
from pathlib import Path

_OWN = Path("/proc/self")


def process_age(process: Path = _OWN) -> float:
    """Return for how many seconds a process has run, given its folder in /proc, to one clock tick (10 ms).

    Raises OSError, ValueError or IndexError if /proc does not show it.
    """
    ticks = int((process / "stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
