# SPDX-License-Identifier: Apache-2.0
"""Helpers of the lab's tests: who asks, what the data plane counted, waiting for a condition."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.lab.addresses import CLIENT, SERVICE_CIDR
from pyebpf_proxy.lab.cluster import Lab, Node, Pod
from pyebpf_proxy.lab.scenario import Client

ROOT = Path(__file__).resolve().parents[2]


def agent_lane(lane: str) -> str:
    """The agent's --lane for a lane under test: the direct one is what the agent chooses by itself."""
    return "netfilter" if lane == "netfilter" else "auto"


def reason_names() -> list[str]:
    """The enumerators of bpf/reason.h, in order, in lower case."""
    text = (ROOT / "bpf" / "reason.h").read_text()
    body = re.sub(r"/\*.*?\*/", "", text[text.index("enum reason {") :], flags=re.DOTALL)
    return [name.lower() for name in re.findall(r"^\s*([A-Z_0-9]+),", body, re.MULTILINE)]


def reasons(node: Node) -> dict[str, int]:
    """The counters of every reason on a node, summed over CPUs."""
    dump = json.loads(node.namespace.run("bpftool", "-j", "map", "dump", "pinned", str(node.agent.pin("reasons"))))
    names = reason_names()
    counts = {}
    for entry in dump:
        formatted = entry["formatted"]
        counts[names[formatted["key"]]] = sum(value["value"] for value in formatted["values"])
    return counts


def moved(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """The reasons that were counted in between."""
    return {name: count - before[name] for name, count in after.items() if count != before[name]}


def wait_until(condition: Callable[[], Any], what: str, deadline: float = 20.0) -> Any:
    """Poll until ``condition`` is true; its value. Fails with ``what`` after ``deadline`` seconds."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"after {deadline} s still not: {what}")
        time.sleep(0.01)
    return value


def pod_client(pod: Pod) -> Client:
    return Client(pod.name, pod.namespace, "pod", pod.address, pod.node)


def node_client(node: Node) -> Client:
    return Client(node.name, node.namespace, "node", node.address, node)


def outside_client(lab: Lab) -> Client:
    return Client("client", lab.client, "external", CLIENT, None)


def route_cluster_ips(lab: Lab, node: Node) -> None:
    """Let the outside client reach ClusterIPs through ``node``, as some on-premises networks do."""
    lab.core.ip(*(f"route replace {cidr} via {node.address.of(4 + 2 * i)}" for i, cidr in enumerate(SERVICE_CIDR)))
