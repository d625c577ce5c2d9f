# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy cluster`` against a real API server: commands that are stopped in the middle, and what goes on then.

As in test_cluster_commands.py; at the end of each test no node may have an agent's programs without a label.
"""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.cluster import api
from pyebpf_proxy.cluster.objects import AGENT, CLEANING, ON, PARKED, UNREACHED, UNVERIFIED
from tests.cluster.commands import (
    IMAGE,
    LEASE,
    NAMES,
    NEWER,
    expire_lease,
    labels,
    now,
    only_error,
    proxies,
    run,
    served_by_agent,
    simulated_cluster,
    started,
)
from tests.cluster.simulated_nodes import SETS, SYSTEM, SimulatedNodes
from tests.support.apiserver import MERGE, ApiServer


@pytest.fixture
def unwatched(server: ApiServer, tmp_path: Path) -> Iterator[SimulatedNodes]:
    """Two nodes without a recorder: for tests that end an agent's pod, whose programs carry the traffic."""
    with simulated_cluster(server, tmp_path, NAMES[:2]) as nodes:
        yield nodes


def ran(cluster: SimulatedNodes) -> list[tuple[str, str]]:
    """The task pods that have ended: task and node."""
    return [(pod["metadata"]["labels"]["pyebpf-proxy/task"], pod["spec"]["nodeName"]) for pod in cluster.ran]


def wait_for_task(cluster: SimulatedNodes, what: str, node: str) -> None:
    cluster.until(lambda pods: any(f"-{what}-{node}-" in name for name in pods), f"the task {what} runs on {node}")


# ---- rollback ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["Ctrl-C", "SIGTERM", "kill", "it fails", "the node dies"])
def test_a_clean_up_that_did_not_end_is_not_forgotten(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path, stop: str
) -> None:
    """The agent's pod is gone and its programs are attached: status names the node, and rollback goes on there."""
    run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    if stop == "it fails":
        cluster.faults.tasks["clean", "n1"] = "the map services cannot be opened"
        said = run(tmp_path, "rollback", status=1)
        assert only_error(said).startswith("Error: n1: clean: the map services cannot be opened; to continue, run")
    else:
        cluster.faults.hanging.add(("clean", "n1"))
        process = started(tmp_path, "rollback", "--timeout", "60")
        wait_for_task(cluster, "clean", "n1")
        if stop == "the node dies":
            cluster.faults.dead.add("n1")
        else:
            number = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "kill": signal.SIGKILL}[stop]
            os.kill(process.pid, number)
        said, _ = process.communicate(timeout=60)
        if stop == "kill":
            expire_lease(server)
        elif stop == "the node dies":
            assert (process.returncode, "n1: the node's kubelet no longer reports" in only_error(said)) == (1, True), (
                said
            )
        else:
            assert process.returncode == 128 + number, said
            assert "n1: interrupted; a proxy serves the node; to continue, run pyebpf-proxy cluster rollback" in said
            cluster.until(lambda pods: len(pods) == 3, "its task pod is deleted")
    assert_it_goes_on(cluster, server, tmp_path)
    assert now(server) == served_by_agent()


