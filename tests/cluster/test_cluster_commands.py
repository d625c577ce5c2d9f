# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy cluster`` against a real API server: there and back, with faults in the middle.

Kubelets and the DaemonSet controller are simulated (simulated_nodes.py); requests, validation, rights, Leases and
watches are real. In each test a recorder looks for a moment at which a node has no proxy.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from . import kubeadm
from .apiserver import ADMIN_TOKEN, ApiError, ApiServer, Object
from .simulated_nodes import SETS, SYSTEM, Recorder, SimulatedNodes

NAMES = ["n1", "n2", "n3"]
IMAGE, NEWER = "registry.example/pyebpf-proxy:1", "registry.example/pyebpf-proxy:2"
CONFIG_MAP = "/api/v1/namespaces/kube-system/configmaps/kube-proxy"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(("--allow-privileged",)) as made:
        yield made


@pytest.fixture
def cluster(server: ApiServer, tmp_path: Path) -> Iterator[SimulatedNodes]:
    """Three nodes on which kube-proxy runs."""
    server.kubeconfig(tmp_path / "admin.conf", {"token": ADMIN_TOKEN})
    server.apply(kubeadm.config_map("https://192.0.2.1:6443"))
    with SimulatedNodes(server, NAMES, tmp_path) as nodes:
        server.create(kubeadm.daemon_set())
        nodes.until(lambda pods: proxies(pods) == taken(), "kube-proxy runs everywhere")
        with Recorder(server) as recorder:
            yield nodes
        assert recorder.served == set(NAMES), "the recorder has not seen them"
        assert recorder.gaps == []


def proxies(pods: dict[str, Object]) -> dict[str, list[str]]:
    """Programmed proxies by node."""
    found: dict[str, list[str]] = {}
    for pod in pods.values():
        conditions = {each["type"]: each["status"] for each in pod.get("status", {}).get("conditions", ())}
        if conditions.get("Programmed") == "True":
            found.setdefault(pod["spec"]["nodeName"], []).append(pod["metadata"]["labels"]["k8s-app"])
    return {node: sorted(names) for node, names in sorted(found.items())}


def command(folder: Path, *arguments: str) -> list[str]:
    confirmed = ["--yes"] if arguments[0] in ("install", "upgrade", "rollback", "test") else []
    where = ["--kubeconfig", str(folder / "admin.conf")]
    if "--timeout" not in arguments:
        where += ["--timeout", "20"]
    return [sys.executable, "-m", "pyebpf_proxy", "cluster", *arguments, *where, *confirmed]


