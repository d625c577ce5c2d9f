# SPDX-License-Identifier: Apache-2.0
"""The proxy is replaced while requests run: the commands of docs/cluster.md, in the cluster of `make cluster-up`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e import control_plane
from tests.e2e.cluster import Cluster
from tests.e2e.layout import NEXT_IMAGE, OUR_IMAGE, REPOSITORY
from tests.e2e.problem import E2EError
from tests.e2e.processes import wait_for

_LOAD = Path(__file__).parent / "load.yaml"
_SPACE = "pep-load"


class Load:
    """Requests from a pod and from the node on each node. ``with Load(cluster) as load``."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __enter__(self) -> Load:
        self._cluster.kubectl("apply", "-f", _LOAD)
        for kind in ("deployment/web", "daemonset/pod", "daemonset/node"):
            self._cluster.kubectl("-n", _SPACE, "rollout", "status", kind, "--timeout=120s")
        # Those that began before the endpoints were ready have failed for that.
        self._cluster.kubectl("-n", _SPACE, "delete", "pods", "-l", "app=ask")
        for kind in ("daemonset/pod", "daemonset/node"):
            self._cluster.kubectl("-n", _SPACE, "rollout", "status", kind, "--timeout=120s")
        wait_for("requests are answered", lambda: self.count()[0] > 100, 60)
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.kubectl("delete", "--ignore-not-found", "-f", _LOAD, check=False)

    def _logs(self) -> str:
        chosen = ("-n", _SPACE, "logs", "-l", "app=ask", "--tail=-1", "--max-log-requests=20", "--prefix")
        return self._cluster.kubectl(*chosen, check=False)

    def count(self) -> tuple[int, int]:
        """How many requests, and how many have failed."""
        latest: dict[str, tuple[int, int]] = {}
        for pod, asked, failed in re.findall(r"^\[(\S+)\] asked (\d+) failed (\d+)$", self._logs(), re.MULTILINE):
            latest[pod] = (int(asked), int(failed))
        return sum(asked for asked, _ in latest.values()), sum(failed for _, failed in latest.values())

    def failures(self) -> list[str]:
        """A line for each failed request."""
        return [line for line in self._logs().splitlines() if "curl ends" in line]


def restart(cluster: Cluster, load: Load) -> None:
    """What nodes go through, while ours serves them: agents end, with and without a word; kubelets, containerd."""
    agents = ("-n", "kube-system", "delete", "pod", "-l", "k8s-app=pyebpf-proxy")

    def restart_kubelets() -> None:
        for node in cluster.nodes:
            node.stop_program("kubelet")
            node.start_kubelet()

    def restart_containerd() -> None:
        for node in cluster.nodes:
            node.stop_program("containerd", "KILL")
            node.start_containerd()

    for what, action in (
        ("agents deleted", lambda: cluster.kubectl(*agents)),
        ("agents deleted by force", lambda: cluster.kubectl(*agents, "--grace-period=0", "--force")),
        ("kubelets restarted", restart_kubelets),
        ("containerd killed and started", restart_containerd),
    ):
        before = load.count()
        action()
        time.sleep(10)
        ready = ("--for=condition=Ready", "pod", "-l", "k8s-app=pyebpf-proxy", "--timeout=60s")
        cluster.kubectl("-n", "kube-system", "wait", *ready)
        asked, failed = (now - then for now, then in zip(load.count(), before, strict=True))
        print(f"{what}: {asked} requests, {failed} failed", flush=True)


def run() -> int:
    """kube-proxy, ours with restarts, kube-proxy again. 1 if a request failed."""
    cluster = Cluster()
    if cluster.proxy != "kube-proxy":
        raise E2EError("this needs a cluster with kube-proxy: make cluster-up PROXY=kube-proxy")
    with Load(cluster) as load:
        for command in (
            ("install", "--image", OUR_IMAGE),
            ("test",),
            ("upgrade", "--image", NEXT_IMAGE),
            ("rollback",),
        ):
            began = time.monotonic()
            before = load.count()
            print(f"\n$ pyebpf-proxy cluster {' '.join(command)}", flush=True)
            done = subprocess.run(
                [*control_plane.INSIDE, REPOSITORY / ".venv/bin/pyebpf-proxy", "cluster", *command, "--yes"],
                check=False,
                env=os.environ | {"KUBECONFIG": str(cluster.kubeconfig)},
                stdin=subprocess.DEVNULL,
            )
            time.sleep(5)
            seconds = time.monotonic() - began - 5
            asked, failed = (now - then for now, then in zip(load.count(), before, strict=True))
            print(f"exit status {done.returncode}, {seconds:.0f} s: {asked} requests, {failed} failed")
            if done.returncode:
                print("\n".join(load.failures()), file=sys.stderr)
                return 1
            if command[0] == "test":
                restart(cluster, load)
        asked, failed = load.count()
        print(f"\n{asked} requests, {failed} failed")
        for line in load.failures():
            print(line, file=sys.stderr)
    return 1 if failed else 0
