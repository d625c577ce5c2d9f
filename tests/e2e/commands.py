# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/cluster.md, run against the cluster as an administrator does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e.control_plane import INSIDE
from tests.e2e.layout import REPOSITORY

_CHANGE_NOTHING = ("check", "status")


def title(words: tuple[str, ...]) -> str:
    """The command, as a person writes it."""
    return f"pyebpf-proxy cluster {' '.join(words)}"


#: What happens while a command runs, in a thread. It gets the command's process.
Fault = Callable[["subprocess.Popen[str]"], object]


def run_command(
    kubeconfig: Path, words: tuple[str, ...], show: Callable[[str], object], fault: Fault | None = None
) -> tuple[int, str]:
    """Run `pyebpf-proxy cluster WORDS` without questions: its exit status and output. ``show`` gets each line."""
    confirmed = [] if words[0] in _CHANGE_NOTHING else ["--yes"]
    said = ""
    with (
        ThreadPoolExecutor(1) as pool,
        subprocess.Popen(
            [*INSIDE, REPOSITORY / ".venv/bin/pyebpf-proxy", "cluster", *words, *confirmed],
            env=os.environ | {"KUBECONFIG": str(kubeconfig)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        beside = pool.submit(fault, process) if fault else None
        for line in process.stdout:
            said += line
            show(line)
        if beside is not None:
            beside.result()
    return process.returncode, said
