# SPDX-License-Identifier: Apache-2.0
"""A node of the lab whose agent is the DaemonSet's pod with the role's rights, an API server, and steady traffic.

A relay between agent and API server refuses, cuts and holds connections; a proxy can corrupt answers.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from pyebpf_proxy.lab.addresses import POD_CIDR, Dual, cluster_ip
from pyebpf_proxy.lab.client import ANSWERED, REFUSED, ask
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.manifests import Port, node, service, slices
from tests import ROOT
from tests.cluster.traffic import Traffic, Way
from tests.deployment.container import Container
from tests.deployment.manifests import DEPLOY
from tests.deployment.node import ACCOUNT_FOLDER, add_volume, contained, pod_of, wait_ready
from tests.support import kubeadm
from tests.support.apiserver import ADMIN_TOKEN, ApiServer
from tests.support.logs import Message
from tests.support.relay import Relay
from tests.support.spoiling_proxy import Proxy
from tests.support.world import TOOLBOX, World

#: A name in the server's certificate; the pod's hosts file has its address.
NAME = "kubernetes.default.svc"
HOSTS = f"127.0.0.1 localhost {NAME}\n"
STEADY = [Port("http", 80, 8080, node_port=30080), Port("echo", 7, 7007, node_port=30007)]
HTTP = [Port("http", 80, 8080)]
DAEMON_SET = "/apis/apps/v1/namespaces/kube-system/daemonsets/pyebpf-proxy"
CONNECTED = re.compile(r'^pyebpf_proxy_api_connected\{resource="(\w+)"\} (\S+)$', re.MULTILINE)
LAST_EVENT = re.compile(r'^pyebpf_proxy_api_last_event_timestamp_seconds\{resource="(\w+)"\} (\S+)$', re.MULTILINE)
ACCOUNT = "pyebpf-proxy"
#: The API server's flag that kubeadm sets: kube-proxy's pods are privileged.
PRIVILEGED = ("--allow-privileged",)
#: The messages about the beginning of an outage, and about its end.
BEGINNINGS = (Message.API_SERVER_FAILS, Message.RESOURCE_FAILS)
ENDS = (Message.API_SERVER_BACK, Message.RESOURCE_BACK)
LONG = 90.0


class OutageWorld(World):
    """An agent that has started before its API server, has its traffic, and is ready."""

    def __init__(self, folder: Path, server: ApiServer | None = None, mode: str = "iptables") -> None:
        """``server``: another than the usual one; it has to allow privileged pods."""
        super().__init__(Lab(nodes=1))
        self.folder = folder
        self._mode = mode
        self.server = server or ApiServer(PRIVILEGED)
        #: What the agent follows.
        self.resources = {"services", "endpointslices", "nodes", "servicecidrs"}
        self.hosts = folder / "hosts"
        self._account = folder / "account"
        self._number = 20

    def build(self) -> None:
        """The agent starts before its API server."""
        enter = self.at_end.enter_context
        enter(self.server)
        enter(self.lab)
        self.pods = [self.lab.add_pod(f"web-{number}", self.node) for number in (1, 2)]
        self.lab.add_pod(TOOLBOX, self.node, serve=False)
        self.proxy = enter(Proxy(self.server.port, self.server.folder))
        self.relay = enter(Relay(self.node.namespace.path, self.server.port))
        self.install()
        self.container = enter(self._container())
        self.relay.refuse()
        self.container.start()
        self.wait(lambda: self.logged(*BEGINNINGS), "it logs that there is no API server")
        self.first_connected = self.connected()
        self.relay.listen()
        wait_ready(self.node, self.container)
        self.wait(lambda: self.logged(*ENDS), "it logs the end of the outage")
        self.first_log = self.container.log()
        self.traffic = enter(Traffic(self.folder, self._places()))
        self.wait(lambda: self.traffic.rounds > 3, "traffic goes")

    # ---- the API server's side -----------------------------------------------------------------------------------

    def install(self) -> None:
        """Create kubeadm's objects, the overlay for them, the Node, the traffic's Service, and a token."""
        server, only = self.server, self.node
        for item in (kubeadm.config_map(f"https://{NAME}:{server.port}"), kubeadm.daemon_set()):
            server.create(item)
        admin = server.kubeconfig(self.folder / "admin.conf", {"token": ADMIN_TOKEN})
        command = ["kubectl", f"--kubeconfig={admin}", "apply", "-k", DEPLOY / "overlays" / "kubeadm"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        known = node(only.name, only.address, only.pod_cidr)
        server.create(known)
        # Not by apply, which accepts only one address of each type.
        path = f"/api/v1/nodes/{only.name}/status"
        server.request("PATCH", path, {"status": known["status"]}, "application/merge-patch+json")
        for item in (service("steady", STEADY, cluster_ip(11)), *slices("steady", STEADY, self._endpoints())):
            server.apply(item)
        self.rotate()

    def rotate(self, token: str = "") -> None:
        """Give the pod another token, as the kubelet does; or this one."""
        self._account.mkdir(exist_ok=True)
        (self._account / "token").write_text(token or self.server.token(ACCOUNT))
        (self._account / "ca.crt").write_text(self.server.ca.read_text())

    def appear(self) -> tuple[str, Dual]:
        """Create a Service with endpoints; returns its name and address."""
        self._number += 1
        name, address = f"fresh-{self._number}", cluster_ip(self._number)
        for item in (service(name, HTTP, address), *slices(name, HTTP, self._endpoints())):
            self.server.apply(item)
        return name, address

    def lose_endpoints(self, name: str) -> None:
        """Delete its slices; the Service stays."""
        for item in slices(name, HTTP, self._endpoints()):
            self.server.delete(item)

    def _endpoints(self) -> list[tuple[Dual, str | None]]:
        return [(pod.address, self.node.name) for pod in self.pods]

    # ---- the node's side -----------------------------------------------------------------------------------------

    def _container(self) -> Container:
        files = self.server.request("GET", "/api/v1/namespaces/kube-system/configmaps/kube-proxy")["data"]
        changed = yaml.safe_load(files["config.conf"]) | {"clusterCIDR": ",".join(POD_CIDR), "mode": self._mode}
        specification = pod_of(self.server.request("GET", DAEMON_SET))
        specification["containers"][0]["command"] = [sys.executable, str(Path(__file__).with_name("quick_agent.py"))]
        add_volume(specification, "account", self._account, ACCOUNT_FOLDER)
        # As the kubelet does. Other names are looked up at an address without a server.
        resolver = self.folder / "resolv.conf"
        resolver.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        self.hosts.write_text(HOSTS)
        add_volume(specification, "hosts", self.hosts, "/etc/hosts")
        add_volume(specification, "resolver", resolver, "/etc/resolv.conf")
        return contained(self.node, specification, files | {"config.conf": yaml.safe_dump(changed)})

    def _places(self) -> list[Any]:
        """From outside through the NodePorts, from a pod and from the node itself through the ClusterIPs."""
        inside = [Way(address, 80, 7) for address in cluster_ip(11)]
        outside = [Way(address, 30080, 30007) for address in self.node.address]
        ways = (("external", outside), ("pod", inside), ("node", inside))
        return [(self.namespace(source), way) for source, way in ways]

    def answers(self, address: Dual) -> set[str]:
        """The result of a request to a Service, in both families."""
        return {self.node.namespace.call(ask, address.of(family), 80).kind for family in (4, 6)}

    def serves(self, address: Dual) -> bool:
        return self.answers(address) == {ANSWERED}

    def refuses(self, address: Dual) -> bool:
        return self.answers(address) == {REFUSED}

    def connected(self) -> dict[str, bool]:
        """Which resources are followed, from the agent's own metric."""
        return {name: float(value) == 1 for name, value in CONNECTED.findall(self.node.agent.metrics())}

    def follows(self) -> bool:
        """Whether all resources are followed."""
        connected = self.connected()
        return connected.keys() == self.resources and all(connected.values())

    def lists(self) -> float:
        """How often Services and slices have been listed; the smaller number."""
        text = self.node.agent.metrics()
        return min(
            float(re.findall(rf'^pyebpf_proxy_api_lists_total{{resource="{name}"}} (\S+)', text, re.MULTILINE)[0])
            for name in ("services", "endpointslices")
        )

    def logged(self, *words: str, since: int = 0) -> list[str]:
        """Lines of the log with any of these words, from this position on."""
        return [line for line in self.container.log()[since:].splitlines() if any(word in line for word in words)]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        self.container.wait_for(condition, what, LONG)

    @contextmanager
    def outage(self, *resources: str) -> Iterator[Outage]:
        """A failure inside the block; traffic must not be affected. ``resources``: each has a line."""
        self.settle()
        outage = Outage(self, resources)
        try:
            yield outage
        except BaseException:
            self.heal()
            raise
        outage.check()

    def settle(self) -> None:
        """Forget everything before: each watch delivers an object, and the traffic's failures are cleared."""
        self.wait(self.follows, "everything is followed at first")
        before = self._events()
        note = {"metadata": {"annotations": {"tests/now": str(time.time_ns())}}}
        paths = {
            "nodes": f"/api/v1/nodes/{self.node.name}",
            "services": "/api/v1/namespaces/default/services/steady",
            "endpointslices": "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/steady-ipv4",
            "servicecidrs": "/apis/networking.k8s.io/v1/servicecidrs/kubernetes",
        }
        for name in self.resources:
            self.server.request("PATCH", paths[name], note, "application/merge-patch+json")
        self.wait(
            lambda: (
                len(events := self._events()) == len(self.resources)
                and all(at > before.get(name, 0) for name, at in events.items())
            ),
            "all watches bring something",
        )
        self.traffic.failures()

    def heal(self) -> None:
        """After a failed test: the next one must not fail because of it."""
        self.hosts.write_text(HOSTS)
        self.server.thaw()
        self.server.start()
        self.relay.target = self.server.port
        self.relay.flow()
        self.relay.listen()
        self.rotate()

    def _events(self) -> dict[str, float]:
        text = self.node.agent.metrics()
        return {name: float(value) for name, value in LAST_EVENT.findall(text)}


