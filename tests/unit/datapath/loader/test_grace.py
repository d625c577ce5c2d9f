# SPDX-License-Identifier: Apache-2.0
"""The grace period: by membarrier(), or by waiting if the kernel refuses it."""

from __future__ import annotations

import time

import pytest

from pyebpf_proxy.datapath.loader import grace


def test_membarrier_is_used() -> None:
    # Every kernel since 4.3, unless booted with nohz_full.
    assert grace.membarrier()


def test_the_agent_waits_if_the_kernel_refuses_membarrier(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    grace.wait()
    assert slept == []
    # An unknown command.
    monkeypatch.setattr(grace, "_MEMBARRIER_CMD_GLOBAL", 1 << 30)
    assert not grace.membarrier()
    grace.wait()
    assert slept == [0.1]
