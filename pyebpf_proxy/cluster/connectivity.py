# SPDX-License-Identifier: Apache-2.0
"""``cluster test``: pods and nodes connect to test Services, through every kind of address. Cleans up."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Iterator
from typing import Any

from pyebpf_proxy.cluster import check, lease, objects, peer, task_pod
from pyebpf_proxy.cluster.api import NAMESPACES, PODS, SERVICES, Api, Object
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.lease import Lease
from pyebpf_proxy.cluster.model import View, installed_image, pod_of, view
from pyebpf_proxy.cluster.output import Output, counted
from pyebpf_proxy.cluster.task_pod import wait_until
from pyebpf_proxy.see.answers import NO_ANSWER, QUESTION, listed

NAMESPACE = "pyebpf-proxy-test"
_LABEL = {"app": "pyebpf-proxy-test"}
_SERVICES = ("web", "local", "balanced")
#: Of the ranges for documentation: no network routes them, so that only a proxy on the way can answer.
_VIPS = {4: "203.0.113.253", 6: "2001:db8:7a:7a::253"}
#: No load balancer's controller knows this class, so that none makes a load balancer for the test.
_CLASS = "pyebpf-proxy/test"
RIGHTS = (
    *((verb, "", "namespaces", "") for verb in ("get", "create", "delete")),
    *((verb, "", "services", NAMESPACE) for verb in ("create", "delete")),
    ("patch", "", "services/status", NAMESPACE),
    *((verb, "", "pods", NAMESPACE) for verb in ("list", "create", "delete")),
    ("get", "", "pods/log", NAMESPACE),
    *((verb, "coordination.k8s.io", "leases", objects.NAMESPACE) for verb in ("get", "create", "patch")),
)
#: More than one packet on every link, jumbo frames included.
_LARGE = 64 << 10
#: Other nodes whose NodePorts a node, and a pod on it, connect to.
_NEIGHBOURS = 5
#: From one look at the pods to the next: the list is long.
_LOOK_SECONDS = 1.0

Row = dict[str, Any]


def run(api: Api, output: Output, found: View, image: str, seconds: float) -> bool:
    """Test from every node of the view; True: everything was reached. ClusterError if another test is running."""
    check.rights(api, RIGHTS)
    image = image or (installed_image(found) if found.agent_set is not None else "")
    if not image:
        raise ClusterError("no image is specified; use --image REGISTRY/pyebpf-proxy:TAG", QUESTION)
    check.some_node(found)
    down = [node for node in found.nodes if not found.is_up(node)]
    found = found._replace(nodes={node: item for node, item in found.nodes.items() if node not in down})
    if down:
        output.say(f"skipped, because they are not ready: {', '.join(down)}")
    if not found.nodes:
        raise ClusterError("none of these nodes is ready", NO_ANSWER)
    with Lease(api, "test", output.say, lease.TEST):
        rows = _test(api, output, found, image, seconds)
    return _show(rows, output)


def _test(api: Api, output: Output, found: View, image: str, seconds: float) -> list[Row]:
    """What the pods and this machine have found. First removes what a killed test has left."""
    rows, uid = list[Row](), ""
    try:
        _remove(api)
        wait_until(
            lambda: api.get(NAMESPACES, NAMESPACE) is None, f"the namespace {NAMESPACE} was not deleted", seconds
        )
        label = {"pod-security.kubernetes.io/enforce": "privileged"}  # for the pods on the nodes' network
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": label}}
        uid = api.create(NAMESPACES, namespace)["metadata"]["uid"]
        services = {name: api.create(SERVICES, _service(name)) for name in _SERVICES}
        services["balanced"] = _balance(api, services["balanced"])
        names = set()
        for node in found.nodes:
            for host in (False, True):
                pod = _pod(found, node, host, image, services)
                names.add(pod["metadata"]["name"])
                api.create(PODS, pod)
        output.say(f"{len(names)} pods test connectivity, on {counted(len(found.nodes), 'node')}, with {image}")
        rows = list(_results(api, output, names, seconds))
        rows += _from_outside(found, services["web"])
    except BaseException:
        with api.last_words():
            if not _is_of_another(api, uid):
                _remove(api)
        raise
    _remove(api)
    wait_until(lambda: not _left(api, found), "the test pods were not deleted", seconds)
    return rows


def _service(name: str) -> Object:
    ports = [{"name": kind.lower(), "port": 80, "targetPort": peer.PORT, "protocol": kind} for kind in ("TCP", "UDP")]
    specification: Object = {"type": "NodePort", "selector": _LABEL, "ports": ports}
    specification["ipFamilyPolicy"] = "PreferDualStack"
    if name == "local":
        specification |= {"internalTrafficPolicy": "Local", "externalTrafficPolicy": "Local"}
    if name == "balanced":
        specification |= {"type": "LoadBalancer", "loadBalancerClass": _CLASS, "allocateLoadBalancerNodePorts": False}
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": specification}


def _balance(api: Api, service: Object) -> Object:
    """Give the Service its VIPs, as a load balancer's controller does."""
    families = {ipaddress.ip_address(address).version for address in _cluster_ips(service)}
    vips = [{"ip": _VIPS[family]} for family in sorted(families)]
    change = {"status": {"loadBalancer": {"ingress": vips}}}
    return api.patch(SERVICES, service["metadata"]["name"], change, NAMESPACE, "status")


