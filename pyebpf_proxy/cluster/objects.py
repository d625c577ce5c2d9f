# SPDX-License-Identifier: Apache-2.0
"""The objects that are applied: those of ``deploy/``, rendered into this folder by ``tools/cluster_objects.py``."""

from __future__ import annotations

import copy
import json
import re
from importlib import resources

import yaml

from pyebpf_proxy import __version__
from pyebpf_proxy.cluster.api import Object

NAMESPACE = "kube-system"
NAME = "pyebpf-proxy"
KUBE_PROXY = "kube-proxy"
#: Selects the pods of both proxies.
PROXIES = f"k8s-app in ({KUBE_PROXY},{NAME})"
#: A node's label. The agent runs where it is ``ON``; ``CLEANING``: the agent has ended, what it attached may be there.
AGENT = "pyebpf-proxy/agent"
#: A node's label. kube-proxy does not run where it is set: ``UNVERIFIED``, and ``ON`` once the node has been verified.
PARKED = "pyebpf-proxy/parked"
ON, CLEANING, UNVERIFIED = "true", "cleaning", "unverified"
#: A node's annotation. It is there from the agent's first start until the clean-up has ended, also if another program
#: removes the labels. Its value: what kube-proxy did not serve there before.
UNREACHED = "pyebpf-proxy/unreached"
#: On kube-proxy's DaemonSet: its update strategy as it was before.
BEFORE = "pyebpf-proxy/before"
#: On the agent's DaemonSet: the pod template of the image before the last upgrade.
FORMER = "pyebpf-proxy/former"
#: On the agent's pods: the image that was asked for. A webhook may take another name of it, such as a mirror's.
IMAGE = "pyebpf-proxy/image"
#: On the agent's pods: a digest of the DatapathConfiguration that they read.
DATAPATH_DIGEST = "pyebpf-proxy/datapath-config"
#: On task pods: which task.
TASK = "pyebpf-proxy/task"
#: On the pods of ``cluster check``: of which run. Several may run at the same time.
RUN = "pyebpf-proxy/run"
_READ = {AGENT: ON}
#: The ConfigMap with the DatapathConfiguration of the agents, and its key.
DATAPATH = "pyebpf-proxy-datapath"
DATAPATH_KEY = "datapath.yaml"
#: The beginning of a version, or of a tag that is one.
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text()


def _load(name: str) -> list[Object]:
    return [item for item in yaml.safe_load_all(_text(name)) if item]


def agent(image: str) -> list[Object]:
    """deploy/overlays/kubeadm with this image, on nodes with the label; pods are replaced only by these commands."""
    items = _load("agent.yaml")
    daemon_set = items[-1]
    template = daemon_set["spec"]["template"]
    template["metadata"]["annotations"] = (template["metadata"].get("annotations") or {}) | {IMAGE: image}
    specification = template["spec"]
    specification["containers"][0]["image"] = image
    specification["nodeSelector"] = {**specification["nodeSelector"], **_READ}
    daemon_set["spec"]["updateStrategy"] = {"type": "OnDelete"}
    return items


def datapath_config_map(text: str) -> Object:
    """The ConfigMap with this DatapathConfiguration."""
    labels = {"app.kubernetes.io/name": NAME, "app.kubernetes.io/version": __version__}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": DATAPATH, "namespace": NAMESPACE, "labels": labels},
        "data": {DATAPATH_KEY: text},
    }


def datapath_digest_of(pod: Object) -> str:
    """The digest of the DatapathConfiguration that a pod was made for, or a pod template; "" if for none."""
    return str((pod.get("metadata", {}).get("annotations") or {}).get(DATAPATH_DIGEST, ""))


