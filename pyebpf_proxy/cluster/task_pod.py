# SPDX-License-Identifier: Apache-2.0
"""Task pods: they do one thing on one node, and end."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from pyebpf_proxy.cluster import objects
from pyebpf_proxy.cluster.api import PODS, SERVICES, SLICES, Api, Object
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.model import pod_of, require_kubelet
from pyebpf_proxy.cluster.objects import NAMESPACE

POLL_SECONDS = 0.3
#: How often a wait checks whether the node's kubelet still reports.
_LOOK_SECONDS = 3.0


def name_of(what: str, node: str) -> str:
    """The name of a task pod: at most 63 characters, whatever the node's name."""
    short = hashlib.sha256(node.encode()).hexdigest()[:8]
    return f"pyebpf-proxy-{what}-{node.replace('.', '-')[:30].strip('-')}-{short}"


def wait_until(
    condition: Callable[[], bool], what: str, seconds: float, look: Callable[[], object] | None = None
) -> None:
    """Wait for the condition. ClusterError if it is not met in time; ``what`` describes the problem to the user.

    ``look`` is called every few seconds, and raises an error if the condition can never be met.
    """
    now = time.monotonic()
    end, next_look = now + seconds, now + _LOOK_SECONDS
    while not condition():
        now = time.monotonic()
        if look is not None and now > next_look:
            look()
            next_look = now + _LOOK_SECONDS
        if now > end:
            raise ClusterError(f"{what}: not within {seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def wait_on_node(api: Api, node: str, condition: Callable[[], bool], what: str, seconds: float) -> None:
    """Like ``wait_until``, for something that the node's kubelet does. NodeLostError if the kubelet stops reporting."""
    wait_until(condition, what, seconds, lambda: require_kubelet(api, node))


def run(
    api: Api,
    what: str,
    node: str,
    image: str,
    command: list[str],
    seconds: float,
    environment: dict[str, str] | None = None,
) -> str:
    """Run a command in a pod on a node, then remove the pod. The result is the output; ClusterError if it fails."""
    pod = objects.task_pod(name_of(what, node), node, image, command, environment)
    name = pod["metadata"]["name"]
    remove(api, name, node, seconds)  # a command that was killed may have left one
    made = api.create(PODS, pod)
    try:
        found = pod_of(made)

        def ended() -> bool:
            nonlocal found
            item = api.get(PODS, name, NAMESPACE)
            if item is None:
                raise ClusterError(f"{what}: another program deleted its pod")
            found = pod_of(item)
            return found.phase in ("Succeeded", "Failed") or bool(found.hopeless)

        wait_on_node(api, node, ended, f"{what}: the pod does not end", seconds)
        if found.phase == "Failed":
            raise ClusterError(f"{what}: {found.hopeless or found.message or 'the pod failed'}")
        if found.phase != "Succeeded":
            raise ClusterError(found.hopeless)
        return api.log(name, NAMESPACE)
    finally:
        api.delete(PODS, name, NAMESPACE)


def remove(api: Api, name: str, node: str, seconds: float) -> None:
    """Delete a node's pod, and wait until it is gone."""
    if api.delete(PODS, name, NAMESPACE):
        gone = f"pod {name} does not go away"
        wait_on_node(api, node, lambda: api.get(PODS, name, NAMESPACE) is None, gone, seconds)


def remove_all(api: Api) -> None:
    """Delete task pods that a killed command has left."""
    for each in api.objects(PODS, NAMESPACE, f"{objects.TASK}=true"):
        api.delete(PODS, each["metadata"]["name"], NAMESPACE)


def targets(api: Api) -> list[str]:
    """TCP Services that almost every cluster has, as ``ADDRESS PORT``, for a connection test. Those without endpoints
    are left out."""
    found = []
    for namespace, name in (("default", "kubernetes"), ("kube-system", "kube-dns")):
        service = api.get(SERVICES, name, namespace)
        if service is None or not _has_endpoints(api, namespace, name):
            continue
        addresses = service["spec"].get("clusterIPs") or [service["spec"].get("clusterIP")]
        ports = [port["port"] for port in service["spec"].get("ports", ()) if port.get("protocol", "TCP") == "TCP"]
        found += [f"{address} {ports[0]}" for address in addresses if ports and address not in (None, "None")]
    return found


def _has_endpoints(api: Api, namespace: str, name: str) -> bool:
    slices: list[Object] = api.objects(SLICES, namespace, f"kubernetes.io/service-name={name}")
    return any(
        (endpoint.get("conditions") or {}).get("ready") is not False
        for each in slices
        for endpoint in each.get("endpoints") or ()
    )
