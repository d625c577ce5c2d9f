# SPDX-License-Identifier: Apache-2.0
"""The part of ``make lab-test`` that runs on a node: requests, load, a restart. Results are lines of JSON.

It is copied to the node, and needs only the agent's own installation, whose lab it uses for requests.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from multiprocessing import get_context
from typing import Any, NamedTuple

from pyebpf_proxy.lab import addresses
from pyebpf_proxy.lab.addresses import Dual
from pyebpf_proxy.lab.agent import METRICS, SYNCED
from pyebpf_proxy.lab.cluster import Lab, Node, Pod
from pyebpf_proxy.lab.demo import request_row
from pyebpf_proxy.lab.load import Load, failed
from pyebpf_proxy.lab.namespace import Namespace, Task
from pyebpf_proxy.lab.scenario import Client, Target

TIMEOUT = 30.0  # seconds for an answer; an emulated node that installs packages is slow
PODS = {"node1": ("web-1", "toolbox"), "node2": ("web-2", "web-3")}
CLUSTER_PORTS = {"tcp": 80, "udp": 53}
NODE_PORTS = {"tcp": 30080, "udp": 30053}
ECHO = {"ClusterIP": 7, "NodePort": 30007}


class Host(Namespace):
    """The machine's own network."""

    def __init__(self) -> None:
        super().__init__("host")
        self.path = "/proc/1/ns/net"


class Place:
    """Both nodes and all pods, as the rules see them; requests are only sent from those of this machine."""

    def __init__(self) -> None:
        lab = Lab()
        self.host = Host()
        self.nodes = {name: Node(name, number, self.host, lab) for number, name in enumerate(PODS, 1)}
        self.pods: dict[str, Pod] = {}
        for node in self.nodes.values():
            for index, name in enumerate(PODS[node.name]):
                address = addresses.pod_address(node.number, index)
                self.pods[name] = Pod(name, node, Namespace(name), address, f"pod{index}")

    def pod_client(self, name: str) -> Client:
        pod = self.pods[name]
        return Client(name, pod.namespace, "pod", pod.address, pod.node)

    def node_client(self, name: str) -> Client:
        node = self.nodes[name]
        return Client(name, self.host, "node", node.address, node)

    def outside(self, name: str) -> Client:
        """For another node a node is an external client."""
        node = self.nodes[name]
        return Client(name, self.host, "external", node.address, None)


def pairs(place: Place, here: str) -> list[tuple[Client, Target]]:
    """The clients and targets of this node."""
    there = next(name for name in PODS if name != here)
    entrance = place.nodes[here]
    both = (place.pods["web-1"], place.pods["web-2"])
    web = Target("web ClusterIP", "ClusterIP", addresses.cluster_ip(10), CLUSTER_PORTS, both, entrance)
    vip = Target("web LB VIP", "LoadBalancer", addresses.vip(10), CLUSTER_PORTS, both, entrance)
    empty = Target("empty ClusterIP", "ClusterIP", addresses.cluster_ip(30), CLUSTER_PORTS, (), entrance)
    other = place.nodes[there]
    port = Target(f"web NodePort at {there}", "NodePort", other.address, NODE_PORTS, both, other)
    local_ports = {"tcp": 30180, "udp": 30153}
    local = Target(f"local NodePort at {there}", "NodePort", other.address, local_ports, both, other, True)
    pods = [place.pod_client(name) for name in PODS[here]]
    node, outside = place.node_client(here), place.outside(here)
    own = [(client, web) for client in (*pods, node)]
    return [*own, (pods[-1], vip), (node, vip), (node, empty), (outside, port), (outside, local)]


def ask_all(here: str) -> None:
    """Every pair, family and protocol; one row per line."""
    for client, target in pairs(Place(), here):
        for family in target.families:
            for protocol in target.ports:
                row = request_row(client, target, family, protocol, TIMEOUT)
                print(json.dumps([here, *row]), flush=True)


class Talk(NamedTuple):
    """A long connection: answers, the longest wait for one in seconds, and the error that ended it (empty: this
    side).
    """

    answers: int
    longest: float
    error: str


class Stream:
    """One connection to an echo server in its own process, held until it is stopped."""

    def __init__(self, namespace: Namespace, address: str, port: int, pause: float) -> None:
        context = get_context("fork")
        self._stop = context.Event()
        self._made = context.RawValue("L", 0)
        self._task: Task[Talk] = namespace.start(_talk, self._stop, self._made, address, port, pause)

    @property
    def made(self) -> int:
        return int(self._made.value)

    @property
    def ended(self) -> bool:
        """Whether it ended without being stopped: lost."""
        return self._task.done()

    def stop(self) -> Talk:
        self._stop.set()
        return self._task.result(2 * TIMEOUT)


def _talk(stop: Any, made: Any, address: str, port: int, pause: float) -> Talk:
    longest = 0.0
    try:
        with socket.create_connection((address, port), timeout=TIMEOUT) as connection:
            while not stop.is_set():
                began = time.monotonic()
                sent = b"%64d" % made.value
                connection.sendall(sent)
                received = b""
                while len(received) < len(sent):
                    more = connection.recv(len(sent) - len(received))
                    if not more:
                        return Talk(made.value, longest, "closed by the other side")
                    received += more
                if received != sent:
                    return Talk(made.value, longest, f"sent {sent!r}, received {received!r}")
                longest = max(longest, time.monotonic() - began)
                made.value += 1
                stop.wait(pause)
    except OSError as error:
        return Talk(made.value, longest, str(error))
    return Talk(made.value, longest, "")