def test_a_failed_installation_that_could_not_be_cleaned_up_is_not_forgotten(
    unwatched: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    unwatched.faults.tasks["verify", "n1"] = "no connection to the Service at 10.96.0.1 port 443: timed out"
    unwatched.faults.tasks["clean", "n1"] = "the map services cannot be opened"
    said = run(tmp_path, "install", "--image", IMAGE, status=1)
    assert "; the node could not be given back: clean: the map services cannot be opened; " in only_error(said)
    assert_it_goes_on(unwatched, server, tmp_path)


def assert_it_goes_on(cluster: SimulatedNodes, server: ApiServer, folder: Path) -> None:
    """The clean-up of n1 has not ended. ``status`` reports it, and ``rollback`` ends it once nothing is wrong."""
    assert labels(server, "n1")[AGENT] == CLEANING
    assert "n1" in cluster.attached
    cluster.faults.tasks.clear()
    cluster.faults.hanging.clear()
    cluster.faults.dead.clear()
    said = run(folder, "status", status=1)
    assert "warning  n1: proxy: what the agent attached is still there: the clean-up has not finished" in said
    cluster.until(lambda pods: is_up(server, "n1"), "its kubelet reports")
    cluster.ran.clear()
    assert "all objects of pyebpf-proxy are removed" in run(folder, "rollback")
    assert ("clean", "n1") in ran(cluster)
    assert cluster.attached == set()


def is_up(server: ApiServer, name: str) -> bool:
    conditions = server.request("GET", f"/api/v1/nodes/{name}")["status"].get("conditions", ())
    return all(each["status"] == "True" for each in conditions)


def test_install_takes_a_node_whose_clean_up_did_not_end(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    cluster.faults.tasks["clean", "n1"] = "the map services cannot be opened"
    run(tmp_path, "rollback", status=1)
    run(tmp_path, "install", "--canary", "1")
    assert now(server) == served_by_agent("n1"), "it comes first, and counts"
    assert labels(server, "n1")[AGENT] == ON


def test_what_a_former_agent_attached_is_removed(unwatched: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    """The present one has never run: its image is gone. With another image the node is given back."""
    run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    server.request("PATCH", "/api/v1/nodes/n1", {"metadata": {"labels": {PARKED: None}}}, MERGE)
    both = ["kube-proxy", "pyebpf-proxy"]
    unwatched.until(lambda pods: proxies(pods)["n1"] == both, "both proxies run on n1")
    unwatched.faults.missing.add((IMAGE, "n1"))
    (pod,) = server.request("GET", f"{SYSTEM}?labelSelector=k8s-app=pyebpf-proxy")["items"]
    server.request("DELETE", f"{SYSTEM}/{pod['metadata']['name']}")
    unwatched.until(lambda pods: proxies(pods)["n1"] == ["kube-proxy"], "the agent's pod is gone")
    said = run(tmp_path, "rollback", "--timeout", "5", status=1)
    assert only_error(said).startswith("Error: n1: the image cannot be pulled: ")
    run(tmp_path, "rollback", "--image", NEWER)
    assert unwatched.attached == set()


def test_without_the_agents_daemonset_an_image_is_asked_for(
    unwatched: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    server.request("DELETE", f"{SETS}/pyebpf-proxy")
    # The garbage collector's part.
    (pod,) = server.request("GET", f"{SYSTEM}?labelSelector=k8s-app=pyebpf-proxy")["items"]
    server.request("DELETE", f"{SYSTEM}/{pod['metadata']['name']}")
    said = run(tmp_path, "rollback", status=2)
    assert "there is no DaemonSet kube-system/pyebpf-proxy any more; nothing was changed; " in only_error(said)
    assert labels(server, "n1")[PARKED] == ON, "nothing was changed"
    assert "all objects of pyebpf-proxy are removed" in run(tmp_path, "rollback", "--image", IMAGE)
    assert unwatched.attached == set()


def test_a_kube_proxy_without_rules_is_restarted(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    """An agent that does not run any more may have removed them; nothing else makes kube-proxy write them soon."""
    run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    cluster.faults.tasks["await", "n1"] = "kube-proxy has no rule for the Service at 10.96.0.1"
    process = started(tmp_path, "rollback")
    wait_for_task(cluster, "await", "n1")
    first = kube_proxy_of(server, "n1")
    cluster.until(
        lambda pods: first not in {pod["metadata"]["uid"] for pod in pods.values()}, "kube-proxy is restarted"
    )
    cluster.faults.tasks.clear()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "n1: await: kube-proxy has no rule for the Service at 10.96.0.1; restarting kube-proxy" in said
    assert now(server) == served_by_agent()


def kube_proxy_of(server: ApiServer, node: str) -> str:
    pods = server.request("GET", f"{SYSTEM}?labelSelector=k8s-app=kube-proxy")["items"]
    return next(str(each["metadata"]["uid"]) for each in pods if each["spec"]["nodeName"] == node)


# ---- install -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("works", [True, False])
def test_what_was_not_verified_is_verified(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path, works: bool
) -> None:
    cluster.faults.hanging.add(("verify", "n1"))
    process = started(tmp_path, "install", "--image", IMAGE)
    wait_for_task(cluster, "verify", "n1")
    process.kill()
    process.wait()
    expire_lease(server)
    cluster.until(lambda pods: now(server) == served_by_agent("n1"), "kube-proxy's pod is gone")
    assert labels(server, "n1")[PARKED] == UNVERIFIED
    said = run(tmp_path, "status", status=1)
    assert "warning  n1: proxy: not taken over: not verified" in said
    cluster.faults.hanging.clear()
    if works:
        said = run(tmp_path, "install", "--canary", "1")
        assert "[1/1] n1: taken over, and verified" in said
        assert ("verify", "n1") in ran(cluster)
        assert labels(server, "n1")[PARKED] == ON
    else:
        cluster.faults.tasks["verify", "n1"] = "no connection to the Service at 10.96.0.1 port 443: timed out"
        said = run(tmp_path, "install", "--canary", "1", status=1)
        assert only_error(said).endswith("; the node was given back to kube-proxy")
        assert now(server) == served_by_agent()


@pytest.mark.parametrize("removed", [[AGENT], [AGENT, PARKED]], ids=["agent", "both"])
@pytest.mark.parametrize("command", ["install", "rollback"])
def test_labels_that_another_program_removes(
    unwatched: SimulatedNodes, server: ApiServer, tmp_path: Path, removed: list[str], command: str
) -> None:
    """No agent runs there any more, but its programs decide about each packet."""
    run(tmp_path, "install", "--image", IMAGE)
    change = {"metadata": {"labels": dict.fromkeys(removed)}}
    server.request("PATCH", "/api/v1/nodes/n1", change, MERGE)
    left = ["kube-proxy"] if PARKED in removed else []
    unwatched.until(lambda pods: proxies(pods).get("n1", []) == left, "the agent has ended")
    said = run(tmp_path, "status", status=1)
    state = "warning" if PARKED in removed else "bad    "
    assert f"{state}  n1: proxy: its label {AGENT}=true is missing, so no agent runs; what the last one" in said
    assert "1 of 2 nodes served by pyebpf-proxy" in said
    said = run(tmp_path, command)
    if command == "install":
        assert "[1/1] n1: taken over, and verified" in said
        assert "2 of 2 nodes served by pyebpf-proxy" in run(tmp_path, "status")
    else:
        # Its pod may be of the changed template, and is then replaced at the end.
        back = {"n1": ["kube-proxy"], "n2": ["kube-proxy"]}
        unwatched.until(lambda pods: proxies(pods) == back, "kube-proxy serves both nodes")
        assert unwatched.attached == set()
        assert UNREACHED not in str(server.request("GET", "/api/v1/nodes"))


# ---- the agents ----------------------------------------------------------------------------------------------------


def test_ctrl_c_while_an_agent_does_not_answer(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    run(tmp_path, "install", "--image", IMAGE)
    asked, ended = threading.Event(), threading.Event()

    def execute(node: str, words: list[str]) -> tuple[int, bytes, bytes]:
        asked.set()
        ended.wait(60)
        return 3, b"", b"no answer"

    cluster.execute = execute
    process = started(tmp_path, "services")
    try:
        assert asked.wait(30)
        os.kill(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=10)
    finally:
        process.kill()
        ended.set()
    assert process.returncode == 130, said


# ---- the API server ------------------------------------------------------------------------------------------------


def stop_when(cluster: SimulatedNodes, server: ApiServer, node: str) -> threading.Thread:
    """End the API server as soon as an agent runs on the node."""

    def wait() -> None:
        cluster.until(lambda pods: "pyebpf-proxy" in proxies(pods).get(node, ()), f"the agent of {node} runs")
        server.kill()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_an_outage_ends_with_the_nodes_name(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without an attempt to give the node back, which would wait as long again."""
    monkeypatch.setattr(api, "PATIENCE", 6.0)
    cluster.faults.never_ready.add("n1")
    killing = stop_when(cluster, server, "n1")
    begin = time.monotonic()
    said = run(tmp_path, "install", "--image", IMAGE, status=3)
    seconds = time.monotonic() - begin
    killing.join()
    server.start()
    error = only_error(said)
    assert error.startswith("Error: n1: the API server has not answered for 6 s: ")
    assert "; a proxy serves the node; to continue, run pyebpf-proxy cluster install" in error
    assert "giving the node back to kube-proxy" not in said
    assert seconds < 18, said
    cluster.faults.never_ready.clear()
    expire_lease(server)
    run(tmp_path, "install")
    assert now(server) == served_by_agent(*NAMES)


def test_ctrl_c_during_an_outage(cluster: SimulatedNodes, server: ApiServer, tmp_path: Path) -> None:
    cluster.faults.hanging.add(("verify", "n1"))
    process = started(tmp_path, "install", "--image", IMAGE)
    wait_for_task(cluster, "verify", "n1")
    server.kill()
    time.sleep(2)
    os.kill(process.pid, signal.SIGINT)
    try:
        said, _ = process.communicate(timeout=4)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    finally:
        server.start()
    assert process.returncode == 130, said
    assert "n1: interrupted; a proxy serves the node" in said


# ---- the Lease -----------------------------------------------------------------------------------------------------


def lease(server: ApiServer, seconds_ago: float, holder: str = "install by operator@laptop") -> None:
    """Hold the Lease for 3 s, by a clock that is wrong by so much."""
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds_ago)
    specification = {"holderIdentity": holder, "leaseDurationSeconds": 3}
    specification["renewTime"] = then.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    metadata = {"name": "pyebpf-proxy-cluster", "namespace": "kube-system"}
    item = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": specification}
    server.apply(item)


@pytest.mark.parametrize("seconds_ago", [600, -600, 9 * 3600])
def test_a_lease_that_is_renewed_counts_whatever_its_clock_says(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path, seconds_ago: float
) -> None:
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.5):
            lease(server, seconds_ago)

    lease(server, seconds_ago)
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        said = run(tmp_path, "install", "--image", IMAGE, status=1)
    finally:
        ended.set()
        thread.join()
    assert "another command changes this cluster: install by operator@laptop" in only_error(said)
    assert now(server) == served_by_agent()
    # It is not renewed any more.
    said = run(tmp_path, "install", "--image", IMAGE, "--canary", "1")
    assert "waiting 3 s to see whether another command is running: install by operator@laptop" in said
    assert now(server) == served_by_agent("n1")


def test_a_command_that_has_lost_the_lease_changes_no_node(
    cluster: SimulatedNodes, server: ApiServer, tmp_path: Path
) -> None:
    """As after a laptop has slept: another command changes the same node."""
    cluster.faults.never_programmed.add("n1")
    process = started(tmp_path, "install", "--image", IMAGE)
    cluster.until(lambda pods: AGENT in labels(server, "n1"), "n1 has the label")
    lease(server, 0, "rollback by operator@laptop")
    cluster.faults.never_programmed.clear()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert "n1: another command has taken over: rollback by operator@laptop; this one stops" in only_error(said)
    assert PARKED not in labels(server, "n1")
    found: Any = server.request("GET", LEASE)
    assert found["spec"]["holderIdentity"] == "rollback by operator@laptop", "it does not take it back"
    expire_lease(server)
