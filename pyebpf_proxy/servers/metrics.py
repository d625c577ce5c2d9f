# SPDX-License-Identifier: Apache-2.0
"""The metrics and their server (spec/metrics; metricsBindAddress)."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import prometheus_client
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from pyebpf_proxy.log import Logger
from pyebpf_proxy.services.model import Family

FAMILIES = {Family.IPV4: "IPv4", Family.IPV6: "IPv6"}
#: Buckets "exp15" of spec/metrics §1, seconds.
EXP15 = tuple(0.001 * 2**power for power in range(15))
BIND_RETRY_SECONDS = 5.0

_log = Logger("metrics")


class Metrics:
    """Every metric of the agent, in a registry of its own."""

    def __init__(self, reasons: Callable[[], Mapping[str, int]]) -> None:
        """``reasons`` is called at every scrape, in the server's thread: packets by reason since the maps exist."""
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.registry)
        prometheus_client.PlatformCollector(registry=self.registry)
        prometheus_client.GCCollector(registry=self.registry)
        self.registry.register(_Reasons(reasons))
        self._duration = prometheus_client.Histogram(
            "kubeproxy_sync_proxy_rules_duration_seconds",
            "SyncProxyRules latency in seconds",
            ["ip_family"],
            buckets=EXP15,
            registry=self.registry,
        )
        self._last = self._gauge(
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds", "The last time proxy rules were successfully synced"
        )
        self._queued = self._gauge(
            "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
            "The last time a sync of proxy rules was queued",
        )
        self._endpoint_changes = self._counter(
            "kubeproxy_sync_proxy_rules_endpoint_changes_total", "Cumulative proxy rules Endpoint changes"
        )
        self._service_changes = self._counter(
            "kubeproxy_sync_proxy_rules_service_changes_total", "Cumulative proxy rules Service changes"
        )
        for family in FAMILIES.values():
            # Zero until the first sync, and there from the start, as kube-proxy's.
            self._last.labels(family)
            self._queued.labels(family)
            self._duration.labels(family)

    def changed(self, services: int, slices: int) -> None:
        """Events came from the source. Both families' trackers see a Service, only its own sees a slice."""
        self._service_changes.inc(len(FAMILIES) * services)
        self._endpoint_changes.inc(slices)

    def queued(self) -> None:
        """A sync was asked for."""
        now = time.time()
        for family in FAMILIES.values():
            self._queued.labels(family).set(now)

    def synced(self, seconds: float, ok: bool) -> None:
        """A sync, of both families, ended after ``seconds``."""
        now = time.time()
        for family in FAMILIES.values():
            self._duration.labels(family).observe(seconds)
            if ok:
                self._last.labels(family).set(now)

    def _gauge(self, name: str, text: str) -> prometheus_client.Gauge:
        return prometheus_client.Gauge(name, text, ["ip_family"], registry=self.registry)

    def _counter(self, name: str, text: str) -> prometheus_client.Counter:
        return prometheus_client.Counter(name, text, registry=self.registry)


class _Reasons(Collector):
    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def describe(self) -> Iterator[CounterMetricFamily]:
        # So that registering does not read the maps, which do not exist yet.
        yield self._family()

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = self._family()
        for reason, packets in self._read().items():
            family.add_metric([reason], packets)
        yield family

    @staticmethod
    def _family() -> CounterMetricFamily:
        return CounterMetricFamily(
            "pyebpf_proxy_reasons", "Packets and socket calls by why they were treated as they were", labels=["reason"]
        )


class MetricsServer:
    """Serves ``/metrics`` from a thread of its own; an address that cannot be bound is tried again every 5 s."""

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry) -> None:
        self._address = address
        self._handler = _handler(registry)
        self._stopping = threading.Event()
        self._server: _Server | None = None
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Bind and serve in the background; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Close the socket; requests being answered are given up with the process."""
        self._stopping.set()
        if self._server is not None:
            self._server.shutdown()
        self._thread.join(timeout=1)

    def _run(self) -> None:
        server = self._bind()
        if server is None:
            return
        with server:
            self._server = server
            if not self._stopping.is_set():
                server.serve_forever(poll_interval=0.1)

    def _bind(self) -> _Server | None:
        host, port = self._address
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        while not self._stopping.is_set():
            try:
                server = _server_class(host)((host, port), self._handler)
            except OSError as error:
                _log.error(
                    "metrics address cannot be bound, tried again",
                    address=shown,
                    error=error.strerror,
                    seconds=int(BIND_RETRY_SECONDS),
                )
                self._stopping.wait(BIND_RETRY_SECONDS)
            else:
                _log.info("metrics are served", address=shown)
                return server
        return None


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


class _Server6(_Server):
    address_family = socket.AF_INET6


def _server_class(host: str) -> type[_Server]:
    return _Server6 if ":" in host else _Server


def _handler(registry: CollectorRegistry) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        #: A client that sends nothing does not keep a thread for ever.
        timeout = 30

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path != "/metrics":
                self._answer(404, "text/plain; charset=utf-8", b"404 page not found\n")
                return
            encode, content_type = prometheus_client.exposition.choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encode(registry))

        do_HEAD = do_GET  # noqa: N815 - the library's naming

        def _answer(self, code: int, content_type: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """A scrape is not a thing that matters."""

    return Handler
