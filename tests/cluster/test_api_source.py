# SPDX-License-Identifier: Apache-2.0
"""The source against a real API server, with a ServiceAccount that may do no more than it must."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.kube.api.connect import find
from pyebpf_proxy.kube.api.timing import Timing
from tests.support.apiserver import ApiServer, Object, running
from tests.support.scripted_api import Following

ACCOUNT = "pyebpf-proxy"
RULES: list[Object] = [
    {"apiGroups": [""], "resources": ["services", "nodes"], "verbs": ["list", "watch"]},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
]
#: As the agent's, but for waits that would only make the tests long.
TIMING = replace(Timing(), backoff=(0.1, 1.0), forbidden=0.5, settle=1.0, node=5.0, look=0.2)

server = pytest.fixture(scope="module")(running)


@pytest.fixture
def kubeconfig(server: ApiServer, tmp_path: Path) -> Iterator[Path]:
    """Of the account, with a token in a file. Objects of the test's own are gone afterwards."""
    server.account(ACCOUNT, RULES)
    (tmp_path / "token").write_text(server.token(ACCOUNT))
    server.apply(node())
    yield server.kubeconfig(tmp_path / "kubeconfig", {"tokenFile": "token"})
    for item in (service("web"), service("api"), slice_of("web")):
        try:
            server.delete(item)
        except Exception:  # most tests have not made all of them
            continue


def following(kubeconfig: Path, timing: Timing = TIMING) -> Following:
    return Following(find(str(kubeconfig), ""), timing)


def node() -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "node1"},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
    }


def service(name: str, **spec: Any) -> Object:
    ports = [{"name": "http", "port": 80, "protocol": "TCP"}]
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports, **spec}}


def slice_of(name: str, *addresses: str, labels: dict[str, str] | None = None) -> Object:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{name}-1",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": name, **(labels or {})},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": [{"addresses": [address]} for address in addresses or ("10.244.0.1",)],
    }


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
        assert source.said("error") == []


def test_the_selectors_choose(server: ApiServer, kubeconfig: Path) -> None:
    """Headless Services and their slices are not watched; the label of another proxy makes a Service go and come."""
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
    # The request itself is in it; what we add is far below.
    assert sorted(times)[10] < 0.25, times