def _pod(found: View, node: str, host: bool, image: str, services: dict[str, Object]) -> Object:
    plan = list(_plan(found, node, host, services))
    environment = {"PEER_PLAN": json.dumps(plan)} | ({} if host else {"PEER_NAME": node})
    container = {
        "name": "peer",
        "image": image,
        "command": ["pyebpf-proxy", "cluster", "on-node", "peer"],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    name = task_pod.name_of("host" if host else "pod", node)
    specification = {
        "nodeName": node,
        "hostNetwork": host,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
    }
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {} if host else _LABEL}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": specification}


def _plan(found: View, node: str, host: bool, services: dict[str, Object]) -> Iterator[Row]:
    """What is asked from a node, or from a pod on it."""

    def row(to: str, address: str, port: int, protocol: str = "TCP", **more: Any) -> Row:
        family = f"IPv{ipaddress.ip_address(address).version}"
        source = f"{'node' if host else 'pod on'} {node}"
        return {"from": source, "to": f"{to}, {protocol}, {family}", "address": address, "port": port} | (
            {"protocol": protocol} | more
        )

    for address in _cluster_ips(services["web"]):
        yield row("ClusterIP", address, 80)
        yield row("ClusterIP", address, 80, "UDP")
        yield row("ClusterIP, 64 KiB", address, 80, size=_LARGE)
        if not host:
            yield row("ClusterIP, hairpin", address, 80, only=node)
    for address in _cluster_ips(services["local"]):
        yield row("ClusterIP, policy Local", address, 80, only=node, always=True)
    for vip in services["balanced"]["status"]["loadBalancer"]["ingress"]:
        # A node without a default route refuses the address before any proxy sees it.
        yield row("load balancer VIP", vip["ip"], 80, unreachable=host)
        yield row("load balancer VIP", vip["ip"], 80, "UDP", unreachable=host)
    ports = {each["protocol"]: each["nodePort"] for each in services["web"]["spec"]["ports"]}
    families = {ipaddress.ip_address(address).version for address in _cluster_ips(services["web"])}
    local = next(each["nodePort"] for each in services["local"]["spec"]["ports"] if each["protocol"] == "TCP")
    for other in _neighbours(list(found.nodes), node):
        for address in _addresses(found.nodes[other]):
            if ipaddress.ip_address(address).version not in families:
                continue
            for protocol, port in ports.items():
                yield row(f"NodePort of {other}", address, port, protocol)
            if host and other != node:
                # Only for clients outside: to pods, and to the node itself, the policy does not apply.
                yield row(f"NodePort of {other}, policy Local", address, local, only=other, always=True)


def _neighbours(nodes: list[str], node: str) -> list[str]:
    """The node and those after it in a ring: each node's NodePorts are asked for by as many others."""
    at = nodes.index(node)
    return (nodes[at:] + nodes[:at])[: 1 + _NEIGHBOURS]


