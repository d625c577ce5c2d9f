# SPDX-License-Identifier: Apache-2.0
"""Task pods: they do one thing on one node, and end."""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Callable

from pyebpf_proxy.cluster import objects, reasons
from pyebpf_proxy.cluster.api import PODS, SERVICES, SLICES, Api, Object
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.model import one_line, pod_of, require_kubelet
from pyebpf_proxy.cluster.objects import NAMESPACE

POLL_SECONDS = 0.3
#: How long a log may be away of a pod that has ended: the API server reads it from the node's kubelet.
_LOG_SECONDS = 30.0
#: How often a wait looks whether the node's kubelet still reports.
_LOOK_SECONDS = 3.0
#: A pod that no command waits for any more ends so much later.
_SPARE_SECONDS = 60
#: How long pods of former versions, which do not end by themselves, may be waited for.
_OLD_SECONDS = 3600
#: Services that every cluster has: namespace and name.
_TARGETS = (("default", "kubernetes"), ("kube-system", "kube-dns"))
#: What ``targets`` needs.
RIGHTS = tuple(
    right
    for namespace, _ in _TARGETS
    for right in (("get", "", "services", namespace), ("list", "discovery.k8s.io", "endpointslices", namespace))
)


def name_of(what: str, node: str, of_run: str = "") -> str:
    """A pod's name: 63 characters, whatever the node is called. ``of_run``: another name for each run of a command."""
    short = hashlib.sha256(f"{node}{of_run}".encode()).hexdigest()[:8]
    return f"pyebpf-proxy-{what}-{node.replace('.', '-')[:30].strip('-')}-{short}"


def wait_until(
    condition: Callable[[], bool],
    what: str,
    seconds: float,
    look: Callable[[], object] | None = None,
    why: Callable[[], str] | None = None,
    period: float = POLL_SECONDS,
) -> None:
    """ClusterError, "what" in the words of the user, if the condition does not come true in time.

    ``look``: called every few seconds, to raise an error if it never will. ``why``: the reason for the error, or "".
    ``period``: seconds from one look at the condition to the next.
    """
    now = time.monotonic()
    end, next_look = now + seconds, now + _LOOK_SECONDS
    while not condition():
        now = time.monotonic()
        if look is not None and now > next_look:
            look()
            next_look = now + _LOOK_SECONDS
        if now > end:
            reason = why() if why is not None else ""
            raise ClusterError(f"{what} within {seconds:.0f} s{f': {reason}' if reason else ''}")
        time.sleep(period)


def wait_on_node(
    api: Api,
    node: str,
    condition: Callable[[], bool],
    what: str,
    seconds: float,
    why: Callable[[], str] | None = None,
) -> None:
    """As ``wait_until``, for something that the node's kubelet does. NodeLostError if the kubelet stops reporting."""
    wait_until(condition, what, seconds, lambda: require_kubelet(api, node), why)


def run(
    api: Api,
    what: str,
    node: str,
    image: str,
    command: list[str],
    seconds: float,
    environment: dict[str, str] | None = None,
    of_run: str = "",
) -> str:
    """Run a command on a node and remove its pod. The result is its output; ClusterError if it fails.

    ``of_run``: for a command of which several may run at the same time, without the Lease.
    """
    pod = objects.task_pod(what, name_of(what, node, of_run), node, image, command, environment)
    name = pod["metadata"]["name"]
    if of_run:
        pod["metadata"]["labels"][objects.RUN] = of_run
        pod["spec"]["activeDeadlineSeconds"] = int(seconds) + _SPARE_SECONDS
    else:
        remove(api, name, node, seconds)  # of a command that was killed
    try:
        made = api.create(PODS, pod)
        if of_run:
            _remove_left(api, what, node, made)
        output = _output(api, what, node, made, seconds)
    except BaseException:
        with api.last_words():
            api.delete(PODS, name, NAMESPACE)
        raise
    api.delete(PODS, name, NAMESPACE)
    return output


