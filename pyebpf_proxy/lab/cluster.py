# SPDX-License-Identifier: Apache-2.0
"""The cluster of network namespaces and veths: a core router, nodes, pods behind them, an external client.

::

    client ── core ──┬── node1 ──┬── pod      core: routes between the client's network, the nodes'
                     │           └── pod      network (a bridge, so nodes are neighbours) and the VIPs
                     └── node2 ──── pod       nodes: one route per other node's pod network

A veth connects each pod to its node: *routed* (a /32 and a /128 route per pod, the gateway address on every veth, as
with the ptp plugin), *bare* (the same without an address on the veth, as with Calico) or *bridge* (cbr0 with the
gateway address, as with the bridge plugin and kubenet).
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pyebpf_proxy.lab import addresses, leftovers, links
from pyebpf_proxy.lab.addresses import Dual
from pyebpf_proxy.lab.agent import Agent
from pyebpf_proxy.lab.namespace import LabError, Namespace, Task
from pyebpf_proxy.lab.servers import Ports, start_servers

PodNetwork = Literal["routed", "bare", "bridge"]

# The kernel sends one client about one ICMP error a second, too few for tests that count refusals.
_HOST = {
    "net.ipv6.conf.default.accept_dad": 0,
    "net.ipv4.icmp_ratelimit": 0,
    "net.ipv6.icmp.ratelimit": 0,
}
_ROUTER = _HOST | {
    "net.ipv4.ip_forward": 1,
    "net.ipv6.conf.all.forwarding": 1,
    "net.ipv6.conf.default.forwarding": 1,
    "net.ipv4.conf.all.rp_filter": 0,
    "net.ipv4.conf.default.rp_filter": 0,
}


class Pod:
    """A pod with its namespace, its addresses and its servers."""

    def __init__(self, name: str, node: Node, namespace: Namespace, address: Dual, device: str) -> None:
        self.name = name
        self.node = node
        self.namespace = namespace
        self.address = address
        self.device = device  # the host side of its veth
        self.servers: Task[None] | None = None

    def serve(self, ports: Ports | None = None) -> None:
        """Start the servers and wait until they listen."""
        identity = {"pod": self.name, "node": self.node.name}
        self.servers = start_servers(self.namespace, identity, ports or Ports())

    def stop(self) -> None:
        """Stop the servers; the pod stays, and refuses connections."""
        if self.servers is not None:
            self.servers.stop()
            self.servers = None


class Node:
    """A node: a router with pods and its own agent."""

    def __init__(self, name: str, number: int, namespace: Namespace, lab: Lab) -> None:
        self.name = name
        self.number = number
        self.namespace = namespace
        self.lab = lab
        self.address = addresses.node_address(number)
        self.gateway = addresses.pod_gateway(number)
        self.pod_cidr = addresses.pod_cidr(number)
        self.pods: list[Pod] = []
        self.agent = Agent(self.name, namespace, lab.folder / name, lab.manifests)
        self._servers: list[Task[None]] = []

    def serve(self, ports: Ports) -> None:
        """Start servers in the node's network namespace, as a pod with ``hostNetwork: true``."""
        self._servers.append(start_servers(self.namespace, {"pod": f"host-{self.name}", "node": self.name}, ports))

    def source_towards(self, pod: Pod) -> Dual:
        """The source address of MASQUERADE, and of the node's sockets, for packets to a pod (service-semantics §5)."""
        if pod.node is not self or self.lab.pod_network == "bare":
            return self.address
        return self.gateway

    def stop_servers(self) -> None:
        for task in self._servers:
            task.stop()


