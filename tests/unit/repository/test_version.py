# SPDX-License-Identifier: Apache-2.0
"""The version is defined in pyproject.toml; all other places have the same one."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest
import yaml

from pyebpf_proxy import __version__
from tests import ROOT
from tests.support.tool_module import tool

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
#: An image of this project with a tag, a package of it, or the version in its label.
NAMED = re.compile(r"(?:pyebpf-proxy[:_-]|newTag: |app\.kubernetes\.io/version: )(\d+\.\d+\.\d+)\b")
#: Examples of other versions.
OTHERS = {
    "tests/unit/cluster/test_upgrade.py",
    "tests/unit/deploy/test_manifests.py",
    "tests/unit/repository/test_version.py",
    "tests/cluster/test_chart.py",
}


def test_the_package_and_the_chart_have_the_version_of_the_project() -> None:
    assert __version__ == VERSION
    chart = tool("chart").CHART
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_the_kustomization_has_it() -> None:
    base = yaml.safe_load((ROOT / "deploy" / "base" / "kustomization.yaml").read_text())
    assert base["labels"][0]["pairs"]["app.kubernetes.io/version"] == VERSION
    assert base["images"][0]["newTag"] == VERSION


def test_the_debian_package_takes_it_from_the_project() -> None:
    assert "\nVersion: @VERSION@\n" in (ROOT / "deploy" / "deb" / "control").read_text()
    assert "pyebpf_proxy.__version__" in (ROOT / "deploy" / "deb" / "build.sh").read_text()


def test_every_image_that_a_file_names_has_it() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    found: dict[str, set[str]] = {}
    for name in listed:
        if not name.endswith((".md", ".yaml", ".py", ".sh", ".service", "Dockerfile")) or name in OTHERS:
            continue
        for version in NAMED.findall((ROOT / name).read_text(errors="replace")):
            found.setdefault(version, set()).add(name)
    assert found.keys() == {VERSION}, found
    assert {"README.md", "docs/cluster.md", "deploy/Dockerfile", "pyebpf_proxy/cluster/agent.yaml"} <= found[VERSION]
