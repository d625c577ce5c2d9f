# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy cluster`` against a real API server: what it refuses, which rights that takes, and the reason given.

As in test_cluster_commands.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.cluster import check, objects
from pyebpf_proxy.cluster.api import Api
from pyebpf_proxy.cluster.objects import AGENT, PARKED
from pyebpf_proxy.cluster.task_pod import name_of
from tests import ROOT
from tests.cluster.commands import (
    CONFIG_MAP,
    IMAGE,
    NAMES,
    NEWER,
    daemon_set,
    labels,
    now,
    only_error,
    run,
    served_by_agent,
    simulated_cluster,
    started,
)
from tests.cluster.simulated_nodes import SETS, SYSTEM, SimulatedNodes
from tests.support.apiserver import MERGE, ApiError, ApiServer, Object

RBAC = "rbac.authorization.k8s.io/v1"


@pytest.fixture
def target(server: ApiServer) -> Iterator[str]:
    """Endpoints of default/kubernetes, so that it is a target: its address and port."""
    item = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "kubernetes", "labels": {"kubernetes.io/service-name": "kubernetes"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["192.0.2.1"]}],
        "ports": [{"name": "https", "port": 6443}],
    }
    server.apply(item)
    service: Any = server.request("GET", "/api/v1/namespaces/default/services/kubernetes")
    yield f"{service['spec']['clusterIP']} {service['spec']['ports'][0]['port']}"
    server.delete(item)


# ---- rights --------------------------------------------------------------------------------------------------------


def account(
    server: ApiServer, folder: Path, name: str, left_out: tuple[str, str] = ("", ""), agents: bool = True
) -> None:
    """admin.conf becomes that of an account with exactly the rights that the commands ask for.

    ``left_out``: verb and resource. ``agents``: also what the agent's role allows, or it could not be made.
    """
    by_namespace: dict[str, list[Object]] = {}
    for verb, group, resource, namespace in check.RIGHTS:
        if (verb, resource) != left_out:
            rule = {"apiGroups": [group], "resources": [resource], "verbs": [verb]}
            by_namespace.setdefault(namespace, []).append(rule)
    role = next(item for item in objects.agent(IMAGE) if item["kind"] == "ClusterRole")
    server.account(name, by_namespace.pop("") + (role["rules"] if agents else []))
    for namespace, rules in by_namespace.items():
        metadata = {"name": name, "namespace": namespace}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
        subject = {"kind": "ServiceAccount", "name": name, "namespace": "kube-system"}
        server.apply({"apiVersion": RBAC, "kind": "Role", "metadata": metadata, "rules": rules})
        binding = {"apiVersion": RBAC, "kind": "RoleBinding", "metadata": metadata}
        server.apply(binding | {"roleRef": reference, "subjects": [subject]})
    path = server.kubeconfig(folder / "admin.conf", {"token": server.token(name)})
    end = time.monotonic() + 30
    while any(not left_out[1] or left_out[1] not in text for text in Api(str(path)).missing_rights(check.RIGHTS)):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_the_rights_that_are_asked_for_suffice(server: ApiServer, tmp_path: Path, target: str) -> None:
    """Without a recorder: an upgrade replaces agents, and what they attached carries the traffic."""
    with simulated_cluster(server, tmp_path, NAMES[:2]) as nodes:
        account(server, tmp_path, "operator")
        example = str(ROOT / "examples" / "datapath-config.yaml")
        run(tmp_path, "install", "--image", IMAGE, "--datapath-config", example)
        run(tmp_path, "upgrade", "--image", NEWER)
        run(tmp_path, "rollback")
        assert {each["metadata"]["labels"][objects.TASK] for each in nodes.ran} == {
            *("fit", "try", "verify", "connect", "await", "clean")
        }
        assert nodes.attached == set()


