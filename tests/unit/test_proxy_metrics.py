# SPDX-License-Identifier: Apache-2.0
"""The metrics, read over HTTP as Prometheus reads them (spec/metrics)."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pyebpf_proxy.servers import metrics as room
from pyebpf_proxy.servers.metrics import Metrics, MetricsServer

REASONS = {"new_flow_direct": 7, "reject_no_endpoints": 0}


def free_port(family: int = socket.AF_INET, host: str = "127.0.0.1") -> int:
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def get(host: str, port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    deadline = time.monotonic() + 5
    while True:
        connection = http.client.HTTPConnection(host, port, timeout=5)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        finally:
            connection.close()


def values(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(lambda: REASONS)


@pytest.fixture
def serve(metrics: Metrics) -> Iterator[object]:
    servers = []

    def serve(host: str, port: int) -> None:
        server = MetricsServer((host, port), metrics.registry)
        server.start()
        servers.append(server)

    yield serve
    for server in servers:
        server.stop()


def test_what_a_scrape_sees(metrics: Metrics, serve) -> None:
    port = free_port()
    serve("127.0.0.1", port)
    before = values(get("127.0.0.1", port)[1])
    for family in ("IPv4", "IPv6"):
        assert before["kubeproxy_sync_proxy_rules_last_timestamp_seconds", (family,)] == 0
    start = time.time()
    metrics.changed(services=2, slices=3)
    metrics.queued()
    metrics.synced(0.003, ok=True)
    metrics.synced(0.003, ok=False)
    after = values(get("127.0.0.1", port)[1])
    for family in ("IPv4", "IPv6"):
        assert start <= after["kubeproxy_sync_proxy_rules_last_timestamp_seconds", (family,)] <= time.time()
        assert start <= after["kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", (family,)] <= time.time()
        assert after["kubeproxy_sync_proxy_rules_duration_seconds_count", (family,)] == 2
        assert after["kubeproxy_sync_proxy_rules_duration_seconds_bucket", (family, "0.002")] == 0
        assert after["kubeproxy_sync_proxy_rules_duration_seconds_bucket", (family, "0.004")] == 2
    assert after["kubeproxy_sync_proxy_rules_service_changes_total", ()] == 4
    assert after["kubeproxy_sync_proxy_rules_endpoint_changes_total", ()] == 3
    assert after["pyebpf_proxy_reasons_total", ("new_flow_direct",)] == 7
    assert after["pyebpf_proxy_reasons_total", ("reject_no_endpoints",)] == 0
    assert after["process_open_fds", ()] > 0
    assert not [name for name, _ in after if name.endswith("_created")]


def test_a_failed_sync_leaves_the_timestamp(metrics: Metrics, serve) -> None:
    port = free_port()
    serve("127.0.0.1", port)
    metrics.synced(1, ok=False)
    seen = values(get("127.0.0.1", port)[1])
    assert seen["kubeproxy_sync_proxy_rules_last_timestamp_seconds", ("IPv4",)] == 0


def test_other_paths_are_not_found_and_head_has_no_body(serve) -> None:
    port = free_port()
    serve("127.0.0.1", port)
    assert get("127.0.0.1", port, "/nothing") == (404, "404 page not found\n")
    assert get("127.0.0.1", port, "/metrics?x=1") != (404, "404 page not found\n")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    for method in ("HEAD", "GET"):  # one connection: a body after HEAD would be taken for the next answer
        connection.request(method, "/nothing")
        assert connection.getresponse().read() == (b"" if method == "HEAD" else b"404 page not found\n")
    connection.close()


def test_ipv6(serve) -> None:
    port = free_port(socket.AF_INET6, "::1")
    serve("::1", port)
    assert get("::1", port)[0] == 200


def test_an_address_in_use_is_tried_again(serve, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(room, "BIND_RETRY_SECONDS", 0.01)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        serve("127.0.0.1", port)
        deadline = time.monotonic() + 5
        while "metrics address cannot be bound" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert get("127.0.0.1", port)[0] == 200
