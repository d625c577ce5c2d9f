# SPDX-License-Identifier: Apache-2.0
"""Pages on CNI plugins: every claim has a test or a recording, of the version that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pyebpf_proxy.cluster import check
from pyebpf_proxy.see.doctor import cni
from tests import ROOT

PAGE = (ROOT / "docs" / "cnis.md").read_text()
TESTED = (ROOT / "docs" / "compatibility.md").read_text()
RULES = ROOT / "tests" / "netns" / "attach" / "rulesets"


def rows(page: str, section: str) -> dict[str, list[str]]:
    """The cells of each row of a section's table, by the first cell."""
    text = re.split(rf"^## {section}$", page, flags=re.MULTILINE)[1].partition("\n## ")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {cells[0]: cells for cells in table[2:]}


def test_the_tests_that_it_names_exist() -> None:
    named = set(re.findall(r"\btest_\w+\.py", TESTED))
    assert len(named) > 4
    assert named <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize(
    ("file", "row"), [("calico", "Calico, iptables"), ("flannel", "flannel (vxlan)"), ("kube-router", "kube-router")]
)
def test_versions_are_those_of_the_recordings(file: str, row: str) -> None:
    head = (RULES / f"{file}.iptables").read_text().splitlines()[0]
    recorded = re.search(r"# \S+ v?(\d+(?:\.\d+)?)", head)
    assert recorded, head
    (cells,) = (cells for name, cells in rows(TESTED, "CNI plugins").items() if name.startswith(row))
    assert cells[1].split(",")[0] == recorded.group(1)


def pinned(folder: Path) -> str:
    """The version of the plugin's module that a go.mod requires; it is the last one that is not indirect."""
    versions: list[str] = re.findall(r"^(?:require |\t)\S+ v(\S+)$", (folder / "go.mod").read_text(), re.MULTILINE)
    return versions[-1]


@pytest.mark.parametrize(
    ("modules", "row"), [(["flannel", "kube-router"], "flannel (host-gw)"), (["cilium"], "Cilium without")]
)
def test_versions_are_those_that_the_cluster_builds(modules: list[str], row: str) -> None:
    (cells,) = (cells for name, cells in rows(TESTED, "CNI plugins").items() if name.startswith(row))
    assert cells[1].split(", ") == [pinned(ROOT / f"tests/e2e/{name}") for name in modules]


@pytest.mark.parametrize(("folder", "row"), [("aws-vpc-cni", "AWS VPC CNI"), ("kube-network-policies", "kindnet")])
def test_versions_are_those_that_wrote_the_recordings(folder: str, row: str) -> None:
    version = pinned(RULES / folder)
    (cells,) = (cells for name, cells in rows(TESTED, "CNI plugins").items() if name.startswith(row))
    assert re.search(rf"\b{re.escape(version)}\b", cells[1])
    recordings = [path for path in (RULES / folder).iterdir() if path.suffix in (".txt", ".nft")]
    assert recordings
    assert {path.name for path in recordings if f" v{version}, " not in path.read_text().splitlines()[0]} == set()


def test_the_plugins_of_the_checks_are_on_the_page() -> None:
    """By the first word of the name that doctor and cluster check use."""
    named = {clash.text.split()[0] for clash in cni._SERVE_THEMSELVES.values()}
    named |= set(cni._BY_KIND) | {text.split()[0] for text, _ in check._CNI.values()}
    assert {name for name in named if name.lower() not in PAGE.lower()} == set()


def test_a_plugin_is_either_tested_or_a_conflict() -> None:
    tested, conflicts = rows(TESTED, "CNI plugins"), rows(PAGE, "Conflicts")
    assert tested
    assert conflicts
    assert tested.keys().isdisjoint(conflicts)