def _remove_left(api: Api, what: str, node: str, made: Object) -> None:
    """Delete what runs that were killed have left on the node: pods whose time was over when this one was made."""
    now = _created(made)
    for each in api.objects(PODS, NAMESPACE, f"{objects.TASK}={what}", f"spec.nodeName={node}"):
        seconds = each["spec"].get("activeDeadlineSeconds", _OLD_SECONDS)
        if now - _created(each) > datetime.timedelta(seconds=seconds):
            api.delete(PODS, each["metadata"]["name"], NAMESPACE, each["metadata"]["uid"])


def _created(pod: Object) -> datetime.datetime:
    """By the API server's clock."""
    return datetime.datetime.fromisoformat(pod["metadata"]["creationTimestamp"])


def _output(api: Api, what: str, node: str, made: Object, seconds: float) -> str:
    """What a task pod has written, once it has succeeded. ClusterError if it fails, or does not end in time."""
    found = pod_of(made)
    name = found.name

    def ended() -> bool:
        nonlocal found
        item = api.get(PODS, name, NAMESPACE)
        if item is None:
            require_kubelet(api, node)  # the pods of a node that does not exist any more are deleted
            raise ClusterError(f"{what}: another program deleted the pod")
        found = pod_of(item)
        # A container that a webhook has added may run on.
        return found.exit is not None or found.phase in ("Succeeded", "Failed") or bool(found.hopeless)

    def why() -> str:
        return reasons.of_pod(api, name) or one_line(api.log(name, NAMESPACE, found.container))

    wait_on_node(api, node, ended, f"{what}: the pod did not finish", seconds, why)
    if found.exit or found.phase == "Failed":
        raise ClusterError(f"{what}: {found.hopeless or found.message or 'the pod failed'}")
    if found.exit is None and found.phase != "Succeeded":
        raise ClusterError(found.hopeless)
    output = ""

    def read() -> bool:
        nonlocal output
        output = api.log(name, NAMESPACE, found.container)
        return bool(output)

    # Every task writes. Without its lines, a Service that was reached would seem not to be, and not be tested later.
    wait_until(read, f"{what}: the pod has succeeded, but its log could not be read", min(seconds, _LOG_SECONDS))
    return output


def remove(api: Api, name: str, node: str, seconds: float) -> None:
    """Delete a node's pod, and wait until it is gone."""
    if api.delete(PODS, name, NAMESPACE):
        gone = f"pod {name} was not deleted"
        wait_on_node(api, node, lambda: api.get(PODS, name, NAMESPACE) is None, gone, seconds)


def remove_all(api: Api) -> None:
    """Task pods that a killed command left. Those of ``cluster check`` stay: it may run at the same time."""
    for each in api.objects(PODS, NAMESPACE, f"{objects.TASK},{objects.TASK}!=check"):
        api.delete(PODS, each["metadata"]["name"], NAMESPACE)


def stop_checks(api: Api, of_run: str) -> None:
    """Delete the pods of a ``cluster check`` that ends early, as far as the API server answers."""
    with api.last_words():
        for each in api.objects(PODS, NAMESPACE, f"{objects.RUN}={of_run}"):
            api.delete(PODS, each["metadata"]["name"], NAMESPACE)


def targets(api: Api) -> list[str]:
    """For a test of connectivity: Services that every cluster has, as far as they have endpoints.

    ``ADDRESS PORT`` of each Service's first TCP port, and ``ADDRESS 53/UDP`` of a DNS server.
    """
    found = []
    for namespace, name in _TARGETS:
        service = api.get(SERVICES, name, namespace)
        if service is None or not _has_endpoints(api, namespace, name):
            continue
        addresses = service["spec"].get("clusterIPs") or [service["spec"].get("clusterIP")]
        listed = [(port["port"], port.get("protocol", "TCP")) for port in service["spec"].get("ports", ())]
        ports = [str(port) for port, protocol in listed if protocol == "TCP"][:1]
        ports += ["53/UDP"] if (53, "UDP") in listed else []
        found += [f"{address} {port}" for address in addresses for port in ports if address not in (None, "None")]
    return found


def _has_endpoints(api: Api, namespace: str, name: str) -> bool:
    slices: list[Object] = api.objects(SLICES, namespace, f"kubernetes.io/service-name={name}")
    return any(
        (endpoint.get("conditions") or {}).get("ready") is not False
        for each in slices
        for endpoint in each.get("endpoints") or ()
    )
