# SPDX-License-Identifier: Apache-2.0
"""Endpoints come and go under load: the pods of a Service are replaced all the time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e import results
from tests.e2e.cluster import Cluster
from tests.e2e.layout import NODES, RELEASE
from tests.e2e.problem import E2EError
from tests.e2e.switch import LOAD_SPACE, Load, show_failures

#: How many pods to delete each second. A node can start fewer: then as many as become ready.
RATE = 10
REPLICAS = 30
#: So many pods stay ready, or the others would have all connections.
FEWEST = REPLICAS // 2
#: A minute of churn replaces at least so many pods, or it was none.
FEWEST_A_MINUTE = 20


@dataclass(frozen=True)
class Churn:
    """A run: how many pods were deleted while they were ready, and the connections meanwhile.

    ``programmed``: within how many seconds 99 % of the changed EndpointSlices were in force on all nodes, and 0 if that
    is not known. If a pod has ended before, its connections fail with any proxy. ``request``: the CPU time that the
    proxy's pods request; empty: none.
    """

    seconds: int
    pods: int
    connections: int
    failed: int
    programmed: float = 0
    request: str = ""


def run(seconds: int, record: bool) -> int:
    """Replace pods for so many seconds, with the proxy that the cluster has. 1 if a connection failed."""
    cluster = Cluster()
    if not cluster.proxy:
        raise E2EError("no cluster is up: make cluster-up")
    with Load(cluster) as load:
        cluster.kubectl("-n", LOAD_SPACE, "scale", "deployment/web", f"--replicas={REPLICAS}")
        cluster.kubectl("-n", LOAD_SPACE, "rollout", "status", "deployment/web", "--timeout=300s")
        before, began, pods = load.count(), time.monotonic(), 0
        while (now := time.monotonic()) < began + seconds:
            pods += _replace(cluster)
            time.sleep(max(0.0, now + 1 - time.monotonic()))
        asked, failed = (after - then for after, then in zip(load.count(), before, strict=True))
        seconds = round(time.monotonic() - began)
        programmed = quantile([node.run(*_METRICS) for node in cluster.nodes])
        made = Churn(seconds, pods, asked, failed, programmed, _request(cluster))
        print(
            f"{cluster.proxy}: {made.pods} pods replaced in {made.seconds} s: {asked} connections, {failed} failed;"
            f" 99 % of the changes in force within {programmed} s"
        )
        show_failures(load)
    if pods < seconds / 60 * FEWEST_A_MINUTE:
        raise E2EError(f"only {pods} pods were replaced in {made.seconds} s")
    if record:
        print(f"written: {save(cluster.proxy, made)}")
    return 1 if failed else 0


_READ = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:10249/metrics', timeout=30).read().decode())"
_METRICS = (sys.executable, "-c", _READ)
_PROGRAMMED = "kubeproxy_network_programming_duration_seconds_bucket"


def quantile(metrics: Sequence[str], share: float = 0.99) -> float:
    """The proxies' own measurement on all nodes: the bound of the bucket that this share of the changes is within."""
    counts: dict[float, float] = {}
    for text in metrics:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == _PROGRAMMED:
                    bound = float(sample.labels["le"])
                    counts[bound] = counts.get(bound, 0) + sample.value
    most = max(counts.values(), default=0)
    return min((bound for bound, count in counts.items() if count >= most * share), default=0) if most else 0


def _request(cluster: Cluster) -> str:
    daemon_set = "pyebpf-proxy" if cluster.proxy == "pyebpf-proxy" else "kube-proxy"
    path = "{.spec.template.spec.containers[0].resources.requests.cpu}"
    return cluster.kubectl("-n", "kube-system", "get", "daemonset", daemon_set, "-o", f"jsonpath={path}").strip()


def _replace(cluster: Cluster) -> int:
    """Delete the oldest ready pods; the Deployment creates others. How many."""
    chosen = ("-n", LOAD_SPACE, "get", "pods", "-l", "app=web", "-o", "json")
    names = oldest(json.loads(cluster.kubectl(*chosen))["items"])
    if names:
        cluster.kubectl("-n", LOAD_SPACE, "delete", "pod", "--wait=false", *names)
    return len(names)


def oldest(pods: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the pods to delete now: the oldest that are ready, if enough others are."""
    ready = [
        pod
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
        and any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))
    ]
    ready.sort(key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
    return [pod["metadata"]["name"] for pod in ready[: max(0, min(RATE, len(ready) - FEWEST))]]


def save(proxy: str, made: Churn, path: Path = results.CHURN) -> Path:
    """recorded/churn.json, for the page: the last run with each proxy and CPU request."""
    about: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    runs = about.get("runs", {}) | {f"{proxy} {made.request}".strip(): asdict(made)}
    path.write_text(json.dumps({"release": RELEASE, "nodes": NODES, "runs": runs}, indent=1) + "\n")
    return path


def load_record(path: Path = results.CHURN) -> dict[str, Churn]:
    """Read what ``save`` wrote, by proxy and CPU request; empty: nothing was recorded."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    return {proxy: Churn(**each) for proxy, each in runs.items()}
