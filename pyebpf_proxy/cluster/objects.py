# SPDX-License-Identifier: Apache-2.0
"""The objects that are applied: those of ``deploy/``, rendered into this folder by ``tools/cluster_objects.py``."""

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
#: On kube-proxy's DaemonSet: what was changed, as it was before.
BEFORE = "pyebpf-proxy/before"
#: On task pods.
TASK = "pyebpf-proxy/task"
_READ = {AGENT: "true"}


def _load(name: str) -> list[Object]:
    text = resources.files(__package__).joinpath(name).read_text()
    return [item for item in yaml.safe_load_all(text) if item]


def agent(image: str) -> list[Object]:
    """deploy/overlays/kubeadm with this image, on nodes with the label; pods are replaced only by these commands."""
    items = _load("agent.yaml")
    daemon_set = items[-1]
    specification = daemon_set["spec"]["template"]["spec"]
    specification["containers"][0]["image"] = image
    specification["nodeSelector"] = {**specification["nodeSelector"], **_READ}
    daemon_set["spec"]["updateStrategy"] = {"type": "OnDelete"}
    return items


def template_image(daemon_set: Object) -> str:
    """The image of a DaemonSet's first container."""
    return str(daemon_set["spec"]["template"]["spec"]["containers"][0]["image"])


def task_pod(name: str, node: str, image: str, command: list[str], environment: dict[str, str] | None = None) -> Object:
    """A pod that does one thing on one node and ends: the clean-up's of deploy/, with another command."""
    daemon_set = _load("cleanup.yaml")[-1]
    specification = copy.deepcopy(daemon_set["spec"]["template"]["spec"])
    (container,) = specification["containers"]
    for field in ("readinessProbe", "resources"):
        container.pop(field, None)
    container |= {"image": image, "command": command}
    if command != CLEAN_UP:
        container["securityContext"]["capabilities"]["add"].remove("BPF")  # only the clean-up opens maps
    container["env"] += [{"name": key, "value": value} for key, value in (environment or {}).items()]
    # nodeName, not a selector: it starts also where the scheduler would not put it.
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
    """Whether the DaemonSet spares parked nodes. An upgrade by kubeadm may have undone it."""
    terms = _terms(kube_proxy["spec"]["template"]["spec"].get("affinity"))
    return bool(terms) and all(_UNLESS_PARKED in term.get("matchExpressions", []) for term in terms)


def prepare(kube_proxy: Object) -> Object:
    """The merge patch with which kube-proxy spares parked nodes. No pod is replaced by it: OnDelete."""
    specification = kube_proxy["spec"]["template"]["spec"]
    affinity = copy.deepcopy(specification.get("affinity") or {})
    terms = _terms(affinity) or [{}]
    for term in terms:
        # Terms are alternatives, the expressions of a term are not.
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
    """The merge patch that gives kube-proxy's DaemonSet its affinity back; None: it was not changed."""
    before = _before(kube_proxy)
    if before is None:
        return None
    return {"spec": {"template": {"spec": {"affinity": _exactly(before["affinity"])}}}}


def restore_strategy(kube_proxy: Object) -> Object | None:
    """The merge patch for the rest of what was changed."""
    before = _before(kube_proxy)
    if before is None:
        return None
    return {"metadata": {"annotations": {BEFORE: None}}, "spec": {"updateStrategy": before["updateStrategy"]}}


def _before(kube_proxy: Object) -> dict[str, Any] | None:
    text = (kube_proxy["metadata"].get("annotations") or {}).get(BEFORE)
    return json.loads(text) if text else None


def _exactly(affinity: Object | None) -> Object | None:
    """For a merge patch: the other fields of nodeAffinity go."""
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
