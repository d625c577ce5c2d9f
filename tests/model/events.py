# SPDX-License-Identifier: Apache-2.0
"""Random objects, and the manifests folder: the contents of each file, and which objects the agent knows from them."""

from __future__ import annotations

import copy
import json
import os
import random
import time
from pathlib import Path
from typing import Any

Object = dict[str, Any]
Key = tuple[str, str, str]

NAMESPACES = ("default", "tenant", "other")
SERVICES = tuple(f"s{number}" for number in range(6))
FILES = tuple(f"{letter}.json" for letter in "abcdef")
NODE_FILE = "nodes.json"
#: Few values, so that objects conflict.
CLUSTER_IPS = {4: [f"10.96.0.{n}" for n in range(1, 10)], 6: [f"fd00:10:96::{n:x}" for n in range(1, 10)]}
OUTSIDE = {
    4: ["203.0.113.1", "203.0.113.2", "203.0.113.3", "192.0.2.11", "10.96.0.3"],
    6: ["2001:db8:3::1", "2001:db8:3::2", "2001:db8:1::11", "fd00:10:96::3"],
}
PORTS = (80, 443, 8080, 30001)
NODE_PORTS = (30000, 30001, 30002, 8080)
PODS = {
    4: [f"10.244.{node}.{n}" for node in (1, 2) for n in range(10, 15)],
    6: [f"fd00:10:244:{node}::{n:x}" for node in (1, 2) for n in range(10, 15)],
}
RANGES = ("198.51.100.0/24", "192.0.2.0/24", "0.0.0.0/0", "2001:db8:2::/64", "2001:db8:1::/64", "10.244.0.0/16", "junk")
#: Seconds until a file that was removed counts as deleted.
DELETED = 0.3
ZONES = ("east", "west")


