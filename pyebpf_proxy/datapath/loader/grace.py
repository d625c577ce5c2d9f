# SPDX-License-Identifier: Apache-2.0
"""Waits until no running BPF program can still use what was just removed."""

from __future__ import annotations

import ctypes
import os
import time

_MEMBARRIER = {"x86_64": 324, "ppc64le": 365, "s390x": 356}  # 283 on every newer architecture
_MEMBARRIER_CMD_GLOBAL = 1
_MEMBARRIER_CMD_GLOBAL_EXPEDITED = 2
_FALLBACK_SECONDS = 0.1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def membarrier() -> bool:
    """One RCU grace period: MEMBARRIER_CMD_GLOBAL is synchronize_rcu(). False if the kernel refuses (nohz_full)."""
    return _membarrier(_MEMBARRIER_CMD_GLOBAL)


def barrier() -> bool:
    """A memory barrier in this thread, in a microsecond. False if the kernel refuses."""
    return _membarrier(_MEMBARRIER_CMD_GLOBAL_EXPEDITED)


def _membarrier(command: int) -> bool:
    number = _MEMBARRIER.get(os.uname().machine, 283)
    result: int = _libc.syscall(ctypes.c_long(number), ctypes.c_int(command), ctypes.c_uint(0), ctypes.c_int(0))
    return result == 0


def wait() -> None:
    """Typically 5 to 30 ms; may be called from another thread."""
    if not membarrier():
        # A program runs for microseconds, in softirq or a system call; a tenth of a second is thousands of times that.
        time.sleep(_FALLBACK_SECONDS)
