# SPDX-License-Identifier: Apache-2.0
"""Takes one node over from kube-proxy, and gives it back. At every moment, one of the two has programmed the node.

Takeover: the agent starts alongside kube-proxy. Once it has programmed the node, kube-proxy is parked. Then the agent
binds the health port and becomes ready. Giving back: kube-proxy starts alongside the agent, and the clean-up waits
until kube-proxy has programmed the node. Every step can be repeated, so the next command continues one that was killed.
"""

from __future__ import annotations

from collections.abc import Callable

from pyebpf_proxy.cluster import objects, task_pod
from pyebpf_proxy.cluster.api import DAEMON_SETS, NODES, PODS, Api, Object
from pyebpf_proxy.cluster.errors import ClusterError, NodeLostError
from pyebpf_proxy.cluster.model import Pod, has_label, is_programmed, pods
from pyebpf_proxy.cluster.objects import AGENT, KUBE_PROXY, NAME, NAMESPACE, PARKED
from pyebpf_proxy.cluster.task_pod import wait_on_node, wait_until

Say = Callable[[str], None]
_AGENTS, _KUBE_PROXIES = f"k8s-app={NAME}", f"k8s-app={KUBE_PROXY}"


def take(api: Api, node: str, image: str, targets: list[str], seconds: float, say: Say) -> None:
    """Give the node to the agent. After a ClusterError, the caller must give it back; kube-proxy may still serve it."""
    label(api, node, AGENT, True)
    say("the agent starts alongside kube-proxy")
    wait_programmed(api, node, seconds)
    say("the agent has programmed the node; kube-proxy is parked")
    label(api, node, PARKED, True)
    gone = "kube-proxy's pod does not end"
    wait_on_node(api, node, lambda: node not in pods(api, _KUBE_PROXIES, node), gone, seconds)
    wait_ready(api, node, seconds)
    verify(api, node, image, targets, seconds)


def wait_programmed(api: Api, node: str, seconds: float) -> Pod:
    """Wait until the agent's pod has programmed the node. ClusterError; it comes at once if the pod cannot start."""

    def programmed(pod: Pod) -> bool:
        # The log of a ready pod may have been rotated, so that the line is gone.
        return pod.ready or is_programmed(api, pod)

    late, hopeless = "the agent has not programmed the node", "the agent does not start"
    return _wait_pod(api, _AGENTS, node, programmed, late, hopeless, seconds)


def wait_ready(api: Api, node: str, seconds: float) -> Pod:
    """Wait until the agent's pod is ready."""
    late = "the agent's pod is not ready"
    return _wait_pod(api, _AGENTS, node, lambda pod: pod.ready, late, "the agent ended", seconds)


def _wait_pod(
    api: Api, labels: str, node: str, good: Callable[[Pod], bool], late: str, hopeless: str, seconds: float
) -> Pod:
    """Wait until the proxy's pod on the node is usable and ``good``.

    ClusterError with the text ``late`` after the time, or with ``hopeless`` at once if the pod cannot start.
    """
    found: Pod | None = None

    def come() -> bool:
        nonlocal found
        found = pods(api, labels, node).get(node)
        if found is not None and found.hopeless:
            raise ClusterError(f"{hopeless}: {found.hopeless}")
        return found is not None and found.usable and good(found)

    wait_on_node(api, node, come, late, seconds)
    assert found is not None
    return found


def try_image(api: Api, node: str, image: str, seconds: float) -> None:
    """Run the image on the node briefly. ClusterError if it cannot be pulled, or if the kernel lacks a requirement."""
    task_pod.run(api, "fit", node, image, ["pyebpf-proxy", "cluster", "on-node", "fit"], seconds)


def unpark_lost(api: Api, node: str) -> None:
    """Remove the parked label of a node that was lost during its takeover: once it is back, kube-proxy also starts."""
    try:
        label(api, node, PARKED, False)
    except NodeLostError:
        pass  # the node does not exist any more


def verify(api: Api, node: str, image: str, targets: list[str], seconds: float) -> None:
    """Remove rules that kube-proxy wrote while both proxies ran, and connect from the node to real Services."""
    command = ["pyebpf-proxy", "cluster", "on-node", "verify", *" ".join(targets).split()]
    task_pod.run(api, "verify", node, image, command, seconds)


