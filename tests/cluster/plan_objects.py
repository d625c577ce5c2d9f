# SPDX-License-Identifier: Apache-2.0
"""Random changes of Services and EndpointSlices, as the API server may send them. No two Services share an address."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

NODE = "node1"
NAMESPACES = ("default", "tenant")
SERVICES = ("a", "b", "c")
PORT_NAMES = ("", "web", "dns", "p", "q")
ZONES = ("", "east", "west", "south")
RANGES = (
    "10.0.0.0/8",
    " 192.0.2.0/24 ",
    "192.0.2.77/24",
    "010.1.0.0/016",
    "0.0.0.0/0",
    "2001:db8::/32",
    "fe80::/10",
    "::/0",
    "::ffff:10.0.0.0/104",
)
#: Ready, serving, terminating; the API's defaults if nothing is given.
CONDITIONS = (
    {},
    {"ready": True, "serving": True, "terminating": False},
    {"ready": True, "serving": True, "terminating": False},
    {"ready": True, "serving": True, "terminating": True},
    {"ready": False, "serving": True, "terminating": True},
    {"ready": False, "serving": False, "terminating": True},
    {"ready": False, "serving": False, "terminating": False},
    {"ready": False},
)

Object = dict[str, Any]


class Step(NamedTuple):
    """A change, ``item`` is None if the object is deleted. ``hidden``: kube-proxy's selectors exclude it. ``sync``: a
    sync follows."""

    kind: str
    namespace: str
    name: str
    item: Object | None
    hidden: bool
    sync: bool


class Objects:
    """``steps`` gives changes that depend only on the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.zone = self.random.choice(ZONES)
        self._number = 0
        self._known: dict[tuple[str, str, str], tuple[Object, bool]] = {}

    def steps(self) -> Iterator[Step]:
        choose = self.random.choice
        for _ in range(choose((3, 10, 30, 60))):
            kind, name = (
                ("Service", choose(SERVICES)) if self._likely(0.45) else ("EndpointSlice", f"s{choose('01234')}")
            )
            namespace = choose(NAMESPACES)
            item, hidden = None, False
            if self._likely(0.8):
                item, hidden = self._next(kind, namespace, name)
                self._known[kind, namespace, name] = item, hidden
            else:
                self._known.pop((kind, namespace, name), None)
            yield Step(kind, namespace, name, item, hidden, self._likely(0.4))

    def _likely(self, share: float) -> bool:
        return self.random.random() < share

    def _next(self, kind: str, namespace: str, name: str) -> tuple[Object, bool]:
        """Another object of this name, or the known one with one difference."""
        known = self._known.get((kind, namespace, name))
        if known is None or self._likely(0.5):
            return self._service(namespace, name) if kind == "Service" else self._slice(namespace, name)
        item, hidden = copy.deepcopy(known)
        if kind == "EndpointSlice":
            if item["endpoints"] and self._likely(0.5):
                item["endpoints"].pop()
            else:
                item["metadata"]["labels"]["kubernetes.io/service-name"] = self.random.choice(SERVICES)
        elif ports := item["spec"].get("ports"):
            if self._likely(0.5):
                ports.reverse()
            else:
                self._number += 1
                ports[0]["name"] = f"renamed-{self._number}"
        return item, hidden

    def _address(self, family: int, four: str, six: str) -> str:
        self._number += 1
        return f"{four}.{self._number >> 8}.{self._number & 255}" if family == 4 else f"{six}::{self._number:x}"

    def _node_port(self) -> int:
        self._number += 1
        return 30000 + self._number % 2700

    def _outside(self) -> str:
        return self._address(self.random.choice((4, 6)), "203.0", "2001:db8")

    def _service(self, namespace: str, name: str) -> tuple[Object, bool]:
        choose = self.random.choice
        families = choose(([4], [6], [4, 6], [6, 4]))
        addresses = [self._address(family, "10.96", "fd00:10:96") for family in families]
        spec: Object = {"type": choose(("ClusterIP", "ClusterIP", "NodePort", "LoadBalancer", "LoadBalancer"))}
        spec |= {"clusterIP": addresses[0], "clusterIPs": addresses, "ipFamilies": [f"IPv{each}" for each in families]}
        if len(families) == 1 and self._likely(0.1):
            del spec["ipFamilies"]
        if self._likely(0.9):
            spec["internalTrafficPolicy"] = choose(("Cluster", "Local"))
        if self._likely(0.3):
            spec["sessionAffinity"] = "ClientIP"
            spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": choose((1, 10800, 86400))}}
        inside = spec["type"] == "ClusterIP"
        spec["ports"] = self._service_ports(node_ports=not inside)
        if self._likely(0.4):
            spec["externalIPs"] = [self._outside() for _ in range(choose((1, 2)))]
        if not inside or "externalIPs" in spec:
            spec["externalTrafficPolicy"] = choose(("Cluster", "Local"))
        item: Object = {"metadata": {"name": name, "namespace": namespace, "labels": {}}, "spec": spec}
        if spec["type"] == "LoadBalancer":
            self._balance(item)
        return item, self._hide_service(item)

    def _hide_service(self, item: Object) -> bool:
        """Now and then a Service that is not served; True if it is not even watched."""
        match self.random.randrange(20):
            case 0:
                item["spec"] |= {"clusterIP": "None", "clusterIPs": ["None"]}
                return True
            case 1:
                item["metadata"]["labels"]["service.kubernetes.io/service-proxy-name"] = self.random.choice(("", "x"))
                return True
            case 2:
                item["spec"] = {"type": "ExternalName", "externalName": "a.example"}
            case 3:
                item["spec"]["type"] = "ExternalName"
        return False

    def _service_ports(self, *, node_ports: bool) -> list[Object]:
        choose = self.random.choice
        ports: list[Object] = []
        for name in self.random.sample(PORT_NAMES, choose((1, 1, 2, 3))):
            port = {"name": name, "protocol": choose(("TCP", "TCP", "UDP", "SCTP")), "port": choose((53, 80, 443))}
            if any((port["protocol"], port["port"]) == (other["protocol"], other["port"]) for other in ports):
                continue
            if node_ports and self._likely(0.8):
                port["nodePort"] = self._node_port()
            ports.append(port)
        return ports

    def _balance(self, item: Object) -> None:
        choose, spec = self.random.choice, item["spec"]
        if spec["externalTrafficPolicy"] == "Local":
            spec["healthCheckNodePort"] = self._node_port()
        if self._likely(0.4):
            spec["loadBalancerSourceRanges"] = self.random.sample(RANGES, choose((1, 2, 3)))
        ingress = []
        for _ in range(choose((0, 1, 2))):
            mode = choose((None, "VIP", "Proxy"))
            ingress.append({"ip": self._outside()} | ({"ipMode": mode} if mode else {}))
        if self._likely(0.1):
            ingress.append({"hostname": "a.example"})
        item["status"] = {"loadBalancer": {"ingress": ingress}}

    def _slice(self, namespace: str, name: str) -> tuple[Object, bool]:
        choose = self.random.choice
        family = choose((4, 4, 6))
        ports = [
            {"name": each, "protocol": protocol, "port": choose((8080, 9090, 53))}
            for each in self.random.sample(PORT_NAMES, choose((0, 1, 2, 3)))
            for protocol in self.random.sample(("TCP", "UDP", "SCTP"), choose((1, 2)))
        ]
        hinted = choose(("none", "all", "some"))
        endpoints = [self._endpoint(family, hinted) for _ in range(choose((0, 1, 2, 3, 5, 8)))]
        labels = {"kubernetes.io/service-name": choose(SERVICES)}
        labels["endpointslice.kubernetes.io/managed-by"] = choose(("endpointslice-controller.k8s.io", "x"))
        metadata = {"name": name, "namespace": namespace, "labels": labels}
        item: Object = {"metadata": metadata, "addressType": f"IPv{family}", "ports": ports, "endpoints": endpoints}
        match self.random.randrange(25):
            case 0:
                labels["service.kubernetes.io/headless"] = ""
                return item, True
            case 1:
                labels["kubernetes.io/service-name"] = ""
            case 2:
                item |= {"addressType": "FQDN", "endpoints": [{"addresses": ["a.example"]}]}
            case 3:
                item["ports"] = None
            case 4:
                item["endpoints"] = None
        return item, False

    def _endpoint(self, family: int, hinted: str) -> Object:
        choose, number = self.random.choice, self.random.randint(1, 12)
        address = choose((f"10.244.1.{number}", f"010.244.01.{number}")) if family == 4 else f"fd00:244::{number:x}"
        made: Object = {"addresses": [address], "conditions": choose(CONDITIONS)}
        if self._likely(0.9):
            made["nodeName"] = choose((NODE, NODE, "node2"))
        if hinted == "all" or (hinted == "some" and self._likely(0.5)):
            made["hints"] = {"forZones": [{"name": zone} for zone in self.random.sample(ZONES[1:], choose((1, 2)))]}
            if self._likely(0.6):
                made["hints"]["forNodes"] = [{"name": choose((NODE, "node2"))}]
        return made
