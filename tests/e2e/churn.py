# SPDX-License-Identifier: Apache-2.0
"""Endpoints come and go under load: the pods of a Service are replaced all the time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
    """A run: how many pods were deleted while they were ready, and the connections meanwhile."""

    seconds: int
    pods: int
    connections: int
    failed: int


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
        made = Churn(round(time.monotonic() - began), pods, asked, failed)
        print(f"{cluster.proxy}: {made.pods} pods replaced in {made.seconds} s: {asked} connections, {failed} failed")
        show_failures(load)
    if pods < seconds / 60 * FEWEST_A_MINUTE:
        raise E2EError(f"only {pods} pods were replaced in {made.seconds} s")
    if record:
        print(f"written: {save(cluster.proxy, made)}")
    return 1 if failed else 0


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
    """recorded/churn.json, for the page: the last run with each proxy."""
    about: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    runs = about.get("runs", {}) | {proxy: asdict(made)}
    path.write_text(json.dumps({"release": RELEASE, "nodes": NODES, "runs": runs}, indent=1) + "\n")
    return path


def load_record(path: Path = results.CHURN) -> dict[str, Churn]:
    """Read what ``save`` wrote, by proxy; empty: nothing was recorded."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    return {proxy: Churn(**each) for proxy, each in runs.items()}
