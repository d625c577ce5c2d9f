# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy cluster`` against a real API server: nodes that are left out, and the order of the others.

As in test_cluster_commands.py, but without a recorder where a node has no kube-proxy on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.cluster.objects import AGENT
from tests.cluster.commands import (
    IMAGE,
    NAMES,
    NEWER,
    daemon_set,
    labels,
    now,
    only_error,
    proxies,
    run,
    served_by_agent,
    simulated_cluster,
    started,
)
from tests.cluster.simulated_nodes import SETS, SYSTEM, SimulatedNodes
from tests.support.apiserver import MERGE, ApiServer


@pytest.fixture
def unwatched(server: ApiServer, tmp_path: Path) -> Iterator[SimulatedNodes]:
    with simulated_cluster(server, tmp_path, NAMES) as nodes:
        yield nodes


def die(cluster: SimulatedNodes, server: ApiServer, name: str) -> None:
    """The node's kubelet stops, and its controller has noticed."""
    cluster.faults.dead.add(name)
    path = f"/api/v1/nodes/{name}"
    cluster.until(
        lambda pods: "Unknown" in str(server.request("GET", path)["status"].get("conditions")), f"{name} is given up"
    )


def agents_image(server: ApiServer) -> str:
    return str(daemon_set(server, "pyebpf-proxy")["spec"]["template"]["spec"]["containers"][0]["image"])


# ---- nodes that are down -------------------------------------------------------------------------------------------


def test_a_node_that_is_down_holds_up_neither_upgrade_nor_test(
    unwatched: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    run(tmp_path, "install", "--image", IMAGE)
    die(unwatched, server, "n1")
    said = run(tmp_path, "upgrade", "--image", NEWER)
    assert "skipped, because they are not ready: n1" in said
    assert "[2/2] n3: upgraded, and verified" in said
    pods = server.request("GET", f"{SYSTEM}?labelSelector=k8s-app=pyebpf-proxy")["items"]
    images = {each["spec"]["nodeName"]: each["spec"]["containers"][0]["image"] for each in pods}
    assert images == {"n1": IMAGE, "n2": NEWER, "n3": NEWER}
    document = json.loads(run(tmp_path, "test", "-o", "json"))
    assert {row["from"].split()[-1] for row in document["rows"]} == {"n2", "n3", "machine"}
    unwatched.until(lambda pods: "pyebpf-proxy-test" not in namespaces(server), "the test's namespace is gone")
    said = run(tmp_path, "check", "--image", NEWER, "--timeout", "5")
    assert "warning  n1: image: not checked: the node is not ready" in said


def namespaces(server: ApiServer) -> list[str]:
    return [each["metadata"]["name"] for each in server.request("GET", "/api/v1/namespaces")["items"]]


def test_a_node_that_is_deleted_meanwhile_is_named(
    unwatched: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    """As an autoscaler does: the others go on."""
    unwatched.faults.never_programmed.add("n2")
    process = started(tmp_path, "install", "--image", IMAGE)
    unwatched.until(lambda pods: AGENT in labels(server, "n2"), "n2 has the label")
    server.request("DELETE", "/api/v1/nodes/n2")
    unwatched.attached.discard("n2")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "[2/3] n2: the node no longer exists" in said
    assert "[3/3] n3: taken over, and verified" in said
    assert now(server)["n3"] == ["pyebpf-proxy"]


# ---- nodes without kube-proxy --------------------------------------------------------------------------------------


def test_nodes_without_kube_proxy_are_not_taken_over_and_keep_an_agent(
    unwatched: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1", "n2"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    patch = {"spec": {"template": {"spec": {"affinity": affinity}}}}
    server.request("PATCH", f"{SETS}/kube-proxy", patch, MERGE)
    unwatched.until(lambda pods: "n3" not in proxies(pods), "kube-proxy has left n3")
    original = daemon_set(server)["spec"]["template"]
    said = run(tmp_path, "install", "--image", IMAGE)
    assert "skipped, because kube-proxy does not run there: n3" in said
    assert AGENT not in labels(server, "n3")
    assert "kube-proxy runs on none of these nodes" in run(
        tmp_path, "install", "--nodes", "kubernetes.io/hostname=n3", status=1
    )
    # An administrator has brought an agent there: without it the node would have no proxy.
    server.request("PATCH", "/api/v1/nodes/n3", {"metadata": {"labels": {AGENT: "true"}}}, MERGE)
    unwatched.until(lambda pods: proxies(pods).get("n3") == ["pyebpf-proxy"], "the agent runs on n3")
    error = only_error(run(tmp_path, "rollback", status=1))
    assert error.startswith("Error: n3: the node selector or affinity of kube-proxy's DaemonSet excludes the node; ")
    assert now(server) == {"n1": ["kube-proxy"], "n2": ["kube-proxy"], "n3": ["pyebpf-proxy"]}
    server.request("PATCH", "/api/v1/nodes/n3", {"metadata": {"labels": {AGENT: None}}}, MERGE)
    unwatched.until(lambda pods: "n3" not in proxies(pods), "the agent has left n3")
    unwatched.attached.discard("n3")
    run(tmp_path, "rollback")
    assert daemon_set(server)["spec"]["template"] == original


# ---- the order of nodes --------------------------------------------------------------------------------------------


def test_the_control_plane_comes_last(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    role = {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}
    server.request("PATCH", "/api/v1/nodes/n1", role, MERGE)
    assert "# nodes, in this order: n2, n3, n1" in run(tmp_path, "install", "--image", IMAGE, "--dry-run")
    run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    assert now(server) == served_by_agent("n2")


def test_a_node_that_is_half_taken_over_comes_first_and_counts(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    server.request("PATCH", "/api/v1/nodes/n3", {"metadata": {"labels": {AGENT: "true"}}}, MERGE)
    run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    assert now(server) == served_by_agent("n3")


# ---- upgrade -------------------------------------------------------------------------------------------------------


def test_an_upgrade_of_no_node_changes_nothing(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    before = daemon_set(server, "pyebpf-proxy")["spec"]
    error = only_error(run(tmp_path, "upgrade", "--image", "registry.example/wrong:1", "--nodes", "no=such", status=2))
    assert "no node matches --nodes" in error
    run(tmp_path, "upgrade", "--image", "registry.example/wrong:1", "--nodes", "kubernetes.io/hostname=n2")
    assert daemon_set(server, "pyebpf-proxy")["spec"] == before
    assert agents_image(server) == IMAGE