@pytest.mark.parametrize("left_out", [("get", "services"), ("list", "endpointslices")])
def test_a_missing_right_is_named_before_anything_is_changed(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path, left_out: tuple[str, str]
) -> None:
    before = daemon_set(server)["spec"]
    account(server, tmp_path, f"without-{left_out[1]}", left_out, agents=False)
    for words in (("install", "--image", IMAGE), ("upgrade",), ("rollback",)):
        error = only_error(run(tmp_path, *words, status=3))
        assert f"this user may not {left_out[0]} {left_out[1]}" in error
        assert "in default" in error
    assert daemon_set(server)["spec"] == before


def test_a_role_that_this_user_may_not_make_is_refused_before_anything_is_changed(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    """Who makes a role needs its rights: no review of a right shows that."""
    before = daemon_set(server)["spec"]
    account(server, tmp_path, "not-all", agents=False)
    error = only_error(run(tmp_path, "install", "--image", IMAGE, status=1))
    assert error.startswith("Error: ClusterRole pyebpf-proxy was rejected: ")
    assert error.endswith("; nothing was changed")
    assert daemon_set(server)["spec"] == before
    with pytest.raises(ApiError, match="not found"):
        daemon_set(server, "pyebpf-proxy")


def test_check_by_a_user_who_may_only_look(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    rules = [
        {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list"]},
        {"apiGroups": ["apps"], "resources": ["daemonsets"], "verbs": ["get"]},
    ]
    server.account("looks", rules)
    server.kubeconfig(tmp_path / "admin.conf", {"token": server.token("looks")})
    said = run(tmp_path, "check", status=1)
    assert "bad      rights: this user may not " in said
    for what in ("kube-proxy", "CNI", "admission"):
        assert f"warning  {what}: not checked: " in said


# ---- what works with kube-proxy must work with the agent -----------------------------------------------------------


def test_what_kube_proxy_does_not_serve_is_not_asked_of_the_agent(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path, target: str
) -> None:
    cluster.faults.unreached.add(("n1", target))
    said = run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    named = target.replace(" ", " port ")
    assert f"n1: a pod does not reach {named} through kube-proxy; this is not tested with the agent" in said
    assert now(server) == served_by_agent("n1")
    (verified,) = (pod for pod in cluster.ran if pod["metadata"]["labels"][objects.TASK] == "verify")
    assert verified["spec"]["containers"][0]["command"][4:] == []
    # What kube-proxy serves is asked for, from the node and from a pod.
    run(tmp_path, "install", "--canary", "2")
    asked = {
        pod["metadata"]["labels"][objects.TASK]: pod["spec"]["containers"][0]["command"][4:]
        for pod in cluster.ran
        if pod["spec"]["nodeName"] == "n2"
    }
    assert asked == dict.fromkeys(("fit", "try", "verify", "connect"), target.split())
    cluster.faults.tasks["connect", "n3"] = "no connection to the Service at 10.96.0.1 port 443: timed out"
    error = only_error(run(tmp_path, "install", status=1))
    assert error.startswith("Error: n3: connect: no connection to the Service at 10.96.0.1 port 443: timed out; ")
    assert now(server) == served_by_agent("n1", "n2")


def test_rules_that_stay_and_are_harmless_are_shown(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    kept = (
        "warning: iptables-nft IPv4: table nat: chain KUBE-MARK-MASQ stays, because a rule of another program uses it"
    )
    cluster.faults.says["verify", "n1"] = f"{kept}\n"
    said = run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    assert f"n1: {kept}" in said
    assert "n1: taken over, and verified" in said


def test_the_clean_up_asks_kube_proxy_where_it_serves_its_health(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    data = server.request("GET", CONFIG_MAP)["data"]["config.conf"]
    changed = data.replace("healthzBindAddress: ''", "healthzBindAddress: 0.0.0.0:10356")
    server.request("PATCH", CONFIG_MAP, {"data": {"config.conf": changed}}, MERGE)
    run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    run(tmp_path, "rollback")
    (clean,) = (pod for pod in cluster.ran if pod["metadata"]["labels"][objects.TASK] == "clean")
    variables = clean["spec"]["containers"][0]["env"]
    assert [each["value"] for each in variables if each["name"] == "KUBE_PROXY_HEALTH"] == ["127.0.0.1:10356"]


# ---- reasons -------------------------------------------------------------------------------------------------------


def event(server: ApiServer, kind: str, name: str, reason: str, message: str) -> None:
    metadata = {"name": f"{name}.{reason.lower()}", "namespace": "kube-system"}
    involved = {"kind": kind, "name": name, "namespace": "kube-system"}
    item = {"apiVersion": "v1", "kind": "Event", "metadata": metadata, "involvedObject": involved, "type": "Warning"}
    server.create(item | {"reason": reason, "message": message, "lastTimestamp": "2026-01-01T00:00:00Z"})


def test_a_pod_that_does_not_come_or_start_is_explained(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    event(server, "DaemonSet", "pyebpf-proxy", "FailedCreate", "exceeded quota: pods")
    event(server, "Pod", name_of("fit", "n2"), "FailedMount", "mkdir /sys/fs/bpf/pyebpf-proxy: operation not permitted")
    cluster.faults.no_pods.add("n1")
    error = only_error(run(tmp_path, "install", "--image", IMAGE, "--canary", "1", "--timeout", "3", status=1))
    assert "n1: the agent did not program the node within 3 s: FailedCreate: exceeded quota: pods; " in error
    cluster.faults.no_pods.clear()
    cluster.faults.hanging.add(("fit", "n2"))
    error = only_error(run(tmp_path, "install", "--image", IMAGE, "--timeout", "3", status=1))
    assert "n2: fit: the pod did not finish within 3 s: FailedMount: mkdir /sys/fs/bpf/pyebpf-proxy: " in error


def test_a_daemonset_that_is_rewritten_meanwhile_is_the_reason(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    original = daemon_set(server)["spec"]
    cluster.faults.never_programmed.add("n1")
    process = started(tmp_path, "install", "--image", IMAGE, "--timeout", "4")
    cluster.until(lambda pods: AGENT in labels(server, "n1"), "n1 has the label")
    server.request("PUT", f"{SETS}/kube-proxy", daemon_set(server) | {"spec": original})
    cluster.faults.never_programmed.clear()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert "n1: kube-proxy's pod did not end within 4 s: its DaemonSet was rewritten; " in only_error(said)
    assert PARKED not in labels(server, "n1")


def test_where_pods_are_refused_check_still_shows_all_findings(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    level = "pod-security.kubernetes.io/enforce"
    server.request("PATCH", "/api/v1/namespaces/kube-system", {"metadata": {"labels": {level: "restricted"}}}, MERGE)
    try:
        said = run(tmp_path, "check", "--image", IMAGE, status=1)
    finally:
        server.request("PATCH", "/api/v1/namespaces/kube-system", {"metadata": {"labels": {level: None}}}, MERGE)
    assert "bad      admission: the API server rejects the agent's pod: " in said
    for name in NAMES:
        assert f"bad      {name}: image: " in said


def test_a_webhook_that_does_not_answer_is_a_refusal(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    webhook = {
        "name": "pods.example.org",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "objectSelector": {"matchExpressions": [{"key": objects.TASK, "operator": "Exists"}]},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    pod = objects.task_pod("fit", "probe", "n1", IMAGE, ["true"])
    item = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    server.request("POST", path, item | {"metadata": {"name": "tests"}, "webhooks": [webhook]})
    try:
        until_accepted(server, pod, False)
        begin = time.monotonic()
        error_line = only_error(run(tmp_path, "install", "--image", IMAGE, status=1))
    finally:
        server.request("DELETE", f"{path}/tests")
    assert "failed calling webhook" in error_line
    assert error_line.endswith("; nothing was changed there")
    assert time.monotonic() - begin < 30
    until_accepted(server, pod, True)


def until_accepted(server: ApiServer, pod: Object, wanted: bool) -> None:
    """Until the API server has read the configuration of its webhooks."""
    end = time.monotonic() + 30
    while accepts(server, pod) != wanted:
        assert time.monotonic() < end
        time.sleep(0.1)


def accepts(server: ApiServer, pod: Object) -> bool:
    try:
        server.request("POST", f"{SYSTEM}?dryRun=All", pod)
    except ApiError:
        return False
    return True
