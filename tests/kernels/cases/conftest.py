# SPDX-License-Identifier: Apache-2.0
"""Requirements of these tests on the kernel, as fixtures that skip with the reason."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fixtures import family, protocol

__all__ = ["family", "needs_module", "protocol"]

Needs = Callable[..., None]


@pytest.fixture(scope="session")
def needs_module() -> Needs:
    """Load kernel modules by name (or find them built in); skip the test if this kernel lacks one of them."""

    def needs(*names: str) -> None:
        for name in names:
            built_in = Path("/sys/module", name).exists()
            if not built_in and subprocess.run(["modprobe", "-q", name], check=False).returncode:
                pytest.skip(f"this kernel has no module {name}")

    return needs
