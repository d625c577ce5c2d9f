# SPDX-License-Identifier: Apache-2.0
"""Finds the agent of a run folder: the process that holds the folder's lock. The agent is not contacted."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pyebpf_proxy.common.process_age import process_age
from pyebpf_proxy.common.run_directory import LOCK, lock_holder


class Agent(NamedTuple):
    """The process that holds the run folder's lock. ``started``: in seconds, as ``time.time``."""

    pid: int
    arguments: tuple[str, ...]
    folder: str
    started: float


def running_agent(directory: Path) -> Agent | None:
    """The agent of a run folder, if one runs. This never takes the lock, since an agent may be starting."""
    pid = lock_holder(directory / LOCK)
    if pid is None:
        return None
    process = Path("/proc", str(pid))
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        folder = os.readlink(process / "cwd")
        started = time.time() - process_age(process)
    except (OSError, IndexError, ValueError):
        return None
    return Agent(pid, _own_arguments(words), folder, started)


def _own_arguments(words: Sequence[str]) -> tuple[str, ...]:
    """The arguments without interpreter and program: everything from the first flag on."""
    at = next((i for i, word in enumerate(words) if i and word.startswith("--")), len(words))
    return tuple(words[at:])
