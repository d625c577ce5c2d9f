# SPDX-License-Identifier: Apache-2.0
"""tests/deb/machine.py calls deploy/image/root.py as it is: neither CI nor make test runs the tests of tests/deb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.deb import machine
from tests.support.tool_module import tool


def test_the_root_is_a_debian_of_this_machines_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tool("root", ROOT / "deploy" / "image")
    ran: list[str] = []

    def run(stage: Any, command: str) -> None:
        assert stage.architecture == recipe.own_architecture()
        ran.append(command)

    monkeypatch.setattr(recipe, "CACHE", tmp_path)
    monkeypatch.setattr(recipe, "run", run)
    monkeypatch.setattr(machine, "tool", lambda name, folder: recipe)
    for folder in ("root", "etc/systemd/system"):
        (tmp_path / "debian-bookworm" / folder).mkdir(parents=True)
    package = tmp_path / "any.deb"
    package.write_text("")
    made = machine.make_root(tmp_path / "folder", (package, package))
    assert made == tmp_path / "folder" / "root"
    assert {path.name for path in (made / "root").iterdir()} == {"package.deb", "later.deb"}
    assert ["/root/package.deb" in command for command in ran] == [True]
