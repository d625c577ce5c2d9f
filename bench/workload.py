# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes objects of a large cluster, the same in every run: Services with one EndpointSlice each, and Nodes.

Every tenth service is UDP, every twentieth has a NodePort. Endpoints are spread over NODES nodes. The agent runs on
node1.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from typing import Any

from pyebpf_proxy.kube.decode import decode_json
from pyebpf_proxy.kube.source import Change

NODES = 100
ENDPOINTS = 10
POD_CIDR = "10.32.0.0/11"
_PODS = int(ipaddress.ip_address("10.32.0.0"))
_CLUSTER_IPS = int(ipaddress.ip_address("172.20.0.0"))

Object = dict[str, Any]


def name_of(number: int) -> str:
    return f"service-{number:05d}"


def cluster_ip(number: int) -> str:
    return str(ipaddress.ip_address(_CLUSTER_IPS + 1 + number))


def pod_ip(number: int) -> str:
    """The address of one of two million pods."""
    return str(ipaddress.ip_address(_PODS + 1 + number))


def _protocol(number: int) -> str:
    return "UDP" if number % 10 == 9 else "TCP"


def service(number: int) -> Object:
    node_port = {"nodePort": 30000 + number // 20} if number % 20 == 5 else {}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name_of(number),
            "namespace": f"team-{number % 50}",
            "uid": f"00000000-0000-4000-8000-{number:012d}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"app.kubernetes.io/name": name_of(number)},
        },
        "spec": {
            "type": "NodePort" if node_port else "ClusterIP",
            "clusterIP": cluster_ip(number),
            "clusterIPs": [cluster_ip(number)],
            "ipFamilies": ["IPv4"],
            "ipFamilyPolicy": "SingleStack",
            "internalTrafficPolicy": "Cluster",
            "ports": [
                {"name": "main", "protocol": _protocol(number), "port": 80, "targetPort": 8080} | node_port,
            ],
            "selector": {"app.kubernetes.io/name": name_of(number)},
            "sessionAffinity": "None",
        },
        "status": {"loadBalancer": {}},
    }


def endpoint_slice(number: int, first_pod: int | None = None, endpoints: int = ENDPOINTS) -> Object:
    """The slice of a service; its endpoints are the pods starting at ``first_pod``."""
    first = number * ENDPOINTS if first_pod is None else first_pod
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{name_of(number)}-x7d2k",
            "namespace": f"team-{number % 50}",
            "labels": {
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": name_of(number),
            },
        },
        "addressType": "IPv4",
        "ports": [{"name": "main", "protocol": _protocol(number), "port": 8080}],
        "endpoints": [
            {
                "addresses": [pod_ip(pod)],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "nodeName": f"node{1 + pod % NODES}",
                "targetRef": {"kind": "Pod", "name": f"pod-{pod}", "namespace": f"team-{number % 50}"},
                "zone": f"zone-{pod % 3}",
            }
            for pod in range(first, first + endpoints)
        ],
    }


def node(number: int) -> Object:
    """One of the Nodes 1 … NODES, each with a /18 of the pod network."""
    cidr = f"{ipaddress.ip_address(_PODS + number * 16384)}/18"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"node{number}",
            "labels": {"topology.kubernetes.io/zone": f"zone-{number % 3}"},
        },
        "spec": {"podCIDR": cidr, "podCIDRs": [cidr]},
        "status": {"addresses": [{"type": "InternalIP", "address": f"192.0.2.{10 + number}"}]},
    }


def everything(services: int, endpoints: int = ENDPOINTS) -> Iterator[tuple[str, Object]]:
    """All objects of a cluster, each with a file name."""
    for number in range(1, NODES + 1):
        yield f"node-{number:03d}.json", node(number)
    for number in range(services):
        yield f"{name_of(number)}.json", service(number)
        yield slice_file(number), endpoint_slice(number, endpoints=endpoints)


def slice_file(number: int) -> str:
    return f"slice-{number:05d}.json"


def read(document: Object) -> Iterator[Change]:
    """An object as a source delivers it: parsed, validated, defaulted."""
    for found in decode_json(json.dumps(document).encode()):
        if found.key is None or found.object is None:
            raise ValueError(f"the workload is not valid: {found.messages}")
        yield Change(found.key.kind, found.key.namespace, found.key.name, found.object)


def parsed(services: int) -> list[Change]:
    """All objects of a cluster, as a source delivers them."""
    return [change for _, document in everything(services) for change in read(document)]
