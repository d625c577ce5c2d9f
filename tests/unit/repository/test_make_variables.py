# SPDX-License-Identifier: Apache-2.0
"""Variables that pages set for `make` reach the tests, also of a user who needs sudo: it keeps no variables."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tests.unit.repository.files import own_files

COMMAND = re.compile(r"((?:\b[A-Z_]+=\S+ )+)make ([a-z-]+)")
COMMANDS = sorted(
    {
        (variable, target)
        for page in own_files(".md")
        for variables, target in COMMAND.findall(page.read_text().replace("\n", " "))
        for variable in variables.split()
    }
)


def test_pages_set_variables() -> None:
    assert ("PEP_FAST_PATH=0", "test") in COMMANDS
    assert len(COMMANDS) > 5


@pytest.mark.parametrize(("variable", "target"), COMMANDS)
def test_sudo_gets_the_variable(variable: str, target: str, tmp_path: Path) -> None:
    for name, text in {"id": "echo 1000", "sudo": "exit 1"}.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    name, _, value = variable.partition("=")
    environment = {**os.environ, name: value, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["make", "-n", target], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    (last,) = [line for line in done.stdout.splitlines() if line.startswith("sudo env ")]
    assert f'{name}="{value}"' in last
