# SPDX-License-Identifier: Apache-2.0
"""A configuration file that is written while the agent starts."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyebpf_proxy import cli
from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.config.flags import parse


@pytest.mark.parametrize("flag", ["config", "datapath-config"])
def test_a_write_after_the_file_was_read_ends_the_agent(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection to the cluster and the imports take a second, in which the file may change."""
    file = tmp_path / "config.yaml"
    file.write_text("old")

    def run(settings: Any, cluster: Any, seen: Any, watch: Any) -> None:
        asyncio.run(asyncio.wait_for(watch.wait(), 5))

    def connect(settings: Any) -> SimpleNamespace:
        file.write_text("new")
        return SimpleNamespace(source=None)

    monkeypatch.setattr(cli, "_cluster", connect)
    monkeypatch.setattr(cli, "_check_imports", lambda: None)
    monkeypatch.setitem(sys.modules, "pyebpf_proxy.agent.run", SimpleNamespace(prepare=None, run=run))
    shown: Any = SimpleNamespace(shown=lambda config, flags: None)
    monkeypatch.setitem(sys.modules, "pyebpf_proxy.config.shown", shown)
    anything: Any = None
    with pytest.raises(FatalError, match="configuration file was updated"):
        cli._agent(anything, anything, parse([f"--{flag}={file}"]))
