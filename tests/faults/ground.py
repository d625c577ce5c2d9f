# SPDX-License-Identifier: Apache-2.0
"""A node with a proxy and Services, and recorded connections through them."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.proxies import OURS
from pyebpf_proxy.lab.addresses import Dual, cluster_ip, vip
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.manifests import Object, Port, node, service, slices
from tests.changes.checker import Record, Stall
from tests.changes.traffic import LongConnections, NewConnections, Server
from tests.faults.contenders import ByApi, ByManifests, Contender
from tests.support.apiserver import ApiServer
from tests.support.world import TOOLBOX, World

#: New connections a second, and long ones, in total.
RATE, LONG = 1000, 200
_LONG_PERIOD = 200  # milliseconds
TARGET_PORT, NODE_PORT, VICTIM_NODE_PORT, VICTIM_UDP_NODE_PORT, VICTIM_UDP_PORT = 8080, 30081, 30082, 30083, 53
SHOP, VICTIM = 11, 12
#: Numbers of the Services that are added during and after a fault.
MEANWHILE, AFTERWARDS = 50, 51
#: The sources of forged packets. Replies to them end at the router.
NOWHERE = "198.18.0.0/15"
SOURCES = ("external", "pod", "node")
PATIENCE = 60.0
#: Changes a second of ``api-churn``.
CHANGES = 1000


class Ground(World):
    """``with Ground(...)``. ``beside``: the name of a proxy that uses ``api``; none: the agent reads manifests."""

    def __init__(
        self,
        name: str = OURS,
        api: ApiServer | None = None,
        own: dict[str, Any] | None = None,
        environment: tuple[str, ...] = (),
        group: Path | None = None,
    ) -> None:
        """``group``: the cgroup that the agent starts in."""
        super().__init__(Lab(nodes=1, own_bpffs=False))
        self.name = name
        self.api = api
        self._own, self._environment, self._group = own, environment, group
        self.news: list[NewConnections] = []
        self.long: list[LongConnections] = []
        #: Changes a second of ``api-churn``.
        self.changes = CHANGES
        #: What a fault has measured itself, for the page.
        self.notes: list[str] = []

    def build(self) -> None:
        """One node, its proxy, and two Services: one for the traffic, one that faults change."""
        self.at_end.enter_context(self.lab)
        state = self.node.agent.directory
        state.mkdir(parents=True)
        # The run folder has its own small file system.
        _mount(b"tmpfs", bytes(state), b"tmpfs", b"size=1m,mode=0700")
        self.node.agent.mount_bpffs()
        for name in ("web-1", "web-2", "victim"):
            pod = self.lab.add_pod(name, self.node, serve=False)
            self.at_end.callback(Server(pod.namespace, name, TARGET_PORT).kill)
        self.toolbox = self.lab.add_pod(TOOLBOX, self.node, serve=False)
        self.lab.core.ip(f"route add blackhole {NOWHERE}")
        self.proxy: Contender
        if self.api is None:
            self.proxy = ByManifests(self.lab, self._own, self._environment, self._group)
        else:
            self.proxy = ByApi(self.name, self.lab, self.api, self.at_end)
        self.proxy.apply("node", [node("node1", self.node.address, self.node.pod_cidr)])
        self.proxy.apply("shop", self.service("shop", SHOP, "web-1", "web-2", node_port=NODE_PORT))
        self.proxy.apply("victim", self.service("victim", VICTIM, "victim", node_port=VICTIM_NODE_PORT, udp=True))
        self.proxy.start()

    def service(
        self, name: str, number: int, *pods: str, node_port: int = 0, port: int = 80, udp: bool = False
    ) -> list[Object]:
        """A Service with these pods; with a NodePort it also has a VIP. ``udp``: also a port whose pods never
        answer.
        """
        ports = [Port("p", port, TARGET_PORT, "TCP", node_port)]
        if udp:
            ports.append(Port("u", VICTIM_UDP_PORT, TARGET_PORT, "UDP", VICTIM_UDP_NODE_PORT))
        more = {"vip": vip(number)} if node_port else {}
        endpoints = [(self.lab.pods[pod].address, "node1") for pod in pods]
        return [service(name, ports, cluster_ip(number), **more), *slices(name, ports, endpoints)]

    def delete(self, file: str, objects: Sequence[Object]) -> None:
        """Delete what was applied."""
        if self.api is None:
            (self.lab.manifests / f"{file}.yaml").unlink(missing_ok=True)
        else:
            for each in objects:
                self.api.delete(each)

    # ---- traffic --------------------------------------------------------------

    def begin_traffic(self, rate: float = RATE) -> None:
        """Start long connections, wait for one round each, then start new ones."""
        ours, virtual = cluster_ip(SHOP), vip(SHOP)
        asked = {
            "external": [f"{virtual.v4},80", f"{virtual.v6},80", f"{self.node.address.v4},{NODE_PORT}"],
            "pod": [f"{ours.v4},80", f"{ours.v6},80"],
            "node": [f"{ours.v4},80", f"{ours.v6},80"],
        }
        shares = [LONG // 3 + (LONG % 3 if source == "external" else 0) for source in SOURCES]
        for source, count in zip(SOURCES, shares, strict=True):
            file = self.lab.folder / f"long-{source}"
            self.long.append(LongConnections(self.namespace(source), file, asked[source], count, _LONG_PERIOD))
            self.at_end.callback(self.long[-1].kill)
        for each in self.long:
            each.wait_rounds(1)
        for source in SOURCES:
            file = self.lab.folder / f"new-{source}"
            self.news.append(NewConnections(self.namespace(source), file, asked[source], rate / len(SOURCES)))
            self.at_end.callback(self.news[-1].kill)

    def more(self, count: int) -> None:
        """Wait until each load has made so many more connections, with any outcome."""
        start = [load.made for load in self.news]
        wait_until(
            lambda: all(load.made >= was + count for load, was in zip(self.news, start, strict=True)),
            f"{count} more connections of each load",
        )

    def wait_for_long_connections(self, seconds: float = PATIENCE) -> int:
        """How many of the long connections are closed or had no round in that time."""
        lost = 0
        begun = time.monotonic()
        for each in self.long:
            open_, least = each.status()
            lost += each.count - open_
            while open_ and each.status()[1] <= least:
                if time.monotonic() > begun + seconds:
                    self._still = least
                    break
                time.sleep(0.02)
        return lost

    def end_traffic(self) -> tuple[list[Record], list[Record], list[Stall]]:
        """The records of new connections and of the long ones; and when the machine paused."""
        for each in (*self.news, *self.long):
            each.stop()
        new, long, stalls = [], [], []
        for load in self.news:
            records, stood = load.records()
            new += records
            stalls += stood
        for held in self.long:
            long += held.records()[0]
        self.news, self.long = [], []
        return new, long, stalls

    # ---- looking --------------------------------------------------------------

    def serves(self, number: int) -> bool:
        """Whether the Service of this number answers a pod."""
        return self.toolbox.namespace.call(answers, cluster_ip(number), 80)

    def status(self) -> list[str]:
        """The warnings of ``status``, or why it shows nothing; none for kube-proxy."""
        if self.name != OURS:
            return []
        import json

        from pyebpf_proxy.lab.agent import command

        ran = subprocess.run(
            ["ip", "netns", "exec", self.node.namespace.name, *command(), "status", "-o", "json"],
            env=os.environ | {"PYEBPF_PROXY_DIRECTORY": str(self.node.agent.directory)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        try:
            return [each["what"] for each in json.loads(ran.stdout)["warnings"]]
        except ValueError:
            return [ran.stderr.strip()]

    def right_endpoints(self, wanted: Mapping[str, str]) -> bool:
        """Whether a new connection from a pod to each of these addresses (port 80) ends at the pod of that name."""
        return self.toolbox.namespace.call(_all_answer, dict(wanted))


def answers(address: Dual, port: int, seconds: float = 0.5) -> bool:
    """Whether both addresses accept a connection and send data."""
    for each in address:
        try:
            with socket.create_connection((each, port), timeout=seconds) as sock:
                if not sock.recv(1):
                    return False
        except OSError:
            return False
    return True


def _all_answer(wanted: dict[str, str]) -> bool:
    for address, name in wanted.items():
        try:
            with socket.create_connection((address, 80), timeout=0.5) as sock:
                if not sock.recv(64).startswith(f"{name}:".encode()):
                    return False
        except OSError:
            return False
    return True


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Poll; TimeoutError if the condition never holds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"after {seconds} s still not: {what}")
        time.sleep(0.01)


def _mount(source: bytes, target: bytes, kind: bytes, options: bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source, target, kind, 0, options) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), target.decode())