def _cluster_ips(service: Object) -> list[str]:
    return [address for address in service["spec"].get("clusterIPs") or () if address != "None"]


def _addresses(node: Object) -> list[str]:
    listed = node["status"].get("addresses") or ()
    return [each["address"] for each in listed if each["type"] == "InternalIP"]


def _results(api: Api, output: Output, names: set[str], seconds: float) -> Iterator[Row]:
    """The rows of each pod, as soon as all have finished. ``names``: of the pods."""
    logs: dict[str, str] = {}

    def ended(step: Callable[[], None]) -> bool:
        present = {pod.name: pod for pod in map(pod_of, api.objects(PODS, NAMESPACE))}
        for name in sorted(names - logs.keys()):
            pod = present.get(name)
            if pod is None or pod.deleted:
                raise ClusterError(f"pod {NAMESPACE}/{name} was deleted before it finished")
            log = api.log(name, NAMESPACE, pod.container)
            if peer.DONE in log.splitlines():
                logs[name] = log
                step()
            elif pod.hopeless:
                raise ClusterError(f"{pod.node}: a test pod does not run: {pod.hopeless}")
        return logs.keys() == names

    def why() -> str:
        left = {pod.node for pod in map(pod_of, api.objects(PODS, NAMESPACE)) if pod.name in names - logs.keys()}
        return f"those on {listed(sorted(left))} did not"

    with output.progress("pods done", len(names)) as step:
        wait_until(lambda: ended(step), "not all test pods finished", seconds, why=why, period=_LOOK_SECONDS)
    for _, log in sorted(logs.items()):
        for line in log.splitlines():
            if line.startswith("{"):
                yield json.loads(line)


def _from_outside(found: View, service: Object) -> Iterator[Row]:
    """From this machine to the NodePorts, as far as it reaches the nodes: what it does not reach is no failure."""
    port = next(each["nodePort"] for each in service["spec"]["ports"] if each["protocol"] == "TCP")
    for node, item in found.nodes.items():
        listed = item["status"].get("addresses") or ()
        for address in [each["address"] for each in listed if each["type"] in ("InternalIP", "ExternalIP")]:
            family = f"IPv{ipaddress.ip_address(address).version}"
            row: Row = {"from": "this machine", "to": f"NodePort of {node}, TCP, {family}", "address": address}
            row = peer.ask(row | {"port": port, "protocol": "TCP"}, patience=0)
            if not row["ok"]:
                row |= {"ok": None, "detail": f"not reachable from this machine: {row['detail']}"}
            yield row


def _remove(api: Api) -> None:
    """Delete everything that the test makes. Pods of a node that has died meanwhile stay until it is back."""
    api.delete(NAMESPACES, NAMESPACE)
    for name in _SERVICES:
        api.delete(SERVICES, name, NAMESPACE)
    for item in api.objects(PODS, NAMESPACE):
        api.delete(PODS, item["metadata"]["name"], NAMESPACE)


def _is_of_another(api: Api, uid: str) -> bool:
    """Whether another test has deleted this one's namespace, and made its own, as versions without the Lease do.

    ``uid``: of this one's namespace, if it is known.
    """
    found = api.get(NAMESPACES, NAMESPACE)
    return bool(uid) and found is not None and found["metadata"]["uid"] != uid


def _left(api: Api, found: View) -> list[str]:
    """Pods of the test on nodes whose kubelets report."""
    pods = [pod for pod in map(pod_of, api.objects(PODS, NAMESPACE)) if pod.node in found.nodes]
    present = view(api) if pods else found
    return [pod.name for pod in pods if pod.node in present.nodes and present.is_up(pod.node)]


def _show(rows: list[Row], output: Output) -> bool:
    words = {True: "ok", False: "FAILED", None: "not tested"}
    texts = [[row["from"], row["to"], words[row["ok"]], row["detail"]] for row in rows]
    output.table("rows", ["FROM", "TO", "RESULT", "ANSWER"], texts, ["from", "to", "result", "answer"])
    failed = [row for row in rows if row["ok"] is False]
    output.say(f"{sum(row['ok'] is True for row in rows)} ok, {len(failed)} failed")
    return not failed
