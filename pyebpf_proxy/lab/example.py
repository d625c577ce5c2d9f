# SPDX-License-Identifier: Apache-2.0
"""The lab of ``examples/``: two nodes, web-1 on node1, web-2 and web-3 on node2, a toolbox on node1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pyebpf_proxy.lab.cluster import Lab, PodNetwork
from pyebpf_proxy.lab.namespace import LabError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SLICES = "web-endpoints.yaml"


def open_example(folder: Path = EXAMPLES, pod_network: PodNetwork = "routed") -> Lab:
    """A lab for the examples, not yet started. Raises LabError if the examples do not exist."""
    if not (folder / "manifests" / SLICES).exists():
        raise LabError(f"no examples in {folder}: name their folder with --examples")
    return Lab(nodes=2, pod_network=pod_network)


def populate(lab: Lab, folder: Path = EXAMPLES) -> None:
    """Add pods, manifests and agents, and wait until every agent is synced."""
    first, second = lab.nodes
    lab.add_pod("web-1", first)
    lab.add_pod("toolbox", first)
    lab.add_pod("web-2", second)
    lab.add_pod("web-3", second)
    lab.copy_manifests(folder / "manifests")
    lab.start_agents(read_config(folder / "config.yaml"))


def read_config(path: Path) -> dict[str, Any]:
    """The KubeProxyConfiguration of the examples."""
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    return document


def with_endpoint(text: str, lab: Lab, pod_name: str) -> str:
    """The text of an EndpointSlice file with one more endpoint in each slice."""
    pod = lab.pods[pod_name]
    documents = list(yaml.safe_load_all(text))
    for document in documents:
        family = 6 if document["addressType"] == "IPv6" else 4
        document["endpoints"].append(
            {
                "addresses": [pod.address.of(family)],
                "nodeName": pod.node.name,
                "targetRef": {"kind": "Pod", "name": pod_name, "namespace": "default"},
            }
        )
    return yaml.safe_dump_all(documents, sort_keys=False)
