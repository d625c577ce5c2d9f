# SPDX-License-Identifier: Apache-2.0
"""The programs that pages name start, and say how they are used."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests import ROOT
from tests.unit.repository.files import own_files

PROGRAM = re.compile(r"python -m ((?:tests|bench)(?:\.\w+)*)")
PROGRAMS = sorted({name for page in own_files(".md") for name in PROGRAM.findall(page.read_text())})


def test_pages_name_programs() -> None:
    assert {"tests.e2e", "tests.packet.mutants", "bench.shares"} <= set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_its_usage_and_does_nothing_else(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", name, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
