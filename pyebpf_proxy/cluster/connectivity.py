# SPDX-License-Identifier: Apache-2.0
"""``cluster test``: pods and nodes connect to test Services through every kind of address. Then all are removed."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Iterator
from typing import Any

from pyebpf_proxy.cluster import check, peer, task_pod
from pyebpf_proxy.cluster.api import NAMESPACES, PODS, SERVICES, Api, Object
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.model import Pod, View, installed_image, pod_of
from pyebpf_proxy.cluster.output import Output
from pyebpf_proxy.cluster.task_pod import wait_until
from pyebpf_proxy.see.answers import QUESTION

NAMESPACE = "pyebpf-proxy-test"
_LABEL = {"app": "pyebpf-proxy-test"}
_SERVICES = ("web", "local", "balanced")
#: Addresses of the documentation ranges: no network routes them, so an answer proves that a proxy translated them.
_VIPS = {4: "203.0.113.253", 6: "2001:db8:7a:7a::253"}
#: No load balancer controller knows this class, so none creates a load balancer for the test.
_CLASS = "pyebpf-proxy/test"
RIGHTS = (
    *((verb, "", "namespaces", "") for verb in ("get", "create", "delete")),
    *((verb, "", "services", NAMESPACE) for verb in ("create", "delete")),
    ("patch", "", "services/status", NAMESPACE),
    *((verb, "", "pods", NAMESPACE) for verb in ("list", "create", "delete")),
    ("get", "", "pods/log", NAMESPACE),
)
#: More than one packet on every link, jumbo frames included.
_LARGE = 64 << 10
_OUTSIDE_SECONDS = 2.0

Row = dict[str, Any]


def run(api: Api, output: Output, found: View, image: str, seconds: float) -> bool:
    """Test from every node of the view. True if no connection failed."""
    check.rights(api, RIGHTS)
    image = image or (installed_image(found) if found.agent_set is not None else "")
    if not image:
        raise ClusterError("no image is named: --image REGISTRY/pyebpf-proxy:TAG", QUESTION)
    if not found.nodes:
        raise ClusterError("no node matches --nodes; kubectl get nodes --show-labels lists the labels", QUESTION)
    rows: list[Row] = []
    try:
        _remove(api, seconds)
        wait_until(
            lambda: api.get(NAMESPACES, NAMESPACE) is None, f"the namespace {NAMESPACE} does not go away", seconds
        )
        label = {"pod-security.kubernetes.io/enforce": "privileged"}  # for the pods on the nodes' network
        api.create(
            NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": label}}
        )
        services = {name: api.create(SERVICES, _service(name)) for name in _SERVICES}
        services["balanced"] = _balance(api, services["balanced"])
        for node in found.nodes:
            for host in (False, True):
                api.create(PODS, _pod(found, node, host, image, services))
        output.say(f"{2 * len(found.nodes)} pods test connectivity, on {len(found.nodes)} nodes, with {image}")
        rows = list(_results(api, output, 2 * len(found.nodes), seconds))
        rows += _from_outside(found, services["web"])
    finally:
        _remove(api, seconds)
    return _show(rows, output)


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
    """Assign VIPs to the Service, as a load balancer controller does."""
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
    """The connections to try from a node, or from a pod on it."""

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
        # On a node without a default route, connect() fails before any proxy sees the address.
        yield row("load balancer VIP", vip["ip"], 80, unreachable=host)
        yield row("load balancer VIP", vip["ip"], 80, "UDP", unreachable=host)
    ports = {each["protocol"]: each["nodePort"] for each in services["web"]["spec"]["ports"]}
    families = {ipaddress.ip_address(address).version for address in _cluster_ips(services["web"])}
    for other in found.nodes:
        for address in _addresses(found.nodes[other]):
            if ipaddress.ip_address(address).version in families:
                for protocol, port in ports.items():
                    yield row(f"NodePort of {other}", address, port, protocol)


def _cluster_ips(service: Object) -> list[str]:
    return [address for address in service["spec"].get("clusterIPs") or () if address != "None"]


def _addresses(node: Object) -> list[str]:
    listed = node["status"].get("addresses") or ()
    return [each["address"] for each in listed if each["type"] == "InternalIP"]


def _results(api: Api, output: Output, pods: int, seconds: float) -> Iterator[Row]:
    """Wait until all pods have finished. The result: the rows of each pod."""
    logs: dict[str, str] = {}

    def ended(step: Callable[[], None]) -> bool:
        for item in api.objects(PODS, NAMESPACE):
            pod: Pod = pod_of(item)
            if pod.name in logs:
                continue
            log = api.log(pod.name, NAMESPACE)
            if peer.DONE in log.splitlines():
                logs[pod.name] = log
                step()
            elif pod.hopeless:
                raise ClusterError(f"{pod.node}: a pod of the test does not run: {pod.hopeless}")
        return len(logs) == len(api.objects(PODS, NAMESPACE))

    with output.progress("pods done", pods) as step:
        wait_until(lambda: ended(step), "not all pods have finished", seconds)
    for _, log in sorted(logs.items()):
        for line in log.splitlines():
            if line.startswith("{"):
                yield json.loads(line)


def _from_outside(found: View, service: Object) -> Iterator[Row]:
    """Connections from this machine to the NodePorts. A node that this machine cannot reach is no failure."""
    port = next(each["nodePort"] for each in service["spec"]["ports"] if each["protocol"] == "TCP")
    for node, item in found.nodes.items():
        listed = item["status"].get("addresses") or ()
        for address in [each["address"] for each in listed if each["type"] in ("InternalIP", "ExternalIP")]:
            family = f"IPv{ipaddress.ip_address(address).version}"
            row: Row = {"from": "this machine", "to": f"NodePort of {node}, TCP, {family}", "address": address}
            row = peer.ask(row | {"port": port, "protocol": "TCP"}, patience=0)
            if not row["ok"]:
                row |= {"ok": None, "detail": f"not reached from here: {row['detail']}"}
            yield row


def _remove(api: Api, seconds: float) -> None:
    """Remove everything that the test creates, and its namespace."""
    for name in _SERVICES:
        api.delete(SERVICES, name, NAMESPACE)
    for item in api.objects(PODS, NAMESPACE):
        api.delete(PODS, item["metadata"]["name"], NAMESPACE)
    wait_until(lambda: not api.objects(PODS, NAMESPACE), "the pods of the test do not go away", seconds)
    api.delete(NAMESPACES, NAMESPACE)


def _show(rows: list[Row], output: Output) -> bool:
    words = {True: "ok", False: "FAILED", None: "not tested"}
    texts = [[row["from"], row["to"], words[row["ok"]], row["detail"]] for row in rows]
    output.table("rows", ["FROM", "TO", "RESULT", "ANSWER"], texts, ["from", "to", "result", "answer"])
    failed = [row for row in rows if row["ok"] is False]
    output.say(f"{sum(row['ok'] is True for row in rows)} ok, {len(failed)} failed")
    return not failed
