# SPDX-License-Identifier: Apache-2.0
"""``cluster test``: what its pods are asked to do stays small in a big cluster."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pyebpf_proxy.cluster import connectivity, lease
from pyebpf_proxy.cluster.api import LEASES, NAMESPACES, PODS, SERVICES, RefusedError
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.model import View, view
from pyebpf_proxy.cluster.objects import NAMESPACE
from pyebpf_proxy.cluster.output import Output
from tests.unit.cluster.fake_api import FakeApi

NODES = 1000
IMAGE = "registry.example/pyebpf-proxy:1"
OWN = NAMESPACES.path(name=connectivity.NAMESPACE)
LEASE = LEASES.path(NAMESPACE, "pyebpf-proxy-test")
#: A request of a test whose pods have been made.
LOG = f"{PODS.path(connectivity.NAMESPACE)}/pyebpf-proxy-pod-n1-"


def service(number: int) -> dict[str, Any]:
    ports = [{"protocol": protocol, "port": 80, "nodePort": 30000 + number} for protocol in ("TCP", "UDP")]
    status = {"loadBalancer": {"ingress": [{"ip": each} for each in ("203.0.113.253", "2001:db8:7a:7a::253")]}}
    clusters = [f"10.96.0.{number}", f"fd00:10:96::{number}"]
    return {"spec": {"clusterIPs": clusters, "ports": ports}, "status": status}


def run(api: FakeApi) -> bool:
    return connectivity.run(api, Output(as_json=False), view(api), IMAGE, 1.0)


def cluster() -> FakeApi:
    """Its API server gives Services the fields that the test needs."""
    api = FakeApi("n1")

    def allocate(method: str, path: str) -> None:
        if method == "POST" and path == SERVICES.path(connectivity.NAMESPACE):
            made = [item for name, item in api.stored.items() if name.rpartition("/")[0] == path]
            for item in made:
                item["spec"]["ports"] = [port | {"nodePort": 30001} for port in item["spec"]["ports"]]
                api.stored[f"{path}/{item['metadata']['name']}/status"] = item

    api.after = allocate
    return api


def at(api: FakeApi, asked: str, do: Callable[[], None]) -> None:
    """``do``, once, before the first request for a path that begins with ``asked``."""

    def before(method: str, path: str) -> None:
        if path.startswith(asked):
            api.before = lambda method, path: None
            do()

    api.before = before


def test_a_second_test_changes_nothing_and_says_who_runs_the_first() -> None:
    api = cluster()
    said: list[str] = []

    def second() -> None:
        before = copy.deepcopy(api.stored)
        with pytest.raises(ClusterError) as caught:
            run(api)
        said.append(str(caught.value))
        assert api.stored == before

    at(api, LOG, second)
    # The fake kubelet's log has no results: the first one waits for them to its end.
    with pytest.raises(ClusterError, match="not all test pods finished within 1 s"):
        run(api)
    (line,) = said
    assert re.match(
        r"a test is already running: test by \S+, process \S+, since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", line
    )
    assert "\n" not in line
    assert OWN not in api.stored
    # The next one need not wait.
    assert not api.stored[LEASE]["spec"].get("holderIdentity")


def test_what_a_killed_test_has_left_is_removed_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Lease is not renewed any more. The namespace and a pod are its own."""
    monkeypatch.setattr(lease, "_LOOK_SECONDS", 0.02)
    api = cluster()
    specification = {"holderIdentity": "test by operator@laptop", "leaseDurationSeconds": 0.1}
    specification["renewTime"] = "2026-01-01T00:00:00.000000Z"
    api.put(LEASE, {"metadata": {"name": "pyebpf-proxy-test", "namespace": NAMESPACE}, "spec": specification})
    api.put(OWN, {"metadata": {"name": connectivity.NAMESPACE}})
    left = f"{PODS.path(connectivity.NAMESPACE)}/left"
    api.put(left, {"metadata": {"name": "left", "namespace": connectivity.NAMESPACE}, "spec": {"nodeName": "n1"}})
    at(api, LOG, lambda: None if left not in api.stored else pytest.fail("the pod of the killed test is there"))
    with pytest.raises(ClusterError, match="not all test pods finished"):
        run(api)
    assert OWN not in api.stored


def test_a_test_that_has_lost_its_lease_removes_nothing() -> None:
    """The machine slept, and another test began meanwhile."""
    api = cluster()

    def other() -> None:
        api.stored[LEASE]["spec"]["holderIdentity"] = "test by operator@laptop"
        raise KeyboardInterrupt

    at(api, LOG, other)
    with pytest.raises(KeyboardInterrupt):
        run(api)
    assert OWN in api.stored
    assert api.stored[LEASE]["spec"]["holderIdentity"] == "test by operator@laptop"


def test_a_plan_for_a_thousand_nodes_is_short_and_each_node_is_asked_for() -> None:
    nodes: dict[str, Any] = {}
    for number in range(NODES):
        addresses = (f"10.0.{number // 250}.{number % 250}", f"2001:db8:aaaa:bbbb:cccc::{number:x}")
        listed = [{"type": "InternalIP", "address": address} for address in addresses]
        nodes[f"ip-10-0-0-{number}.eu-central-1.compute.internal"] = {"status": {"addresses": listed}}
    found = View(nodes, {}, {}, None, None, {}, "")
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

    def other(method: str, asked: str) -> None:
        if method == "PATCH":
            del api.stored[OWN]
            api.put(OWN, {"metadata": {"name": connectivity.NAMESPACE}})

    api.before = other
    with pytest.raises(RefusedError, match="services/balanced"):
        run(api)
    assert OWN in api.stored
