# SPDX-License-Identifier: Apache-2.0
"""A small load-balancer controller: ``python -m tests.e2e.load_balancer KUBECONFIG`` in the control plane's namespace.

Each Service of type LoadBalancer gets an address, in ``status.loadBalancer`` and as a route to the nodes that may serve
it: all, or with externalTrafficPolicy Local those that are healthy by their node port. Packets arrive at a node with
the load balancer's address as their destination, as from a load balancer that works at layer 3.

All other addresses of the range are silent: what is sent to a released address disappears, without an error.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import time
from typing import Any

from kubernetes import client, config

FINALIZER = "service.kubernetes.io/load-balancer-cleanup"
#: The source of requests to load balancers. A spec considers an address of the nodes' network masqueraded.
CLIENT = "198.51.100.1"
RANGE = "192.168.79.0/24"
ADDRESSES = [f"192.168.79.{number}" for number in range(1, 255)]
#: Where addresses without a Service lead.
_SILENT = "silent"
_PAUSE = 0.5

Object = dict[str, Any]
Key = tuple[str, str]


class Controller:
    """Assigns addresses and maintains the routes."""

    def __init__(self) -> None:
        self._api = client.CoreV1Api()
        self._assigned: dict[Key, str] = {}
        self._routes: dict[str, tuple[str, ...]] = {}

    def step(self) -> None:
        """One pass over all Services."""
        serialize = self._api.api_client.sanitize_for_serialization
        services = serialize(self._api.list_service_for_all_namespaces())["items"]
        nodes = serialize(self._api.list_node())["items"]
        present: set[Key] = set()
        for service in services:
            key = (service["metadata"]["namespace"], service["metadata"]["name"])
            spec = service["spec"]
            deleted = "deletionTimestamp" in service["metadata"]
            if spec["type"] == "LoadBalancer" and "loadBalancerClass" not in spec and not deleted:
                present.add(key)
                self._serve(key, service, nodes)
            elif key in self._assigned or FINALIZER in service["metadata"].get("finalizers", []):
                self._release(key, service)
        for key in set(self._assigned) - present:
            self.unroute(self._assigned.pop(key))

    def _serve(self, key: Key, service: Object, nodes: list[Object]) -> None:
        ingress = service.get("status", {}).get("loadBalancer", {}).get("ingress") or []
        address = self._assigned.get(key) or (ingress[0].get("ip") if ingress else None)
        if address is None:
            address = next(each for each in ADDRESSES if each not in self._assigned.values())
        self._assigned[key] = address
        finalizers = service["metadata"].get("finalizers", [])
        if FINALIZER not in finalizers:
            change = {"metadata": {"finalizers": [*finalizers, FINALIZER]}}
            self._api.patch_namespaced_service(key[1], key[0], change)
        healthy = [node for node in map(_address, nodes) if _is_healthy(node, service["spec"])]
        self.route(address, chosen(healthy, service["spec"]))
        if not ingress:
            status = {"status": {"loadBalancer": {"ingress": [{"ip": address, "ipMode": "VIP"}]}}}
            self._api.patch_namespaced_service_status(key[1], key[0], status)

    def _release(self, key: Key, service: Object) -> None:
        if address := self._assigned.pop(key, None):
            self.unroute(address)
        if service.get("status", {}).get("loadBalancer", {}).get("ingress"):
            self._api.patch_namespaced_service_status(key[1], key[0], {"status": {"loadBalancer": None}})
        finalizers = service["metadata"].get("finalizers", [])
        if FINALIZER in finalizers:
            left = [each for each in finalizers if each != FINALIZER]
            self._api.patch_namespaced_service(key[1], key[0], {"metadata": {"finalizers": left or None}})

    def route(self, address: str, nodes: list[str]) -> None:
        """Set the route of this address to these nodes."""
        if self._routes.get(address) == tuple(nodes):
            return
        if nodes:
            hops = [word for node in nodes for word in ("nexthop", "via", node)]
            subprocess.run(["ip", "route", "replace", address, "src", CLIENT, *hops], check=True)
        else:
            # No node may serve the address now, so it is silent, as a load balancer without healthy nodes may be.
            # A route of type unreachable would give clients an error, and they would not try again.
            self.unroute(address)
        self._routes[address] = tuple(nodes)
        print(f"{address} goes to {' '.join(nodes) or 'nowhere'}", flush=True)

    def unroute(self, address: str) -> None:
        """Remove the route: the address is silent again."""
        if self._routes.pop(address, None) is not None:
            subprocess.run(["ip", "route", "flush", "root", address], check=False)


def chosen(healthy: list[str], spec: Object) -> list[str]:
    """The nodes that get requests. There is one client, so with session affinity it is one node."""
    return healthy[:1] if spec.get("sessionAffinity") == "ClientIP" else healthy


def _address(node: Object) -> str:
    return next(str(each["address"]) for each in node["status"]["addresses"] if each["type"] == "InternalIP")


def _is_healthy(node: str, spec: Object) -> bool:
    port = spec.get("healthCheckNodePort")
    if spec.get("externalTrafficPolicy") != "Local" or not port:
        return True
    connection = http.client.HTTPConnection(node, port, timeout=1)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def prepare() -> None:
    """Add the client's address, and the route of the range to a device that loses every packet."""
    subprocess.run(["ip", "addr", "replace", f"{CLIENT}/32", "dev", "lo"], check=True)
    # Connections of one client go to different nodes: the hash includes ports.
    subprocess.run(["sysctl", "-qw", "net.ipv4.fib_multipath_hash_policy=1"], check=True)
    # Without a route, and with one of type blackhole, the kernel reports an error to a local sender. Without ARP, the
    # device itself is the destination of each frame, so its peer drops them as frames for another host.
    subprocess.run(["ip", "link", "del", _SILENT], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(["ip", "link", "add", _SILENT, "type", "veth", "peer", "name", f"{_SILENT}-peer"], check=True)
    for device in (f"{_SILENT}-peer", _SILENT):
        subprocess.run(["ip", "link", "set", device, "arp", "off", "up"], check=True)
    subprocess.run(["ip", "route", "replace", RANGE, "dev", _SILENT, "src", CLIENT], check=True)


def main(arguments: list[str]) -> int:
    """Runs until it is killed."""
    prepare()
    config.load_kube_config(arguments[0])  # type: ignore[no-untyped-call]
    controller = Controller()
    while True:
        try:
            controller.step()
        except client.ApiException as error:
            # Another writer was faster, or the object was deleted: the next read shows which.
            print(f"{error.status} {error.reason}", file=sys.stderr, flush=True)
        time.sleep(_PAUSE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