def service(chance: random.Random, namespace: str, name: str) -> Object:
    """A valid Service."""
    families = chance.choice(([4], [6], [4, 6], [4, 6], [6, 4]))
    addresses = [chance.choice(CLUSTER_IPS[family]) for family in families]
    spec: Object = {"clusterIP": addresses[0]}
    if len(addresses) > 1 or chance.random() < 0.5:
        spec["clusterIPs"] = addresses
        spec["ipFamilies"] = [f"IPv{family}" for family in families]
    seen: set[tuple[str, Any]] = set()
    ports = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        protocol = chance.choice(("TCP", "TCP", "UDP", "SCTP"))
        port = {"name": chance.choice(("", "web", "dns")), "port": chance.choice(PORTS), "protocol": protocol}
        if chance.random() < 0.4:
            port["nodePort"] = chance.choice(NODE_PORTS)
        marks = {(protocol, (field, value)) for field, value in port.items() if field != "protocol"}
        if not marks & seen:
            seen |= marks
            ports.append(port)
    spec["ports"] = ports
    spec["type"] = chance.choice(("ClusterIP", "NodePort", "LoadBalancer"))
    for field in ("internalTrafficPolicy", "externalTrafficPolicy"):
        if chance.random() < 0.4:
            spec[field] = chance.choice(("Local", "Local", "Cluster"))
    if spec["type"] == "LoadBalancer":
        spec["healthCheckNodePort"] = 0
    if chance.random() < 0.3:
        spec["sessionAffinity"] = "ClientIP"
        if chance.random() < 0.5:
            spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": chance.choice((1, 60, 10800))}}
    outside = OUTSIDE[4] + OUTSIDE[6]
    if chance.random() < 0.4:
        spec["externalIPs"] = chance.sample([*outside, "127.0.0.1", "nonsense"], chance.choice((1, 2, 3)))
    if chance.random() < 0.4:
        spec["loadBalancerSourceRanges"] = chance.sample(RANGES, chance.choice((1, 2)))
    made: Object = {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": namespace, "name": name}}
    made["spec"] = spec
    if chance.random() < 0.4:
        ingress = [{"ip": text} for text in chance.sample(outside, chance.choice((1, 2)))]
        if chance.random() < 0.2:
            ingress[0]["ipMode"] = chance.choice(("Proxy", "VIP"))
        made["status"] = {"loadBalancer": {"ingress": ingress}}
    if chance.random() < 0.8:
        made["metadata"]["creationTimestamp"] = f"2026-01-0{chance.randint(1, 5)}T00:00:00Z"
    match chance.random():
        case draw if draw < 0.03:
            spec["clusterIP"] = "None"
            spec.pop("clusterIPs", None)
            spec.pop("ipFamilies", None)
        case draw if draw < 0.06:
            made["metadata"]["labels"] = {"service.kubernetes.io/service-proxy-name": "other"}
        case draw if draw < 0.09:
            spec["type"] = "ExternalName"
    return made


def endpoint_slice(chance: random.Random, namespace: str, name: str) -> Object:
    """A valid EndpointSlice."""
    family = chance.choice((4, 6))
    ports = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        port = {"name": chance.choice(("", "web", "dns")), "protocol": chance.choice(("TCP", "UDP", "SCTP"))}
        port["port"] = chance.choice((8080, 9090, 53))
        if not any((each["name"], each["protocol"]) == (port["name"], port["protocol"]) for each in ports):
            ports.append(port)
    addresses = [
        *PODS[family],
        "192.0.2.11" if family == 4 else "2001:db8:1::11",
        "127.0.0.1" if family == 4 else "::1",
    ]
    hinted = chance.choice(("", "", "zones", "nodes", "some"))
    endpoints = []
    for address in chance.sample(addresses, chance.choice((0, 1, 2, 3, 5))):
        node = "node2" if ".244.2." in address or ":244:2:" in address else "node1"
        each: Object = {"addresses": [address]}
        if chance.random() < 0.9:
            each["nodeName"] = node
        conditions = {}
        for field, likely in (("ready", 0.7), ("serving", 0.8), ("terminating", 0.25)):
            if chance.random() < 0.6:
                conditions[field] = chance.random() < likely
        if conditions or chance.random() < 0.5:
            each["conditions"] = conditions
        if hinted == "zones" or (hinted == "some" and chance.random() < 0.7):
            each["hints"] = {"forZones": [{"name": chance.choice(ZONES)}]}
        elif hinted == "nodes":
            each["hints"] = {"forNodes": [{"name": chance.choice(("node1", "node2"))}]}
        endpoints.append(each)
    labels = {"kubernetes.io/service-name": chance.choice(SERVICES)}
    if chance.random() < 0.04:
        labels = chance.choice(({}, labels | {"service.kubernetes.io/headless": ""}))
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"namespace": namespace, "name": name, "labels": labels},
        "addressType": f"IPv{family}",
        "ports": ports,
        "endpoints": endpoints,
    }


def node(chance: random.Random, name: str) -> Object:
    """A Node; its addresses are mostly those of the lab."""
    number = name.removeprefix("node")
    last = 10 + int(number) if chance.random() < 0.8 else chance.randint(10, 20)
    addresses = [{"type": "InternalIP", "address": text} for text in (f"192.0.2.{last}", f"2001:db8:1::{last}")]
    labels = {"topology.kubernetes.io/zone": chance.choice(ZONES)} if chance.random() < 0.6 else {}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {"podCIDRs": [f"10.244.{number}.0/24", f"fd00:10:244:{number}::/64"]},
        "status": {"addresses": addresses},
    }


def service_cidr(chance: random.Random) -> Object:
    """A ServiceCIDR."""
    cidrs = chance.choice((["10.96.0.0/16"], ["10.96.0.0/16", "fd00:10:96::/112"], ["10.97.0.0/16"]))
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": {"name": "kubernetes"},
        "spec": {"cidrs": cidrs},
    }


