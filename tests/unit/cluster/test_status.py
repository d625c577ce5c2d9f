# SPDX-License-Identifier: Apache-2.0
"""``cluster status``: what it says of kube-proxy's DaemonSet while nodes are taken over."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from pyebpf_proxy.cluster import cli, objects, status
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.model import View, pod_of
from pyebpf_proxy.cluster.output import Output
from pyebpf_proxy.see.answers import QUESTION
from tests.support.merge_patch import merged
from tests.unit.cluster.fake_api import FakeApi


def kube_proxy(image: str) -> Any:
    container = {"name": "kube-proxy", "image": image}
    update = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
    return {"metadata": {}, "spec": {"updateStrategy": update, "template": {"spec": {"containers": [container]}}}}


def view(daemon_set: Any) -> View:
    """n1 is taken over, kube-proxy runs on n2."""
    nodes = {name: {"metadata": {"name": name, "labels": {}}, "status": {}} for name in ("n1", "n2")}
    nodes["n1"]["metadata"]["labels"] = {objects.AGENT: objects.ON, objects.PARKED: objects.ON}
    specification = {"nodeName": "n2", "containers": [{"name": "kube-proxy", "image": "kube-proxy:1"}]}
    pod = pod_of({"metadata": {"name": "kube-proxy-1", "uid": "u"}, "spec": specification, "status": {}})
    return View(nodes, {}, {"n2": pod}, None, daemon_set, {}, "")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("prepared", []),
        ("rewritten", ["its DaemonSet was rewritten, so that it runs on all nodes again"]),
        ("rolled back halfway", ["a rollback has not finished, or its DaemonSet was rewritten"]),
        ("another strategy", ["the update strategy of its DaemonSet was changed"]),
        ("another image", ["kube-proxy:1 runs on n2; its DaemonSet has kube-proxy:2 and does not replace the pods"]),
    ],
)
def test_what_has_become_of_the_daemonset(case: str, said: list[str]) -> None:
    original = kube_proxy("kube-proxy:2" if case == "another image" else "kube-proxy:1")
    prepared = merged(original, objects.prepare(original))
    if case == "rewritten":
        prepared = original
    elif case == "rolled back halfway":
        prepared = merged(prepared, objects.unprepare(prepared))
    elif case == "another strategy":
        prepared["spec"]["updateStrategy"] = {"type": "RollingUpdate"}
    found = list(status._of_kube_proxy(view(prepared), prepared))
    assert len(found) == len(said)
    assert all(text in each.text for text, each in zip(said, found, strict=True)), found


@pytest.mark.parametrize("image", ["", "registry.example/pyebpf-proxy:1"])
def test_the_agents_daemonset_was_deleted(image: str) -> None:
    """Its pods end with it, and kube-proxy stays parked."""
    original = kube_proxy("kube-proxy:1")
    found = view(merged(original, objects.prepare(original)))
    texts = [each.text for each in status.problems(found, image)]
    deleted = "DaemonSet kube-system/pyebpf-proxy was deleted: no agent starts any more"
    assert (deleted in texts) == (not image)


def test_a_selector_of_no_node_is_an_error() -> None:
    """A monitor with a misspelt selector would see status 0 whatever happens."""
    options = argparse.Namespace(nodes="role=wroker", timeout=1.0)
    with pytest.raises(ClusterError, match="no node matches --nodes") as caught:
        cli._status(FakeApi("n1"), Output(as_json=False), options)
    assert caught.value.status == QUESTION
