# SPDX-License-Identifier: Apache-2.0
"""The contenders, each on its own node: no proxy, kube-proxy in its modes, pyebpf-proxy with its defaults.

All nodes are alike and exist at the same time, each in its own lab with the same addresses: a client pod, a server pod,
an external client. So the loads of the contenders follow each other within seconds, and nothing starts in between. They
share the machine: its CPUs, the kernel's static branches, the root cgroup with each agent's socket programs.

pyebpf-proxy reads a directory of manifests; kube-proxy reads the same objects from a real API server.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from pyebpf_proxy.lab import addresses, manifests
from pyebpf_proxy.lab.addresses import Dual
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.namespace import LabError, Namespace
from tests.support.apiserver import ADMIN_TOKEN, ApiServer
from tests.support.relay import Relay

from . import api_load, workload
from .measure import TOOLS, say
from .proxies import IPTABLES as IPTABLES
from .proxies import NFTABLES as NFTABLES
from .proxies import Proxy

#: Number of endpoints of each of the many services.
ENDPOINTS = 3
#: The prefix of files with many services, and the number of objects in each of these files.
OTHERS, OBJECTS_A_FILE = "others-", 500
CONNECT, EXCHANGE, STREAM, UDP, DNS = 8080, 8081, 8082, 8083, 8053
#: Ports of the pod and of ClusterIPs, and their NodePorts: of the Service with policy Cluster, and of that with Local.
NODE_PORT = {port: port + 24000 for port in (CONNECT, EXCHANGE, STREAM)}
#: These are outside the NodePorts of workload.py with 30 000 Services.
LOCAL_NODE_PORT = {port: port + 24100 for port in (CONNECT, EXCHANGE, STREAM, UDP, DNS)}
ADDRESS = Dual("172.31.0.10", "fd00:10:96::110")
UDP_ADDRESS = Dual("172.31.0.11", "fd00:10:96::111")
LOCAL_ADDRESS = Dual("172.31.0.12", "fd00:10:96::112")
#: iperf3 runs without real-time priority: its client waits for its server in a loop, and both share one CPU.
BEFORE_OTHERS = ["nice", "-n", "-20"]
WAYS = {
    "pod": "pod → ClusterIP, same node",
    "client": "client → NodePort, policy Local",
    "cluster": "client → NodePort, policy Cluster",
}
#: The capabilities of the DaemonSet's container.
_CAPABILITIES = "-all,+net_admin,+bpf,+perfmon"


class CannotTakePartError(Exception):
    """This machine, or this version, lacks a requirement of a contender."""


class Contender(NamedTuple):
    """What runs on a node. ``proxy``: "ours" (pyebpf-proxy), a mode of kube-proxy, or "".

    ``own``: fields of the DatapathConfiguration. ``rules``: an nftables table. ``past``: loads are sent to the pod's
    own address instead of the Service.
    """

    name: str
    words: str
    proxy: str = ""
    own: dict[str, Any] | None = None
    rules: str = ""
    past: bool = False


_TRACKING = "table inet bench { chain c { type filter hook prerouting priority 0; ct state invalid counter; }; }"
NONE, OURS, XDP, SLOW, SOCKET, TRACKED = "none", "ours", "xdp", "slow", "socket", "tracked"
#: These are no contenders, but show the limits of the machine.
FORWARD, LIMIT = LIMITS = ("forward", "limit")
#: These are only for packets that belong to no service.
PAST, EMPTY = "past", "empty"
CONTENDERS = {
    each.name: each
    for each in (
        Contender(NONE, "no proxy", past=True),
        Contender(TRACKED, "no proxy, connections tracked", rules=_TRACKING, past=True),
        Contender(IPTABLES, "kube-proxy, iptables", proxy=IPTABLES),
        Contender(NFTABLES, "kube-proxy, nftables", proxy=NFTABLES),
        Contender(OURS, "pyebpf-proxy (defaults)", proxy="ours", own={}),
        Contender(XDP, "pyebpf-proxy (XDP)", proxy="ours", own={"xdpDevices": ["eth0"]}),
        Contender(SLOW, "pyebpf-proxy (fastPath: false)", proxy="ours", own={"fastPath": False}),
        Contender(SOCKET, "pyebpf-proxy (socketLB: all)", proxy="ours", own={"socketLB": "all"}),
        Contender(FORWARD, "XDP that only forwards", past=True),
        Contender(LIMIT, "XDP_DROP where it comes in", past=True),
        Contender(PAST, "pyebpf-proxy (to the pod itself)", proxy="ours", own={}, past=True),
        Contender(EMPTY, "its rules, and empty programs", past=True),
    )
}
#: Contenders that always take part; the others only if named (``--also``) or required by a figure.
USUAL = (NONE, IPTABLES, NFTABLES, OURS)
OPTIONAL = (TRACKED, XDP, SLOW, SOCKET)


def objects(server: Dual) -> list[manifests.Object]:
    """The Services under load, with one endpoint, and their node."""
    tcp, local = (
        [manifests.Port(f"p{port}", port, port, "TCP", of[port]) for port in (CONNECT, EXCHANGE, STREAM)]
        for of in (NODE_PORT, LOCAL_NODE_PORT)
    )
    udp = [manifests.Port(f"p{port}", port, port, "UDP", LOCAL_NODE_PORT[port]) for port in (UDP, DNS)]
    here = [(server, "node1")]
    return [
        manifests.service("bench", tcp, ADDRESS),
        *manifests.slices("bench", tcp, here),
        manifests.service("bench-local", local, LOCAL_ADDRESS, externalTrafficPolicy="Local"),
        *manifests.slices("bench-local", local, here),
        # External traffic keeps its source: masquerading allows at most 64 000 flows to an endpoint.
        manifests.service("bench-udp", udp, UDP_ADDRESS, externalTrafficPolicy="Local"),
        *manifests.slices("bench-udp", udp, here),
        manifests.node("node1", addresses.node_address(1), addresses.pod_cidr(1)),
    ]


class Ground:
    """One contender with its node, ready for loads."""

    def __init__(self, contender: Contender, stack: ExitStack) -> None:
        self.contender = contender
        #: When conntrack was flushed last.
        self.flushed = -math.inf
        self.lab = stack.enter_context(Lab(nodes=1))
        self.node = self.lab.nodes[0]
        self.pod = self.lab.add_pod("client-pod", self.node, serve=False)
        self.server = self.lab.add_pod("server-pod", self.node, serve=False)
        self.asks: dict[str, Namespace] = {
            "pod": self.pod.namespace,
            "client": self.lab.client,
            "cluster": self.lab.client,
        }
        for command in (
            [str(TOOLS / "connections"), "serve", str(CONNECT)],
            [str(TOOLS / "pingpong"), "serve", str(EXCHANGE)],
            [str(TOOLS / "datagrams"), "serve", str(DNS)],
            [*BEFORE_OTHERS, "iperf3", "-s", "-p", str(STREAM), "--forceflush"],
        ):
            stack.enter_context(serving(self.server.namespace, pinned(command)))

    def start(self, api: ApiServer | None, stack: ExitStack) -> None:
        """Set up the contender on the node; ``api`` is for kube-proxy."""
        one = self.contender
        if one.rules:
            self.node.namespace.run("nft", "-f", "-", stdin=one.rules)
        elif one.proxy == "ours":
            agent = self.node.agent
            # With many services, the node is one of the workload's nodes.
            has_others = (agent.manifests / f"{OTHERS}000.json").exists()
            manifests.write(agent.manifests / "bench.yaml", objects(self.server.address)[: -1 if has_others else None])
            # As in a container: the node's network, and the host's /sys; ``ip netns exec`` would mount a new one.
            enter = ("nsenter", f"--net=/run/netns/{self.node.namespace.name}", "setpriv")
            few = (f"--bounding-set={_CAPABILITIES}", f"--inh-caps={_CAPABILITIES}")
            agent.start(own=one.own, enter=(*enter, *few))
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

    def forget_flows(self) -> None:
        """Flush conntrack."""
        self.node.namespace.run("conntrack", "-F")
        self.flushed = time.monotonic()

    def target(self, port: int, way: str, family: int) -> tuple[str, str]:
        """The target of loads: address and port, as arguments of the tools."""
        if self.contender.past:
            return self.server.address.of(family), str(port)
        if way == "pod":
            return (UDP_ADDRESS if port in (UDP, DNS) else ADDRESS).of(family), str(port)
        return self.node.address.of(family), str((NODE_PORT if way == "cluster" else LOCAL_NODE_PORT)[port])


def pinned(command: Sequence[str]) -> list[str]:
    """The command, run on the last CPU, which the servers also use.

    A wake-up on another CPU costs several times as much as a proxy, so the placement must not be left to chance.
    """
    return ["taskset", "-c", str(max(os.sched_getaffinity(0))), *command]


@contextmanager
def serving(namespace: Namespace, command: Sequence[str]) -> Iterator[None]:
    """Run a server in the namespace, and wait until it reports that it listens."""
    command = ["ip", "netns", "exec", namespace.name, *command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            while "listening" not in (line := process.stdout.readline()):
                if not line:
                    raise RuntimeError(f"{' '.join(command)} does not listen")
            # iperf3 prints some lines for each test. They must be read: a full pipe would stop it.
            threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
            yield
        finally:
            process.kill()


class Field:
    """The grounds of this run; each is created on first use and kept until ``close``.

    ``services``: the number of additional services on every node, with ENDPOINTS endpoints each.
    """

    def __init__(self, services: int = 0) -> None:
        self._services = services
        self._stack = ExitStack()
        self._grounds: dict[str, Ground] = {}
        self._left_out: set[str] = set()
        self._manifests: Path | None = None
        self._api: ApiServer | None = None

    def grounds(self, names: Sequence[str]) -> list[Ground]:
        """The contenders that can take part on this machine, in this order."""
        return [ground for name in names if (ground := self._ground(name)) is not None]

    def close(self) -> None:
        """Remove everything."""
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
            # A ground's own resources must end before those that it shares with others.
            self._stack.push(stack.pop_all())
        return ground

    def _folder(self) -> Path:
        """The manifests of all services for every agent, as lists, which are faster to write and read."""
        if self._manifests is None:
            self._manifests = Path(self._stack.enter_context(TemporaryDirectory(prefix="bench-manifests-")))
            documents = (document for _, document in workload.everything(self._services, ENDPOINTS))
            for number, items in enumerate(iter(lambda: list(islice(documents, OBJECTS_A_FILE)), [])):
                made = {"apiVersion": "v1", "kind": "List", "items": items}
                (self._manifests / f"{OTHERS}{number:03d}.json").write_text(json.dumps(made))
        return self._manifests


@cache
def field() -> Field:
    """The field of this process."""
    return Field()


def turns(rounds: int, grounds: Sequence[Ground]) -> Iterator[tuple[int, list[Ground]]]:
    """The number of each round, and its order: in the next round, the first contender is last."""
    for number in range(rounds):
        yield number, list(grounds)[:: -1 if number % 2 else 1]
