# SPDX-License-Identifier: Apache-2.0
"""``cluster check``: what it says of versions and architectures that nothing was tested on, and lost API servers."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pyebpf_proxy.cluster import check, model, objects, task_pod
from pyebpf_proxy.cluster.api import CONFIG_MAPS, PODS, Api
from pyebpf_proxy.cluster.errors import ClusterError, StoppedError
from pyebpf_proxy.cluster.model import view
from pyebpf_proxy.cluster.objects import KUBE_PROXY, NAMESPACE
from pyebpf_proxy.see.answers import NO_ANSWER
from tests.unit.cluster.fake_api import NOW, FakeApi


class Server:
    """An API server that knows its version."""

    url = "https://192.0.2.1:6443"

    def __init__(self, version: str) -> None:
        major, minor, _ = version.removeprefix("v").split(".", 2)
        self.version = {"gitVersion": version, "major": major, "minor": f"{minor}+"}

    def request(self, method: str, path: str) -> dict[str, str]:
        assert (method, path) == ("GET", "/version")
        return self.version


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("v1.32.9", "warning"),
        ("v1.33.0", "good"),
        ("v1.36.3-eks-1", "good"),
        ("v1.37.0", "warning"),
        ("v2.0.0", "warning"),
    ],
)
def test_versions_of_kubernetes(version: str, state: str) -> None:
    (finding,) = check._server(cast(Api, Server(version)))
    assert finding.state == state
    assert (": not tested; this release is made for 1.33 to 1.36" in finding.text) == (state == "warning")


@pytest.mark.parametrize(
    ("changed", "state", "said"),
    [
        ({}, "good", "containerd://1.7.24"),
        ({"architecture": "arm64"}, "warning", "tested in emulation only"),
        ({"architecture": "s390x"}, "bad", "no image for this architecture"),
        ({"kernelVersion": "5.15.0-1"}, "warning", "kernels from 6.1 are tested"),
        ({"kernelVersion": "5.10.0-30-amd64"}, "bad", "older than 5.14"),
    ],
)
def test_nodes(changed: dict[str, str], state: str, said: str) -> None:
    info: dict[str, Any] = {"kernelVersion": "6.1.0-44-amd64", "containerRuntimeVersion": "containerd://1.7.24"}
    info |= {"architecture": "amd64", "kubeletVersion": "v1.36.3"} | changed
    (finding,) = check._node("n1", {"status": {"nodeInfo": info}})
    assert (finding.state, finding.where) == (state, "n1")
    assert said in finding.text


class Cilium:
    """An API server with Cilium's DaemonSet and this value of its setting, or without the setting."""

    def __init__(self, replacement: str | None) -> None:
        self.data = {} if replacement is None else {"kube-proxy-replacement": replacement}

    def objects(self, _: Any) -> list[dict[str, Any]]:
        return [{"metadata": {"name": "cilium", "namespace": "kube-system"}}]

    def get(self, kind: Any, name: str, namespace: str) -> dict[str, Any]:
        assert (kind, name, namespace) == (CONFIG_MAPS, "cilium-config", "kube-system")
        return {"data": self.data}


@pytest.mark.parametrize(
    ("replacement", "state", "said"),
    [
        ("true", "bad", "implements Services itself"),
        ("false", "warning", "socket programs"),
        (None, "warning", "socket"),
    ],
)
def test_cilium(replacement: str | None, state: str, said: str) -> None:
    findings = list(check._cni(cast(Api, Cilium(replacement))))
    assert findings[0].state == state
    assert said in findings[0].text


@pytest.mark.parametrize(
    ("words", "states"),
    [
        ({}, ["bad"]),
        ({"args": ["--run-router=false", "--run-service-proxy=false"]}, ["good"]),
        ({"command": ["kube-router", "--run-service-proxy=False"]}, ["good"]),
        ({"command": ["kube-router"], "args": ["--run-service-proxy"]}, ["bad"]),
        ({"args": ["--run-service-proxy=false", "--run-service-proxy=true"]}, ["bad"]),
    ],
)
def test_only_the_service_proxy_of_kube_router_conflicts(words: dict[str, Any], states: list[str]) -> None:
    class Router:
        def objects(self, _: Any) -> list[dict[str, Any]]:
            containers = [{"name": "kube-router", "image": "x:1"} | words]
            return [
                {"metadata": {"name": "kube-router"}, "spec": {"template": {"spec": {"containers": containers}}}},
                {"metadata": {"name": "kube-flannel-ds"}},
            ]

    assert [each.state for each in check._cni(cast(Api, Router()))] == states


