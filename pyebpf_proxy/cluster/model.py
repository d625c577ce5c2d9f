# SPDX-License-Identifier: Apache-2.0
"""What runs where: nodes, the pods of both proxies, and what a pod's status means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

from pyebpf_proxy.cluster import machines, objects
from pyebpf_proxy.cluster.api import CONFIG_MAPS, DAEMON_SETS, NODES, PODS, Api, Object, RefusedError
from pyebpf_proxy.cluster.errors import ClusterError, NodeGoneError, NodeLostError
from pyebpf_proxy.cluster.objects import AGENT, CLEANING, KUBE_PROXY, NAME, NAMESPACE, ON, PARKED, UNREACHED
from pyebpf_proxy.config import addresses, yaml_text
from pyebpf_proxy.see.answers import QUESTION
from pyebpf_proxy.services.nodes import TO_BE_DELETED_TAINT

#: Reasons of a waiting container that do not go away by themselves.
_HOPELESS = {
    "ImagePullBackOff": "the image cannot be pulled",
    "InvalidImageName": "the name of the image is invalid",
    "ErrImageNeverPull": "the image is not on the node, and imagePullPolicy is Never",
    "CreateContainerConfigError": "the container cannot be created",
    "CreateContainerError": "the container cannot be created",
    "RunContainerError": "the container cannot be started",
    "CrashLoopBackOff": "the container exits repeatedly",
}
#: The agent's log line once the node is programmed, as text and as JSON.
_PROGRAMMED = re.compile(r'^\S+ info ready |"message": ?"ready"', re.MULTILINE)
#: Its first log line.
_STARTS = re.compile(r'^\S+ info pyebpf-proxy starts |"message": ?"pyebpf-proxy starts"', re.MULTILINE)
_WHERE = f"ConfigMap {NAMESPACE}/{KUBE_PROXY}"
#: Where kube-proxy serves its health if its configuration does not say, and from where the node itself reaches it.
_HEALTH_PORT = 10256
_LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


class Pod(NamedTuple):
    """A pod, as far as it matters here: one container of it."""

    name: str
    container: str
    uid: str
    node: str
    image: str
    #: The digest of the DatapathConfiguration that the pod was made for; "" if for none.
    datapath: str
    phase: str
    #: The container runs, and its startup probe has succeeded.
    started: bool
    ready: bool
    deleted: bool
    restarts: int
    #: Why the container cannot start; "" if it can, or if it may be early.
    hopeless: str
    #: Whether the container has ever run.
    ran: bool
    #: What a container that has ended wrote.
    message: str
    #: With which status it has ended; None if it has not, or if it was started again.
    exit: int | None
    #: When the container started, as the API writes times; "" if it does not run.
    since: str

    @property
    def usable(self) -> bool:
        """It runs and is not terminating."""
        return self.started and not self.deleted


def pod_of(item: Object) -> Pod:
    """A pod's object in short."""
    status = item.get("status", {})
    # The kubelet sorts the statuses by name: that of a webhook's container may come first.
    name, statuses = objects.container_of(item)["name"], status.get("containerStatuses") or ()
    container: Mapping[str, Any] = next((each for each in statuses if each.get("name") == name), {})
    state, last = container.get("state") or {}, container.get("lastState") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated") or last.get("terminated") or {}
    reason = waiting.get("reason", "")
    hopeless = ""
    if reason in _HOPELESS:
        # For a container that ends again and again, the kubelet's own message says only how long it waits.
        said = [waiting.get("message"), ended.get("message")]
        why = next(filter(None, reversed(said) if reason == "CrashLoopBackOff" else said), "") or reason
        hopeless = f"{_HOPELESS[reason]}: {one_line(why)}"
    elif status.get("phase") == "Failed":
        hopeless = (ended.get("message") or status.get("message") or status.get("reason") or "the pod failed").strip()
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    return Pod(
        name=item["metadata"]["name"],
        container=name,
        uid=item["metadata"]["uid"],
        node=item["spec"].get("nodeName", ""),
        image=objects.image_of(item),
        datapath=objects.datapath_digest_of(item),
        phase=status.get("phase", ""),
        started="running" in state and container.get("started") is not False,
        ready=conditions.get("Ready") == "True",
        deleted="deletionTimestamp" in item["metadata"],
        restarts=int(container.get("restartCount", 0)),
        hopeless=one_line(hopeless),
        ran="running" in state or bool(ended) or int(container.get("restartCount", 0)) > 0,
        message=one_line(ended.get("message") or ""),
        exit=(state.get("terminated") or {}).get("exitCode"),
        since=(state.get("running") or {}).get("startedAt") or "",
    )


