# SPDX-License-Identifier: Apache-2.0
"""Lines for ``ip -batch`` that connect a pod to its node by a veth, for the lab and for nodes that are machines."""

from __future__ import annotations

from pyebpf_proxy.lab.addresses import Dual


def veth(namespace: str, device: str) -> list[str]:
    """A veth pair: ``device`` on the node, eth0 in the pod's namespace."""
    return [f"link add {device} type veth peer name eth0 netns {namespace}", f"link set {device} up"]


def routed_pod(namespace: str, device: str, address: Dual, gateway: Dual) -> tuple[list[str], list[str]]:
    """A pod with its own route, as the ptp plugin creates it: lines for the node, lines for the pod."""
    node = [
        *veth(namespace, device),
        f"addr add {gateway.v4}/32 dev {device}",
        f"addr add {gateway.v6}/128 dev {device} nodad",
        *pod_routes(device, address),
    ]
    return node, ["link set eth0 up", *host_addresses(address, gateway), *default_routes(gateway)]


def pod_routes(device: str, address: Dual) -> list[str]:
    """The node's routes to a pod."""
    return [f"route add {address.v4}/32 dev {device}", f"route add {address.v6}/128 dev {device}"]


def host_addresses(address: Dual, via: Dual) -> list[str]:
    """A pod's addresses, and its route to a gateway outside of its networks."""
    return [
        f"addr add {address.v4}/32 dev eth0",
        f"addr add {address.v6}/128 dev eth0 nodad",
        f"route add {via.v4}/32 dev eth0 scope link",
        *([] if via.v6.startswith("fe80") else [f"route add {via.v6}/128 dev eth0"]),
    ]


def default_routes(via: Dual) -> list[str]:
    """A pod's default routes."""
    return [f"route add default via {via.v4} dev eth0", f"route add default via {via.v6} dev eth0"]
