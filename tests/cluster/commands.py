# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy cluster`` in tests: a cluster with simulated nodes, the commands, and what they leave."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyebpf_proxy.cli import main
from pyebpf_proxy.cluster.objects import AGENT
from tests.cluster.simulated_nodes import SETS, SYSTEM, Recorder, SimulatedNodes
from tests.support import kubeadm
from tests.support.apiserver import ADMIN_TOKEN, MERGE, ApiServer, Object

NAMES = ["n1", "n2", "n3"]
IMAGE, NEWER = "registry.example/pyebpf-proxy:1", "registry.example/pyebpf-proxy:2"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/pyebpf-proxy-cluster"
CONFIG_MAP = "/api/v1/namespaces/kube-system/configmaps/kube-proxy"


@contextlib.contextmanager
def watched(server: ApiServer, folder: Path) -> Iterator[SimulatedNodes]:
    """Three nodes on which kube-proxy runs, and a recorder that fails the test if one is without a proxy."""
    with simulated_cluster(server, folder, NAMES) as nodes:
        with Recorder(server) as recorder:
            yield nodes
        assert recorder.served == set(NAMES), "the recorder has not seen them"
        assert recorder.gaps == []


@contextlib.contextmanager
def simulated_cluster(server: ApiServer, folder: Path, names: list[str]) -> Iterator[SimulatedNodes]:
    """Nodes on which kube-proxy runs, kubeadm's objects, and ``admin.conf`` in the folder.

    At the end, each node with programs of an agent must have the label by which the commands know it.
    """
    server.kubeconfig(folder / "admin.conf", {"token": ADMIN_TOKEN})
    server.apply(kubeadm.config_map("https://192.0.2.1:6443"))
    with SimulatedNodes(server, names, folder) as nodes:
        server.create(kubeadm.daemon_set())
        nodes.until(lambda pods: proxies(pods).keys() == set(names), "kube-proxy runs everywhere")
        yield nodes
        forgotten = [name for name in sorted(nodes.attached) if AGENT not in labels(server, name)]
        assert forgotten == [], "an agent's programs are attached, and no label says so"


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
    """The command's output, then its errors. In this process: importing the library takes a second."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        ended = main(command(folder, *arguments)[3:])
    text = output.getvalue() + errors.getvalue()
    assert ended == status, text
    return text


def only_error(output: str) -> str:
    """The one error line of a command."""
    (line,) = (line for line in output.splitlines() if line.startswith("Error: "))
    return line


def labels(server: ApiServer, node: str) -> dict[str, str]:
    """Of a node; empty if it does not exist any more."""
    items = server.request("GET", "/api/v1/nodes")["items"]
    return next((each["metadata"].get("labels", {}) for each in items if each["metadata"]["name"] == node), {})


def expire_lease(server: ApiServer) -> None:
    """As long after a command was killed. The next one watches it only for a second."""
    past = {"spec": {"renewTime": "2026-01-01T00:00:00.000000Z", "leaseDurationSeconds": 1}}
    server.request("PATCH", LEASE, past, MERGE)


def daemon_set(server: ApiServer, name: str = "kube-proxy") -> Any:
    return server.request("GET", f"{SETS}/{name}")


def served_by_agent(*nodes: str) -> dict[str, list[str]]:
    return {node: ["pyebpf-proxy" if node in nodes else "kube-proxy"] for node in NAMES}


def now(server: ApiServer) -> dict[str, list[str]]:
    return proxies({each["metadata"]["name"]: each for each in server.request("GET", SYSTEM)["items"]})


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(folder, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