def _read_datapath(template: Object, digest: str) -> None:
    """Let a pod template read the DatapathConfiguration, as deploy/components/datapath-config does; "": no longer."""
    metadata, container = template["metadata"], container_of(template)
    annotations = {key: value for key, value in (metadata.get("annotations") or {}).items() if key != DATAPATH_DIGEST}
    metadata["annotations"] = annotations | ({DATAPATH_DIGEST: digest} if digest else {})
    for operation in yaml.safe_load(_text("datapath.yaml")):
        *_, key, _ = operation["path"].split("/")
        place, value = template["spec"] if key == "volumes" else container, operation["value"]
        # By its name: a template that the API server has kept has default values, too.
        others = [each for each in place.get(key) or () if _name_of(each) != _name_of(value)]
        place[key] = others + ([value] if digest else [])


def _name_of(entry: Object | str) -> str:
    """The name of a volume or a mount; an argument."""
    return entry if isinstance(entry, str) else str(entry["name"])


def image_of(pod: Object) -> str:
    """The image that was asked for, of a pod or a pod template: that of the proxy's container, unless it says so."""
    annotations = pod.get("metadata", {}).get("annotations") or {}
    return str(annotations.get(IMAGE) or container_of(pod)["image"])


def container_of(pod: Object) -> Object:
    """The proxy's container of a pod or a pod template. A webhook may add its own, also before it.

    It is named as the proxy, in the pod of a task as the agent.
    """
    name = (pod.get("metadata", {}).get("labels") or {}).get("k8s-app", NAME)
    containers: list[Object] = pod["spec"]["containers"]
    return next((each for each in containers if each.get("name") == name), containers[0])


def template_image(daemon_set: Object) -> str:
    """The image that was asked for of a DaemonSet's pods."""
    return image_of(daemon_set["spec"]["template"])


def upgraded(present: Object, image: str, datapath: str = "") -> Object:
    """The agent's DaemonSet with this image; the present template stays in its annotation if it has another one.

    An image older than this command gets the template that ran it before, if that is known (:func:`fits`).

    ``datapath``, here and below: the digest of the DatapathConfiguration that the agents read; "": they read none.
    """
    daemon_set = agent(image)[-1]
    former = _former(present) if template_image(present) == image else present["spec"]["template"]
    _keep_templates(daemon_set, present, image, former)
    _read_datapath(daemon_set["spec"]["template"], datapath)
    return daemon_set


def installed(present: Object | None, image: str, datapath: str = "") -> list[Object]:
    """As ``agent``, where a DaemonSet may be present: an image older than this command keeps its pod template.

    The former template, which an upgrade has noted, stays noted.
    """
    items = agent(image)
    if present is not None:
        _keep_templates(items[-1], present, image, _former(present))
    _read_datapath(items[-1]["spec"]["template"], datapath)
    return items


def _keep_templates(daemon_set: Object, present: Object, image: str, former: Object | None) -> None:
    """Give an image older than this command the template that ran it before; note the former template, if any."""
    if is_older(image) and (template := _template_of(present, image)):
        daemon_set["spec"]["template"] = copy.deepcopy(template)
    if former:
        daemon_set["metadata"]["annotations"] = {FORMER: json.dumps(former)}


def fits(present: Object | None, image: str) -> bool:
    """Whether there is a pod template for this image: it is not older than this command, or it ran here before."""
    return not is_older(image) or (present is not None and _template_of(present, image) is not None)


def is_older(image: str) -> bool:
    """Whether the tag is a version, and an older one than this command's."""
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    image_version, own = _VERSION.match(tag), _VERSION.match(__version__)
    assert own is not None
    return image_version is not None and tuple(map(int, image_version.groups())) < tuple(map(int, own.groups()))


def downgraded(present: Object, image: str, datapath: str = "") -> Object:
    """The agent's DaemonSet with the template that ran this image before, or with the client's if that is not known.

    The present template stays noted if it has another image, so that the upgrade to that one can be repeated.
    """
    daemon_set = agent(image)[-1]
    if template := _template_of(present, image):
        daemon_set["spec"]["template"] = copy.deepcopy(template)
    if template_image(present) != image:
        daemon_set["metadata"]["annotations"] = {FORMER: json.dumps(present["spec"]["template"])}
    _read_datapath(daemon_set["spec"]["template"], datapath)
    return daemon_set


