# SPDX-License-Identifier: Apache-2.0
"""An API server in memory, with a DaemonSet controller and kubelets that have done their work at the next request.

The suite tests/cluster has a real API server. This one is for what that one cannot do: an answer that is lost, a pod
that is rejected, a node that is deleted between two requests.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from pyebpf_proxy.cluster.api import (
    CONFIG_MAPS,
    DAEMON_SETS,
    JSON,
    NODES,
    PODS,
    SERVICES,
    SLICES,
    Api,
    Object,
    RefusedError,
    unguarded,
)
from pyebpf_proxy.cluster.connectivity import NAMESPACE as TEST
from pyebpf_proxy.cluster.objects import AGENT, KUBE_PROXY, NAME, NAMESPACE, ON, PARKED
from tests.support import kubeadm
from tests.support.merge_patch import merged

_CONFIG_MAP = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{KUBE_PROXY}"
#: By its clock, which stands.
NOW = "2026-01-01T12:00:00Z"
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_LOG = "2026-01-01T00:00:00.000Z info pyebpf-proxy starts version=1\n2026-01-01T00:00:00.100Z info ready objects=3\n"


class FakeApi(Api):
    """Nodes on which kube-proxy runs. ``before``: called with each request, may raise RefusedError or change objects.

    ``after``: the same, once the request has been made; RefusedError: its answer is lost.
    """

    def __init__(self, *nodes: str) -> None:
        self.context, self.url = "test", "https://192.0.2.1:6443"
        self.stored: dict[str, Object] = {_CONFIG_MAP: kubeadm.config_map(self.url)}
        self.before: Callable[[str, str], None] = lambda method, path: None
        self.after: Callable[[str, str], None] = lambda method, path: None
        #: What a kubelet reports of a pod: its status.
        self.status_of: Callable[[Object], Object] = lambda pod: running(ready=True)
        #: What admission makes of a new pod.
        self.admitted: Callable[[Object], Object] = lambda pod: pod
        #: What their controller has seen last of DaemonSets that have changed since.
        self.seen: dict[str, Object] = {}
        self.guard = unguarded
        self._numbers = itertools.count(1)
        for node in nodes:
            self.put(NODES.path(name=node), node_object(node))
        self.put(DAEMON_SETS.path(NAMESPACE, KUBE_PROXY), kubeadm.daemon_set())

    def delete_after(self, asked: str, path: str) -> None:
        """Another program deletes this object as soon as a path that begins with ``asked`` has been requested."""

        def delete(method: str, requested: str) -> None:
            if requested.startswith(asked):
                self.stored.pop(path, None)

        self.after = delete

    def configure(self, old: str, new: str) -> None:
        """Replace a part of kube-proxy's configuration."""
        data = self.stored[CONFIG_MAPS.path(NAMESPACE, KUBE_PROXY)]["data"]
        assert old in data["config.conf"]
        data["config.conf"] = data["config.conf"].replace(old, new)

    def put(self, path: str, item: Object) -> Object:
        """Store an object as it is, but for its version."""
        item = copy.deepcopy(item)
        number = next(self._numbers)
        uid = self.stored.get(path, {}).get("metadata", {}).get("uid", f"uid-{number}")
        item["metadata"] |= {"resourceVersion": str(number), "generation": number, "uid": uid}
        self.stored[path] = item
        return item

    def label(self, node: str, **labels: str) -> None:
        """Give a node one or both of the labels ``agent`` and ``parked``."""
        names = {"agent": AGENT, "parked": PARKED}
        self.stored[NODES.path(name=node)]["metadata"]["labels"] |= {names[key]: each for key, each in labels.items()}

    def pods_of(self, name: str) -> dict[str, Object]:
        """The pods of a DaemonSet by node."""
        return {
            pod["spec"]["nodeName"]: pod
            for path, pod in self.stored.items()
            if path.startswith(PODS.path(NAMESPACE) + "/") and pod["metadata"]["labels"].get("k8s-app") == name
        }

    def name_of_agent(self, node: str) -> str:
        """The name of the agent's pod, once the controllers have worked."""
        self._control()
        return str(self.pods_of(NAME)[node]["metadata"]["name"])

    def images(self) -> dict[str, str]:
        """The agents' images by node."""
        return {node: pod["spec"]["containers"][0]["image"] for node, pod in self.pods_of(NAME).items()}

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        content: str = JSON,
        query: Mapping[str, str] | None = None,
        text: bool = False,
        later: frozenset[int] = frozenset(),
    ) -> Any:
        """One request."""
        self._ask_guard(method, path)
        self.before(method, path)
        self._control()
        answer = self._answer(method, path, body, query or {})
        self.after(method, path)
        return copy.deepcopy(answer)

    def _answer(self, method: str, path: str, body: Any, query: Mapping[str, str]) -> Any:
        if path == _REVIEWS:
            return {"status": {"allowed": True}}
        if path.endswith("/log"):
            pod = self.stored.get(path.removesuffix("/log"), {"spec": {"containers": ()}})
            if len(pod["spec"]["containers"]) > 1 and "container" not in query:
                raise RefusedError(400, "BadRequest", "a container name must be specified for the pod")
            return _LOG
        if method == "POST":
            metadata = body["metadata"] | {"creationTimestamp": NOW}
            return self.put(f"{path}/{metadata['name']}", body | {"metadata": metadata})
        if method == "GET" and path in [
            kind.path(space) for kind in (NODES, PODS, SERVICES, SLICES) for space in ("", NAMESPACE, "default", TEST)
        ]:
            return {"items": [item for name, item in self.stored.items() if self._is_listed(name, item, path, query)]}
        present = self.stored.get(path)
        if present is None and (method != "PATCH" or "fieldManager" not in query or "force" not in query):
            raise RefusedError(404, "NotFound", f"{path} not found")
        if method == "DELETE":
            return self.stored.pop(path)
        if method == "PATCH" and "dryRun" not in query:
            wanted = body["metadata"].get("resourceVersion") if "metadata" in body else None
            if wanted and present and present["metadata"]["resourceVersion"] != wanted:
                raise RefusedError(409, "Conflict", "the object has been modified")
            return self.put(path, body if "force" in query else merged(present, body))
        return present if present is not None else body

    @staticmethod
    def _is_listed(name: str, item: Object, path: str, query: Mapping[str, str]) -> bool:
        key, _, value = query.get("labelSelector", "").partition("=")
        node = query.get("fieldSelector", "").removeprefix("spec.nodeName=")
        if name.rpartition("/")[0] != path:
            return False
        if value and (item["metadata"].get("labels") or {}).get(key) != value:
            return False
        return not node or item["spec"].get("nodeName") == node

    def _control(self) -> None:
        """Pods of both DaemonSets where they belong, and the generation that the controller has seen."""
        nodes = {path.rpartition("/")[2]: item for path, item in self.stored.items() if path.startswith(NODES.path())}
        for name in (NAME, KUBE_PROXY):
            stored = self.stored.get(DAEMON_SETS.path(NAMESPACE, name))
            if stored is None:
                continue
            daemon_set = self.seen.get(name, stored)
            stored["status"] = {"observedGeneration": daemon_set["metadata"]["generation"]}
            present = self.pods_of(name)
            template = daemon_set["spec"]["template"]
            for node, item in nodes.items():
                labels = item["metadata"]["labels"]
                wanted = labels.get(AGENT) == ON if name == NAME else PARKED not in labels
                if wanted and node not in present:
                    metadata = {"name": f"{name}-{next(self._numbers)}", "namespace": NAMESPACE}
                    metadata |= {key: template["metadata"].get(key) or {} for key in ("labels", "annotations")}
                    pod = {"metadata": metadata, "spec": template["spec"] | {"nodeName": node}}
                    self.put(PODS.path(NAMESPACE, str(metadata["name"])), self.admitted(pod))
                if not wanted and node in present:
                    del self.stored[PODS.path(NAMESPACE, present[node]["metadata"]["name"])]
        for name in (NAME, KUBE_PROXY):
            for pod in self.pods_of(name).values():
                status = pod["status"] = self.status_of(pod)
                for container, shown in zip(
                    pod["spec"]["containers"], status.get("containerStatuses") or (), strict=False
                ):
                    shown["name"] = container["name"]


def node_object(name: str) -> Object:
    """A node whose kubelet reports."""
    info = {
        "kernelVersion": "6.1.0",
        "architecture": "amd64",
        "operatingSystem": "linux",
        "machineID": f"machine of {name}",
    }
    status = {"nodeInfo": info, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}, "status": status}


def running(ready: bool) -> Object:
    """The status of a pod whose container runs."""
    container = {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "started": True, "restartCount": 0}
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {"phase": "Running", "containerStatuses": [container], "conditions": conditions}
