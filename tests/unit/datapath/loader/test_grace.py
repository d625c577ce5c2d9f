# SPDX-License-Identifier: Apache-2.0
"""The grace period: asked of the kernel, waited for where it refuses."""

from __future__ import annotations

import time

import pytest

from pyebpf_proxy.datapath.loader import grace


def test_the_kernel_is_asked() -> None:
    # Every kernel since 4.3 but those booted with nohz_full.
    assert grace.membarrier()


def test_waiting_where_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    grace.wait()
    assert slept == []
    # A command that no kernel knows.
    monkeypatch.setattr(grace, "_MEMBARRIER_CMD_GLOBAL", 1 << 30)
    assert not grace.membarrier()
    grace.wait()
    assert slept == [0.1]
