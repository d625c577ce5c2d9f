# SPDX-License-Identifier: Apache-2.0
"""Task pods: when they have ended, and their output."""

from __future__ import annotations

import pytest

from pyebpf_proxy.cluster import task_pod
from pyebpf_proxy.cluster.api import NODES, PODS, RefusedError
from pyebpf_proxy.cluster.errors import ClusterError, NodeGoneError
from pyebpf_proxy.cluster.objects import NAME, NAMESPACE
from tests.unit.cluster.fake_api import FakeApi

IMAGE = "registry.example/pyebpf-proxy:1"


@pytest.mark.parametrize("failures", [2, 1000])
def test_the_output_of_a_pod_whose_log_cannot_be_read(failures: int) -> None:
    """It says which Services were reached: an empty one would leave all of them untested."""
    api = FakeApi("n1")
    path = PODS.path(NAMESPACE, task_pod.name_of("fit", "n1"))
    left = failures

    def kubelet(method: str, asked: str) -> None:
        nonlocal left
        if method == "GET" and asked == path:
            api.stored[path]["status"] = {"phase": "Succeeded"}
        if asked == f"{path}/log" and left:
            left -= 1
            raise RefusedError(503, "ServiceUnavailable", "dial tcp 192.0.2.1:10250: i/o timeout")

    api.before = kubelet
    if failures == 2:
        assert "pyebpf-proxy starts" in task_pod.run(api, "fit", "n1", IMAGE, ["true"], 5.0)
    else:
        with pytest.raises(ClusterError, match="fit: the pod has succeeded, but its log could not be read within"):
            task_pod.run(api, "fit", "n1", IMAGE, ["true"], 1.0)
    assert path not in api.stored, "the pod is deleted"


@pytest.mark.parametrize("status", [0, 1])
def test_a_container_of_a_webhook_runs_on(status: int) -> None:
    """The pod's phase stays Running."""
    api = FakeApi("n1")
    path = PODS.path(NAMESPACE, task_pod.name_of("fit", "n1"))

    def kubelet(method: str, asked: str) -> None:
        if method == "GET" and asked == path:
            ended = {"exitCode": status, "message": "the kernel has no BTF" if status else ""}
            statuses = [{"name": "mesh", "state": {"running": {}}}, {"name": NAME, "state": {"terminated": ended}}]
            api.stored[path]["status"] = {"phase": "Running", "containerStatuses": statuses}
            api.stored[path]["spec"]["containers"].insert(0, {"name": "mesh", "image": "mesh:7"})

    api.before = kubelet
    if status:
        with pytest.raises(ClusterError, match=r"^fit: the kernel has no BTF$"):
            task_pod.run(api, "fit", "n1", IMAGE, ["true"], 1.0)
    else:
        assert task_pod.run(api, "fit", "n1", IMAGE, ["true"], 1.0)


def test_the_pod_of_a_node_that_is_deleted() -> None:
    """It is deleted, too. The command names the node and continues with the next one."""
    api = FakeApi("n1")
    path = PODS.path(NAMESPACE, task_pod.name_of("fit", "n1"))

    def autoscaler(method: str, asked: str) -> None:
        if method == "GET" and asked == path:
            api.stored.pop(path, None)
            api.stored.pop(NODES.path(name="n1"), None)

    api.before = autoscaler
    with pytest.raises(NodeGoneError):
        task_pod.run(api, "fit", "n1", IMAGE, ["true"], 5.0)
