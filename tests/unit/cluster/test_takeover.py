# SPDX-License-Identifier: Apache-2.0
"""Steps on a node: pods that the kubelet rejects, and changes of kube-proxy's DaemonSet."""

from __future__ import annotations

import copy

import pytest

from pyebpf_proxy.cluster import objects, takeover, task_pod
from pyebpf_proxy.cluster.api import DAEMON_SETS, NODES, PODS, Object
from pyebpf_proxy.cluster.errors import ClusterError, NodeGoneError
from pyebpf_proxy.cluster.objects import AGENT, KUBE_PROXY, NAME, NAMESPACE, ON, PARKED
from pyebpf_proxy.cluster.takeover import Reached, Site
from tests.unit.cluster.fake_api import FakeApi, node_object, running

IMAGE = "registry.example/pyebpf-proxy:1"


def test_a_rejected_pod_of_a_daemonset_is_replaced() -> None:
    """The kubelet knew the node's new label too late. The DaemonSet controller makes another pod."""
    api = FakeApi("n1")
    api.put(DAEMON_SETS.path(NAMESPACE, NAME), objects.agent(IMAGE)[-1])
    api.label("n1", agent=objects.ON, parked=objects.ON)
    rejected = api.name_of_agent("n1")
    message = "Pod was rejected: Predicate NodeAffinity failed"
    api.status_of = lambda pod: (
        {"phase": "Failed", "reason": "NodeAffinity", "message": message}
        if pod["metadata"]["name"] == rejected
        else running(ready=True)
    )
    looks = 0

    def controller(method: str, path: str) -> None:
        nonlocal looks
        looks += path == PODS.path(NAMESPACE)
        if looks == 2:
            api.stored.pop(PODS.path(NAMESPACE, rejected), None)

    api.before = controller
    site = Site(api, IMAGE, [], "", 1.0)
    assert takeover.wait_ready(site, "n1").name != rejected


def test_a_pod_that_is_rejected_again_and_again_is_explained() -> None:
    api = FakeApi("n1")
    api.put(DAEMON_SETS.path(NAMESPACE, NAME), objects.agent(IMAGE)[-1])
    api.label("n1", agent=objects.ON, parked=objects.ON)
    api.status_of = lambda pod: {"phase": "Failed", "reason": "OutOfpods", "message": "Pod was rejected: too many pods"}
    site = Site(api, IMAGE, [], "", 0.2)
    with pytest.raises(ClusterError, match=r"the agent's pod did not become ready within 0 s: .*too many pods"):
        takeover.wait_ready(site, "n1")


def test_what_others_change_in_kube_proxys_affinity_at_the_same_time_stays() -> None:
    """As an operator does that applies its own manifest."""
    api = FakeApi("n1")
    path = DAEMON_SETS.path(NAMESPACE, KUBE_PROXY)
    theirs = {"key": "example.org/no-proxy", "operator": "DoesNotExist"}

    def other(method: str, asked: str) -> None:
        if method == "PATCH" and asked == path:
            api.before = lambda method, path: None
            changed = copy.deepcopy(api.stored[path])
            terms = {"nodeSelectorTerms": [{"matchExpressions": [theirs]}]}
            affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
            changed["spec"]["template"]["spec"]["affinity"] = affinity
            api.put(path, changed)

    api.before = other
    takeover.patch_kube_proxy(api, objects.prepare, 1.0)
    assert objects.is_prepared(api.stored[path])
    assert theirs in terms_of(api.stored[path])[0]["matchExpressions"]
    takeover.patch_kube_proxy(api, objects.unprepare, 1.0)
    assert terms_of(api.stored[path]) == [{"matchExpressions": [theirs]}]


