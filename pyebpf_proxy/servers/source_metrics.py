# SPDX-License-Identifier: Apache-2.0
"""What every source of objects tells about what it was given."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pyebpf_proxy.servers.numbers import Gauge, MetricFamily


class SourceMetrics:
    """A ``kube.source.Critic``, called in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bad = Gauge(
            "pyebpf_proxy_bad_objects",
            "Objects that break a rule, now: refused as a whole, or used in part, without what is wrong",
            ("kind", "outcome"),
        )

    @property
    def families(self) -> Sequence[MetricFamily]:
        """What a registry is to take in."""
        return (self._bad,)

    def bad(self, kind: str, refused: int, in_part: int) -> None:
        with self._lock:
            self._bad.set(kind, "refused", value=refused)
            self._bad.set(kind, "used_in_part", value=in_part)