class Outage:
    """What the agent shows since the beginning of a failure."""

    def __init__(self, world: OutageWorld, resources: tuple[str, ...]) -> None:
        self._world = world
        self._resources = resources or ("",)
        self._begin = len(world.container.log())
        self._rounds = world.traffic.rounds
        self._since = time.monotonic()

    def _lines(self, *words: str) -> list[str]:
        return self._world.logged(*words, since=self._begin)

    def seen(self, words: str) -> None:
        """Wait until the log reports it, and the metric shows which resources are not followed."""
        world = self._world
        world.wait(lambda: self._lines(words), words)
        lost = set(self._resources) - {""}
        world.wait(
            lambda: lost <= {name for name, value in world.connected().items() if not value} and not world.follows(),
            f"the metric shows it: {world.connected()} {lost}",
        )

    def lasts(self, seconds: float) -> None:
        """Wait until it has lasted so long, with traffic."""
        self._world.wait(lambda: time.monotonic() - self._since >= seconds, "time goes by")

    def check(self) -> None:
        """One line at the beginning, one at the end, no other problem, and no failed packet."""
        world = self._world
        world.wait(world.follows, "everything is followed again")
        world.wait(lambda: len(self._lines(*ENDS)) >= len(self._resources), "it logs the end of the outage")
        rounds = world.traffic.rounds
        world.wait(lambda: world.traffic.rounds > rounds + 1, "traffic continues")
        assert world.traffic.failures() == []
        assert world.traffic.rounds > self._rounds + 3
        wrong = self._lines(" error ", " warning ")
        assert len(wrong) == len(self._resources), wrong
        for resource in self._resources:
            begun = [line for line in wrong if f"resource={resource}" in line or not resource]
            assert len(begun) == 1, wrong
            assert any(beginning in begun[0] for beginning in BEGINNINGS), wrong
        assert len(self._lines(*ENDS)) == len(self._resources), self._lines(*ENDS)


def expired(server: ApiServer) -> str:
    """An expired token of the account, signed with the server's own key."""
    head, body, _ = server.token(ACCOUNT).split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    claims |= {"iat": claims["iat"] - 7200, "nbf": claims["nbf"] - 7200, "exp": claims["exp"] - 7200}
    signed = f"{head}.{_encoded(json.dumps(claims).encode())}"
    sign = ["openssl", "dgst", "-sha256", "-sign", server.folder / "accounts.key"]
    der = subprocess.run(sign, input=signed.encode(), check=True, capture_output=True).stdout
    # SEQUENCE of two INTEGERs; the token has both as 32 bytes.
    length = der[3]
    numbers = (der[4 : 4 + length], der[6 + length :])
    return f"{signed}.{_encoded(b''.join(number.lstrip(bytes(1)).rjust(32, bytes(1)) for number in numbers))}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