class Lab:
    """A running lab. It is a context manager, which always removes everything at its end.

    ``nodes``: the number of nodes. ``own_bpffs``: mount a bpffs in the directory of each node's agent, so that pins are
    removed with the lab. If False, the agent finds or mounts one. ``start_agents`` starts the agents.
    """

    _counter = itertools.count(1)

    def __init__(self, nodes: int = 2, pod_network: PodNetwork = "routed", own_bpffs: bool = True) -> None:
        self.pod_network: PodNetwork = pod_network
        self.own_bpffs = own_bpffs
        self._wanted_nodes = nodes
        self.tag = leftovers.new_tag(next(Lab._counter))
        self.folder = leftovers.folder_of(self.tag)
        self.manifests = self.folder / "manifests"
        self.nodes: list[Node] = []
        self.pods: dict[str, Pod] = {}
        self._namespaces: list[Namespace] = []
        self._lock: leftovers.Claim | None = None

    # ---- life -------------------------------------------------------------

    def __enter__(self) -> Lab:
        try:
            self._lock = leftovers.claim(self.tag)
            self.manifests.mkdir()
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop agents and servers, remove every namespace, mount and file. An error does not stop the clean-up."""
        problems: list[BaseException] = []
        for node in self.nodes:
            _try(problems, node.agent.close)
            _try(problems, node.stop_servers)
        for pod in self.pods.values():
            _try(problems, pod.stop)
        for namespace in reversed(self._namespaces):
            _try(problems, namespace.remove)
        _try(problems, lambda: leftovers.remove_folder(self.folder))
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self.nodes, self.pods, self._namespaces = [], {}, []
        if problems:
            raise ExceptionGroup("the lab was not removed cleanly", [p for p in problems if isinstance(p, Exception)])

    def _namespace(self, name: str) -> Namespace:
        namespace = Namespace(f"{self.tag}-{name}")
        self._namespaces.append(namespace)
        namespace.create()
        return namespace

    def _build(self) -> None:
        self.core = self._namespace("core")
        self.client = self._namespace("client")
        self.core.sysctl(_ROUTER)
        self.client.sysctl(_HOST)
        lan, outside = addresses.CORE_TO_NODES, addresses.CORE_TO_CLIENT
        self.core.ip(
            "link add lan0 type bridge forward_delay 0",
            f"addr add {lan.v4}/24 dev lan0",
            f"addr add {lan.v6}/64 dev lan0 nodad",
            "link set lan0 up",
            f"link add client0 type veth peer name eth0 netns {self.client.name}",
            f"addr add {outside.v4}/24 dev client0",
            f"addr add {outside.v6}/64 dev client0 nodad",
            "link set client0 up",
        )
        self.client.ip(
            f"addr add {addresses.CLIENT.v4}/24 dev eth0",
            f"addr add {addresses.CLIENT.v6}/64 dev eth0 nodad",
            "link set eth0 up",
            f"route add default via {outside.v4}",
            f"route add default via {outside.v6}",
        )
        for number in range(1, self._wanted_nodes + 1):
            self._add_node(number)
        self.route_vips(self.nodes[0])

    def _add_node(self, number: int) -> None:
        node = Node(f"node{number}", number, self._namespace(f"node{number}"), self)
        node.namespace.sysctl(_ROUTER)
        self.core.ip(
            f"link add {node.name} type veth peer name eth0 netns {node.namespace.name}",
            f"link set {node.name} master lan0",
            f"link set {node.name} up",
            *_pod_routes(node),
        )
        lan = addresses.CORE_TO_NODES
        lines = [
            f"addr add {node.address.v4}/24 dev eth0",
            f"addr add {node.address.v6}/64 dev eth0 nodad",
            "link set eth0 up",
            f"route add default via {lan.v4}",
            f"route add default via {lan.v6}",
        ]
        if self.pod_network == "bridge":
            lines += [
                "link add cbr0 type bridge forward_delay 0",
                f"addr add {node.gateway.v4}/24 dev cbr0",
                f"addr add {node.gateway.v6}/64 dev cbr0 nodad",
                "link set cbr0 up",
            ]
        node.namespace.ip(*lines)
        for other in self.nodes:
            other.namespace.ip(*_pod_routes(node))
            node.namespace.ip(*_pod_routes(other))
        self.nodes.append(node)
        if self.own_bpffs:
            node.agent.mount_bpffs()

    # ---- contents ---------------------------------------------------------

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise LabError(f"no node {name!r} here: there are {', '.join(node.name for node in self.nodes)}")

    def add_pod(self, name: str, node: Node, ports: Ports | None = None, serve: bool = True) -> Pod:
        """Add a pod on ``node``, reachable from everywhere; its servers listen."""
        index = len(node.pods)
        namespace = self._namespace(name)
        namespace.sysctl(_HOST)
        address, gateway = addresses.pod_address(node.number, index), node.gateway
        device = f"pod{index}"
        if self.pod_network == "routed":
            host, inside = links.routed_pod(namespace.name, device, address, gateway)
        elif self.pod_network == "bridge":
            host = links.veth(namespace.name, device)
            # Hairpin packets of a pod leave by the bridge port through which they came in (the plugin's hairpinMode).
            host += [f"link set {device} master cbr0", f"link set {device} type bridge_slave hairpin on"]
            inside = [
                "link set eth0 up",
                f"addr add {address.v4}/24 dev eth0",
                f"addr add {address.v6}/64 dev eth0 nodad",
            ]
            inside += links.default_routes(gateway)
        else:
            node.namespace.ip(*links.veth(namespace.name, device))
            node.namespace.sysctl({f"net.ipv4.conf.{device}.proxy_arp": 1})
            host = [f"addr add fe80::1/64 dev {device} nodad", *links.pod_routes(device, address)]
            via = Dual("169.254.1.1", "fe80::1")
            inside = ["link set eth0 up", *links.host_addresses(address, via), *links.default_routes(via)]
        node.namespace.ip(*host)
        namespace.ip(*inside)
        pod = Pod(name, node, namespace, address, device)
        node.pods.append(pod)
        self.pods[name] = pod
        if serve:
            pod.serve(ports)
        return pod

    def route_vips(self, node: Node) -> None:
        """Send the LoadBalancer VIPs to this node, as an external load balancer or BGP would."""
        self.core.ip(
            *(f"route replace {vips} via {node.address.of(4 + 2 * i)}" for i, vips in enumerate(addresses.VIP_CIDR))
        )

    # ---- agents -----------------------------------------------------------

    def start_agents(self, config: dict[str, object] | None = None, own: dict[str, Any] | None = None) -> None:
        """Start every node's agent and wait until all have synced both families."""
        for node in self.nodes:
            node.agent.start(config, own=own)
        for node in self.nodes:
            node.agent.wait_synced()

    def stop_agents(self) -> None:
        """Send SIGTERM to all agents, then wait until all have ended."""
        for node in self.nodes:
            node.agent.terminate()
        for node in self.nodes:
            node.agent.wait_ended()

    def write(self, file: str, objects: Sequence[object]) -> float:
        """Write a manifest file into the folder that all agents watch; returns the time (``time.time``)."""
        from pyebpf_proxy.lab.manifests import write

        return write(self.manifests / file, objects)

    def copy_manifests(self, source: Path) -> None:
        """Copy all manifests of a folder."""
        for path in sorted(source.glob("*.yaml")):
            shutil.copy(path, self.manifests / path.name)

    def wait_synced(self, since: float) -> None:
        """Wait until every agent is synced with files written before ``since``."""
        for node in self.nodes:
            node.agent.wait_synced(since)


def _pod_routes(node: Node) -> list[str]:
    return [
        f"route add {node.pod_cidr.v4} via {node.address.v4}",
        f"route add {node.pod_cidr.v6} via {node.address.v6}",
    ]


def _try(problems: list[BaseException], step: Callable[[], object]) -> None:
    try:
        step()
    except Exception as error:
        problems.append(error)
