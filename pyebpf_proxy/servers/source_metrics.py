# SPDX-License-Identifier: Apache-2.0
"""Metrics about the objects that a source has read."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pyebpf_proxy.servers.registry import Gauge, MetricFamily


class SourceMetrics:
    """The metrics as a ``kube.source.Critic``, which several threads call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bad = Gauge(
            "pyebpf_proxy_bad_objects",
            "Current number of invalid objects: refused as a whole, or used without the invalid parts",
            ("kind", "outcome"),
        )

    @property
    def families(self) -> Sequence[MetricFamily]:
        """The metrics for a registry."""
        return (self._bad,)

    def bad(self, kind: str, refused: int, in_part: int) -> None:
        with self._lock:
            self._bad.set(kind, "refused", value=refused)
            self._bad.set(kind, "used_in_part", value=in_part)