def terms_of(daemon_set: Object) -> list[Object]:
    affinity = daemon_set["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    found: list[Object] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return found


@pytest.mark.parametrize("moment", ["before it is read", "before it is changed"])
def test_kube_proxy_is_not_parked_on_a_node_that_has_registered_again(moment: str) -> None:
    """The agent had programmed the node. Now it ends, because the new object of the node has no label."""
    api, path = FakeApi("n1"), NODES.path(name="n1")
    api.put(DAEMON_SETS.path(NAMESPACE, NAME), objects.agent(IMAGE)[-1])

    def register(method: str, asked: str) -> None:
        labels = api.stored[path]["metadata"]["labels"]
        if AGENT in labels and (asked.endswith("/log") if moment == "before it is read" else method == "PATCH"):
            api.put(path, node_object("n1"))

    if moment == "before it is read":
        api.after = register
    else:
        api.before = register
    with pytest.raises(ClusterError, match=f"the node has lost its label {AGENT}={ON}"):
        takeover.take(Site(api, IMAGE, [], "", 1.0), "n1", Reached([], []), print)
    assert PARKED not in api.stored[path]["metadata"]["labels"]
    assert "n1" in api.pods_of(KUBE_PROXY)


def test_a_node_that_is_deleted_before_its_label_changes_is_gone() -> None:
    """The command names it and continues: nothing failed there."""
    api, path = FakeApi("n1"), NODES.path(name="n1")

    def delete(method: str, asked: str) -> None:
        if method == "PATCH":
            api.stored.pop(path, None)

    api.before = delete
    with pytest.raises(NodeGoneError):
        takeover.label(Site(api, IMAGE, [], "", 1.0), "n1", AGENT, ON)


def test_kube_proxy_comes_back_after_the_pod_that_removes_its_rules_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verification was interrupted: its pod is deleted, and runs for its grace period."""
    api, node = FakeApi("n1"), NODES.path(name="n1")
    api.put(DAEMON_SETS.path(NAMESPACE, NAME), objects.agent(IMAGE)[-1])
    api.label("n1", agent=ON, parked=objects.UNVERIFIED)
    name = task_pod.name_of("verify", "n1")
    path = PODS.path(NAMESPACE, name)
    pod = api.put(path, objects.task_pod("verify", name, "n1", IMAGE, ["true"]))
    looks, ended = 0, []

    def kubelet(method: str, asked: str) -> None:
        nonlocal looks
        if asked == path and method == "DELETE":
            api.put(path, pod)
        elif asked == path:
            looks += 1
            if looks == 2:
                del api.stored[path]
        elif asked == node and method == "PATCH":
            ended.append(path not in api.stored)

    monkeypatch.setattr(task_pod, "run", lambda *_: "all is well\n")
    api.after = kubelet
    takeover.give_back(Site(api, IMAGE, [], "", 1.0), "n1", print)
    assert len(ended) == 3
    assert all(ended)


@pytest.mark.parametrize("restarts", [False, True])
def test_an_agent_that_restarts_while_it_is_given_back(monkeypatch: pytest.MonkeyPatch, restarts: bool) -> None:
    """At each start it removes kube-proxy's rules: they are looked at again once it cannot start any more."""
    api = FakeApi("n1")
    api.put(DAEMON_SETS.path(NAMESPACE, NAME), objects.agent(IMAGE)[-1])
    api.label("n1", agent=ON, parked=ON)
    done: list[str] = []

    def task(_: object, what: str, *__: object) -> str:
        done.append(what if "n1" in api.pods_of(NAME) else f"{what} without the agent")
        return "all is well\n"

    def status_of(pod: Object) -> Object:
        status = running(ready=True)
        if restarts and pod["metadata"]["labels"]["k8s-app"] == NAME:
            status["containerStatuses"][0]["restartCount"] = len(done)
        return status

    monkeypatch.setattr(task_pod, "run", task)
    api.status_of = status_of
    takeover.give_back(Site(api, IMAGE, [], "", 1.0), "n1", print)
    again = ["await without the agent"] if restarts else []
    assert done == ["await", *again, "clean without the agent"]