class Work(NamedTuple):
    """A row of the load: new connections one after the other, or (``streams`` > 0) long connections."""

    client: str
    what: str
    family: int
    protocol: str
    streams: int


def works(here: str) -> list[Work]:
    """The load of this node while an agent is restarted or replaced."""
    if here == "node1":
        return [
            Work("toolbox", "ClusterIP", 4, "tcp", 0),
            Work("toolbox", "ClusterIP", 6, "udp", 0),
            Work("node1", "ClusterIP", 6, "tcp", 0),
            Work("node1", "ClusterIP", 4, "udp", 0),
            Work("toolbox", "ClusterIP", 4, "tcp", 3),
            Work("toolbox", "ClusterIP", 6, "tcp", 3),
            Work("node1", "ClusterIP", 4, "tcp", 3),
        ]
    return [
        Work("web-3", "ClusterIP", 6, "tcp", 0),
        Work("node2", "NodePort", 4, "tcp", 0),
        Work("node2", "NodePort", 6, "udp", 0),
        Work("node2", "NodePort", 4, "tcp", 3),
        Work("node2", "NodePort", 6, "tcp", 3),
    ]


def _start(place: Place, work: Work, pause: float) -> list[Load | Stream]:
    namespace = place.pods[work.client].namespace if work.client in place.pods else place.host
    node_port = work.what == "NodePort"

    def address(service: Dual) -> str:
        return (place.nodes["node1"].address if node_port else service).of(work.family)

    if work.streams:
        echo = address(addresses.cluster_ip(40))
        return [Stream(namespace, echo, ECHO[work.what], pause) for _ in range(work.streams)]
    port = (NODE_PORTS if node_port else CLUSTER_PORTS)[work.protocol]
    return [Load(namespace, address(addresses.cluster_ip(10)), port, work.protocol, TIMEOUT, pause)]


def load(here: str, pause: float) -> None:
    """Load from now on, each part with ``pause`` seconds between two requests.

    ``count`` on standard input: prints the smallest number of requests; another line: the end.
    """
    place = Place()
    running = [(work, _start(place, work, pause)) for work in works(here)]
    for line in sys.stdin:
        if line.strip() != "count":
            break
        # A lost one is reported at the end; it must not block the others.
        going = [each for _, several in running for each in several if not (isinstance(each, Stream) and each.ended)]
        print(json.dumps(min((each.made for each in going), default=sys.maxsize)), flush=True)
    for work, several in running:
        print(json.dumps([here, *_came_of(work, several)]), flush=True)


def _came_of(work: Work, several: list[Load | Stream]) -> tuple[str, str, str, str, int, int, float, str]:
    """Client, target, family, protocol, requests, how many failed, the longest wait in seconds, the first error."""
    requests = lost = 0
    longest = 0.0
    error = ""
    for each in several:
        if isinstance(each, Stream):
            talk = each.stop()
            requests += talk.answers
            lost += bool(talk.error)
            longest = max(longest, talk.longest)
            error = error or talk.error
        else:
            samples = each.stop()
            broken = failed(samples)
            requests += len(samples)
            lost += len(broken)
            longest = max(longest, *(sample.took for sample in samples))
            error = error or (f"{broken[0].kind} {broken[0].error}" if broken else "")
    kind = f"{work.streams} that last" if work.streams else "new ones"
    return work.client, f"{work.what}, {kind}", f"IPv{work.family}", work.protocol, requests, lost, longest, error


def _main_process() -> str:
    command = ["systemctl", "show", "--property", "MainPID", "--value", "pyebpf-proxy"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def agent() -> None:
    """The running agent: process, version, and the layouts of the pinned maps."""
    version = subprocess.run(["pyebpf-proxy", "--version"], check=True, capture_output=True, text=True).stdout
    layouts = []
    for folder, names, _ in os.walk("/sys/fs/bpf"):
        layouts += [f"{os.path.basename(folder)}/{name}" for name in names if re.fullmatch(r"v\d+", name)]
    print(json.dumps({"process": _main_process(), "version": version.split()[-1], "layouts": sorted(layouts)}))


def restart() -> None:
    """Restart the service; returns when the new process has written both families."""
    began, before = time.time(), _main_process()
    subprocess.run(["systemctl", "restart", "pyebpf-proxy"], check=True)
    while not _synced_since(began):
        if time.time() > began + 600:
            raise SystemExit("the agent has written nothing for 600 s after its restart")
        time.sleep(1)  # each request costs CPU time, and an emulated node has little
    print(json.dumps({"before": before, "after": _main_process(), "seconds": time.time() - began}))


def _synced_since(moment: float) -> bool:
    connection = http.client.HTTPConnection(*METRICS, timeout=10)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    except OSError:
        return False
    finally:
        connection.close()
    written = [float(value) for _, value in SYNCED.findall(text)]
    return len(written) >= 2 and min(written) >= moment


if __name__ == "__main__":
    name = socket.gethostname()
    verbs = {"ask": lambda: ask_all(name), "agent": agent, "restart": restart}
    verbs["load"] = lambda: load(name, float(sys.argv[2]))
    verbs[sys.argv[1]]()
