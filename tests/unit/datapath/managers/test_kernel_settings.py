# SPDX-License-Identifier: Apache-2.0
"""When the fast path's settings of conntrack are set again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyebpf_proxy.datapath.managers import kernel_settings
from pyebpf_proxy.datapath.managers.kernel_settings import FastPathSettings
from pyebpf_proxy.datapath.node.node_settings import FAST_PATH, LIBERAL, Setting
from pyebpf_proxy.services.node_facts import NodeFacts


class Sysctls:
    """The settings that are set, and those that were set by the agent."""

    def __init__(self) -> None:
        self.now: set[str] = set()
        self.refuses = False
        #: Of the settings that were held: whether the configuration asks for them, too.
        self.configured: dict[str, bool] = {}

    def hold(self, setting: Setting, directory: Path, configured: bool = False) -> str:
        if self.refuses:
            return f"{setting.name} cannot be set"
        self.now.add(setting.name)
        self.configured[setting.name] = configured
        return ""

    def held(self, setting: Setting, directory: Path) -> bool:
        return setting.name in self.now

    def is_set(self, setting: Setting) -> bool:
        return setting.name in self.now

    def restore(self, directory: Path, **more: Any) -> tuple[list[str], list[str]]:
        self.now.clear()
        return [], []


@pytest.fixture
def sysctls(monkeypatch: pytest.MonkeyPatch) -> Sysctls:
    found = Sysctls()
    monkeypatch.setattr(kernel_settings, "sysctls", found)
    monkeypatch.setattr(kernel_settings, "fast_path_is_built", lambda: True)
    monkeypatch.setattr(kernel_settings, "make_liberal", lambda: 0)
    return found


def settings(tcp_be_liberal: bool = False) -> FastPathSettings:
    kernel = SimpleNamespace(conntrack=SimpleNamespace(tcp_be_liberal=tcp_be_liberal))
    effective: Any = SimpleNamespace(fast_path=True, directory=Path("/none"), kernel=kernel)
    return FastPathSettings(effective)


def run(sysctls: Sysctls, restored: bool) -> tuple[set[str], list[str]]:
    """What is set, and the problems, after another program has changed all settings."""

    async def scene() -> tuple[set[str], list[str]]:
        made = settings()
        made.start(NodeFacts(), {})
        if restored:
            made.restore()
        sysctls.now.clear()
        made.refresh()
        made.close()
        return sysctls.now, list(made.problems)

    return asyncio.run(scene())


def test_they_are_set_again(sysctls: Sysctls) -> None:
    assert run(sysctls, restored=False) == ({each.name for each in FAST_PATH}, [])


@pytest.mark.parametrize("asked", [False, True])
def test_what_the_configuration_asks_for_too_is_set_again_for_it(sysctls: Sysctls, asked: bool) -> None:
    """The clean-up for a kube-proxy that runs again restores only what was set for the fast path alone."""

    async def scene() -> None:
        made = settings(asked)
        made.start(NodeFacts(), {})
        sysctls.now.clear()
        sysctls.configured.clear()
        made.refresh()
        made.close()

    asyncio.run(scene())
    assert sysctls.configured == {each.name: asked and each == LIBERAL for each in FAST_PATH}


def test_they_stay_as_they_are_if_the_kernel_refused_the_fast_path(sysctls: Sysctls) -> None:
    """The fast path is configured, but there is none: conntrack stays strict."""
    assert run(sysctls, restored=True) == (set(), [])


def test_a_setting_that_cannot_be_set_again_is_a_problem(sysctls: Sysctls) -> None:
    async def scene() -> list[str]:
        made = settings()
        made.start(NodeFacts(), {})
        sysctls.now.clear()
        sysctls.refuses = True
        made.refresh()
        made.close()
        return list(made.problems)

    assert asyncio.run(scene()) == [f"{each.name} cannot be set" for each in FAST_PATH]
