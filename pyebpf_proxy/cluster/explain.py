# SPDX-License-Identifier: Apache-2.0
"""``cluster explain POD SERVICE``: what happens to a connection of a pod, by the agent of its node; then all nodes."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from pyebpf_proxy.cluster import ask, services
from pyebpf_proxy.cluster.api import PODS, SERVICES, Api, Object
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.model import View
from pyebpf_proxy.cluster.output import Output
from pyebpf_proxy.config.addresses import join_host_port
from pyebpf_proxy.see import explain_text, model
from pyebpf_proxy.see.answers import NO_ANSWER, QUESTION, SeeError

RIGHTS = (("get", "", "pods", ""), ("get", "", "services", ""))
_SERVED = "served"


class Question(NamedTuple):
    """One family: from where to where."""

    source: str
    destination: str
    protocol: str


def run(api: Api, output: Output, found: View, pod_name: str, service_name: str, seconds: float) -> bool:
    """Print the answer. True: the connection is served, and all nodes have the Service alike."""
    namespace, pod_name = _name(pod_name, "pod")
    pod = api.get(PODS, pod_name, namespace)
    if pod is None:
        raise ClusterError(f"there is no pod {namespace}/{pod_name}", QUESTION)
    node = pod["spec"].get("nodeName", "")
    sources = [each["ip"] for each in pod.get("status", {}).get("podIPs") or ()]
    if not node or not sources:
        raise ClusterError(f"pod {namespace}/{pod_name} has no address yet", NO_ANSWER)
    wanted, _, port_name = service_name.partition(":")
    service_namespace, wanted = _name(wanted, "Service", namespace)
    service = api.get(SERVICES, wanted, service_namespace)
    if service is None:
        raise ClusterError(f"there is no Service {service_namespace}/{wanted}", QUESTION)
    port = _port(service, port_name)
    agent = found.agents.get(node)
    if agent is None or not agent.usable:
        proxy = found.proxy(node) if node in found.nodes else "unknown, the node is not selected"
        raise ClusterError(f"no agent runs on {node}, the node of the pod; its proxy: {proxy}", NO_ANSWER)
    explanations = []
    for question in _questions(service, port, sources):
        try:
            explanations.append(ask.one(api, agent, ["explain", *question], model.Explanation, seconds))
        except SeeError as error:
            raise ClusterError(f"{node}: {error}", NO_ANSWER) from None
    port_text = f":{port['name']}" if port.get("name") else ""
    compared = services.read(api, found, f"{service_namespace}/{wanted}{port_text}", seconds)
    answer = model.ClusterExplanation(
        pod=f"{namespace}/{pod_name}",
        node=node,
        explanations=explanations,
        services=compared.services,
        problems=compared.problems,
    )
    output.document |= msgspec.to_builtins(answer)
    output.say(f"pod {namespace}/{pod_name}, answer of the agent on {node}:")
    for explanation in explanations:
        output.say("")
        for line in explain_text.text(explanation, output.terminal):
            output.say(line)
    output.say("")
    services.say_differences(compared, output)
    return not compared.is_bad and all(each.verdict == _SERVED and not each.disagreements for each in explanations)


def _name(text: str, what: str, namespace: str = "default") -> tuple[str, str]:
    """``[NAMESPACE/]NAME``."""
    first, slash, rest = text.partition("/")
    found = (first, rest) if slash else (namespace, first)
    if not all(found) or "/" in found[1]:
        raise ClusterError(f"{text} is not the name of a {what}; use [NAMESPACE/]NAME", QUESTION)
    return found


def _port(service: Object, wanted: str) -> dict[str, Any]:
    """The port of that name or number; without one, the only port."""
    name = f"{service['metadata']['namespace']}/{service['metadata']['name']}"
    specification = service["spec"]
    if specification.get("type") == "ExternalName" or specification.get("clusterIP") in ("None", "", None):
        raise ClusterError(f"Service {name} has no ClusterIP: no proxy serves it", QUESTION)
    ports: list[dict[str, Any]] = specification.get("ports") or []
    known = ", ".join(str(each.get("name") or each["port"]) for each in ports)
    if not wanted and len(ports) > 1:
        raise ClusterError(f"Service {name} has several ports ({known}); specify one as {name}:PORT", QUESTION)
    found = [each for each in ports if not wanted or each.get("name") == wanted]
    found = found or [each for each in ports if str(each["port"]) == wanted]
    if len(found) > 1:
        named = ", ".join(f"{each.get('name')} {each.get('protocol', 'TCP')}" for each in found)
        raise ClusterError(
            f"Service {name} has several ports {wanted} ({named}); specify one by its name, as"
            f" {name}:{found[0].get('name')}",
            QUESTION,
        )
    if found:
        return found[0]
    raise ClusterError(f"Service {name} has no port {wanted}; it has: {known}", QUESTION)


def _questions(service: Object, port: dict[str, Any], sources: list[str]) -> Iterator[Question]:
    """For each family that pod and Service share. ClusterError: there is none."""
    addresses = service["spec"].get("clusterIPs") or [service["spec"]["clusterIP"]]
    by_family = {ipaddress.ip_address(each).version: each for each in sources}
    shared = [(by_family[version], each) for each in addresses if (version := _family(each)) in by_family]
    if not shared:
        raise ClusterError("pod and Service have no IP family in common", QUESTION)
    for source, address in shared:
        yield Question(source, join_host_port(address, port["port"]), port.get("protocol", "TCP"))


def _family(address: str) -> int:
    return ipaddress.ip_address(address).version
