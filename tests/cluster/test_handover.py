# SPDX-License-Identifier: Apache-2.0
"""From the real kube-proxy to the agent, and back, under full load: no connection is lost, none is moved."""

from __future__ import annotations

import contextlib
import http.client
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from pyebpf_proxy.lab.addresses import POD_CIDR, cluster_ip
from pyebpf_proxy.lab.agent import SYNCED
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.manifests import Port, node, service, slices
from pyebpf_proxy.lab.namespace import die_with_parent
from tests.changes.load import FullLoad, Source, Way
from tests.changes.traffic import Server, plain_rate
from tests.support.apiserver import ADMIN_TOKEN, ApiServer
from tests.support.fast_lab import FastWorld
from tests.support.lab_tools import wait_until
from tests.support.logs import Log, Message
from tests.support.reference import kube_proxy
from tests.support.relay import Relay

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf, pytest.mark.alone]

ADDRESS = cluster_ip(11)
PORT, TARGET_PORT, NODE_PORT = 80, 8080, 30007
PORTS = [Port(protocol.lower(), PORT, TARGET_PORT, protocol, NODE_PORT) for protocol in ("TCP", "UDP")]
NAMES = frozenset({f"web-1:{TARGET_PORT}", f"web-2:{TARGET_PORT}"})
METRICS, HEALTH = 10299, 10298


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer() as made:
        yield made


@dataclass
class Place:
    """A node with two endpoints and a client, and the real kube-proxy when a test starts it."""

    world: FastWorld
    mode: str
    folder: Path
    server: ApiServer
    process: subprocess.Popen[bytes] | None = None

    def start_agent(self) -> None:
        """The agent searches for kube-proxy's leftovers whenever it reads the rules, which is often here."""
        quick = {"minSyncPeriod": "10ms", "syncPeriod": "500ms"}
        self.world.node.agent.start({"mode": self.mode, self.mode: quick})
        self.world.node.agent.wait_synced()

    def start_kube_proxy(self) -> None:
        """It has started when it has programmed both families."""
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
            # With other ports than the agent.
            "metricsBindAddress": f"127.0.0.1:{METRICS}",
            "healthzBindAddress": f"127.0.0.1:{HEALTH}",
            # The tests do not change this machine's conntrack limits.
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
    with Lab(nodes=1) as lab, contextlib.ExitStack() as servers:
        (only,) = lab.nodes
        client, near, far = (lab.add_pod(name, only, serve=False) for name in ("toolbox", "web-1", "web-2"))
        for pod in (near, far):
            servers.callback(Server(pod.namespace, pod.name, TARGET_PORT).kill)
        objects = [service("two", PORTS, ADDRESS)]
        objects += slices("two", PORTS, [(pod.address, only.name) for pod in (near, far)])
        known = node(only.name, only.address, only.pod_cidr)
        server.apply({name: value for name, value in known.items() if name != "status"})
        # Not by apply, which accepts only one address of each type.
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


# ---- all of it -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_load(place: Place, capsys: pytest.CaptureFixture[str]) -> Iterator[FullLoad]:
    """From a pod and from the node to the ClusterIP, from outside to the NodePort; in the end all were answered."""
    world = place.world
    inside = [Way(address, PORT, NAMES) for address in ADDRESS]
    outside = [Way(address, NODE_PORT, NAMES) for address in world.node.address]
    sources = {
        "external": Source(world.lab.client, outside),
        "pod": Source(world.client.namespace, inside),
        "node": Source(world.node.namespace, inside),
    }
    direct = f"{world.near.address.v4},{TARGET_PORT}"
    plain = plain_rate(world.lab.folder, {name: each.namespace for name, each in sources.items()}, direct)
    with FullLoad(world.lab.folder, sources, plain) as load:
        yield load
        outcome = load.end()
    with capsys.disabled():
        print(f"\n  {outcome.size()}")
    outcome.report()


def fast(world: FastWorld, load: FullLoad) -> None:
    """The load continues, and many of its connections are young flows."""
    before = world.count("new_flow_fast")
    load.wait_progress()
    wait_until(lambda: world.count("new_flow_fast") > before + load.wanted / 4, "new flows take the fast path")


def test_from_kube_proxy_to_the_agent(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    world, agent = place.world, place.world.node.agent
    place.start_kube_proxy()
    with full_load(place, capsys) as load:
        load.wait_progress()
        place.stop_kube_proxy()
        load.wait_progress()
        place.start_agent()
        Log(agent).wait(Message.KUBE_PROXY_REMOVED)
        load.wait_progress()
        fast(world, load)


def test_from_the_agent_to_kube_proxy(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Some flows of the agent are young at every moment, since new ones start all the time."""
    world, agent = place.world, place.world.node.agent
    place.start_agent()
    with full_load(place, capsys) as load:
        fast(world, load)
        place.start_kube_proxy()
        fast(world, load)
        agent.stop()
        agent.cleanup("--keep-kube-proxy-rules")
        assert not re.search("pyebpf", world.node.namespace.run("nft", "list", "tables"))
        load.wait_progress()
    assert place.process is not None
    assert place.process.poll() is None
