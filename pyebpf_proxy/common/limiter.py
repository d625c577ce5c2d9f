# SPDX-License-Identifier: Apache-2.0
"""clientConnection's qps and burst: a token bucket, as in client-go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: The meaning of 0, as in client-go.
DEFAULT_QPS = 5.0
DEFAULT_BURST = 10


class Limiter:
    """``burst`` requests at once, ``qps`` per second sustained; a negative ``qps`` sets no limit. Thread-safe."""

    def __init__(self, qps: float, burst: int, now: Callable[[], float] = time.monotonic) -> None:
        self._qps = qps or DEFAULT_QPS
        self._burst = float(burst or DEFAULT_BURST)
        self._now = now
        self._lock = threading.Lock()
        self._tokens = self._burst
        self._at = now()

    def take(self) -> float:
        """Take a token; returns the seconds to wait before it may be used."""
        if self._qps < 0:
            return 0.0
        with self._lock:
            now = self._now()
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._qps) - 1
            self._at = now
            return max(0.0, -self._tokens / self._qps)