def test_check_waits_for_a_lost_api_server_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [f"n{number:02}" for number in range(40)]
    api = FakeApi(*nodes)
    tried: list[str] = []

    def run(api: Api, what: str, node: str, *_: Any) -> str:
        tried.append(node)
        raise StoppedError("the API server has not answered for 300 s: timed out", NO_ANSWER)

    monkeypatch.setattr(task_pod, "run", run)
    with pytest.raises(StoppedError):
        list(check._image(api, view(api), "registry.example/pyebpf-proxy:1", 1.0))
    assert len(tried) < len(nodes)


@pytest.mark.parametrize("text", ["a: " + "[" * 5000, "a: [", "a: !!int x", "a: \0", "- a", ""])
def test_a_configuration_that_cannot_be_read_is_one_line(text: str) -> None:
    api = FakeApi("n1")
    api.stored[CONFIG_MAPS.path(NAMESPACE, KUBE_PROXY)]["data"]["config.conf"] = text
    with pytest.raises(ClusterError, match=r"ConfigMap kube-system/kube-proxy: config\.conf is not [^\n]*$"):
        model.kube_proxy_configuration(api)


def test_a_configuration_is_read_as_by_the_proxies() -> None:
    """To other readers of YAML 1.1 these are an invalid date, a number to base 60 and a tag, and one document too many.

    kube-proxy starts with all of it.
    """
    api = FakeApi("n1")
    for field, value in (("hostnameOverride", "2026-13-45"), ("portRange", "=")):
        api.configure(f"{field}: ''\n", f"{field}: {value}\n")
    api.configure("bindAddress: 0.0.0.0\n", "bindAddress: 2001:10:0:0:0:0:0:1\n")
    api.configure("showHiddenMetricsForVersion: ''\n", "---\n[\n")
    configuration = model.valid_configuration(api)
    assert configuration["bindAddress"] == "2001:10:0:0:0:0:0:1"


def test_two_checks_at_once_do_not_disturb_each_other() -> None:
    """Two administrators try two images: each has pods of its own."""
    api = FakeApi("n1")
    other: list[Any] = []

    def kubelet(method: str, path: str) -> None:
        if method != "GET" or not path.startswith(PODS.path(NAMESPACE, "pyebpf-proxy-check-n1-")):
            return
        if not other:
            other.append(None)
            other[:] = check._image(api, view(api), "registry.example/pyebpf-proxy:2", 1.0)
        if path in api.stored:
            api.stored[path]["status"] = {"phase": "Succeeded"}

    api.before = kubelet
    own = list(check._image(api, view(api), "registry.example/pyebpf-proxy:1", 1.0))
    assert [(each.state, each.text.split()[0].rpartition(":")[2]) for each in [*own, *other]] == [
        ("good", "1"),
        ("good", "2"),
    ]
    assert not [path for path in api.stored if "-check-" in path]


def test_ctrl_c_in_a_check_ends_only_its_own_pods() -> None:
    api = FakeApi("n1")
    name = task_pod.name_of("check", "n1", "other")
    pod = objects.task_pod("check", name, "n1", "registry.example/pyebpf-proxy:2", ["true"])
    pod["metadata"] |= {"creationTimestamp": NOW, "labels": pod["metadata"]["labels"] | {objects.RUN: "other"}}
    path = PODS.path(NAMESPACE, name)
    api.put(path, pod)

    def interrupt(method: str, asked: str) -> None:
        if method == "GET" and "-check-" in asked:
            api.after = lambda method, path: None
            raise KeyboardInterrupt

    api.after = interrupt
    with pytest.raises(KeyboardInterrupt):
        list(check._image(api, view(api), "registry.example/pyebpf-proxy:1", 1.0))
    assert [each for each in api.stored if "-check-" in each] == [path]


@pytest.mark.parametrize(("created", "left"), [("2026-01-01T11:54:59Z", False), ("2026-01-01T11:55:01Z", True)])
def test_what_a_killed_check_has_left_is_deleted_once_its_time_is_over(created: str, left: bool) -> None:
    api = FakeApi("n1")
    name = task_pod.name_of("check", "n1", "killed")
    pod = objects.task_pod("check", name, "n1", "registry.example/pyebpf-proxy:1", ["true"])
    pod["metadata"]["creationTimestamp"] = created
    pod["spec"]["activeDeadlineSeconds"] = 300
    path = PODS.path(NAMESPACE, name)
    api.put(path, pod)

    def kubelet(method: str, asked: str) -> None:
        if method == "GET" and asked in api.stored and "-check-" in asked:
            api.stored[asked]["status"] = {"phase": "Succeeded"}

    api.before = kubelet
    list(check._image(api, view(api), "registry.example/pyebpf-proxy:1", 1.0))
    assert (path in api.stored) == left
