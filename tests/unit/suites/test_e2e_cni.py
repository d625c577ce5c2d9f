# SPDX-License-Identifier: Apache-2.0
"""What connects the pods of the cluster of tests/e2e."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from tests.e2e import images, page, results, specs
from tests.e2e.cluster import Cluster
from tests.e2e.cni import CNIS, DEFAULT_CNI
from tests.e2e.layout import Network
from tests.e2e.node import Node
from tests.e2e.problem import E2EError
from tests.e2e.results import Spec

SUBNET = "10.244.1.0/24"


class FakeNode:
    """A node that records what is started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name, self.network, self.admin = folder, "pep-e2e-1", Network(), folder / "admin.conf"
        self.started: dict[str, tuple[str, ...]] = {}

    def keep_running(self, name: str, *command: str | Path, environment: dict[str, str] | None = None) -> None:
        self.started[name] = tuple(map(str, command))

    def run(self, *command: str, check: bool = True) -> str:
        assert command == ("cat", "/run/flannel/subnet.env")
        return "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.1.1/24\nFLANNEL_MTU=1450\n"


def plugins(name: str, folder: Path) -> tuple[FakeNode, list[dict[str, Any]]]:
    node = FakeNode(folder)
    return node, CNIS[name].start(cast(Node, node), [SUBNET])


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("ptp", ["ptp", "portmap"]),
        ("bridge", ["bridge", "portmap", "bandwidth"]),
        ("flannel", ["bridge", "portmap", "bandwidth"]),
    ],
)
def test_each_cni_gives_pods_addresses_of_the_nodes_range(name: str, types: list[str], tmp_path: Path) -> None:
    _, listed = plugins(name, tmp_path)
    assert [each["type"] for each in listed] == types
    assert listed[0]["ipam"]["ranges"] == [[{"subnet": SUBNET}]]
    assert set(CNIS) == {"ptp", "bridge", "flannel"}


def test_flannel_has_its_processes_and_its_mtu(tmp_path: Path) -> None:
    node, listed = plugins("flannel", tmp_path)
    assert set(node.started) == set(CNIS["flannel"].programs)
    assert json.loads((tmp_path / "net-conf.json").read_text())["Network"] == Network().pods
    assert listed[0]["mtu"] == 1450
    assert plugins(DEFAULT_CNI, tmp_path)[0].started == {}


def test_flannel_refuses_both_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "prepare", lambda: pytest.fail("the cluster is made"))
    with pytest.raises(E2EError, match="flannel connects only one family"):
        Cluster().up("pyebpf-proxy", dual=True, cni="flannel")


def test_the_fast_path_of_all_agents_is_read_although_status_has_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    views = {"a": {"sent": 3, "closed4": "", "why4": ""}, "b": {"sent": 4, "closed4": "a rule", "why4": ""}}

    def kubectl(self: Cluster, *command: str, check: bool = True) -> str:
        assert not check
        return json.dumps({"fastPath": views[command[3]]})

    monkeypatch.setattr(Cluster, "agents", lambda self: [{"metadata": {"name": name}} for name in views])
    monkeypatch.setattr(Cluster, "kubectl", kubectl)
    assert Cluster().fast_path() == {"sent": 7, "closed": ["a rule"]}


def test_specs_of_network_policies_run_where_they_are_enforced() -> None:
    name = "[sig-network] Netpol NetworkPolicy between server and client should"
    for cni in CNIS.values():
        patterns = specs.left_out(False, cni.policies)
        assert any(pattern.startswith("Netpol") for pattern in patterns) is not cni.policies, name


def test_the_page_shows_each_cni(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    ran = [
        Spec("Services", "one", "passed", 1),
        Spec("Netpol", "two", "passed", 1),
        Spec("Netpol", "three", "failed", 1),
    ]
    results.save("pyebpf-proxy-flannel", ran, {"fastPath": {"sent": 12345, "closed": []}})
    results.save("kube-proxy-flannel", ran[:1], {"fastPath": {"sent": 0, "closed": []}})
    results.save("pyebpf-proxy-bridge", ran[:1], {"fastPath": {"sent": 0, "closed": ["a rule"]}})
    shown = page.text()
    title = CNIS["flannel"].title
    assert f"| `flannel` | {title} | kube-proxy | 1 of 1 | – | – |\n" in shown
    assert f"| `flannel` | {title} | pyebpf-proxy | 1 of 1 | 1 of 2 | open, 12,345 packets |\n" in shown
    assert f"| `bridge` | {CNIS['bridge'].title} | pyebpf-proxy | 1 of 1 | – | closed: a rule |\n" in shown
    assert "| three | pyebpf-proxy, flannel | not known |" in shown
