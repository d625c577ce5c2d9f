# SPDX-License-Identifier: Apache-2.0
"""Fixtures of more than one suite. The conftest.py of a suite imports the ones that it uses."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(params=(4, 6), ids=("ipv4", "ipv6"))
def family(request: pytest.FixtureRequest) -> int:
    value: int = request.param
    return value


@pytest.fixture(params=("tcp", "udp"))
def protocol(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture
def bpffs(tmp_path: Path) -> Iterator[Path]:
    """A separate bpffs for each test."""
    folder = tmp_path / "bpffs"
    folder.mkdir()
    subprocess.run(["mount", "-t", "bpf", "bpf", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
