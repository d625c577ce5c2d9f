# SPDX-License-Identifier: Apache-2.0
"""The Services of the tests: one for each kind of policy, in both families, for TCP and UDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyebpf_proxy.lab.addresses import Dual, cluster_ip, vip
from pyebpf_proxy.lab.cluster import Lab, Node, Pod
from pyebpf_proxy.lab.manifests import Object, Port, node, service, slices
from pyebpf_proxy.lab.rules import Destination
from pyebpf_proxy.lab.scenario import Target


class Kind:
    """One Service of the tests; its number determines its addresses and NodePorts."""

    def __init__(self, name: str, number: int, **spec: Any) -> None:
        self.name = name
        self.number = number
        self.spec = spec
        self.endpoints: tuple[Pod, ...] = ()
        self.ports = [
            Port("http", 80, 8080, "TCP", 30000 + number),
            Port("dns", 53, 5353, "UDP", 31000 + number),
        ]

    @property
    def external_ip(self) -> Dual:
        return vip(100 + self.number)

    def objects(self) -> list[Object]:
        """The Service and its slices, with the current endpoints."""
        made = service(
            self.name,
            self.ports,
            cluster_ip(self.number),
            vip=vip(self.number),
            externalIPs=list(self.external_ip),
            **self.spec,
        )
        found = slices(self.name, self.ports, [(pod.address, pod.node.name) for pod in self.endpoints])
        for each in found:
            for endpoint, pod in zip(each["endpoints"], self.endpoints, strict=True):
                endpoint["targetRef"] = {"kind": "Pod", "name": pod.name, "namespace": "default"}
        return [made, *found]

    def target(self, kind: Destination, entrance: Node, at: Node | None = None) -> Target:
        """A frontend of this Service. ``at``: the node whose NodePort is used (default: the entrance)."""
        address, ports = {
            "ClusterIP": (cluster_ip(self.number), {"tcp": 80, "udp": 53}),
            "ExternalIP": (self.external_ip, {"tcp": 80, "udp": 53}),
            "LoadBalancer": (vip(self.number), {"tcp": 80, "udp": 53}),
            "NodePort": ((at or entrance).address, {"tcp": 30000 + self.number, "udp": 31000 + self.number}),
        }[kind]
        return Target(
            f"{self.name} {kind}",
            kind,
            address,
            ports,
            self.endpoints,
            at or entrance,
            self.spec.get("externalTrafficPolicy") == "Local",
            self.spec.get("internalTrafficPolicy") == "Local",
        )


def write_nodes(lab: Lab) -> None:
    """The Node objects."""
    lab.write("nodes.yaml", [node(each.name, each.address, each.pod_cidr) for each in lab.nodes])


def write_services(lab: Lab, *kinds: Kind) -> float:
    """One manifest file per service; returns the time of the last write."""
    moment = 0.0
    for kind in kinds:
        moment = max(moment, lab.write(f"{kind.name}.yaml", kind.objects()))
    return moment


@contextmanager
def build_remote_only(*kinds: Kind, empty: Kind | None = None, own: dict[str, Any] | None = None) -> Iterator[Lab]:
    """Two nodes with agents. The only endpoint of these Services is a pod of the second node; ``empty`` has none."""
    with Lab(nodes=2) as lab:
        pod = lab.add_pod("web-2", lab.nodes[1])
        for kind in kinds:
            kind.endpoints = () if kind is empty else (pod,)
        write_nodes(lab)
        write_services(lab, *kinds)
        lab.start_agents(own=own)
        yield lab