def _template_of(present: Object, image: str) -> Object | None:
    """The pod template that ran this image, if it is the present or the former one."""
    templates = (_former(present), present["spec"]["template"])
    return next((template for template in templates if template and image_of(template) == image), None)


def _former(daemon_set: Object) -> Object | None:
    found = _noted(daemon_set, FORMER) or {}
    return found if (found.get("spec") or {}).get("containers") else None


# ---- task pods -----------------------------------------------------------------------------------------------------

CLEAN_UP = ["/bin/sh", "-c", "pyebpf-proxy probe kube-proxy && pyebpf-proxy --cleanup --keep-kube-proxy-rules"]
#: Tasks of ``cluster check`` and those before a node is changed: no other pod has to go for them.
_NOT_CRITICAL = frozenset({"check", "fit", "try"})
#: Tasks in a pod of the pod network: they connect, as any pod does.
ON_POD_NETWORK = frozenset({"try", "connect"})
_LOCK = "/run/xtables.lock"


def task_pod(
    what: str, name: str, node: str, image: str, command: list[str], environment: dict[str, str] | None = None
) -> Object:
    """A pod that does one thing on one node and ends: the clean-up's of deploy/, with another command.

    ``what``: the task. ``environment`` replaces variables of the same name.
    """
    daemon_set = _load("cleanup.yaml")[-1]
    specification = copy.deepcopy(daemon_set["spec"]["template"]["spec"])
    (container,) = specification["containers"]
    for field in ("readinessProbe", "resources"):
        container.pop(field, None)
    variables = {each["name"]: each for each in container["env"]}
    variables |= {key: {"name": key, "value": value} for key, value in (environment or {}).items()}
    container |= {"image": image, "command": command, "env": list(variables.values())}
    # nodeName, not a selector: it starts also where the scheduler would not put it.
    specification |= {"nodeName": node, "restartPolicy": "Never"}
    specification.pop("serviceAccountName", None)
    specification["automountServiceAccountToken"] = False
    if what in _NOT_CRITICAL:
        specification.pop("priorityClassName")
    capabilities = container["securityContext"]["capabilities"]
    if what in ON_POD_NETWORK:
        capabilities.pop("add")
        container.pop("volumeMounts")
        for field in ("volumes", "hostNetwork"):
            specification.pop(field)
    elif what != "clean":
        # The tools of iptables-legacy need this right and the lock; only the clean-up opens maps.
        capabilities["add"] = ["NET_ADMIN", "NET_RAW"]
        container["volumeMounts"].append({"mountPath": _LOCK, "name": "xtables-lock"})
        lock = {"name": "xtables-lock", "hostPath": {"path": _LOCK, "type": "FileOrCreate"}}
        specification["volumes"].append(lock)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {TASK: what}},
        "spec": specification,
    }


# ---- kube-proxy's DaemonSet ----------------------------------------------------------------------------------------

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_UNLESS_PARKED = {"key": PARKED, "operator": "DoesNotExist"}


def spares_parked(kube_proxy: Object) -> bool:
    """Whether the DaemonSet leaves parked nodes out. An upgrade by kubeadm may have undone it."""
    terms = _terms(kube_proxy["spec"]["template"]["spec"].get("affinity"))
    return bool(terms) and all(_is_empty(term) or _UNLESS_PARKED in term.get("matchExpressions", []) for term in terms)


def is_prepared(kube_proxy: Object) -> bool:
    """Whether the DaemonSet leaves parked nodes out, and replaces no pod by itself."""
    return spares_parked(kube_proxy) and kube_proxy["spec"]["updateStrategy"]["type"] == "OnDelete"


