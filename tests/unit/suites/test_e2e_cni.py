# SPDX-License-Identifier: Apache-2.0
"""What connects the pods of the cluster of tests/e2e."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from tests.e2e import cni, images, page, results, specs
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
        self.number = 1
        self.started: dict[str, tuple[str, ...]] = {}

    def keep_running(self, name: str, *command: str | Path, environment: dict[str, str] | None = None) -> None:
        self.started[name] = tuple(map(str, command))

    def mount_cgroup(self, target: str) -> None:
        self.cgroup = target

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
    # Cilium gives them by itself.
    assert set(CNIS) == {"ptp", "bridge", "flannel", "cilium"}


def test_flannel_has_its_processes_and_its_mtu(tmp_path: Path) -> None:
    node, listed = plugins("flannel", tmp_path)
    assert set(node.started) == set(CNIS["flannel"].programs)
    assert json.loads((tmp_path / "net-conf.json").read_text())["Network"] == Network().pods
    assert listed[0]["mtu"] == 1450
    assert plugins(DEFAULT_CNI, tmp_path)[0].started == {}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the plugin and the sources of Cilium's BPF programs."""
    for file in ("bpf/bpf_lxc.c", "bpf/tests/large.c", "go/cilium-cni", "usr/lib/cni/portmap"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch(0o755)
    monkeypatch.setattr(cni, "source", lambda module, pinned_by: tmp_path)
    monkeypatch.setattr(cni, "built", lambda name: tmp_path / "go" / name)
    monkeypatch.setattr(cni, "UNPACKED", tmp_path)
    return tmp_path


def test_cilium_serves_no_services_and_has_one_operator(cache: Path, tmp_path: Path) -> None:
    for number, started in ((1, {"cilium-operator", "cilium-agent"}), (2, {"cilium-agent"})):
        node = FakeNode(tmp_path / str(number))
        node.number = number
        listed = CNIS["cilium"].start(cast(Node, node), [SUBNET])
        assert [each["type"] for each in listed] == ["cilium-cni", "portmap"]
        assert set(node.started) == started
        for command in node.started.values():
            assert "--kube-proxy-replacement=false" in command
        assert f"--cgroup-root={node.cgroup}" in node.started["cilium-agent"], "its own, which has no programs"
        (library,) = (each.partition("=")[2] for each in node.started["cilium-agent"] if each.startswith("--lib-dir="))
        assert [path.name for path in Path(library, "bpf").iterdir()] == ["bpf_lxc.c"]
    assert (cache / "usr/lib/cni/cilium-cni").resolve() == cache / "go/cilium-cni"


@pytest.mark.parametrize("name", ["flannel", "cilium"])
def test_some_refuse_both_families(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "prepare", lambda: pytest.fail("the cluster is made"))
    with pytest.raises(E2EError, match=f"{name} connects only one family"):
        Cluster().up("pyebpf-proxy", dual=True, cni=name)


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
    for each in CNIS.values():
        patterns = specs.left_out(False, each.policies)
        assert any(pattern.startswith("Netpol") for pattern in patterns) is not each.policies, name


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
    assert "| three | pyebpf-proxy (flannel) | not known |" in shown
    monkeypatch.setattr(specs, "KNOWN", {"pyebpf-proxy-flannel": {"thr": "a reason"}})
    assert "| three | pyebpf-proxy (flannel) | a reason |" in page.text()
