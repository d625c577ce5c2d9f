# SPDX-License-Identifier: Apache-2.0
"""Metrics of the API client: kube-proxy's ``rest_client_*`` and pyebpf-proxy's own (spec/metrics §5)."""

from __future__ import annotations

from collections.abc import Sequence

from pyebpf_proxy.servers.registry import Counter, Gauge, Histogram, MetricFamily
from pyebpf_proxy.servers.source_metrics import SourceMetrics

_SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
_BYTES = (64, 256, 512, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216)
_VERB = ("verb", "host")
_RESOURCE = ("resource",)


class ClientMetrics(SourceMetrics):
    """The metrics as a ``kube.api.observer.Observer``, which several threads call."""

    def __init__(self) -> None:
        super().__init__()
        self._requests = Counter(
            "rest_client_requests_total",
            "[ALPHA] Number of HTTP requests, partitioned by status code, method, and host.",
            ("code", "method", "host"),
        )
        self._duration = _histogram("request_duration_seconds", "Request latency in seconds.", "verb, and", _SECONDS)
        self._sent = _histogram("request_size_bytes", "Request size in bytes.", "verb and", _BYTES)
        self._received = _histogram("response_size_bytes", "Response size in bytes.", "verb and", _BYTES)
        self._limited = _histogram(
            "rate_limiter_duration_seconds", "Client side rate limiter latency in seconds.", "verb, and", _SECONDS
        )
        self._connected = Gauge(
            "pyebpf_proxy_api_connected", "1 while the resource of the API server is watched", _RESOURCE
        )
        self._last_event = Gauge(
            "pyebpf_proxy_api_last_event_timestamp_seconds", "When a watch last delivered an event", _RESOURCE
        )
        self._lists = Counter("pyebpf_proxy_api_lists_total", "Number of complete lists of a resource", _RESOURCE)
        self._retries = Counter(
            "pyebpf_proxy_api_retries_total", "Number of retries after a list or watch of a resource failed", _RESOURCE
        )

    @property
    def families(self) -> Sequence[MetricFamily]:
        """The metrics for a registry."""
        return (
            self._requests,
            self._duration,
            self._sent,
            self._received,
            self._limited,
            self._connected,
            self._last_event,
            self._lists,
            self._retries,
            *super().families,
        )

    def requested(self, method: str, host: str, code: str, seconds: float) -> None:
        with self._lock:
            self._requests.add(code, method, host)
            self._duration.observe(method, host, value=seconds)

    def transferred(self, method: str, host: str, sent: int, received: int) -> None:
        with self._lock:
            self._sent.observe(method, host, value=sent)
            self._received.observe(method, host, value=received)

    def limited(self, method: str, host: str, seconds: float) -> None:
        with self._lock:
            self._limited.observe(method, host, value=seconds)

    def connected(self, resource: str, connected: bool) -> None:
        with self._lock:
            self._connected.set(resource, value=float(connected))

    def listed(self, resource: str) -> None:
        with self._lock:
            self._lists.add(resource)

    def received(self, resource: str, at: float) -> None:
        with self._lock:
            self._last_event.set(resource, value=at)

    def retried(self, resource: str) -> None:
        with self._lock:
            self._retries.add(resource)


def _histogram(name: str, text: str, words: str, bounds: Sequence[float]) -> Histogram:
    return Histogram(f"rest_client_{name}", f"[ALPHA] {text} Broken down by {words} host.", _VERB, bounds)
