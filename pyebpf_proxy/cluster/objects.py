# SPDX-License-Identifier: Apache-2.0
"""The objects to apply. ``tools/cluster_objects.py`` renders those of ``deploy/`` into this folder."""

from __future__ import annotations

import copy
import json
from importlib import resources
from typing import Any

import yaml

from pyebpf_proxy.cluster.api import Object

NAMESPACE = "kube-system"
NAME = "pyebpf-proxy"
KUBE_PROXY = "kube-proxy"
#: Selects the pods of both proxies.
PROXIES = f"k8s-app in ({KUBE_PROXY},{NAME})"
#: The agent runs on nodes with this label.
AGENT = "pyebpf-proxy/agent"
#: kube-proxy does not run on nodes with this label.
PARKED = "pyebpf-proxy/parked"
#: Annotation of kube-proxy's DaemonSet: the original values of the fields that were changed.
BEFORE = "pyebpf-proxy/before"
#: Label of task pods.
TASK = "pyebpf-proxy/task"
_ONLY_LABELLED = {AGENT: "true"}


def _load(name: str) -> list[Object]:
    text = resources.files(__package__).joinpath(name).read_text()
    return [item for item in yaml.safe_load_all(text) if item]


def agent(image: str) -> list[Object]:
    """deploy/overlays/kubeadm with this image, for labelled nodes only. Only these commands replace pods (OnDelete)."""
    items = _load("agent.yaml")
    daemon_set = items[-1]
    specification = daemon_set["spec"]["template"]["spec"]
    specification["containers"][0]["image"] = image
    specification["nodeSelector"] = {**specification["nodeSelector"], **_ONLY_LABELLED}
    daemon_set["spec"]["updateStrategy"] = {"type": "OnDelete"}
    return items


def template_image(daemon_set: Object) -> str:
    """The image of a DaemonSet's first container."""
    return str(daemon_set["spec"]["template"]["spec"]["containers"][0]["image"])


def task_pod(name: str, node: str, image: str, command: list[str], environment: dict[str, str] | None = None) -> Object:
    """A pod that does one thing on one node and ends: the clean-up pod of deploy/ with another command."""
    daemon_set = _load("cleanup.yaml")[-1]
    specification = copy.deepcopy(daemon_set["spec"]["template"]["spec"])
    (container,) = specification["containers"]
    for field in ("readinessProbe", "resources"):
        container.pop(field, None)
    container |= {"image": image, "command": command}
    if command != CLEAN_UP:
        container["securityContext"]["capabilities"]["add"].remove("BPF")  # only the clean-up opens maps
    container["env"] += [{"name": key, "value": value} for key, value in (environment or {}).items()]
    # nodeName instead of a selector: the pod also starts on nodes that the scheduler would avoid.
    specification |= {"nodeName": node, "restartPolicy": "Never"}
    specification.pop("serviceAccountName", None)
    specification["automountServiceAccountToken"] = False
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {TASK: "true"}},
        "spec": specification,
    }


CLEAN_UP = ["/bin/sh", "-c", "pyebpf-proxy probe kube-proxy && pyebpf-proxy --cleanup --keep-kube-proxy-rules"]


# ---- kube-proxy's DaemonSet ----------------------------------------------------------------------------------------

_UNLESS_PARKED = {"key": PARKED, "operator": "DoesNotExist"}


def is_prepared(kube_proxy: Object) -> bool:
    """Whether the DaemonSet excludes parked nodes. An upgrade by kubeadm may have reverted this."""
    terms = _terms(kube_proxy["spec"]["template"]["spec"].get("affinity"))
    return bool(terms) and all(_UNLESS_PARKED in term.get("matchExpressions", []) for term in terms)


def prepare(kube_proxy: Object) -> Object:
    """The merge patch that excludes parked nodes from kube-proxy's DaemonSet. With OnDelete, it replaces no pod."""
    specification = kube_proxy["spec"]["template"]["spec"]
    affinity = copy.deepcopy(specification.get("affinity") or {})
    terms = _terms(affinity) or [{}]
    for term in terms:
        # A node needs to match only one term, but all expressions of it: so each term gets the expression.
        if _UNLESS_PARKED not in term.setdefault("matchExpressions", []):
            term["matchExpressions"].append(_UNLESS_PARKED)
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    affinity["nodeAffinity"] = (affinity.get("nodeAffinity") or {}) | required
    annotations = kube_proxy["metadata"].get("annotations") or {}
    before = annotations.get(BEFORE) or json.dumps(
        {"affinity": specification.get("affinity"), "updateStrategy": kube_proxy["spec"].get("updateStrategy")}
    )
    return {
        "metadata": {"annotations": {BEFORE: before}},
        "spec": {
            "updateStrategy": {"type": "OnDelete", "rollingUpdate": None},
            "template": {"spec": {"affinity": affinity}},
        },
    }


def unprepare(kube_proxy: Object) -> Object | None:
    """The merge patch that restores the affinity of kube-proxy's DaemonSet; None if it was not changed."""
    before = _before(kube_proxy)
    if before is None:
        return None
    return {"spec": {"template": {"spec": {"affinity": _replacement(before["affinity"])}}}}


def restore_strategy(kube_proxy: Object) -> Object | None:
    """The merge patch that restores the update strategy and removes the annotation; None if nothing was changed."""
    before = _before(kube_proxy)
    if before is None:
        return None
    return {"metadata": {"annotations": {BEFORE: None}}, "spec": {"updateStrategy": before["updateStrategy"]}}


def _before(kube_proxy: Object) -> dict[str, Any] | None:
    text = (kube_proxy["metadata"].get("annotations") or {}).get(BEFORE)
    return json.loads(text) if text else None


def _replacement(affinity: Object | None) -> Object | None:
    """The affinity for a merge patch, with None for the field that the patch must remove."""
    if affinity is None:
        return None
    node = affinity.get("nodeAffinity")
    if node is None:
        return affinity | {"nodeAffinity": None}
    return affinity | {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": None} | node}


def _terms(affinity: Object | None) -> list[Object]:
    node = (affinity or {}).get("nodeAffinity") or {}
    required = node.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return list(required.get("nodeSelectorTerms") or [])
