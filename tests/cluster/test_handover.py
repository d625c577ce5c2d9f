# SPDX-License-Identifier: Apache-2.0
"""From the real kube-proxy to the agent, and back, with connections of every age: none is lost, none is moved.

On the way back the flows of the agent are young at every moment: there are new ones all the time.
"""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from pyebpf_proxy.lab.addresses import POD_CIDR, cluster_ip
from pyebpf_proxy.lab.agent import SYNCED
from pyebpf_proxy.lab.client import read_answer
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.manifests import Port, node, service, slices
from pyebpf_proxy.lab.namespace import Namespace, die_with_parent
from pyebpf_proxy.lab.servers import Ports
from tests.support.apiserver import ADMIN_TOKEN, ApiServer
from tests.support.fast_lab import ON, FastWorld, asking
from tests.support.lab_tools import wait_until
from tests.support.logs import Log, Message
from tests.support.new_flows import BOTH, NewFlows, entries, fast_ones, flowing
from tests.support.reference import kube_proxy
from tests.support.relay import Relay
from tests.support.talk import PORT, Talk, serve

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

FAMILIES = (4, 6)
ADDRESS = cluster_ip(11)
PORTS = [
    Port("tcp", PORT, PORT, "TCP", 30007),
    Port("udp", PORT, PORT, "UDP", 30007),
    Port("who", 53, 5353, "UDP"),
]
METRICS, HEALTH = 10299, 10298
#: Long flows of datagrams, of each family.
LONG = 8


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer() as made:
        yield made