def one_line(text: str) -> str:
    """The last line of a text that is not empty, shortened."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return " ".join(lines[-1].split())[:400] if lines else ""


class View(NamedTuple):
    """The cluster at one moment. Pods by node; of several on a node, the one that stays."""

    nodes: dict[str, Object]
    agents: dict[str, Pod]
    kube_proxies: dict[str, Pod]
    agent_set: Object | None
    kube_proxy_set: Object | None
    #: On which machines an agent was started, by the name of the node (``machines``).
    machines: Mapping[str, str]
    #: Why these are not known, for a user with few rights; "" if they are.
    machines_unknown: str

    def has(self, node: str, label: str) -> bool:
        """Whether the node has one of our labels, with any value."""
        return label in (self.nodes[node]["metadata"].get("labels") or {})

    def label(self, node: str, label: str) -> str:
        """The value of one of our labels; "" if the node does not have it."""
        return label_of(self.nodes[node], label)

    def is_ours(self, node: str) -> bool:
        """Whether an agent runs there, or has run there and is not cleaned up."""
        return self.is_begun(node) or node in self.agents or self.is_registered_again(node)

    def is_begun(self, node: str) -> bool:
        """Whether the node's object says that an agent runs there, or has run there and is not cleaned up."""
        return self.has(node, AGENT) or self.has(node, PARKED) or self.is_noted(node)

    def is_noted(self, node: str) -> bool:
        """Whether these commands have noted that an agent has been started there, and is not cleaned up."""
        return unreached_of(self.nodes[node]) is not None

    def is_registered_again(self, node: str) -> bool:
        """Whether the node's object is a new one, without labels, of a machine on which an agent was started."""
        noted = self.machines.get(node)
        return noted is not None and noted == machines.machine_of(self.nodes[node]) and not self.is_begun(node)

    def lacks_agent(self, node: str) -> bool:
        """Whether another program has taken the label away without which no agent runs there."""
        is_begun = self.has(node, PARKED) or self.is_noted(node)
        return is_begun and self.label(node, AGENT) not in (ON, CLEANING)

    def is_cleaning(self, node: str) -> bool:
        """Whether the agent has ended, and the clean-up of what it attached has not."""
        return self.label(node, AGENT) == CLEANING

    def is_up(self, node: str) -> bool:
        """Whether the node's kubelet reports: without it no pod starts or ends."""
        status = self.nodes[node]["status"]
        conditions = status.get("conditions") or ()
        has_reported = bool((status.get("nodeInfo") or {}).get("kernelVersion"))
        return has_reported and all(each["status"] == "True" for each in conditions if each["type"] == "Ready")

    def is_leaving(self, node: str) -> bool:
        """As :func:`is_leaving`."""
        return is_leaving(self.nodes[node])

    def proxy(self, node: str) -> str:
        """Which proxy runs there."""
        names = [name for name, pods in ((KUBE_PROXY, self.kube_proxies), (NAME, self.agents)) if node in pods]
        return " and ".join(names) or "none"

    def is_done(self, node: str) -> bool:
        """Taken over: the agent alone, ready, and verified."""
        pod = self.agents.get(node)
        parked = self.label(node, PARKED) == ON
        is_alone = pod is not None and pod.ready and node not in self.kube_proxies
        return parked and is_alone and not self.lacks_agent(node)


def require_kubelet(api: Api, node: str) -> Object:
    """The node's object. NodeLostError if there is none, or if the node's controller has given its kubelet up."""
    found = api.get(NODES, node)
    if found is None:
        raise NodeGoneError("the node no longer exists")
    conditions = found["status"].get("conditions") or ()
    if any(each["type"] == "Ready" and each["status"] == "Unknown" for each in conditions):
        raise NodeLostError("the node's kubelet no longer reports")
    return found


def is_leaving(node: Object) -> bool:
    """Whether an autoscaler or a user is removing the node. No agent is ready there (spec/service-semantics §11.2)."""
    taints = (node.get("spec") or {}).get("taints") or ()
    return "deletionTimestamp" in node["metadata"] or any(each.get("key") == TO_BE_DELETED_TAINT for each in taints)


def label_of(node: Object, label: str) -> str:
    """The value of one of our labels in a node's object; "" if it does not have it."""
    return str((node["metadata"].get("labels") or {}).get(label, ""))


def unreached_of(node: Object) -> str | None:
    """What these commands have noted on a node's object; None: nothing, because no agent has been started there."""
    note = (node["metadata"].get("annotations") or {}).get(UNREACHED)
    return None if note is None else str(note)


