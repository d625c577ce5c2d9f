# SPDX-License-Identifier: Apache-2.0
"""Who takes part: no proxy, kube-proxy in its modes, ours in its configurations. Each on a node of its own.

All nodes are alike and are there at once, each in a lab of its own with the same addresses: a pod that asks, a pod that
serves, a client from outside. So a load goes to one after the other within seconds, and nothing starts in between. What
they share is the machine: its CPUs, the kernel's static branches, the root cgroup with each agent's socket programs.

Ours reads a folder of manifests, kube-proxy the same objects from a real API server.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from pyebpf_proxy.lab import addresses, manifests
from pyebpf_proxy.lab.addresses import Dual
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.namespace import LabError, Namespace
from tests.cluster.apiserver import ADMIN_TOKEN, ApiServer
from tests.cluster.relay import Relay

from . import api_load, workload
from .measure import TOOLS, say
from .proxies import IPTABLES, NFTABLES, Proxy

#: Of each of many services.
ENDPOINTS = 3
CONNECT, EXCHANGE, STREAM, UDP = 8080, 8081, 8082, 8083
#: A port of the pod's, what the ClusterIP has for it, and the node.
NODE_PORT = {port: port + 24000 for port in (CONNECT, EXCHANGE, STREAM, UDP)}
ADDRESS = Dual("172.31.0.10", "fd00:10:96::110")
UDP_ADDRESS = Dual("172.31.0.11", "fd00:10:96::111")
#: iperf3 without real-time priority: its client waits for its server in a loop, and both ends have one CPU.
BEFORE_OTHERS = ["nice", "-n", "-20"]
WAYS = {"pod": "pod → ClusterIP, same node", "client": "client → NodePort"}


class CannotTakePartError(Exception):
    """This machine, or this version, does not have what a contender needs."""


class Contender(NamedTuple):
    """``proxy``: "ours", a mode of kube-proxy, or "". ``own``: our configuration. ``rules``: an nftables table instead.

    ``past``: loads go to the pod itself all the same.
    """

    name: str
    words: str
    proxy: str = ""
    own: dict[str, Any] | None = None
    lane: str = "auto"
    rules: str = ""
    past: bool = False


_TRACKING = "table inet bench { chain c { type filter hook prerouting priority 0; ct state invalid counter; }; }"
_DNAT = f"""table inet bench {{ chain c {{ type nat hook prerouting priority -100;
 ip daddr {ADDRESS.v4} dnat ip to %(v4)s
 ip6 daddr {ADDRESS.v6} dnat ip6 to %(v6)s
}}; }}"""
NONE = "none"
#: No contenders: what there is to be had at all.
FORWARD, LIMIT = LIMITS = ("forward", "limit")
CONTENDERS = {
    each.name: each
    for each in (
        Contender(NONE, "no proxy", past=True),
        Contender("tracked", "no proxy, connections tracked", rules=_TRACKING, past=True),
        Contender("dnat", "no proxy, one nftables DNAT rule", rules=_DNAT),
        Contender(IPTABLES, "kube-proxy, iptables", proxy=IPTABLES),
        Contender(NFTABLES, "kube-proxy, nftables", proxy=NFTABLES),
        Contender("netfilter", "ours, netfilter lane", proxy="ours", own={}, lane="netfilter"),
        Contender("direct", "ours", proxy="ours", own={}),
        Contender("fast", "ours, fast path", proxy="ours", own={"fastPath": True}),
        Contender("xdp", "ours, XDP", proxy="ours", own={"fastPath": True, "xdpDevices": ["eth0"]}),
        Contender("socket", "ours, socketLB: all", proxy="ours", own={"socketLB": "all"}),
        Contender(FORWARD, "XDP that only forwards", past=True),
        Contender(LIMIT, "XDP_DROP where it comes in", past=True),
        Contender("beside", "ours, past it to the pod", proxy="ours", own={}, past=True),
    )
}
PROXIES = (NONE, IPTABLES, NFTABLES, "netfilter", "direct", "fast", "socket")


def objects(server: Dual) -> list[manifests.Object]:
    """The Services that are asked, with one endpoint, and their node."""
    tcp = [manifests.Port(f"p{port}", port, port, "TCP", NODE_PORT[port]) for port in (CONNECT, EXCHANGE, STREAM)]
    udp = [manifests.Port("udp", UDP, UDP, "UDP", NODE_PORT[UDP])]
    here = [(server, "node1")]
    return [
        manifests.service("bench", tcp, ADDRESS),
        *manifests.slices("bench", tcp, here),
        # What comes from outside keeps its source: a masquerade has no more than 64 000 flows for an endpoint.
        manifests.service("bench-udp", udp, UDP_ADDRESS, externalTrafficPolicy="Local"),
        *manifests.slices("bench-udp", udp, here),
        manifests.node("node1", addresses.node_address(1), addresses.pod_cidr(1)),
    ]


class Ground:
    """One contender on its node, ready to be asked."""

    def __init__(self, contender: Contender, stack: ExitStack) -> None:
        self.contender = contender
        self.lab = stack.enter_context(Lab(nodes=1))
        self.node = self.lab.nodes[0]
        self.pod = self.lab.add_pod("client-pod", self.node, serve=False)
        self.server = self.lab.add_pod("server-pod", self.node, serve=False)
        self.asks: dict[str, Namespace] = {"pod": self.pod.namespace, "client": self.lab.client}
        for command in (
            [str(TOOLS / "connections"), "serve", str(CONNECT)],
            [str(TOOLS / "pingpong"), "serve", str(EXCHANGE)],
            [*BEFORE_OTHERS, "iperf3", "-s", "-p", str(STREAM), "--forceflush"],
        ):
            stack.enter_context(serving(self.server.namespace, pinned(command)))

    def start(self, api: ApiServer | None, stack: ExitStack) -> None:
        """Bring the node into the contender's state; ``api`` is for kube-proxy."""
        one = self.contender
        if one.rules:
            pod = self.server.address._asdict()
            self.node.namespace.run("nft", "-f", "-", stdin=one.rules % pod if "%" in one.rules else one.rules)
        elif one.proxy == "ours":
            agent = self.node.agent
            # Among many services the node is one of theirs.
            theirs = (agent.manifests / "node-001.json").exists()
            manifests.write(agent.manifests / "bench.yaml", objects(self.server.address)[: -1 if theirs else None])
            agent.start(lane=one.lane, own=one.own)
            try:
                agent.wait_synced(deadline=600)
            except LabError:
                if "xdpDevices" in (one.own or {}) and "xdpDevices" in agent.log():
                    raise CannotTakePartError(agent.log().strip().splitlines()[-1]) from None
                raise
        elif one.proxy:
            assert api is not None
            stack.enter_context(Relay(self.node.namespace.path, api.port))
            self.node.agent.folder.mkdir(exist_ok=True)
            proxy = Proxy(one.proxy, self.node.namespace, self.node.agent.folder)
            stack.callback(proxy.stop)
            kubeconfig = api.kubeconfig(self.lab.folder / "kubeconfig", {"token": ADMIN_TOKEN})
            proxy.start(kubeconfig, "node1", ",".join(addresses.POD_CIDR), families=2)

    def target(self, port: int, way: str, family: int) -> tuple[str, str]:
        """Where to ask: address and port, as the tools take them."""
        if self.contender.past:
            return self.server.address.of(family), str(port)
        if way == "pod":
            return ADDRESS.of(family), str(port)
        return self.node.address.of(family), str(NODE_PORT[port])