def give_back(api: Api, node: str, image: str, targets: list[str], seconds: float, say: Say) -> None:
    """Give the node back to kube-proxy, and remove everything of the agent from it. Raises ClusterError."""
    agent = pods(api, _AGENTS, node).get(node)
    parked = has(api, node, PARKED)
    attached = parked or (agent is not None and agent.ran)
    label(api, node, PARKED, False)
    old = pods(api, _KUBE_PROXIES, node).get(node)
    if old is not None and agent is not None and _has_removed_rules(api, agent, old, parked):
        # kube-proxy rewrites them only at its next full sync: in mode nftables within an hour. A new pod writes them
        # at its start.
        api.delete(PODS, old.name, NAMESPACE, old.uid)
        _wait_new(api, _KUBE_PROXIES, node, old, "no new pod of kube-proxy comes, and the agent stays", seconds)
    late = "kube-proxy's pod does not run, and the agent stays"
    hopeless = "kube-proxy does not start, and the agent stays"
    _wait_pod(api, _KUBE_PROXIES, node, lambda pod: True, late, hopeless, seconds)
    if attached:
        # kube-proxy's health server cannot be asked: the agent has bound the port.
        command = ["pyebpf-proxy", "cluster", "on-node", "kube-proxy", *" ".join(targets).split()]
        task_pod.run(api, "await", node, image, command, seconds)
    say("kube-proxy has programmed the node; the agent ends")
    label(api, node, AGENT, False)
    gone = "the agent's pod does not end"
    wait_on_node(api, node, lambda: node not in pods(api, _AGENTS, node), gone, seconds)
    if attached:
        # The agent's programs stay attached until here.
        task_pod.run(api, "clean", node, image, objects.CLEAN_UP, seconds)
    say("kube-proxy serves the node")


def _has_removed_rules(api: Api, agent: Pod, kube_proxy: Pod, parked: bool) -> bool:
    """Whether the agent started after this kube-proxy, and has therefore removed its rules."""
    later = not parked or agent.since > kube_proxy.since
    return later and agent.usable and is_programmed(api, agent)


def _wait_new(api: Api, labels: str, node: str, old: Pod, late: str, seconds: float) -> None:
    """Wait until another pod has replaced this one. ClusterError with the text ``late`` after the time."""

    def replaced() -> bool:
        found = pods(api, labels, node).get(node)
        return found is not None and found.uid != old.uid

    wait_on_node(api, node, replaced, late, seconds)


def replace(api: Api, node: str, old: Pod, seconds: float, say: Say) -> Pod:
    """Replace the agent's pod by one of the DaemonSet's current template. Attached programs serve traffic meanwhile."""
    api.delete(PODS, old.name, NAMESPACE, old.uid)
    _wait_new(api, _AGENTS, node, old, "no new pod of the agent comes", seconds)
    wait_programmed(api, node, seconds)
    say("the new agent has programmed the node")
    return wait_ready(api, node, seconds)


def has(api: Api, node: str, name: str) -> bool:
    """Whether the node has this label of pyebpf-proxy. NodeLostError if there is no such node."""
    found = api.get(NODES, node)
    if found is None:
        raise NodeLostError("the node does not exist any more")
    return has_label(found, name)


def label(api: Api, node: str, name: str, on: bool) -> None:
    """Set or remove a label of pyebpf-proxy."""
    if has(api, node, name) != on:
        api.patch(NODES, node, {"metadata": {"labels": {name: "true" if on else None}}})


def patch_kube_proxy(api: Api, change: Callable[[Object], Object | None], seconds: float) -> None:
    """Change kube-proxy's DaemonSet, and wait until the DaemonSet controller has observed the change."""
    found = api.get(DAEMON_SETS, KUBE_PROXY, NAMESPACE)
    if found is None:
        return
    body = change(found)
    if body is None:
        return
    generation = api.patch(DAEMON_SETS, KUBE_PROXY, body, NAMESPACE)["metadata"]["generation"]

    def observed() -> bool:
        now = api.get(DAEMON_SETS, KUBE_PROXY, NAMESPACE)
        return now is None or now.get("status", {}).get("observedGeneration", 0) >= generation

    wait_until(observed, f"the DaemonSet controller does not notice the change of {KUBE_PROXY}", seconds)