def run(folder: Path, *arguments: str, status: int = 0) -> str:
    """What the command says, stderr included."""
    done = subprocess.run(command(folder, *arguments), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def daemon_set(server: ApiServer, name: str = "kube-proxy") -> Any:
    return server.request("GET", f"{SETS}/{name}")


def taken(*nodes: str) -> dict[str, list[str]]:
    return {node: ["pyebpf-proxy" if node in nodes else "kube-proxy"] for node in NAMES}


def now(server: ApiServer) -> dict[str, list[str]]:
    return proxies({each["metadata"]["name"]: each for each in server.request("GET", SYSTEM)["items"]})


def test_there_with_a_canary_and_back(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    original = daemon_set(server)["spec"]
    before = {each["metadata"]["uid"] for each in server.request("GET", SYSTEM)["items"]}
    assert "3 nodes" in run(tmp_path, "status")
    said = run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    assert "[1/1] n1: taken over, and verified" in said
    assert "2 nodes are left to kube-proxy" in said
    assert now(server) == taken("n1")
    assert daemon_set(server, "pyebpf-proxy")["spec"]["template"]["spec"]["containers"][0]["image"] == IMAGE
    assert "1 of 3 nodes" in run(tmp_path, "status")
    assert "nothing to do" in run(tmp_path, "install", "--canary", "1")
    # The other nodes' pods are the very same: no restart anywhere.
    kept = {each["metadata"]["uid"] for each in server.request("GET", SYSTEM)["items"]}
    assert len(kept & before) == 2
    document = json.loads(run(tmp_path, "install", "-o", "json"))
    assert (document["done"], document["error"]) == (["n2", "n3"], None)
    assert now(server) == taken(*NAMES)
    table = json.loads(run(tmp_path, "status", "-o", "json"))
    assert [row["state"] for row in table["nodes"]] == ["taken over"] * 3
    assert table["takenOver"] == 3
    assert "all objects of pyebpf-proxy are removed" in run(tmp_path, "rollback")
    assert now(server) == taken()
    assert daemon_set(server)["spec"] == original, "kubeadm's DaemonSet is as it was"
    assert "pyebpf-proxy/before" not in daemon_set(server)["metadata"].get("annotations", {})
    for path in (f"{SETS}/pyebpf-proxy", "/apis/rbac.authorization.k8s.io/v1/clusterroles/pyebpf-proxy"):
        with pytest.raises(ApiError, match="not found"):
            server.request("GET", path)
    labels = [each["metadata"]["labels"] for each in server.request("GET", "/api/v1/nodes")["items"]]
    assert not any(name.startswith("pyebpf-proxy/") for each in labels for name in each)
    assert "nothing to do" in run(tmp_path, "rollback")


def test_after_kubeadm_has_rewritten_the_daemonset(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    """As `kubeadm upgrade` does. And a node whose kubelet does not report is left out."""
    down = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
    server.request("PATCH", "/api/v1/nodes/n3/status", down, "application/merge-patch+json")
    original = daemon_set(server)
    said = run(tmp_path, "install", "--image", IMAGE)
    assert "left out, because their kubelets do not report: n3" in said
    assert now(server) == taken("n1", "n2")
    rewritten = daemon_set(server) | {"spec": original["spec"]}
    rewritten["metadata"]["annotations"].pop("pyebpf-proxy/before")
    server.request("PUT", f"{SETS}/kube-proxy", rewritten)
    both = ["kube-proxy", "pyebpf-proxy"]
    cluster.until(lambda pods: proxies(pods) == {"n1": both, "n2": both, "n3": ["kube-proxy"]}, "both run")
    assert "its DaemonSet was rewritten" in run(tmp_path, "status", status=1)
    # One of the agents is not as it should be: kube-proxy must not go there, though the node has its label.
    cluster.faults.never_programmed.add("n2")
    cluster.until(lambda pods: proxies(pods)["n2"] == ["kube-proxy"], "the agent of n2 has not programmed it any more")
    said = run(tmp_path, "install", "--timeout", "3", status=1)
    assert "n2: the agent has not programmed the node" in said
    assert now(server) == taken("n1")
    cluster.faults.never_programmed.clear()
    run(tmp_path, "install")
    assert now(server) == taken("n1", "n2")


@pytest.mark.parametrize("fault", ["image", "ready", "programmed", "service"])
def test_what_fails_is_given_back(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path, fault: str) -> None:
    if fault == "image":
        cluster.faults.missing.add((IMAGE, "n2"))
        words = f'the agent does not start: the image cannot be pulled: failed to pull "{IMAGE}": not found'
    elif fault == "ready":
        cluster.faults.never_ready.add("n2")
        words = "the agent's pod is not ready: not within 3 s"
    elif fault == "programmed":
        cluster.faults.never_programmed.add("n2")
        words = "the agent has not programmed the node: not within 3 s"
    else:
        cluster.faults.errands["verify", "n2"] = words = "no connection to the Service at 10.96.0.1 port 443: timed out"
    said = run(tmp_path, "install", "--image", IMAGE, "--timeout", "3", status=1)
    assert "[1/3] n1: taken over, and verified" in said
    (error,) = (line for line in said.splitlines() if line.startswith("Error: "))
    assert error.startswith("Error: n2: ")
    assert words in error
    assert error.endswith("; the node was given back to kube-proxy; done before: n1")
    assert now(server) == taken("n1")
    pods = [each["metadata"]["name"] for each in server.request("GET", SYSTEM)["items"]]
    assert len(pods) == 3, "errands are removed"
    if fault == "image":
        # Once it is repaired, the same command goes on.
        cluster.faults.missing.clear()
        run(tmp_path, "install")
        assert now(server) == taken(*NAMES)


def test_the_api_server_goes_away_and_comes_back(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    process = started(tmp_path, "install", "--image", IMAGE)
    cluster.until(lambda pods: "pyebpf-proxy" in proxies(pods).get("n1", ()), "the first agent runs")
    server.kill()
    time.sleep(2)
    server.start()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "the API server does not answer (" in said
    assert "the API server answers again" in said
    assert now(server) == taken(*NAMES)


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(folder, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def test_ctrl_c_and_kill_leave_a_proxy_and_the_next_one_goes_on(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    process = started(tmp_path, "install", "--image", IMAGE)
    cluster.until(lambda pods: "pyebpf-proxy" in proxies(pods).get("n2", ()), "the second node's agent runs")
    os.kill(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert "n2: stopped here; a proxy serves the node" in said
    assert now(server)["n1"] == ["pyebpf-proxy"]
    # Killed without a word: the Lease is held until it expires, so only a rollback by hand of it shows the way.
    process = started(tmp_path, "install")
    cluster.until(lambda pods: "pyebpf-proxy" in proxies(pods).get("n3", ()), "the third node's agent runs")
    process.kill()
    process.wait()
    assert "another command changes this cluster: install by " in run(tmp_path, "install", status=1)
    path = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/pyebpf-proxy-cluster"
    past = {"spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}}
    server.request("PATCH", path, past, "application/merge-patch+json")
    run(tmp_path, "install")
    assert now(server) == taken(*NAMES)


def test_two_installs_at_once(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    both = [started(tmp_path, "install", "--image", IMAGE) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], said
    (refused,) = (text for process, text in zip(both, said, strict=True) if process.returncode)
    assert "another command" in refused
    assert "taken over" not in refused
    assert now(server) == taken(*NAMES)


# ---- upgrade -------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(server: ApiServer, tmp_path: Path) -> Iterator[SimulatedNodes]:
    """Two nodes, taken over. No recorder: while a pod is replaced, what it attached carries the traffic."""
    server.kubeconfig(tmp_path / "admin.conf", {"token": ADMIN_TOKEN})
    server.apply(kubeadm.config_map("https://192.0.2.1:6443"))
    with SimulatedNodes(server, NAMES[:2], tmp_path) as nodes:
        server.create(kubeadm.daemon_set())
        run(tmp_path, "install", "--image", IMAGE)
        yield nodes


def images(server: ApiServer) -> dict[str, str]:
    pods = server.request("GET", f"{SYSTEM}?labelSelector=k8s-app=pyebpf-proxy")["items"]
    return {each["spec"]["nodeName"]: each["spec"]["containers"][0]["image"] for each in pods}


def test_upgrade_node_by_node_and_not_where_it_fails(
    installed: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    said = run(tmp_path, "install", "--image", NEWER, status=1)
    assert f"{IMAGE} is installed; for another image: pyebpf-proxy cluster upgrade --image {NEWER}" in said
    # What cannot be pulled replaces nothing: the old agent has not even been touched.
    before = {each["metadata"]["uid"] for each in server.request("GET", SYSTEM)["items"]}
    installed.faults.missing.add((NEWER, "n1"))
    assert "pull: the image cannot be pulled" in run(tmp_path, "upgrade", "--image", NEWER, status=1)
    installed.until(lambda pods: {each["metadata"]["uid"] for each in pods.values()} == before, "the errand is gone")
    installed.faults.missing.clear()
    # What does not become ready is replaced by what was there before.
    installed.faults.errands["verify", "n2"] = "no connection to the Service at 10.96.0.1 port 443: timed out"
    said = run(tmp_path, "upgrade", "--image", NEWER, status=1)
    assert "[1/2] n1: upgraded, and verified" in said
    assert f"n2: verify: no connection to the Service at 10.96.0.1 port 443: timed out; the agent of {IMAGE}" in said
    assert images(server) == {"n1": NEWER, "n2": IMAGE}
    # Some nodes have an older agent: status says so, install asks for an upgrade.
    assert f"1 nodes run {NEWER}, the DaemonSet has {IMAGE}" in run(tmp_path, "status", status=1)
    said = run(tmp_path, "install", status=1)
    assert "an agent of another image runs on n1: first pyebpf-proxy cluster upgrade" in said
    installed.faults.errands.clear()
    assert "[1/1] n2: upgraded, and verified" in run(tmp_path, "upgrade", "--image", NEWER)
    assert images(server) == {"n1": NEWER, "n2": NEWER}
    assert "2 of 2 nodes" in run(tmp_path, "status")


# ---- check, dry run, bad input -------------------------------------------------------------------------------------


def test_check_and_dry_run_change_nothing(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    def everything() -> list[Object]:
        paths = (SETS, SYSTEM, "/api/v1/nodes", CONFIG_MAP.rpartition("/")[0])
        paths += ("/apis/rbac.authorization.k8s.io/v1/clusterroles", "/api/v1/namespaces/kube-system/serviceaccounts")
        return [server.request("GET", path)["items"] for path in paths]

    before = everything()
    cluster.faults.errands["check", "n3"] = "the kernel has no BTF (/sys/kernel/btf/vmlinux, CONFIG_DEBUG_INFO_BTF)"
    cluster.faults.missing.add((IMAGE, "n2"))
    document = json.loads(run(tmp_path, "check", "--image", IMAGE, "-o", "json", status=1).partition("\nError")[0])
    bad = {each["where"]: each["text"] for each in document["findings"] if each["state"] != "good"}
    assert bad.keys() == {"n2", "n3"}, document
    assert "the image cannot be pulled" in bad["n2"]
    assert "the kernel has no BTF" in bad["n3"]
    said = run(tmp_path, "install", "--image", IMAGE, "--dry-run", "--canary", "2")
    objects = [each for each in yaml.safe_load_all(said) if each]
    assert [each.get("kind") for each in objects] == [
        *("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "DaemonSet"),
        None,
    ]
    assert "# nodes, in this order: n1, n2\n" in said
    cluster.until(lambda pods: len(pods) == 3, "the errands are gone")
    assert everything() == before


def test_a_node_that_is_refused_is_named_by_check(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    status = {
        "status": {"nodeInfo": {"kernelVersion": "5.10.0-30-amd64", "containerRuntimeVersion": "docker://20.10.24"}}
    }
    server.request("PATCH", "/api/v1/nodes/n1/status", status, "application/merge-patch+json")
    status = {"status": {"nodeInfo": {"containerRuntimeVersion": "containerd://1.6.8"}}}
    server.request("PATCH", "/api/v1/nodes/n2/status", status, "application/merge-patch+json")
    namespace = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    server.request("PATCH", "/api/v1/namespaces/kube-system", namespace, "application/merge-patch+json")
    try:
        said = run(tmp_path, "check", status=1)
    finally:
        namespace["metadata"]["labels"] = dict.fromkeys(namespace["metadata"]["labels"])
        server.request("PATCH", "/api/v1/namespaces/kube-system", namespace, "application/merge-patch+json")
    assert "bad      n1: node: Linux 5.10.0-30-amd64" in said
    assert "warning  n2: node: " in said
    assert "containerd before 1.6.20 may forbid bpf()" in said
    assert "bad      admission: the agent's pod is refused: " in said
    assert "warning  image: not checked" in said


def only_error(said: str) -> str:
    (line,) = said.splitlines()
    return line


def test_bad_input_is_one_line(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    """And nothing is done: the recorder and the pods show it."""
    python = [sys.executable, "-m", "pyebpf_proxy", "cluster"]

    def say(*arguments: str, status: int, **environment: str) -> str:
        variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **environment}
        done = subprocess.run(
            [*python, *arguments], env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done
        return only_error(done.stdout + done.stderr)

    admin = ("--kubeconfig", str(tmp_path / "admin.conf"))
    assert say("status", status=3).startswith("Error: no kubeconfig: ")
    assert "no context other in the kubeconfig; it has: tests" in say("status", *admin, "--context", "other", status=3)
    assert "nobody can be asked whether this is meant; say --yes" in say("install", *admin, status=2)
    assert "no image is named: --image" in say("install", *admin, "--yes", status=2)
    assert "no node matches" in say("install", *admin, "--yes", "--nodes", "no=such", status=2)
    assert "see pyebpf-proxy cluster" in say("instal", *admin, status=2)
    (tmp_path / "broken.conf").write_text("{")
    assert say("status", "--kubeconfig", str(tmp_path / "broken.conf"), status=3).startswith("Error: no kubeconfig: ")
    server.account("viewer", [{"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "get"]}])
    viewer = server.kubeconfig(tmp_path / "viewer.conf", {"token": server.token("viewer")})
    said = say("install", "--kubeconfig", str(viewer), "--yes", "--image", IMAGE, status=1)
    assert said.startswith("Error: not allowed: this user may not patch nodes, ")
    assert "create pods in kube-system, " in said
    assert "patch daemonsets.apps in kube-system" in said
    stranger = server.kubeconfig(tmp_path / "stranger.conf", {"token": "nobody"})
    assert "not allowed: Unauthorized" in say("status", "--kubeconfig", str(stranger), status=3)
    nobody = server.kubeconfig(tmp_path / "nobody.conf", {"token": ADMIN_TOKEN}, "https://127.0.0.1:1")
    assert "the API server at https://127.0.0.1:1 does not answer: " in say(
        "status", "--kubeconfig", str(nobody), status=3
    )
    data = server.request("GET", CONFIG_MAP)["data"]["config.conf"]
    changed = {"data": {"config.conf": data.replace("mode: ''", "mode: ipvs")}}
    server.request("PATCH", CONFIG_MAP, changed, "application/merge-patch+json")
    assert "kube-proxy runs in mode ipvs" in say("install", *admin, "--yes", "--image", IMAGE, status=1)
    server.request("DELETE", CONFIG_MAP)
    assert "there is no ConfigMap kube-system/kube-proxy" in say("install", *admin, "--yes", "--image", IMAGE, status=1)
    with pytest.raises(ApiError, match="not found"):
        daemon_set(server, "pyebpf-proxy")


def test_without_kube_proxy_nothing_is_done(server: ApiServer, tmp_path: Path) -> None:
    server.kubeconfig(tmp_path / "admin.conf", {"token": ADMIN_TOKEN})
    with SimulatedNodes(server, ["n1"], tmp_path):
        said = only_error(run(tmp_path, "install", "--image", IMAGE, status=1))
        assert said.startswith("Error: there is no DaemonSet kube-system/kube-proxy: ")
        said = only_error(run(tmp_path, "rollback", status=1))
        assert "the agent stays, it is the only proxy" in said


# ---- sysdump -------------------------------------------------------------------------------------------------------


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        names = archive.getnames()
        files = {name.partition("/")[2]: archive.extractfile(name) for name in names}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_sysdump_has_what_a_report_needs_and_no_secret(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    server.account("somebody", [])
    secret, token = "the-password-of-somebody", server.token("somebody")
    server.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"key": secret}})
    data = server.request("GET", CONFIG_MAP)["data"]
    user = {"token": token, "password": secret, "client-key-data": secret}
    kubeconfig = yaml.safe_load(data["kubeconfig.conf"]) | {"users": [{"name": "default", "user": user}]}
    changed = {"data": {"kubeconfig.conf": yaml.safe_dump(kubeconfig)}}
    server.request("PATCH", CONFIG_MAP, changed, "application/merge-patch+json")
    run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    target = tmp_path / "dump.tar.gz"
    said = run(tmp_path, "sysdump", "--file", str(target))
    assert "look at it before you publish it" in said
    assert target.stat().st_mode & 0o777 == 0o600
    files = contents(target)
    assert files["missing.txt"] == ""
    assert [each["metadata"]["name"] for each in yaml.safe_load(files["nodes.yaml"])] == NAMES
    assert "kubernetes" in files["services.yaml"]
    assert "1 of 3 nodes are served by pyebpf-proxy" in files["status.txt"]
    (agent,) = (text for name, text in files.items() if name.startswith("logs/pyebpf-proxy"))
    assert " info ready " in agent
    everything = "\n".join(files.values())
    assert "mode: ''" in files["kube-proxy.config.yaml"]
    assert secret not in everything
    assert token not in everything
    assert files["kube-proxy.config.yaml"].count("REDACTED") == 3
    assert "exists already" in run(tmp_path, "sysdump", "--file", str(target), status=2)
    server.account("reader", [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}])
    server.kubeconfig(tmp_path / "admin.conf", {"token": server.token("reader")})
    said = run(tmp_path, "sysdump", "--file", str(tmp_path / "part.tar.gz"), status=1)
    assert "missing: services.yaml: services is forbidden" in said
    assert contents(tmp_path / "part.tar.gz")["missing.txt"].count("forbidden") > 5


# ---- test ----------------------------------------------------------------------------------------------------------


def test_connectivity_is_tested_on_every_node_and_nothing_stays(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    document = json.loads(run(tmp_path, "test", "--image", IMAGE, "-o", "json"))
    asked = {(row["from"], row["to"]) for row in document["rows"] if row["result"] == "ok"}
    for node in NAMES:
        for source in (f"pod on {node}", f"node {node}"):
            for family in ("IPv4", "IPv6"):
                for what in (
                    "ClusterIP, TCP",
                    "ClusterIP, UDP",
                    "ClusterIP, 64 KiB, TCP",
                    "ClusterIP, policy Local, TCP",
                ):
                    assert (source, f"{what}, {family}") in asked
            for other in NAMES:
                assert (source, f"NodePort of {other}, UDP, IPv4") in asked
        assert (f"pod on {node}", "ClusterIP, hairpin, TCP, IPv6") in asked
        assert (f"node {node}", "ClusterIP, hairpin, TCP, IPv6") not in asked
    # Nothing listens at the nodes' addresses, as seen from here.
    outside = {row["result"] for row in document["rows"] if row["from"] == "this machine"}
    assert outside == {"not tested"}
    cluster.faults.rows["NodePort of n2, TCP, IPv4"] = "timed out"
    said = run(tmp_path, "test", "--image", IMAGE, "--nodes", "kubernetes.io/hostname in (n1, n2)", status=1)
    failed = [line.split("  ")[0] for line in said.splitlines() if "FAILED" in line and "timed out" in line]
    assert failed == ["node n1", "node n2", "pod on n1", "pod on n2"]
    assert " 4 failed" in said.splitlines()[-1]
    cluster.faults.missing.add((IMAGE, "n3"))
    assert "n3: a pod of the test does not run: the image cannot be pulled" in run(
        tmp_path, "test", "--image", IMAGE, status=1
    )

    def gone(pods: dict[str, Object]) -> bool:
        names = [each["metadata"]["name"] for each in server.request("GET", "/api/v1/namespaces")["items"]]
        return len(pods) == 3 and "pyebpf-proxy-test" not in names

    cluster.until(gone, "the test's pods and its namespace are gone")