def spoilt(chance: random.Random, good: Object) -> Object:
    """The object with an error for which it is rejected as a whole."""
    bad = copy.deepcopy(good)
    if bad["kind"] == "Service":
        match chance.randrange(5):
            case 0:
                ports = bad["spec"].get("ports")
                # A Service may be spoilt twice: the list may be the "80" below.
                bad["spec"]["ports"] = [*(ports if isinstance(ports, list) else []), {"name": "bad", "port": 70000}]
            case 1:
                bad["spec"].update(clusterIP="10.96.0.300", clusterIPs=["10.96.0.300"], type="ClusterIP")
                bad["spec"].pop("ipFamilies", None)
            case 2:
                bad["spec"]["internalTrafficPolicy"] = "Sometimes"
            case 3:
                bad["spec"]["ports"] = "80"
            case 4:
                bad["spec"]["sessionAffinity"] = "Always"
        if bad["spec"].get("type") == "ExternalName":
            bad["spec"]["type"] = "ClusterIP"
    else:
        match chance.randrange(3):
            case 0:
                bad["addressType"] = "IPv5"
            case 1:
                bad["endpoints"] = [{"addresses": ["web.example"]}]
            case 2:
                bad["ports"] = [{"name": "web", "protocol": "ICMP", "port": 1}]
    return bad


def key_of(made: Object) -> Key:
    """Kind, namespace and name."""
    metadata = made["metadata"]
    return made["kind"], metadata.get("namespace", ""), metadata["name"]


class Folder:
    """The manifests folder, and what an agent that follows it knows.

    ``valid`` and ``wrong`` are kept by file: an object that becomes invalid keeps its last valid state in that file, as
    long as the agent runs; an unreadable file keeps all of its objects.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        #: By file: objects, and whether each is valid. None: the text cannot be read.
        self.files: dict[str, list[tuple[Object, bool]] | None] = {}
        self._known: dict[str, dict[Key, Object]] = {}
        #: When a file was removed that has not been written again.
        self._gone: dict[str, float] = {}

    def objects(self) -> dict[Key, Object]:
        """The objects that the agent knows: if several files have one, the last file by name counts."""
        found: dict[Key, Object] = {}
        for name in sorted(self._known):
            found |= self._known[name]
        return found

    def in_file(self, name: str) -> list[tuple[Object, bool]]:
        """A copy of the contents of a readable file."""
        return list(self.files.get(name) or ())

    def write(self, name: str, contents: list[tuple[Object, bool]]) -> None:
        """Replace a file by one with these objects."""
        self.files[name] = contents
        before = self._known.get(name, {})
        now: dict[Key, Object] = {}
        for made, valid in contents:
            if valid:
                now[key_of(made)] = made
            elif key_of(made) in before:
                now[key_of(made)] = before[key_of(made)]
        self._known[name] = now
        items = [made for made, _ in contents]
        self._replace(name, json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))

    def garble(self, name: str) -> None:
        """Replace a file by one that cannot be read."""
        self.files[name] = None
        self._known.setdefault(name, {})
        self._replace(name, '{"kind": "List", "items": [{')

    def remove(self, name: str) -> None:
        """Remove a file."""
        self.files.pop(name, None)
        self._known.pop(name, None)
        if (self.path / name).exists():
            (self.path / name).unlink()
            self._gone[name] = time.monotonic()

    def forget(self) -> None:
        """The agent starts again: it does not know earlier valid states."""
        self._known = {
            name: {key_of(made): made for made, valid in contents or () if valid}
            for name, contents in self.files.items()
        }

    def _replace(self, name: str, text: str) -> None:
        if (gone := self._gone.pop(name, None)) is not None:
            # A file that returns in time counts as never deleted.
            time.sleep(max(0.0, gone + DELETED - time.monotonic()))
        aside = self.path / f".{name}.new"
        aside.write_text(text)
        os.rename(aside, self.path / name)