@dataclass
class Place:
    """A node with two endpoints and a client, and the real kube-proxy when it is wanted."""

    world: FastWorld
    mode: str
    folder: Path
    server: ApiServer
    process: subprocess.Popen[bytes] | None = None

    def start_agent(self) -> None:
        """It looks for what kube-proxy has left at each of its looks at the rules, which come often here."""
        quick = {"minSyncPeriod": "10ms", "syncPeriod": "500ms"}
        self.world.node.agent.start({"mode": self.mode, self.mode: quick}, own=ON)
        self.world.node.agent.wait_synced()

    def start_kube_proxy(self) -> None:
        """It is there when it has programmed both families."""
        only = self.world.node
        document = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": self.mode,
            "hostnameOverride": only.name,
            "clusterCIDR": ",".join(POD_CIDR),
            "clientConnection": {
                "kubeconfig": str(self.server.kubeconfig(self.folder / "kubeconfig", {"token": ADMIN_TOKEN}))
            },
            # Beside the agent, which has the usual ports.
            "metricsBindAddress": f"127.0.0.1:{METRICS}",
            "healthzBindAddress": f"127.0.0.1:{HEALTH}",
            # The tables of this machine are not the tests'.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        }
        path = self.folder / "kube-proxy.yaml"
        path.write_text(yaml.safe_dump(document))
        with open(self.folder / "kube-proxy.log", "ab") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", only.namespace.name, str(kube_proxy()), "--config", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        wait_until(
            lambda: len(set(SYNCED.findall(only.namespace.call(_scrape)))) == 2, "kube-proxy has programmed both"
        )
        assert self.process.poll() is None

    def stop_kube_proxy(self) -> None:
        """Its rules stay."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)
            self.process = None


def _scrape() -> str:
    connection = http.client.HTTPConnection("127.0.0.1", METRICS, timeout=5)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    except OSError:
        return ""
    finally:
        connection.close()


@pytest.fixture(params=["iptables", "nftables"])
def place(request: pytest.FixtureRequest, server: ApiServer, tmp_path: Path) -> Iterator[Place]:
    with Lab(nodes=1) as lab:
        (only,) = lab.nodes
        client, near, far = (lab.add_pod(name, only, serve=False) for name in ("toolbox", "web-1", "web-2"))
        for pod in (near, far):
            serve(pod)
            pod.serve(Ports((), (), (5353,)))
        objects = [service("two", PORTS, ADDRESS)]
        objects += slices("two", PORTS, [(pod.address, only.name) for pod in (near, far)])
        known = node(only.name, only.address, only.pod_cidr)
        server.apply({name: value for name, value in known.items() if name != "status"})
        # Not by apply, which takes one address of each type.
        status = {"status": known["status"]}
        server.request("PATCH", f"/api/v1/nodes/{only.name}/status", status, "application/merge-patch+json")
        for item in objects:
            server.apply(item)
        lab.write("nodes.yaml", [known])
        lab.write("two.yaml", objects)
        with Relay(only.namespace.path, server.port):
            made = Place(FastWorld(lab, client, near, far), request.param, tmp_path, server)
            try:
                yield made
            finally:
                made.stop_kube_proxy()


# ---- long flows of datagrams ---------------------------------------------------------------------------------


class Datagrams:
    """UDP sockets that ask again and again who answers."""

    def __init__(self, namespace: Namespace, address: str) -> None:
        context = multiprocessing.get_context("fork")
        self._state = context.Array("d", [0.0, 0.0, 0.0])  # asked, without an answer, answered by another one
        self._task = namespace.start(_ask_who, address, self._state)

    @property
    def asked(self) -> int:
        return int(self._state[0])

    @property
    def wrong(self) -> tuple[int, int]:
        """Questions without an answer, and those that another endpoint answered than the first one."""
        return int(self._state[1]), int(self._state[2])

    def end(self) -> None:
        self._task.stop()


def _ask_who(address: str, state: Any) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket(family, socket.SOCK_DGRAM)) for _ in range(LONG)]
        known: dict[int, str] = {}
        for sock in socks:
            sock.settimeout(5)
            sock.connect((address, 53))
        while True:
            for sock in socks:
                try:
                    sock.send(b"who")
                    pod = read_answer(sock.recv(65536)).pod
                    state[2] += known.setdefault(sock.fileno(), pod) != pod
                except OSError:
                    state[1] += 1
                state[0] += 1
                # The machine is needed for the agent's start, too.
                time.sleep(0.005)


# ---- all of it -----------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    short: list[NewFlows]
    long: list[Talk]
    datagrams: list[Datagrams]

    def goes_on(self) -> None:
        """For some rounds of each."""
        for flows in self.short:
            flows.wait_made(20)
        for talk in self.long:
            talk.wait(20)
        for each in self.datagrams:
            before = each.asked
            wait_until(lambda each=each, before=before: each.asked > before + 3 * LONG, "datagrams")

    def check(self) -> None:
        # One of each may be under way.
        assert [each.made - each.answered <= 1 for each in self.short] == [True] * len(self.short), self.lost()
        assert [each.wrong for each in self.datagrams] == [(0, 0)] * len(self.datagrams)

    def lost(self) -> list[int]:
        return [each.made - each.answered for each in self.short]


@contextlib.contextmanager
def traffic(world: FastWorld) -> Iterator[Traffic]:
    """Of a pod through the ClusterIP, and from outside through the NodePort."""
    pod, outside = world.client.namespace, world.lab.client
    places = [(pod, ADDRESS, PORT), (outside, world.node.address, 30007)]
    with asking() as ask, contextlib.ExitStack() as stack:
        made = Traffic([], [], [])
        for family in FAMILIES:
            for namespace, address, port in places:
                for protocol in BOTH:
                    made.short.append(NewFlows(namespace, address.of(family), protocol, port, patience=10.0))
                    stack.enter_context(flowing(made.short[-1]))
                made.long += [ask(namespace, address.of(family), "tcp", port) for _ in range(2)]
            made.datagrams.append(Datagrams(pod, ADDRESS.of(family)))
            stack.callback(made.datagrams[-1].end)
        yield made


def test_from_kube_proxy_to_the_agent(place: Place) -> None:
    world, agent = place.world, place.world.node.agent
    place.start_kube_proxy()
    with traffic(world) as flows:
        flows.goes_on()
        place.stop_kube_proxy()
        flows.goes_on()
        place.start_agent()
        Log(agent).wait(Message.KUBE_PROXY_REMOVED)
        flows.goes_on()
        fast_ones(world, *flows.short)
        flows.goes_on()
        flows.check()


def test_from_the_agent_to_kube_proxy(place: Place) -> None:
    world, agent = place.world, place.world.node.agent
    place.start_agent()
    with traffic(world) as flows:
        fast_ones(world, *flows.short)
        flows.goes_on()
        place.start_kube_proxy()
        flows.goes_on()
        with asking() as ask:
            young = [
                ask(world.client.namespace, ADDRESS.of(family), protocol) for family in FAMILIES for protocol in BOTH
            ]
            assert any(e["young"] for e in entries(world))
            agent.stop()
            agent.cleanup("--keep-kube-proxy-rules")
            assert not re.search("pyebpf", world.node.namespace.run("nft", "list", "tables"))
            for talk in young:
                talk.wait(50)
        flows.goes_on()
        flows.check()
    assert place.process is not None
    assert place.process.poll() is None
