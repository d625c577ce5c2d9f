# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy cluster`` with a real API server: takeover and return to kube-proxy, with faults in between.

Kubelets and the DaemonSet controller are simulated (simulated_nodes.py); requests, validation, rights, Leases and
watches are real. In each test a recorder checks that no node is ever without a proxy.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pyebpf_proxy.cluster.objects import AGENT, PARKED
from tests.cluster.commands import (
    IMAGE,
    NAMES,
    command,
    daemon_set,
    expire_lease,
    now,
    proxies,
    run,
    served_by_agent,
    started,
)
from tests.cluster.simulated_nodes import SETS, SYSTEM, SimulatedNodes
from tests.support.apiserver import ApiError, ApiServer


def test_takeover_with_a_canary_and_back(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    original = daemon_set(server)["spec"]
    before = {each["metadata"]["uid"] for each in server.request("GET", SYSTEM)["items"]}
    assert "3 nodes" in run(tmp_path, "status")
    output = run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    assert "[1/1] n1: taken over, and verified" in output
    assert "2 nodes left to kube-proxy" in output
    assert now(server) == served_by_agent("n1")
    assert daemon_set(server, "pyebpf-proxy")["spec"]["template"]["spec"]["containers"][0]["image"] == IMAGE
    assert "1 of 3 nodes" in run(tmp_path, "status")
    assert "nothing to do" in run(tmp_path, "install", "--canary", "1")
    # The other nodes' pods are the same ones: none was restarted.
    kept = {each["metadata"]["uid"] for each in server.request("GET", SYSTEM)["items"]}
    assert len(kept & before) == 2
    document = json.loads(run(tmp_path, "install", "-o", "json"))
    assert (document["done"], document["error"]) == (["n2", "n3"], None)
    assert now(server) == served_by_agent(*NAMES)
    table = json.loads(run(tmp_path, "status", "-o", "json"))
    assert [row["state"] for row in table["nodes"]] == ["taken over"] * 3
    assert table["takenOver"] == 3
    assert "all objects of pyebpf-proxy are removed" in run(tmp_path, "rollback")
    assert now(server) == served_by_agent()
    assert daemon_set(server)["spec"] == original, "kubeadm's DaemonSet is unchanged"
    assert "pyebpf-proxy/before" not in daemon_set(server)["metadata"].get("annotations", {})
    for path in (f"{SETS}/pyebpf-proxy", "/apis/rbac.authorization.k8s.io/v1/clusterroles/pyebpf-proxy"):
        with pytest.raises(ApiError, match="not found"):
            server.request("GET", path)
    labels = [each["metadata"]["labels"] for each in server.request("GET", "/api/v1/nodes")["items"]]
    assert not any(name.startswith("pyebpf-proxy/") for each in labels for name in each)
    assert "nothing to do" in run(tmp_path, "rollback")


def test_after_kubeadm_has_rewritten_the_daemonset(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    """As `kubeadm upgrade` does. A node whose kubelet does not report is left out."""
    down = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
    server.request("PATCH", "/api/v1/nodes/n3/status", down, "application/merge-patch+json")
    original = daemon_set(server)
    output = run(tmp_path, "install", "--image", IMAGE)
    assert "skipped, because they are not ready: n3" in output
    assert now(server) == served_by_agent("n1", "n2")
    rewritten = daemon_set(server) | {"spec": original["spec"]}
    rewritten["metadata"]["annotations"].pop("pyebpf-proxy/before")
    server.request("PUT", f"{SETS}/kube-proxy", rewritten)
    both = ["kube-proxy", "pyebpf-proxy"]
    cluster.until(lambda pods: proxies(pods) == {"n1": both, "n2": both, "n3": ["kube-proxy"]}, "both run")
    assert "its DaemonSet was rewritten" in run(tmp_path, "status", status=1)
    # One agent is not healthy: kube-proxy must not start there, though the node has its label.
    cluster.faults.never_programmed.add("n2")
    cluster.until(lambda pods: proxies(pods)["n2"] == ["kube-proxy"], "the agent of n2 has not programmed it any more")
    output = run(tmp_path, "install", "--timeout", "3", status=1)
    assert "n2: the agent did not program the node" in output
    assert now(server) == served_by_agent("n1")
    cluster.faults.never_programmed.clear()
    run(tmp_path, "install")
    assert now(server) == served_by_agent("n1", "n2")


@pytest.mark.parametrize("fault", ["image", "kernel", "ready", "programmed", "service"])
def test_a_node_with_a_failed_step_is_given_back(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path, fault: str
) -> None:
    if fault == "image":
        cluster.faults.missing.add((IMAGE, "n2"))
        words = f'the image cannot be pulled: failed to pull "{IMAGE}": not found'
    elif fault == "kernel":
        cluster.faults.tasks["fit", "n2"] = words = "the kernel has no BTF"
    elif fault == "ready":
        cluster.faults.never_ready.add("n2")
        words = "the agent's pod did not become ready within 3 s"
    elif fault == "programmed":
        cluster.faults.never_programmed.add("n2")
        words = "the agent did not program the node within 3 s"
    else:
        cluster.faults.tasks["verify", "n2"] = words = "no connection to the Service at 10.96.0.1 port 443: timed out"
    output = run(tmp_path, "install", "--image", IMAGE, "--timeout", "3", status=1)
    assert "[1/3] n1: taken over, and verified" in output
    (error,) = (line for line in output.splitlines() if line.startswith("Error: "))
    assert error.startswith("Error: n2: ")
    assert words in error
    early = fault in ("image", "kernel")
    end = "nothing was changed there" if early else "the node was given back to kube-proxy"
    assert error.endswith(f"; {end}; done before: n1")
    assert now(server) == served_by_agent("n1")
    if early:
        # The agent has not been requested there.
        assert server.request("GET", "/api/v1/nodes/n2")["metadata"]["labels"].keys().isdisjoint({AGENT, PARKED})
        assert "n2: the agent starts" not in output
    cluster.until(lambda pods: len(pods) == 3, "task pods are removed")
    if fault == "image":
        # After the repair, the same command continues.
        cluster.faults.missing.clear()
        run(tmp_path, "install")
        assert now(server) == served_by_agent(*NAMES)


def test_a_wrong_image_name_is_corrected_by_another_install(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    wrong = "registry.example/pyebpf-prxy:1"
    cluster.faults.missing |= {(wrong, name) for name in NAMES}
    assert "the image cannot be pulled" in run(tmp_path, "install", "--image", wrong, "--timeout", "3", status=1)
    assert now(server) == served_by_agent()
    run(tmp_path, "install", "--image", IMAGE, "--canary", "10%")
    assert now(server) == served_by_agent("n1")
    assert "[1/1] n2: taken over" in run(tmp_path, "install", "--canary", "50%")
    assert now(server) == served_by_agent("n1", "n2")


def test_an_unfit_node_is_refused_before_anything_is_changed(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    old = {"status": {"nodeInfo": {"kernelVersion": "5.10.0-30-amd64"}}}
    server.request("PATCH", "/api/v1/nodes/n3/status", old, "application/merge-patch+json")
    said = run(tmp_path, "install", "--image", IMAGE, status=1)
    assert said.startswith("Error: n3: Linux 5.10.0-30-amd64, ")
    assert "the kernel is older than 5.14" in said
    assert said.endswith("nothing was changed; to exclude nodes, use --nodes\n")
    with pytest.raises(ApiError, match="not found"):
        daemon_set(server, "pyebpf-proxy")
    run(tmp_path, "install", "--image", IMAGE, "--nodes", "kubernetes.io/hostname in (n1, n2)")
    assert now(server) == served_by_agent("n1", "n2")


@pytest.mark.parametrize("moment", ["before it is programmed", "after kube-proxy is parked", "before its label"])
def test_a_node_that_fails_during_the_takeover(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path, moment: str
) -> None:
    """The command stops and names the node. When it is back, both proxies start there, and install continues."""

    def labels() -> set[str]:
        return set(server.request("GET", "/api/v1/nodes/n2")["metadata"]["labels"])

    if moment == "before it is programmed":
        cluster.faults.never_programmed.add("n2")
    elif moment == "after kube-proxy is parked":
        cluster.faults.never_ready.add("n2")
    else:
        cluster.faults.hanging.add(("fit", "n2"))
    process = started(tmp_path, "install", "--image", IMAGE, "--timeout", "60")
    if moment == "before its label":
        cluster.until(lambda pods: any("-fit-n2-" in name for name in pods), "the image is tried on n2")
    else:
        wanted = AGENT if moment == "before it is programmed" else PARKED
        cluster.until(lambda pods: wanted in labels(), f"n2 has the label {wanted}")
    cluster.faults.dead.add("n2")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    (error,) = (line for line in said.splitlines() if line.startswith("Error: "))
    assert error.startswith("Error: n2: the node's kubelet no longer reports")
    assert error.endswith("; done before: n1")
    assert PARKED not in labels()
    cluster.faults.never_programmed.clear()
    cluster.faults.never_ready.clear()
    cluster.faults.hanging.clear()
    # Meanwhile the other nodes continue.
    said = run(tmp_path, "install")
    assert "skipped, because they are not ready: n2" in said
    cluster.faults.dead.clear()
    kube_proxy_too = ["kube-proxy"] if moment == "before its label" else ["kube-proxy", "pyebpf-proxy"]
    cluster.until(lambda pods: proxies(pods)["n2"] == kube_proxy_too, "n2 is back, with a proxy")
    cluster.until(lambda pods: is_up(server, "n2"), "its kubelet reports")
    run(tmp_path, "install")
    assert now(server) == served_by_agent(*NAMES)


def is_up(server: ApiServer, name: str) -> bool:
    conditions = server.request("GET", f"/api/v1/nodes/{name}")["status"].get("conditions", ())
    return all(each["status"] == "True" for each in conditions)


@pytest.mark.parametrize("answer", ["n", "y"])
def test_the_question_before_changes(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path, answer: str) -> None:
    """On a terminal without --yes, the command shows the context and the API server's address, and does nothing without
    a y.
    """
    words = command(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    words.remove("--yes")
    leader, follower = os.openpty()
    try:
        with subprocess.Popen(
            words, stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            os.write(leader, f"{answer}\n".encode())
            said, asked = process.communicate(timeout=60)
    finally:
        os.close(leader)
        os.close(follower)
    question = f"context tests, {server.url}: run install on this cluster? [y/N] "
    if answer == "y":
        assert (process.returncode, asked) == (0, question), said
        assert now(server) == served_by_agent("n1")
        return
    assert (process.returncode, said, asked) == (1, "", f"{question}Error: not confirmed; nothing was changed\n")
    with pytest.raises(ApiError, match="not found"):
        daemon_set(server, "pyebpf-proxy")


def test_the_api_server_is_down_for_a_while(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    process = started(tmp_path, "install", "--image", IMAGE)
    cluster.until(lambda pods: "pyebpf-proxy" in proxies(pods).get("n1", ()), "the first agent runs")
    server.kill()
    time.sleep(2)
    server.start()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "the API server does not answer (" in output
    assert "the API server answers again" in output
    assert now(server) == served_by_agent(*NAMES)


def test_ctrl_c_and_kill_leave_a_proxy_and_the_next_command_continues(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    process = started(tmp_path, "install", "--image", IMAGE)
    cluster.until(lambda pods: "pyebpf-proxy" in proxies(pods).get("n2", ()), "the second node's agent runs")
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "n2: interrupted; a proxy serves the node" in output
    assert now(server)["n1"] == ["pyebpf-proxy"]
    # After kill -9 the Lease is held until it expires.
    process = started(tmp_path, "install")
    cluster.until(lambda pods: "pyebpf-proxy" in proxies(pods).get("n3", ()), "the third node's agent runs")
    process.kill()
    process.wait()
    assert "another command changes this cluster: install by " in run(tmp_path, "install", status=1)
    expire_lease(server)
    run(tmp_path, "install")
    assert now(server) == served_by_agent(*NAMES)


def test_two_installs_at_once(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    both = [started(tmp_path, "install", "--image", IMAGE) for _ in range(2)]
    output = [process.communicate(timeout=60)[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], output
    (refused,) = (text for process, text in zip(both, output, strict=True) if process.returncode)
    assert "another command" in refused
    assert "taken over" not in refused
    assert now(server) == served_by_agent(*NAMES)
