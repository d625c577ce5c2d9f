# SPDX-License-Identifier: Apache-2.0
"""Processes that outlive the command that starts them, and the file that lists them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.problem import E2EError
from tests.e2e.programs import search_path


def started(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty if it has ended. With the pid it identifies one process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    words = text.rpartition(")")[2].split()
    return "" if words[0] in "ZX" else words[19]


class State:
    """state.json in the cluster's folder: the processes, who started them, and whether the cluster is complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "state.json"
        self._lock = threading.RLock()

    def read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return dict(found)

    def change(self, **values: Any) -> None:
        with self._lock:
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps(self.read() | values, indent=1))
            fresh.rename(self._path)

    def _remember(self, name: str, process: list[Any] | None) -> None:
        with self._lock:
            listed = self.read().get("processes", {})
            listed.pop(name, None)
            self.change(processes=listed | ({name: process} if process else {}))

    def spawn(self, name: str, command: Sequence[str | Path]) -> int:
        """Start a process in its own session; its output goes to logs/NAME.log."""
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | {"PATH": search_path()},
                cwd="/",
            )
        self._remember(name, [process.pid, started(process.pid)])
        return process.pid

    def runs(self, name: str) -> int:
        """The pid of a process that the cluster started; 0 if it has ended."""
        pid, since = self.read().get("processes", {}).get(name, [0, ""])
        return int(pid) if pid and since and started(pid) == since else 0

    def must_run(self, name: str) -> None:
        """E2EError with its last line if the process has ended."""
        if not self.runs(name):
            log = self.folder / "logs" / f"{name}.log"
            lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            raise E2EError(f"{name} has ended: {lines[-1] if lines else 'no output'} ({log})")

    def stop(self, name: str, seconds: float = 10.0) -> None:
        """End a process by SIGTERM, after a while by SIGKILL."""
        if pid := self.runs(name):
            _signal(pid, signal.SIGTERM)
            end = time.monotonic() + seconds
            while self.runs(name) and time.monotonic() < end:
                _reap(pid)
                time.sleep(0.05)
            if self.runs(name):
                _signal(pid, signal.SIGKILL)
        self._remember(name, None)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has just ended


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass  # started by another command


def kill_all(find: Callable[[], list[int]], seconds: float = 20.0) -> None:
    """SIGKILL to every process that ``find`` returns, until it returns none."""
    end = time.monotonic() + seconds
    while pids := find():
        for pid in pids:
            _signal(pid, signal.SIGKILL)
            _reap(pid)
        if time.monotonic() > end:
            raise E2EError(f"these processes do not end: {' '.join(map(str, pids))}")
        time.sleep(0.1)


def wait_for(what: str, condition: Callable[[], bool], seconds: float) -> None:
    """E2EError if the condition is not met in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise E2EError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.3)
