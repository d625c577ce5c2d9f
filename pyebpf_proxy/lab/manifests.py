# SPDX-License-Identifier: Apache-2.0
"""Kubernetes objects for tests as plain dicts. They are written as an editor or a ConfigMap volume writes them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from pyebpf_proxy.lab.addresses import Dual

Object = dict[str, Any]


class Port:
    """A service port: its number, the endpoints' number, and a NodePort if it has one."""

    def __init__(self, name: str, port: int, target: int, protocol: str = "TCP", node_port: int = 0) -> None:
        self.name = name
        self.port = port
        self.target = target
        self.protocol = protocol
        self.node_port = node_port


def service(name: str, ports: Sequence[Port], cluster_ip: Dual, **spec: Any) -> Object:
    """A dual-stack Service. ``vip`` (Dual) becomes status.loadBalancer; all other fields go into spec."""
    vip: Dual | None = spec.pop("vip", None)
    body: Object = {
        "type": "LoadBalancer" if vip else ("NodePort" if any(port.node_port for port in ports) else "ClusterIP"),
        "clusterIP": cluster_ip.v4,
        "clusterIPs": list(cluster_ip),
        "ipFamilies": ["IPv4", "IPv6"],
        "ipFamilyPolicy": "RequireDualStack",
        "ports": [
            {"name": port.name, "port": port.port, "protocol": port.protocol, "targetPort": port.target}
            | ({"nodePort": port.node_port} if port.node_port else {})
            for port in ports
        ],
    }
    result: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": body | spec,
    }
    if vip:
        result["status"] = {"loadBalancer": {"ingress": [{"ip": address} for address in vip]}}
    return result


def endpoint(address: str, node: str | None, **conditions: bool) -> Object:
    """One endpoint of a slice."""
    return {"addresses": [address], "conditions": {"ready": True} | conditions} | ({"nodeName": node} if node else {})


def slices(name: str, ports: Sequence[Port], endpoints: Iterable[tuple[Dual, str | None]]) -> list[Object]:
    """The two EndpointSlices (one per family) of a service."""
    found = list(endpoints)
    return [
        endpoint_slice(name, family, ports, [endpoint(address.of(family), node) for address, node in found])
        for family in (4, 6)
    ]


def endpoint_slice(
    service: str, family: int, ports: Sequence[Port], endpoints: Sequence[Object], name: str = ""
) -> Object:
    """One EndpointSlice of a service. Several slices of one family need a ``name``. ``endpoints``: see ``endpoint``."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name or f"{service}-ipv{family}",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": f"IPv{family}",
        "ports": [{"name": port.name, "port": port.target, "protocol": port.protocol} for port in ports],
        "endpoints": list(endpoints),
    }


def node(name: str, address: Dual, pod_cidr: Dual, zone: str = "") -> Object:
    """A Node with its addresses and pod networks."""
    labels = {"kubernetes.io/hostname": name} | ({"topology.kubernetes.io/zone": zone} if zone else {})
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {"podCIDR": pod_cidr.v4, "podCIDRs": list(pod_cidr)},
        "status": {"addresses": [{"type": "InternalIP", "address": text} for text in address]},
    }


def write(path: Path, objects: Sequence[object]) -> float:
    """Write YAML documents to a temporary file and rename it to ``path``. The result: the time before the rename.

    Unchanged text is not written again. Then the result is 0.0, since there is no sync to wait for.
    """
    text = yaml.dump_all(objects, Dumper=_DUMPER, sort_keys=False)
    if path.exists() and path.read_text() == text:
        return 0.0
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    moment = time.time()
    os.rename(temporary, path)
    return moment


# libyaml's emitter, if PyYAML was built with it, is ten times faster.
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
