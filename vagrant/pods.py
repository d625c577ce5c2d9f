# SPDX-License-Identifier: Apache-2.0
"""The lab's pods on one Vagrant node, as a systemd service. When the service ends, its pods end.

Pods and addresses are those of ``pyebpf-proxy lab`` (docs/lab.md), so examples/manifests fit both.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess

from pyebpf_proxy.lab import addresses
from pyebpf_proxy.lab.links import routed_pod
from pyebpf_proxy.lab.namespace import Namespace, batch
from pyebpf_proxy.lab.servers import Ports, start_servers

PODS = {"node1": ("web-1", "toolbox"), "node2": ("web-2", "web-3")}
_SYSCTLS = {"net.ipv6.conf.default.accept_dad": 0, "net.ipv4.icmp_ratelimit": 0, "net.ipv6.icmp.ratelimit": 0}


def private_device(address: str) -> str:
    """The device with the node's address. LookupError if there is none."""
    shown = subprocess.run(["ip", "-j", "-4", "addr", "show"], check=True, capture_output=True, text=True).stdout
    for link in json.loads(shown):
        if any(entry["local"] == address for entry in link["addr_info"]):
            return str(link["ifname"])
    raise LookupError(f"no device has {address}, this node's address on the private network")


def main() -> None:
    """Start the pods, notify systemd, wait for a signal, remove the pods."""
    node = socket.gethostname()
    if node not in PODS:
        raise SystemExit(f"{node}: the lab has {', '.join(PODS)}")
    number = list(PODS).index(node) + 1
    address = addresses.node_address(number)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    namespaces = [Namespace(name) for name in PODS[node]]
    _clear(namespaces)
    batch([f"addr replace {address.v6}/64 dev {private_device(address.v4)} nodad"])
    batch(
        f"route replace {addresses.pod_cidr(other).of(family)} via {addresses.node_address(other).of(family)}"
        for other in range(1, len(PODS) + 1)
        if other != number
        for family in (4, 6)
    )
    for index, namespace in enumerate(namespaces):
        namespace.create()
        namespace.sysctl(_SYSCTLS)
        pod = addresses.pod_address(number, index)
        outside, inside = routed_pod(namespace.name, f"pod{index}", pod, addresses.pod_gateway(number))
        batch(outside)
        namespace.ip(*inside)
    servers = [start_servers(namespace, {"pod": namespace.name, "node": node}, Ports()) for namespace in namespaces]
    _tell_systemd()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    for server in servers:
        server.stop()
    _clear(namespaces)


def _clear(namespaces: list[Namespace]) -> None:
    for namespace in namespaces:
        namespace.remove()


def _tell_systemd() -> None:
    if path := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"READY=1", path.replace("@", "\0", 1) if path.startswith("@") else path)


if __name__ == "__main__":
    main()