def pinned(command: Sequence[str]) -> list[str]:
    """The command on the last CPU, where the servers are too.

    Who wakes whom on another CPU pays for that several times what a proxy costs: chance must not choose.
    """
    return ["taskset", "-c", str(max(os.sched_getaffinity(0))), *command]


@contextmanager
def serving(namespace: Namespace, command: Sequence[str]) -> Iterator[None]:
    """A server in the namespace, which says when it listens."""
    command = ["ip", "netns", "exec", namespace.name, *command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            while "listening" not in (line := process.stdout.readline()):
                if not line:
                    raise RuntimeError(f"{' '.join(command)} does not listen")
            yield
        finally:
            process.kill()


class Field:
    """The grounds of this run; each is made when a figure first asks for it, and stays until ``close``.

    ``services``: so many others are loaded everywhere beside those that are asked, ENDPOINTS endpoints each.
    """

    def __init__(self, services: int = 0) -> None:
        self._services = services
        self._stack = ExitStack()
        self._grounds: dict[str, Ground] = {}
        self._left_out: set[str] = set()
        self._manifests: Path | None = None
        self._api: ApiServer | None = None

    def grounds(self, names: Sequence[str]) -> list[Ground]:
        """Those of them that can take part here, in this order."""
        return [ground for name in names if (ground := self._ground(name)) is not None]

    def close(self) -> None:
        """Take everything down."""
        self._grounds, self._left_out, self._api, self._manifests = {}, set(), None, None
        self._stack.close()

    def _ground(self, name: str) -> Ground | None:
        contender = CONTENDERS[name]
        if name not in self._grounds and name not in self._left_out:
            try:
                self._grounds[name] = self._made(contender)
            except CannotTakePartError as error:
                self._left_out.add(name)
                say(f"{contender.words}: left out: {error}")
        return self._grounds.get(name)

    def _made(self, contender: Contender) -> Ground:
        of_kubernetes = contender.proxy in (IPTABLES, NFTABLES)
        if of_kubernetes and (missing := api_load.missing()):
            raise CannotTakePartError(f"there is no {missing}")
        with ExitStack() as stack:
            ground = Ground(contender, stack)
            if of_kubernetes and self._api is None:
                server = api_load.loaded(self._services, ENDPOINTS) if self._services else ApiServer(api_load.ARGUMENTS)
                self._api = self._stack.enter_context(server)
                for each in objects(ground.server.address)[: -1 if self._services else None]:
                    self._api.create(each)
                    if "status" in each:  # kube-proxy takes the node's addresses from there
                        self._api.patch_status(each)
            if contender.proxy == "ours" and self._services:
                ground.node.agent.manifests = self._folder()
            began = time.monotonic()
            ground.start(self._api, stack)
            if self._services:
                say(f"{contender.words}: {self._services} services programmed in {time.monotonic() - began:.0f} s")
            # Its own end comes before what it shares with others.
            self._stack.push(stack.pop_all())
        return ground

    def _folder(self) -> Path:
        """The manifests of all services, for every agent of ours."""
        if self._manifests is None:
            self._manifests = Path(self._stack.enter_context(TemporaryDirectory(prefix="bench-manifests-")))
            for name, document in workload.everything(self._services, ENDPOINTS):
                (self._manifests / name).write_text(json.dumps(document))
        return self._manifests


@cache
def field() -> Field:
    """The one of this process."""
    return Field()


def turns(rounds: int, grounds: Sequence[Ground]) -> Iterator[tuple[int, list[Ground]]]:
    """The number of each round, and the order in it: who was first is last in the next."""
    for number in range(rounds):
        yield number, list(grounds)[:: -1 if number % 2 else 1]
