# SPDX-License-Identifier: Apache-2.0
"""``cluster test``: what its pods are asked to do stays small in a big cluster."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from pyebpf_proxy.cluster import connectivity
from pyebpf_proxy.cluster.api import NAMESPACES, RefusedError
from pyebpf_proxy.cluster.model import View, view
from pyebpf_proxy.cluster.output import Output
from tests.unit.cluster.fake_api import FakeApi

NODES = 1000


def service(number: int) -> dict[str, Any]:
    ports = [{"protocol": protocol, "port": 80, "nodePort": 30000 + number} for protocol in ("TCP", "UDP")]
    status = {"loadBalancer": {"ingress": [{"ip": each} for each in ("203.0.113.253", "2001:db8:7a:7a::253")]}}
    clusters = [f"10.96.0.{number}", f"fd00:10:96::{number}"]
    return {"spec": {"clusterIPs": clusters, "ports": ports}, "status": status}


def test_a_plan_for_a_thousand_nodes_is_short_and_each_node_is_asked_for() -> None:
    nodes: dict[str, Any] = {}
    for number in range(NODES):
        addresses = (f"10.0.{number // 250}.{number % 250}", f"2001:db8:aaaa:bbbb:cccc::{number:x}")
        listed = [{"type": "InternalIP", "address": address} for address in addresses]
        nodes[f"ip-10-0-0-{number}.eu-central-1.compute.internal"] = {"status": {"addresses": listed}}
    found = View(nodes, {}, {}, None, None)
    services = {"web": service(1), "local": service(2), "balanced": service(3)}
    asked: Counter[str] = Counter()
    for node in list(nodes)[::100]:
        pod = connectivity._pod(found, node, True, "registry.example/pyebpf-proxy:1", services)
        # One variable may have 128 KiB.
        assert len(json.dumps(pod)) < 64 << 10
    for node in nodes:
        rows = connectivity._plan(found, node, True, services)
        asked.update({row["address"] for row in rows if row["port"] == 30001})
    assert set(asked.values()) == {6}
    assert len(asked) == 2 * NODES


def test_the_namespace_of_another_administrators_test_stays() -> None:
    """That test has deleted this one's, as it does with what a killed one has left."""
    api = FakeApi("n1")
    path = NAMESPACES.path(name=connectivity.NAMESPACE)

    def other(method: str, asked: str) -> None:
        if method == "PATCH":
            del api.stored[path]
            api.put(path, {"metadata": {"name": connectivity.NAMESPACE}})

    api.before = other
    with pytest.raises(RefusedError, match="services/balanced"):
        connectivity.run(api, Output(as_json=False), view(api), "registry.example/pyebpf-proxy:1", 1.0)
    assert path in api.stored
