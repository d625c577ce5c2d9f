# SPDX-License-Identifier: Apache-2.0
"""The source with a real API server, with a ServiceAccount that has only the necessary rights."""

from __future__ import annotations

import time
from pathlib import Path

from tests.cluster.api_source import following, kubeconfig, node, server, service, slice_of
from tests.support.apiserver import ApiServer

__all__ = ["kubeconfig", "server"]


def test_objects_are_delivered_as_they_come_change_and_go(server: ApiServer, kubeconfig: Path) -> None:
    with following(kubeconfig) as source:
        source.until(lambda: source.complete)
        assert source.names("Service") == {"kubernetes"}
        assert source.names("Node") == {"node1"}
        server.create(service("web"))
        server.create(slice_of("web"))
        source.until(lambda: "web" in source.names("Service") and source.names("EndpointSlice") == {"web-1"})
        assert source.objects["Service", "web"].spec.cluster_ip.startswith("10.96.")
        server.apply(slice_of("web", "10.244.0.1", "10.244.0.2"))
        source.until(lambda: len(source.objects["EndpointSlice", "web-1"].endpoints) == 2)
        server.delete(service("web"))
        server.delete(slice_of("web"))
        source.until(lambda: source.names("Service") == {"kubernetes"} and not source.names("EndpointSlice"))
        assert source.errors() == []


def test_the_selectors_choose(server: ApiServer, kubeconfig: Path) -> None:
    """Headless Services and their slices are not watched; setting or removing the label of another proxy hides or shows
    a Service.
    """
    label = "service.kubernetes.io/service-proxy-name"
    with following(kubeconfig) as source:
        server.create(service("api", clusterIP="None"))
        server.create(service("web"))
        server.create(slice_of("web", labels={"service.kubernetes.io/headless": ""}))
        server.apply({**node(), "metadata": {"name": "node2"}})
        source.until(lambda: source.complete and "web" in source.names("Service"))
        server.patch(service("web"), {"metadata": {"labels": {label: "other"}}})
        source.until(lambda: "web" not in source.names("Service"))
        server.patch(service("web"), {"metadata": {"labels": {label: None}}})
        source.until(lambda: "web" in source.names("Service"))
        server.patch(slice_of("web"), {"metadata": {"labels": {"service.kubernetes.io/headless": None}}})
        source.until(lambda: source.names("EndpointSlice") == {"web-1"})
        assert {change.name for change in source.changes} == {"kubernetes", "web", "web-1", "node1"}


def test_a_service_keeps_no_address_with_an_object_that_the_server_accepts_and_the_agent_refuses(
    server: ApiServer, kubeconfig: Path
) -> None:
    """256 KiB of commas as an annotation are no values. 200 000 external IPs are, and leave the Service unserved."""
    ports = [{"name": "http", "port": 80, "protocol": "TCP", "nodePort": 30080}]
    with following(kubeconfig) as source:
        server.create(service("web", type="NodePort", ports=ports))
        source.until(lambda: source.complete and "web" in source.names("Service"))
        ports[0]["nodePort"] = 30081
        server.patch(service("web"), {"metadata": {"annotations": {"commas": "," * 262_000}}, "spec": {"ports": ports}})
        source.until(lambda: source.objects["Service", "web"].spec.ports[0].node_port == 30081)
        ports[0]["nodePort"] = 30082
        server.patch(service("web"), {"spec": {"externalIPs": ["1::"] * 210_000, "ports": ports}})
        source.until(lambda: "web" not in source.names("Service"))
        assert ["it is not served" in line for line in source.errors()] == [True]


def test_a_change_arrives_soon(server: ApiServer, kubeconfig: Path) -> None:
    server.create(service("web"))
    server.create(slice_of("web"))
    times = []
    with following(kubeconfig) as source:
        source.until(lambda: source.complete)
        for i in range(20):
            address = f"10.244.1.{i + 1}"
            begin = time.monotonic()
            server.patch(slice_of("web"), {"endpoints": [{"addresses": [address]}]})
            source.until(lambda a=address: a in str(source.objects.get(("EndpointSlice", "web-1"))))  # type: ignore[misc]
            times.append(time.monotonic() - begin)
    # This includes the request itself; the program's own part is far smaller.
    assert sorted(times)[10] < 0.25, times
