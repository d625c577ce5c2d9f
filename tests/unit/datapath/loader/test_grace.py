# SPDX-License-Identifier: Apache-2.0
"""The grace period, and the order of stores: by membarrier(), or by waiting if the kernel refuses it."""

from __future__ import annotations

import platform
import time

import pytest

from pyebpf_proxy.datapath.loader import grace, ordering


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


def test_only_processors_that_reorder_stores_need_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without membarrier(), a grace period has one."""
    steps: list[str] = []
    kernel_has_it = grace.barrier()
    assert kernel_has_it
    for machine, result in (("x86_64", True), ("aarch64", True), ("aarch64", False)):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(grace, "barrier", lambda result=result: steps.append("barrier") or result)
        monkeypatch.setattr(grace, "wait", lambda: steps.append("wait"))
        steps.append(f"{machine}:")
        assert ordering.is_weak() == (machine == "aarch64")
        ordering.publish()
    assert steps == ["x86_64:", "aarch64:", "barrier", "aarch64:", "barrier", "wait"]
