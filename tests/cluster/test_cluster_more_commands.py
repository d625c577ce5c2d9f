# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy cluster`` against a real API server: upgrade, check, test, sysdump, bad input.

Kubelets and the DaemonSet controller are simulated (simulated_nodes.py); requests, validation, rights, Leases and
watches are real. In each test a recorder looks for a moment at which a node has no proxy.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pyebpf_proxy import __version__
from pyebpf_proxy.cluster import objects
from pyebpf_proxy.see import model
from tests.cluster import agent_answers
from tests.cluster.commands import CONFIG_MAP, IMAGE, NAMES, NEWER, daemon_set, run, simulated_cluster, started
from tests.cluster.simulated_nodes import SETS, SYSTEM, SimulatedNodes
from tests.support.apiserver import ADMIN_TOKEN, MERGE, ApiError, ApiServer, Object

# ---- upgrade -------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(server: ApiServer, tmp_path: Path) -> Iterator[SimulatedNodes]:
    """Two nodes, taken over. No recorder: while a pod is replaced, what it attached carries the traffic."""
    with simulated_cluster(server, tmp_path, NAMES[:2]) as nodes:
        run(tmp_path, "install", "--image", IMAGE)
        yield nodes


def images(server: ApiServer) -> dict[str, str]:
    pods = server.request("GET", f"{SYSTEM}?labelSelector=k8s-app=pyebpf-proxy")["items"]
    return {each["spec"]["nodeName"]: each["spec"]["containers"][0]["image"] for each in pods}


