# SPDX-License-Identifier: Apache-2.0
"""The source with a real API server: its account, its objects, and short waits."""

from __future__ import annotations

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
    {"apiGroups": ["networking.k8s.io"], "resources": ["servicecidrs"], "verbs": ["list", "watch"]},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
]


#: The agent's timing, except for waits that would make the tests too long.
TIMING = replace(Timing(), backoff=(0.1, 1.0), forbidden=0.5, settle=1.0, node=5.0, look=0.2)


server = pytest.fixture(scope="module")(running)


@pytest.fixture
def kubeconfig(server: ApiServer, tmp_path: Path) -> Iterator[Path]:
    """A kubeconfig of the account, with a token in a file. The test's objects are deleted afterwards."""
    server.account(ACCOUNT, RULES)
    (tmp_path / "token").write_text(server.token(ACCOUNT))
    server.apply(node())
    yield server.kubeconfig(tmp_path / "kubeconfig", {"tokenFile": "token"})
    for item in (service("web"), service("api"), slice_of("web")):
        try:
            server.delete(item)
        except Exception:  # most tests have not created all of them
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