def view(api: Api, selector: str = "") -> View:
    """Linux nodes that match the selector. ClusterError if it is none."""
    try:
        nodes = api.objects(NODES, labels=selector)
    except RefusedError as refused:
        if refused.status != 400 or not selector:
            raise
        raise ClusterError(f"--nodes {selector}: not a label selector: {refused}", QUESTION) from None
    linux = [
        each for each in nodes if (each["status"].get("nodeInfo") or {}).get("operatingSystem", "linux") == "linux"
    ]
    known, why = machines.readable(api)
    return View(
        nodes={each["metadata"]["name"]: each for each in sorted(linux, key=lambda each: each["metadata"]["name"])},
        agents=pods(api, f"k8s-app={NAME}"),
        kube_proxies=pods(api, f"k8s-app={KUBE_PROXY}"),
        agent_set=api.get(DAEMON_SETS, NAME, NAMESPACE),
        kube_proxy_set=api.get(DAEMON_SETS, KUBE_PROXY, NAMESPACE),
        machines=known,
        machines_unknown=why,
    )


def pods(api: Api, labels: str, node: str = "") -> dict[str, Pod]:
    """Pods by node."""
    found = [pod_of(each) for each in api.objects(PODS, NAMESPACE, labels, f"spec.nodeName={node}" if node else "")]
    # A pod that is being deleted counts only where there is no other.
    return {pod.node: pod for pod in sorted(found, key=lambda pod: not pod.deleted) if pod.node}


def is_programmed(api: Api, pod: Pod) -> bool:
    """Whether this agent has programmed its node since its start, as its log says.

    An agent may be ready before. It counts only where the log is so long that its beginning is gone.
    """
    log = api.log(pod.name, NAMESPACE, pod.container)
    return says_programmed(log) or (pod.ready and bool(log) and not _STARTS.search(log))


def says_programmed(log: str) -> bool:
    """Whether an agent's log says that the node is programmed."""
    return bool(_PROGRAMMED.search(log))


def kube_proxy_configuration(api: Api) -> dict[str, Any]:
    """What kubeadm's ConfigMap has, on which the agent runs. ClusterError where it is not as expected."""
    return _as_yaml(_kube_proxy_text(api))


def valid_configuration(api: Api) -> dict[str, Any]:
    """The same. ClusterError also if a proxy that starts with it would exit.

    kube-proxy reads it only when it starts: it may run although someone has changed the ConfigMap.
    """
    from pyebpf_proxy.config import flags
    from pyebpf_proxy.config.complete import complete
    from pyebpf_proxy.config.loader import ConfigError

    text = _kube_proxy_text(api)
    configuration = _as_yaml(text)
    with NamedTemporaryFile() as file:
        file.write(text.encode(errors="surrogatepass"))
        file.flush()
        try:
            complete(flags.parse([f"--config={file.name}"]), lambda *_: None)
        except ConfigError as error:
            raise ClusterError(
                f"{_WHERE}: config.conf: {error}; a proxy that starts with it exits, so correct it first"
            ) from None
    return configuration


def _kube_proxy_text(api: Api) -> str:
    config_map = api.get(CONFIG_MAPS, KUBE_PROXY, NAMESPACE)
    if config_map is None:
        raise ClusterError(f"there is no {_WHERE}: this command is for clusters created by kubeadm (docs/deploy.md)")
    data = config_map.get("data") or {}
    missing = [name for name in ("config.conf", "kubeconfig.conf") if name not in data]
    if missing:
        raise ClusterError(f"{_WHERE} has no {' and no '.join(missing)}: it is not kubeadm's (docs/deploy.md)")
    return str(data["config.conf"])


def _as_yaml(text: str) -> dict[str, Any]:
    """The document as the proxies read it: by Go's rules, and only the first one of the text."""
    try:
        configuration = yaml_text.load(text.encode(errors="surrogatepass")).value
    except ValueError as error:
        raise ClusterError(f"{_WHERE}: config.conf is not YAML: {str(error).removeprefix('yaml: ')}") from None
    if not isinstance(configuration, dict):
        raise ClusterError(f"{_WHERE}: config.conf is not a configuration")
    return configuration


def kube_proxy_health(configuration: dict[str, Any]) -> str:
    """Host and port at which a node's own processes reach the health page of its kube-proxy."""
    address = addresses.append_port(str(configuration.get("healthzBindAddress") or "0.0.0.0"), _HEALTH_PORT)
    host, port = addresses.split_host_port(address) or ("", str(_HEALTH_PORT))
    return addresses.join_host_port(_LOOPBACK.get(host, host), int(port) if port.isdecimal() else _HEALTH_PORT)


def installed_image(found: View) -> str:
    """The agent's image; "" if it is not installed. ClusterError: it was installed in another way."""
    if found.agent_set is None:
        return ""
    selector = found.agent_set["spec"]["template"]["spec"].get("nodeSelector") or {}
    if selector.get(AGENT) != ON:
        raise ClusterError(
            f"DaemonSet {NAMESPACE}/{NAME} was not created by this command: it runs on all nodes, not only on those"
            f" with the label {AGENT}; first go back to kube-proxy (docs/migrating-from-kube-proxy.md), or continue"
            " without this command"
        )
    return objects.template_image(found.agent_set)