def test_upgrade_node_by_node_until_one_fails(installed: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    output = run(tmp_path, "install", "--image", NEWER, status=1)
    assert f"{IMAGE} is installed; to change it, run pyebpf-proxy cluster upgrade --image {NEWER}" in output
    # What cannot be pulled replaces nothing: the old agent has not even been touched.
    before = {each["metadata"]["uid"] for each in server.request("GET", SYSTEM)["items"]}
    installed.faults.missing.add((NEWER, "n1"))
    output = run(tmp_path, "upgrade", "--image", NEWER, status=1)
    assert "n1: the image cannot be pulled" in output
    assert f"the agent with {IMAGE} stays" in output
    installed.until(lambda pods: {each["metadata"]["uid"] for each in pods.values()} == before, "the task pod is gone")
    installed.faults.missing.clear()
    # What does not become ready is replaced by what was there before.
    installed.faults.tasks["verify", "n2"] = "no connection to the Service at 10.96.0.1 port 443: timed out"
    output = run(tmp_path, "upgrade", "--image", NEWER, status=1)
    assert "[1/2] n1: upgraded, and verified" in output
    assert (
        f"n2: verify: no connection to the Service at 10.96.0.1 port 443: timed out; the agent with {IMAGE}" in output
    )
    assert images(server) == {"n1": NEWER, "n2": IMAGE}
    # Some nodes have an older agent: status reports it, install requests an upgrade.
    assert f"1 node with {NEWER}; the DaemonSet has {IMAGE}" in run(tmp_path, "status", status=1)
    output = run(tmp_path, "install", status=1)
    assert "an agent with another image runs on n1; run pyebpf-proxy cluster upgrade first" in output
    installed.faults.tasks.clear()
    assert "[1/1] n2: upgraded, and verified" in run(tmp_path, "upgrade", "--image", NEWER)
    assert images(server) == {"n1": NEWER, "n2": NEWER}
    assert "2 of 2 nodes" in run(tmp_path, "status")


def test_ready_is_no_proof_that_the_new_agent_has_programmed_the_node(
    installed: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    """The former agent's programs still answer, so that a connection does not show it either."""
    installed.faults.ready_early.add("n1")
    installed.faults.never_programmed.add((NEWER, "n1"))
    output = run(tmp_path, "upgrade", "--image", NEWER, "--timeout", "4", status=1)
    assert "n1: the agent did not program the node within 4 s" in output
    assert f"; the agent with {IMAGE} runs there again" in output
    assert images(server) == {"n1": IMAGE, "n2": IMAGE}


def test_a_failed_upgrade_restores_the_template_and_applies_the_new_rights(
    installed: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    """The installation is of another version: its pods have a variable more, its role a rule less."""
    older = objects.agent(IMAGE)[-1]
    older["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "OLDER", "value": "1"})
    query = "?fieldManager=pyebpf-proxy-cluster&force=true"
    server.request("PATCH", f"{SETS}/pyebpf-proxy{query}", json.dumps(older), "application/apply-patch+yaml")
    role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/pyebpf-proxy"
    rules = server.request("GET", role)["rules"]
    server.request("PATCH", role, {"rules": rules[:-1]}, "application/merge-patch+json")
    before = daemon_set(server, "pyebpf-proxy")["spec"]["template"]
    installed.faults.tasks["verify", "n2"] = "no connection to the Service at 10.96.0.1 port 443: timed out"
    run(tmp_path, "upgrade", "--image", NEWER, status=1)
    assert daemon_set(server, "pyebpf-proxy")["spec"]["template"] == before
    assert images(server) == {"n1": NEWER, "n2": IMAGE}
    assert server.request("GET", role)["rules"] == rules


# ---- status --------------------------------------------------------------------------------------------------------


def test_status_asks_the_agents_and_names_those_that_differ(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    run(tmp_path, "install", "--image", IMAGE)
    said = run(tmp_path, "status")
    assert "FAST PATH  DROPS  BEHIND" in said
    assert f"n1    pyebpf-proxy  taken over  0         {__version__}    open       0      0 s" in said
    other = agent_answers.status()
    other.version, other.kernel, other.features = "0.2.0", "6.12.1-amd64", ["fast path"]
    other.agent.behind_seconds = 300.0
    other.drops = [agent_answers.drop(7, 2)]
    other.warnings = [model.Trouble(what="conntrack: 9 of 10 in use", remedy="raise it")]
    assert other.fast_path is not None
    other.fast_path.closed4, other.fast_path.why4 = "stack_rules", "nftables table ip mine, chain forward: log"

    def execute(node: str, words: list[str]) -> tuple[int, bytes, bytes]:
        if node == "n3":
            return 3, b"", b"Error: maps of another layout\n"
        return (0, model.encode(other).encode(), b"") if node == "n2" else agent_answers.answer(node, words)

    cluster.execute = execute
    said = run(tmp_path, "status", status=1)
    row = next(line for line in said.splitlines() if line.startswith("n2 "))
    assert re.search(r" 0\.2\.0 +IPv4 closed +7, 2 in the last minute +5 min$", row), row
    for line in (
        "warning  n3: agent: no answer: maps of another layout",
        f"warning  version: nodes differ: {__version__} on n1; 0.2.0 on n2",
        f"good     kernel: nodes differ: {agent_answers.KERNEL} on n1; 6.12.1-amd64 on n2",
        "warning  features: nodes differ: nftables mode, fast path on n1; fast path on n2",
        "good     n2: fast path: closed for IPv4: stack_rules, nftables table ip mine, chain forward: log",
        "warning  n2: agent: behind the API server for 5 min",
        "warning  n2: agent: conntrack: 9 of 10 in use",
    ):
        assert line in said.splitlines(), said
    document = json.loads(run(tmp_path, "status", "-o", "json", status=1))
    assert {each["image"] for each in document["nodes"]} == {IMAGE}
    first, second, third = (each["agent"] for each in document["nodes"])
    assert (first["version"], first["drops"], first["fastPath"], first["behindSeconds"]) == (__version__, 0, "open", 0)
    assert (second["kernel"], second["drops"], second["dropsLastMinute"]) == ("6.12.1-amd64", 7, 2)
    assert second["fastPathClosed"].keys() == {"IPv4"}
    assert second["warnings"] == [{"what": "conntrack: 9 of 10 in use", "remedy": "raise it"}]
    assert third is None
    # Who may not run commands in pods still sees the rest.
    rules = [
        {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list"]},
        {"apiGroups": ["apps"], "resources": ["daemonsets"], "verbs": ["get"]},
    ]
    server.account("watcher", rules)
    server.kubeconfig(tmp_path / "admin.conf", {"token": server.token("watcher")})
    said = run(tmp_path, "status")
    assert "the agents could not be queried: this user may not get, create pods/exec in kube-system" in said
    assert "nodes that have registered again are not recognized: this user may not get configmaps in kube-sys" in said
    assert "3 of 3 nodes served" in said
    unknown = json.loads(run(tmp_path, "status", "-o", "json"))["unknown"]
    assert [each.rpartition(": this user may not ")[2] for each in unknown] == [
        "get, create pods/exec in kube-system",
        "get configmaps in kube-system",
    ]


def test_a_policy_that_forbids_commands_in_pods_hides_only_the_agents_reports(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    """The rights alone do not show it: an admission policy refuses the request."""
    run(tmp_path, "install", "--image", IMAGE)
    rules = [
        {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["get", "create"]},
        {"apiGroups": ["apps"], "resources": ["daemonsets"], "verbs": ["get"]},
    ]
    server.account("barred", rules)
    server.kubeconfig(tmp_path / "admin.conf", {"token": server.token("barred")})
    version = "admissionregistration.k8s.io/v1"
    exec_rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CONNECT"], "resources": ["pods/exec"]}
    # Only for this account: other tests are not disturbed.
    allowed = "request.userInfo.username != 'system:serviceaccount:kube-system:barred'"
    specifications: dict[str, Object] = {
        "ValidatingAdmissionPolicy": {
            "matchConstraints": {"resourceRules": [exec_rule]},
            "validations": [{"expression": allowed, "reason": "Forbidden", "message": "no commands in pods"}],
        },
        "ValidatingAdmissionPolicyBinding": {"policyName": "no-exec", "validationActions": ["Deny"]},
    }
    for kind, collection in zip(
        specifications, ("validatingadmissionpolicies", "validatingadmissionpolicybindings"), strict=True
    ):
        item = {"apiVersion": version, "kind": kind, "metadata": {"name": "no-exec"}, "spec": specifications[kind]}
        server.request("POST", f"/apis/{version}/{collection}", item)
    end = time.monotonic() + 30
    while "no commands in pods" not in started(tmp_path, "status").communicate(timeout=60)[0]:
        assert time.monotonic() < end, "the API server applies a policy a moment later"
    said = run(tmp_path, "status", status=1)
    assert re.search(r"^n1 +pyebpf-proxy +taken over +0 *$", said, re.MULTILINE), said
    assert re.search(r"^warning  n3: agent: no answer: .*: no commands in pods$", said, re.MULTILINE), said
    assert "3 of 3 nodes served" in said
    run(tmp_path, "sysdump", "--file", str(tmp_path / "dump.tar.gz"), status=1)
    assert "3 of 3 nodes served" in contents(tmp_path / "dump.tar.gz")["status.txt"]


# ---- the datapath configuration ------------------------------------------------------------------------------------


def test_a_datapath_configuration_from_install_to_rollback(server: ApiServer, tmp_path: Path) -> None:
    """No recorder: while a pod is replaced, what it attached carries the traffic."""
    with simulated_cluster(server, tmp_path, NAMES):
        datapath_configurations(server, tmp_path)


def datapath_configurations(server: ApiServer, tmp_path: Path) -> None:
    place = f"{CONFIG_MAP.rpartition('/')[0]}/pyebpf-proxy-datapath"
    option = "--datapath-config=/etc/datapath/datapath.yaml"
    file = tmp_path / "datapath.yaml"
    head = "apiVersion: datapath.pyebpf-proxy.io/v1alpha1\nkind: DatapathConfiguration\n"
    given = ("--datapath-config", str(file))

    def agents() -> dict[str, tuple[str, list[str]]]:
        items = server.request("GET", SYSTEM)["items"]
        own = [each for each in items if each["metadata"]["labels"].get("k8s-app") == "pyebpf-proxy"]
        return {
            each["spec"]["nodeName"]: (each["metadata"]["uid"], each["spec"]["containers"][0]["args"]) for each in own
        }

    run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    file.write_text(f"{head}fastPath: maybe\nmaps: {{slots: 1}}\n")
    said = run(tmp_path, "install", *given, status=2)
    assert "fastPath: must be" in said
    assert "maps.slots: must be from 256" in said
    file.write_text(f"{head}fastPath: false\n")
    printed = [each for each in yaml.safe_load_all(run(tmp_path, "install", *given, "--dry-run")) if each]
    (made,) = (each for each in printed if each.get("kind") == "ConfigMap")
    with pytest.raises(ApiError):
        server.request("GET", place)
    first = agents()
    run(tmp_path, "install", *given)
    assert server.request("GET", place)["data"] == made["data"] == {"datapath.yaml": file.read_text()}
    second = agents()
    assert list(second) == NAMES
    assert first["n1"][0] != second["n1"][0], "it ran without the configuration"
    assert all(option in arguments for _, arguments in second.values())
    # An argument that was added by hand does not last: the list is applied as a whole.
    item = daemon_set(server, "pyebpf-proxy")
    (container,) = item["spec"]["template"]["spec"]["containers"]
    container["args"].append("--v=4")
    server.request("PATCH", f"{SETS}/pyebpf-proxy", {"spec": item["spec"]}, MERGE)
    run(tmp_path, "upgrade", "--image", NEWER)
    third = agents()
    assert all(arguments[-1] == option for _, arguments in third.values())
    file.write_text(f"{head}socketLB: off\n")
    run(tmp_path, "install", *given)
    fourth = agents()
    assert not {uid for uid, _ in third.values()} & {uid for uid, _ in fourth.values()}
    assert server.request("GET", place)["data"] == {"datapath.yaml": file.read_text()}
    run(tmp_path, "rollback")
    with pytest.raises(ApiError):
        server.request("GET", place)


# ---- check, dry run, bad input -------------------------------------------------------------------------------------


def test_check_and_dry_run_change_nothing(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    def everything() -> list[Object]:
        paths = (SETS, SYSTEM, "/api/v1/nodes", CONFIG_MAP.rpartition("/")[0])
        paths += ("/apis/rbac.authorization.k8s.io/v1/clusterroles", "/api/v1/namespaces/kube-system/serviceaccounts")
        return [server.request("GET", path)["items"] for path in paths]

    before = everything()
    cluster.faults.tasks["check", "n3"] = "the kernel has no BTF (/sys/kernel/btf/vmlinux, CONFIG_DEBUG_INFO_BTF)"
    cluster.faults.missing.add((IMAGE, "n2"))
    document = json.loads(run(tmp_path, "check", "--image", IMAGE, "-o", "json", status=1).partition("\nError")[0])
    bad = {each["where"]: each["text"] for each in document["findings"] if each["state"] != "good"}
    assert bad.keys() == {"n2", "n3"}, document
    assert "the image cannot be pulled" in bad["n2"]
    assert "the kernel has no BTF" in bad["n3"]
    output = run(tmp_path, "install", "--image", IMAGE, "--dry-run", "--canary", "2")
    objects = [each for each in yaml.safe_load_all(output) if each]
    assert [each.get("kind") for each in objects] == [
        *("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "DaemonSet"),
        None,
    ]
    assert "# nodes, in this order: n1, n2\n" in output
    cluster.until(lambda pods: len(pods) == 3, "the task pods are gone")
    assert everything() == before


def test_a_node_that_is_refused_is_named_by_check(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    status = {
        "status": {"nodeInfo": {"kernelVersion": "5.10.0-30-amd64", "containerRuntimeVersion": "docker://20.10.24"}}
    }
    server.request("PATCH", "/api/v1/nodes/n1/status", status, "application/merge-patch+json")
    status = {"status": {"nodeInfo": {"containerRuntimeVersion": "containerd://1.6.8"}}}
    server.request("PATCH", "/api/v1/nodes/n2/status", status, "application/merge-patch+json")
    status = {"status": {"nodeInfo": {"architecture": "arm64"}}}
    server.request("PATCH", "/api/v1/nodes/n3/status", status, "application/merge-patch+json")
    namespace = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    server.request("PATCH", "/api/v1/namespaces/kube-system", namespace, "application/merge-patch+json")
    try:
        output = run(tmp_path, "check", status=1)
    finally:
        namespace["metadata"]["labels"] = dict.fromkeys(namespace["metadata"]["labels"])
        server.request("PATCH", "/api/v1/namespaces/kube-system", namespace, "application/merge-patch+json")
    assert "bad      n1: node: Linux 5.10.0-30-amd64" in output
    assert "warning  n2: node: " in output
    assert "containerd before 1.6.20 may forbid bpf()" in output
    assert re.search("^warning  n3: node: Linux .*: tested in emulation only$", output, re.MULTILINE)
    assert "bad      admission: the API server rejects the agent's pod: " in output
    assert "warning  image: not checked" in output


def only_error(output: str) -> str:
    (line,) = output.splitlines()
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
    assert "not confirmed, because stdin is not a terminal; use --yes" in say("install", *admin, status=2)
    assert "no image is specified; use --image" in say("install", *admin, "--yes", status=2)
    assert "no node matches" in say("install", *admin, "--yes", "--nodes", "no=such", status=2)
    assert "--nodes a==b==c: not a label selector: " in say("status", *admin, "--nodes", "a==b==c", status=2)
    assert "see pyebpf-proxy cluster" in say("instal", *admin, status=2)
    (tmp_path / "broken.conf").write_text("{")
    broken = say("status", "--kubeconfig", str(tmp_path / "broken.conf"), status=3)
    assert broken.startswith(f"Error: no kubeconfig: {tmp_path}/broken.conf is not valid YAML: line 1; ")
    gone = say("status", "--kubeconfig", str(tmp_path / "gone.conf"), status=3)
    assert gone.startswith(f"Error: no kubeconfig: {tmp_path}/gone.conf does not exist; ")
    server.account("viewer", [{"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "get"]}])
    viewer = server.kubeconfig(tmp_path / "viewer.conf", {"token": server.token("viewer")})
    output = say("install", "--kubeconfig", str(viewer), "--yes", "--image", IMAGE, status=3)
    assert output.startswith("Error: not allowed: this user may not patch nodes; ")
    assert "create, delete pods in kube-system; " in output
    assert "get, create, patch, delete daemonsets.apps in kube-system; " in output
    stranger = server.kubeconfig(tmp_path / "stranger.conf", {"token": "unknown"})
    assert "does not accept the kubeconfig's credentials" in say("status", "--kubeconfig", str(stranger), status=3)
    unreachable = server.kubeconfig(tmp_path / "unreachable.conf", {"token": ADMIN_TOKEN}, "https://127.0.0.1:1")
    assert "the API server at https://127.0.0.1:1 does not answer: " in say(
        "status", "--kubeconfig", str(unreachable), status=3
    )
    data = server.request("GET", CONFIG_MAP)["data"]["config.conf"]
    changed = {"data": {"config.conf": data.replace("mode: ''", "mode: ipvs")}}
    server.request("PATCH", CONFIG_MAP, changed, "application/merge-patch+json")
    assert "kube-proxy runs in mode ipvs" in say("install", *admin, "--yes", "--image", IMAGE, status=1)
    server.request("DELETE", CONFIG_MAP)
    assert "there is no ConfigMap kube-system/kube-proxy" in say("install", *admin, "--yes", "--image", IMAGE, status=1)
    with pytest.raises(ApiError, match="not found"):
        daemon_set(server, "pyebpf-proxy")


def test_without_kube_proxy_nothing_is_changed(server: ApiServer, tmp_path: Path) -> None:
    server.kubeconfig(tmp_path / "admin.conf", {"token": ADMIN_TOKEN})
    with SimulatedNodes(server, ["n1"], tmp_path):
        output = only_error(run(tmp_path, "install", "--image", IMAGE, status=1))
        assert output.startswith("Error: there is no DaemonSet kube-system/kube-proxy: ")
        output = only_error(run(tmp_path, "rollback", status=1))
        assert "the agent is the only proxy and was not removed" in output


# ---- sysdump -------------------------------------------------------------------------------------------------------


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        names = archive.getnames()
        files = {name.partition("/")[2]: archive.extractfile(name) for name in names}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_sysdump_has_everything_for_a_report_and_no_secret(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    server.account("visitor", [])
    secret, token = "the-password-of-a-visitor", server.token("visitor")
    server.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"key": secret}})
    data = server.request("GET", CONFIG_MAP)["data"]
    user = {"token": token, "password": secret, "client-key-data": secret}
    kubeconfig = yaml.safe_load(data["kubeconfig.conf"]) | {"users": [{"name": "default", "user": user}]}
    changed = {"data": {"kubeconfig.conf": yaml.safe_dump(kubeconfig)}}
    server.request("PATCH", CONFIG_MAP, changed, "application/merge-patch+json")
    run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    target = tmp_path / "dump.tar.gz"
    output = run(tmp_path, "sysdump", "--file", str(target))
    assert "review it before you share it" in output
    assert target.stat().st_mode & 0o777 == 0o600
    files = contents(target)
    assert files["missing.txt"] == ""
    assert [each["metadata"]["name"] for each in yaml.safe_load(files["nodes.yaml"])] == NAMES
    assert "kubernetes" in files["services.yaml"]
    assert "1 of 3 nodes served by pyebpf-proxy" in files["status.txt"]
    said_by = {name: yaml.safe_load(text) for name, text in files.items() if name.startswith("agents/")}
    assert said_by.keys() == {f"agents/n1/{what}.yaml" for what in ("status", "drops", "flows")}
    assert said_by["agents/n1/status.yaml"]["kernel"] == agent_answers.KERNEL
    assert said_by["agents/n1/drops.yaml"]["drops"][0]["count"] == 3
    flows = said_by["agents/n1/flows.yaml"]
    assert (flows["flows"], flows["byService"], flows["byPath"]) == (1, {"default/web:http": 1}, {"fast": 1})
    (agent,) = (text for name, text in files.items() if name.startswith("logs/pyebpf-proxy"))
    assert " info ready " in agent
    everything = "\n".join(files.values())
    assert "mode: ''" in files["kube-proxy.config.yaml"]
    assert agent_answers.CLIENT not in everything, "clients are counted, not listed"
    assert secret not in everything
    assert token not in everything
    assert files["kube-proxy.config.yaml"].count("REDACTED") == 3
    assert "already exists" in run(tmp_path, "sysdump", "--file", str(target), status=2)
    # A node that does not answer, and one that is not asked for its many flows, are named.
    busy = agent_answers.status()
    busy.conntrack = model.Fill(name="conntrack", used=200_000, capacity=262_144)
    cluster.execute = lambda node, words: (
        (0, model.encode(busy).encode(), b"") if "status" in words else (3, b"", b"no")
    )
    said = run(tmp_path, "sysdump", "--file", str(tmp_path / "busy.tar.gz"), status=1)
    assert "missing: agents/n1/flows.yaml: conntrack has more than 20000 entries" in said
    assert "missing: agents/n1/drops.yaml: no" in said
    server.account("reader", [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}])
    server.kubeconfig(tmp_path / "admin.conf", {"token": server.token("reader")})
    output = run(tmp_path, "sysdump", "--file", str(tmp_path / "part.tar.gz"), status=1)
    assert "missing: services.yaml: services is forbidden" in output
    assert contents(tmp_path / "part.tar.gz")["missing.txt"].count("forbidden") > 5


# ---- test ----------------------------------------------------------------------------------------------------------


def test_connectivity_is_tested_on_every_node_and_pods_are_removed(
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
                    "load balancer VIP, TCP",
                    "load balancer VIP, UDP",
                ):
                    assert (source, f"{what}, {family}") in asked
            for other in NAMES:
                assert (source, f"NodePort of {other}, UDP, IPv4") in asked
                local = (source, f"NodePort of {other}, policy Local, TCP, IPv4")
                assert (local in asked) == (source.startswith("node") and other != node)
        assert (f"pod on {node}", "ClusterIP, hairpin, TCP, IPv6") in asked
        assert (f"node {node}", "ClusterIP, hairpin, TCP, IPv6") not in asked
    # Nothing listens at the nodes' addresses, as seen from here.
    outside = {row["result"] for row in document["rows"] if row["from"] == "this machine"}
    assert outside == {"not tested"}
    cluster.faults.rows["NodePort of n2, TCP, IPv4"] = "timed out"
    output = run(tmp_path, "test", "--image", IMAGE, "--nodes", "kubernetes.io/hostname in (n1, n2)", status=1)
    failed = [line.split("  ")[0] for line in output.splitlines() if "FAILED" in line and "timed out" in line]
    assert failed == ["node n1", "node n2", "pod on n1", "pod on n2"]
    assert " 4 failed" in output.splitlines()[-1]
    cluster.faults.hanging.add(("-pod-", "n1"))
    process = started(tmp_path, "test", "--image", IMAGE)
    cluster.until(lambda pods: any("-pod-n1-" in name for name in pods), "a pod of the test is there")
    (name,) = (name for name in cluster._pods() if "-pod-n1-" in name)
    server.request("DELETE", f"/api/v1/namespaces/pyebpf-proxy-test/pods/{name}")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert f"pod pyebpf-proxy-test/{name} was deleted before it finished" in said
    error = run(tmp_path, "test", "--image", IMAGE, "--timeout", "3", status=1).splitlines()[-1]
    assert error == "Error: not all test pods finished within 3 s: those on n1 did not"
    cluster.faults.hanging.clear()
    cluster.faults.missing.add((IMAGE, "n3"))
    assert "n3: a test pod does not run: the image cannot be pulled" in run(
        tmp_path, "test", "--image", IMAGE, status=1
    )

    def gone(pods: dict[str, Object]) -> bool:
        names = [each["metadata"]["name"] for each in server.request("GET", "/api/v1/namespaces")["items"]]
        return len(pods) == 3 and "pyebpf-proxy-test" not in names

    cluster.until(gone, "the test's pods and its namespace are gone")