def prepare(kube_proxy: Object) -> Object:
    """The merge patch with which kube-proxy spares parked nodes. No pod is replaced by it: OnDelete."""
    specification = kube_proxy["spec"]["template"]["spec"]
    affinity = copy.deepcopy(specification.get("affinity") or {})
    terms = _terms(affinity)
    for term in terms:
        # Terms are alternatives, the expressions of a term are not. An empty term matches no node, and must not begin
        # to match.
        if not _is_empty(term) and _UNLESS_PARKED not in term.setdefault("matchExpressions", []):
            term["matchExpressions"].append(_UNLESS_PARKED)
    terms = terms or [{"matchExpressions": [_UNLESS_PARKED]}]
    affinity["nodeAffinity"] = (affinity.get("nodeAffinity") or {}) | {_REQUIRED: {"nodeSelectorTerms": terms}}
    strategy = kube_proxy["spec"]["updateStrategy"]
    before = _before(kube_proxy)
    if before is None or strategy["type"] != "OnDelete":
        before = {"updateStrategy": strategy}
    return {
        "metadata": {"annotations": {BEFORE: json.dumps(before)}},
        "spec": {
            "updateStrategy": {"type": "OnDelete", "rollingUpdate": None},
            "template": {"spec": {"affinity": affinity}},
        },
    }


def unprepare(kube_proxy: Object) -> Object | None:
    """The merge patch that takes our expression out of kube-proxy's affinity; None: it is not there.

    What others have changed in the affinity meanwhile stays.
    """
    affinity = kube_proxy["spec"]["template"]["spec"].get("affinity") or {}
    terms = _terms(affinity)
    if not any(_UNLESS_PARKED in term.get("matchExpressions", []) for term in terms):
        return None
    kept = [_without_ours(term) for term in terms]
    if any(_is_empty(left) and not _is_empty(term) for left, term in zip(kept, terms, strict=True)):
        # One of the alternatives had no other condition: kube-proxy runs on every node that is not parked.
        kept = []
    left: Object | None = {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": kept} if kept else None}}
    if not kept and affinity["nodeAffinity"].keys() == {_REQUIRED}:
        left = {"nodeAffinity": None} if len(affinity) > 1 else None
    return {"spec": {"template": {"spec": {"affinity": left}}}}


def restore_strategy(kube_proxy: Object) -> Object | None:
    """The merge patch for the rest of what was changed. A strategy that others have set meanwhile stays."""
    before = _before(kube_proxy)
    if before is None:
        return None
    patch: Object = {"metadata": {"annotations": {BEFORE: None}}}
    if kube_proxy["spec"]["updateStrategy"]["type"] == "OnDelete":
        patch["spec"] = {"updateStrategy": before.get("updateStrategy") or {"type": "RollingUpdate"}}
    return patch


def was_changed(kube_proxy: Object) -> bool:
    """Whether an installation has changed the DaemonSet, and no rollback has restored all of it."""
    return _before(kube_proxy) is not None


def _before(kube_proxy: Object) -> Object | None:
    return _noted(kube_proxy, BEFORE)


def _noted(item: Object, annotation: str) -> Object | None:
    """What an annotation has noted; empty if another program has made it unreadable."""
    text = (item["metadata"].get("annotations") or {}).get(annotation)
    if not text:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _without_ours(term: Object) -> Object:
    """A term of the affinity; empty if there was nothing else in it."""
    left = [each for each in term.get("matchExpressions", ()) if each != _UNLESS_PARKED]
    others = {name: value for name, value in term.items() if name != "matchExpressions"}
    return others | ({"matchExpressions": left} if left else {})


def _terms(affinity: Object | None) -> list[Object]:
    node = (affinity or {}).get("nodeAffinity") or {}
    return list((node.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [])


def _is_empty(term: Object) -> bool:
    """Whether the term has no condition. Such a term matches no node."""
    return not (term.get("matchExpressions") or term.get("matchFields"))
