# SPDX-License-Identifier: Apache-2.0
"""The pod of deploy/ as a real API server returns it, run on a node of the lab: its rights suffice."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pyebpf_proxy.cluster.model import says_programmed
from pyebpf_proxy.cluster.objects import task_pod
from pyebpf_proxy.kube.api.resources import ENDPOINT_SLICES, SERVICE_CIDRS, SERVICES, Resource
from pyebpf_proxy.kube.api.resources import node as one_node
from pyebpf_proxy.lab.addresses import POD_CIDR, cluster_ip
from pyebpf_proxy.lab.client import ANSWERED, REFUSED, ask
from pyebpf_proxy.lab.cluster import Lab, Node
from pyebpf_proxy.lab.manifests import Port, node, service, slices
from tests import CACHE, ROOT
from tests.cluster.account import Account
from tests.deployment import manifests
from tests.deployment.container import Container, die_with_parent
from tests.deployment.manifests import DEPLOY
from tests.deployment.node import (
    ACCOUNT_FOLDER,
    add_volume,
    contained,
    pod_of,
    probe_succeeds,
    use_folder,
    wait_ready,
)
from tests.support import kubeadm
from tests.support.apiserver import ADMIN_TOKEN, ApiServer
from tests.support.logs import Log, Message
from tests.support.relay import Relay

DAEMON_SET = "/apis/apps/v1/namespaces/kube-system/daemonsets/pyebpf-proxy"
PORTS = [Port("http", 80, 8080)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """With deploy/overlays/kubeadm applied to kubeadm's objects."""
    with ApiServer(("--allow-privileged",)) as made:
        for item in (kubeadm.config_map(made.url), kubeadm.daemon_set()):
            made.create(item)
        admin = made.kubeconfig(tmp_path_factory.mktemp("admin") / "admin.conf", {"token": ADMIN_TOKEN})
        subprocess.run(
            ["kubectl", f"--kubeconfig={admin}", "apply", "-k", DEPLOY / "overlays" / "kubeadm"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        yield made


@pytest.fixture(scope="module")
def small(server: ApiServer) -> Iterator[Lab]:
    """One Node in the API server, with one pod behind a Service; it can reach the API server."""
    with Lab(nodes=1) as lab:
        (only,) = lab.nodes
        pod = lab.add_pod("web-1", only)
        known = node(only.name, only.address, only.pod_cidr)
        server.create(known)
        # Not by apply, which accepts only one address of each type.
        status = {"status": known["status"]}
        server.request("PATCH", f"/api/v1/nodes/{only.name}/status", status, "application/merge-patch+json")
        for item in (
            service("web", PORTS, cluster_ip(11)),
            *slices("web", PORTS, [(pod.address, only.name)]),
        ):
            server.apply(item)
        with Relay(only.namespace.path, server.port):
            yield lab


def started(server: ApiServer, lab: Lab, configuration: dict[str, Any]) -> Container:
    """The DaemonSet's container with the files that the kubelet mounts: ConfigMap, token, CA."""
    (only,) = lab.nodes
    daemon_set = server.request("GET", DAEMON_SET)
    files = server.request("GET", "/api/v1/namespaces/kube-system/configmaps/kube-proxy")["data"]
    changed = yaml.safe_load(files["config.conf"]) | configuration
    account = only.agent.folder / "account"
    account.mkdir(parents=True, exist_ok=True)
    (account / "token").write_text(server.token(daemon_set["spec"]["template"]["spec"]["serviceAccountName"]))
    (account / "ca.crt").write_text(server.ca.read_text())
    specification = pod_of(daemon_set)
    add_volume(specification, "account", account, ACCOUNT_FOLDER)
    return contained(only, specification, files | {"config.conf": yaml.safe_dump(changed)})


def reasons_of_events(server: ApiServer, name: str) -> set[str]:
    """The reasons of the events about an object of this name, such as a Node."""
    events = server.request("GET", "/apis/events.k8s.io/v1/events")["items"]
    return {event["reason"] for event in events if event["regarding"].get("name") == name}


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_the_agent_serves_the_objects_of_the_api_server(server: ApiServer, small: Lab, mode: str) -> None:
    """With kubeadm's own configuration, except for the lab's pod network: Services are created, changed and deleted."""
    (only,) = small.nodes
    (pod,) = only.pods
    with started(server, small, {"clusterCIDR": ",".join(POD_CIDR), "mode": mode}) as container:
        container.start()
        wait_ready(only, container)
        for family in (4, 6):
            assert only.namespace.call(ask, cluster_ip(11).of(family), 80).kind == ANSWERED
        fresh = service("fresh", PORTS, cluster_ip(12))
        server.apply(fresh)
        container.wait_for(lambda: only.namespace.call(ask, cluster_ip(12).v4, 80).kind == REFUSED, "no endpoints yet")
        for item in slices("fresh", PORTS, [(pod.address, only.name)]):
            server.apply(item)
        container.wait_for(lambda: only.namespace.call(ask, cluster_ip(12).v4, 80).kind == ANSWERED, "the slice came")
        for item in slices("fresh", PORTS, [(pod.address, only.name)]):
            server.delete(item)
        server.delete(fresh)
        container.wait_for(lambda: only.namespace.call(ask, cluster_ip(12).v4, 80).kind != ANSWERED, "the Service went")
        free = cluster_ip(200)
        server.apply(service("thief", PORTS, cluster_ip(13), externalIPs=[free.v4]))
        for item in slices("thief", PORTS, [(pod.address, only.name)]):
            server.apply(item)
        container.wait_for(lambda: only.namespace.call(ask, cluster_ip(13).v4, 80).kind == ANSWERED, "the thief came")
        container.wait_for(lambda: "AddressRefused" in reasons_of_events(server, "thief"), "its address is refused")
        assert only.namespace.call(ask, free.v4, 80).kind != ANSWERED, "an address that another Service may get"
        server.delete(service("thief", PORTS, cluster_ip(13)))
        container.wait_for(lambda: "Starting" in reasons_of_events(server, only.name), "the event of the start")
        log = container.log()
        assert not [line for line in log.splitlines() if "orbidden" in line or "not allowed" in line], log
        assert container.terminate() == 0


@contextmanager
def kube_proxy(server: ApiServer, on: Node, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The real kube-proxy in the node's network, until the end."""
    admin = server.kubeconfig(folder / "kube-proxy.conf", {"token": ADMIN_TOKEN})
    command = [
        *("ip", "netns", "exec", on.namespace.name),
        *(str(CACHE / "go" / "kube-proxy"), f"--kubeconfig={admin}", f"--hostname-override={on.name}"),
        *("--proxy-mode=iptables", f"--cluster-cidr={','.join(POD_CIDR)}", "--conntrack-max-per-core=0"),
    ]
    with open(folder / "kube-proxy.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def test_the_agent_runs_beside_kube_proxy_during_the_takeover(server: ApiServer, small: Lab, tmp_path: Path) -> None:
    """For `cluster install`: while kube-proxy runs, the agent reports that it has programmed the node, but it is not
    ready. Without kube-proxy it becomes ready by itself.
    """
    (only,) = small.nodes
    with ExitStack() as stack:
        process = stack.enter_context(kube_proxy(server, only, tmp_path))
        agent = stack.enter_context(started(server, small, {"clusterCIDR": ",".join(POD_CIDR)}))
        end = time.monotonic() + 30
        while not only.namespace.run("ss", "-Hltn", "sport", "=", ":10256"):
            assert time.monotonic() < end, "kube-proxy does not serve its health page"
            time.sleep(0.1)
        agent.start()
        agent.wait_for(lambda: says_programmed(agent.log()), "it reports that the node is programmed")
        assert only.namespace.call(ask, cluster_ip(11).v4, 80).kind == ANSWERED
        with pytest.raises(AssertionError, match="readinessProbe succeeds"):
            wait_ready(only, agent, 2)
        process.kill()
        process.wait()
        wait_ready(only, agent)
        assert only.namespace.call(ask, cluster_ip(11).v4, 80).kind == ANSWERED
        assert agent.terminate() == 0


def test_an_agent_that_may_not_list_endpoints_is_live_and_not_ready(server: ApiServer, small: Lab) -> None:
    """A roll-out of such a release stops: no node after this one gets an agent that follows nothing."""
    role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/pyebpf-proxy"
    rules = server.request("GET", role)["rules"]
    fewer = [rule for rule in rules if "endpointslices" not in rule["resources"]]

    def grant(wanted: list[dict[str, Any]]) -> None:
        server.request("PATCH", role, {"rules": wanted}, "application/merge-patch+json")

    with started(server, small, {"clusterCIDR": ",".join(POD_CIDR)}) as container:
        grant(fewer)
        try:
            container.start()
            container.wait_for(lambda: "endpointslices" in container.log(), "it logs what it may not list")
            container.wait_for(lambda: probe_succeeds(container, "livenessProbe"), "livenessProbe succeeds")
            assert not probe_succeeds(container, "readinessProbe")
        finally:
            grant(rules)
        wait_ready(small.nodes[0], container)
        assert container.terminate() == 0


def test_kube_proxy_takes_over_again(server: ApiServer, small: Lab, tmp_path: Path) -> None:
    """The clean-up waits until kube-proxy has programmed the node. No connection fails in between."""
    (only,) = small.nodes

    def answered() -> bool:
        return all(only.namespace.call(ask, cluster_ip(11).of(family), 80).kind == ANSWERED for family in (4, 6))

    def rules() -> dict[str, list[str]]:
        saved = {name: only.namespace.run(name, "-t", "nat") for name in ("iptables-save", "ip6tables-save")}
        return {
            name: [line for line in text.splitlines() if line.startswith("-A KUBE-")] for name, text in saved.items()
        }

    def programmed() -> bool:
        return all(sum("default/web:http" in line for line in lines) > 2 for lines in rules().values())

    cleaning = pod_of(manifests.one(manifests.build(DEPLOY / "overlays/kubeadm-back/cleanup"), "DaemonSet"))
    clean = tmp_path / "clean"
    clean.mkdir()
    use_folder(cleaning, clean)
    path = {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"}

    with ExitStack() as stack:
        agent = stack.enter_context(started(server, small, {"clusterCIDR": ",".join(POD_CIDR)}))
        agent.start()
        wait_ready(only, agent)
        assert agent.terminate() == 0
        assert answered(), "the attached programs work without the agent"
        # The clean-up's pod starts first, as it may if kube-proxy's pods count before they have programmed the node.
        cleaner = stack.enter_context(contained(only, cleaning, environment=path))
        cleaner.start()
        cleaner.wait_for(lambda: "waiting for kube-proxy at 127.0.0.1:10256" in cleaner.log(), "it waits", 30)
        process = stack.enter_context(kube_proxy(server, only, tmp_path))
        end = time.monotonic() + 120
        while not (clean / "done").exists():
            assert time.monotonic() < end, cleaner.log()
            assert answered(), "either the agent's programs or kube-proxy's rules exist"
            cleaner.wait_for(lambda: True, "it runs")
            time.sleep(0.05)
        assert "kube-proxy has programmed this node: IPv4, IPv6" in cleaner.log()
        assert programmed(), "kube-proxy's rules of both families exist"
        assert "pyebpf-proxy" not in only.namespace.run("nft", "list", "tables")
        assert answered(), "kube-proxy's rules serve"
        assert process.poll() is None
        cleaner.kill()
        process.kill()
        process.wait()
        # `cluster install` removes by a pod what kube-proxy wrote while the agent ran.
        verify = ["pyebpf-proxy", "cluster", "on-node", "verify"]
        removing = task_pod("verify", "verify", only.name, "image", verify)["spec"]
        use_folder(removing, clean)
        removing["containers"][0]["command"][0] = str(Path(sys.executable).parent / "pyebpf-proxy")
        container = stack.enter_context(contained(only, removing, environment=path))
        container.start()
        assert container.wait_ended() == 0, container.log()
        Log(container).some(f"{Message.KUBE_PROXY_REMOVED}: ")
        assert not any(rules().values())


# ---- exactly these rights ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def account(server: ApiServer) -> Account:
    return Account(server)


@pytest.mark.parametrize(
    "resource", [SERVICES, ENDPOINT_SLICES, SERVICE_CIDRS, one_node("node1")], ids=lambda resource: resource.name
)
def test_followed_resources_may_only_be_listed_and_watched(account: Account, resource: Resource) -> None:
    query = "&".join(f"{name}={urllib.request.quote(text)}" for name, text in resource.selectors.items())
    assert account.status("GET", f"{resource.path}?{query}") == 200
    assert account.status("GET", f"{resource.path}?{query}&watch=true&timeoutSeconds=1") == 200
    assert account.status("DELETE", f"{resource.path}/no-such") in (403, 404)
    assert account.status("DELETE", f"{resource.path}?dryRun=All") == 403
    assert account.status("POST", f"{resource.path}?dryRun=All", {}) in (403, 405)


def test_events_may_be_created_and_updated(account: Account) -> None:
    path = "/apis/events.k8s.io/v1/namespaces/default/events"
    event = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "node1.1", "namespace": "default"},
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "kube-proxy",
        "reportingInstance": "node1",
        "action": "StartKubeProxy",
        "reason": "Starting",
        "type": "Normal",
        "regarding": {"kind": "Node", "name": "node1"},
    }
    assert account.status("POST", path, event) == 201
    series = {"series": {"count": 2, "lastObservedTime": "2026-01-01T00:00:01.000000Z"}}
    assert account.status("PATCH", f"{path}/node1.1", series, "application/merge-patch+json") == 200
    assert account.status("DELETE", f"{path}/node1.1") == 403
    assert account.status("GET", path) == 403


@pytest.mark.parametrize("path", ["secrets", "configmaps", "pods", "endpoints", "namespaces", "serviceaccounts"])
def test_nothing_else_may_be_read(account: Account, path: str) -> None:
    assert account.status("GET", f"/api/v1/{path}") == 403


def test_every_rule_of_the_role_is_tested() -> None:
    """A new rule of the role needs a request that uses it."""
    rules = manifests.one(manifests.base(), "ClusterRole")["rules"]
    followed = {(each.group, each.name) for each in (SERVICES, ENDPOINT_SLICES, SERVICE_CIDRS, one_node("x"))}
    granted = {(group, name) for rule in rules for group in rule["apiGroups"] for name in rule["resources"]}
    assert granted == followed | {("events.k8s.io", "events")}
