# SPDX-License-Identifier: Apache-2.0
"""How long a process has run, as /proc shows it."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from pyebpf_proxy.common.process_age import process_age


def test_a_process_ages() -> None:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    before = time.monotonic()
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        begun = time.monotonic()
        young = process_age(Path("/proc", str(child.pid)))
        assert -tick <= young <= time.monotonic() - before + tick
        while time.monotonic() - begun < 3 * tick:
            time.sleep(tick)
        assert process_age(Path("/proc", str(child.pid))) > young
        assert process_age() > young
    finally:
        child.communicate()


def test_a_process_that_is_gone_has_no_age(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="stat"):
        process_age(tmp_path)
