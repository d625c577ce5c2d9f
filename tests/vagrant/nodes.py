# SPDX-License-Identifier: Apache-2.0
"""The machines: vagrant starts them, and commands run on them through ssh."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tests import ROOT
from tests.vagrant.problem import VagrantError

REPOSITORY = ROOT
FOLDER = REPOSITORY / "vagrant"
BUILT = REPOSITORY / "build" / "vagrant"
#: The output of vagrant and libvirt, and the machines' consoles.
LOGS = BUILT / "log"
CONSOLES = Path("/var/log/libvirt/qemu")
NODES = ("node1", "node2")
_PYTHON = 'exec sudo env PYTHONDONTWRITEBYTECODE=1 "$(readlink -f /opt/pyebpf-proxy/current)/bin/python"'
# vagrant's progress output, and its report of each machine's settings.
_NOISE = re.compile(r"\x1b|Progress|^==> \w+:  -- |^$")


class Vagrant:
    """Vagrant's commands, with their output in ``log``. ``scratch``: removed after the run."""

    def __init__(self, driver: str, home: Path, scratch: Path) -> None:
        self._scratch = scratch
        self._environment = os.environ | {
            "LAB_DRIVER": driver,
            "VAGRANT_HOME": str(home),
            "VAGRANT_DOTFILE_PATH": str(scratch / "machines"),
            "VAGRANT_CHECKPOINT_DISABLE": "1",
            "VAGRANT_DEFAULT_PROVIDER": "libvirt",
        }
        LOGS.mkdir(parents=True, exist_ok=True)
        self.log = LOGS / "vagrant.log"
        self.log.write_text("")

    def run(self, *arguments: str, limit: float) -> str:
        """A command's output. VagrantError with its last line if it fails or takes more than ``limit`` seconds."""
        began = self.log.stat().st_size
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                ["vagrant", *arguments],
                cwd=FOLDER,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
        shown = self.log.read_bytes()[began:].decode(errors="replace")
        if status == 0:
            return shown
        lines = [line for line in shown.replace("\r", "\n").splitlines() if not _NOISE.search(line)]
        why = f"not done after {limit:.0f} s" if status is None else (lines or ["no word"])[-1].strip()
        raise VagrantError(f"vagrant {arguments[0]}: {why} ({self.log})")

    def up(self, limit: float) -> None:
        """Boot both. A machine that does not boot is reported with the last lines of its console."""
        try:
            self.run("up", "--no-provision", limit=limit)
        except VagrantError as error:
            for node in NODES:
                if problem := console_problem(node):
                    raise VagrantError(f"{problem}; {error}") from None
            raise

    def nodes(self) -> list[Node]:
        """How to reach them. VagrantError if one is missing."""
        settings = self._scratch / "ssh"
        text = self.run("ssh-config", limit=120)
        # ssh's own lines: everything from the first Host on.
        settings.write_text(text[text.index("Host ") :])
        return [Node(name, settings) for name in NODES]


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def console_problem(node: str) -> str:
    """The console of a machine that cannot be reached; empty if there is none, or it has booted."""
    kept = CONSOLES / f"pyebpf-proxy-{node}.console"
    try:
        text = kept.read_bytes().decode(errors="replace").replace("\r", "")
    except FileNotFoundError:
        return ""
    shutil.copy(kept, LOGS / kept.name)
    return judge_console(node, text)


def judge_console(node: str, text: str) -> str:
    """One line about a machine by the text of its console; empty if it shows its login prompt."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return f"{node}: the box does not boot: no word on its console"
    if any(line.endswith("login:") for line in lines):
        return ""
    panics = [line for line in lines if "Kernel panic" in line]
    return f"{node}: the box does not boot: {(panics or lines)[-1][:200]}"


class Node:
    """One machine, by ssh, with one connection for all commands."""

    def __init__(self, name: str, settings: Path) -> None:
        self.name = name
        # Outside the run's own folder, which is removed: the end of libvirtd also kills ssh, and its socket stays.
        control = settings.with_name(f"{name}.ssh")
        self._ssh = [
            *("ssh", "-F", str(settings), "-o", "ControlMaster=auto", "-o", f"ControlPath={control}"),
            *("-o", "ControlPersist=60", "-o", "LogLevel=ERROR", "-o", "ServerAliveInterval=60", "-T", name),
        ]

    def run(self, script: str, stdin: bytes = b"", limit: float = 600) -> str:
        """The output of a shell command. VagrantError with its last lines if it fails."""
        try:
            done = subprocess.run([*self._ssh, script], input=stdin, capture_output=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            raise VagrantError(f"{self.name}: {script.split()[0]}: not done after {limit:.0f} s") from None
        if done.returncode:
            last = (done.stderr.decode(errors="replace").strip() or "no word").splitlines()[-1]
            raise VagrantError(f"{self.name}: exit status {done.returncode}: {last}")
        return done.stdout.decode()

    def install(self) -> None:
        """Copy the programs that run there."""
        self.run("sudo tee /run/lab-guest.py >/dev/null", (Path(__file__).with_name("guest.py")).read_bytes())

    def ask(self, *words: str) -> list[Any]:
        """The answer of guest.py, one value per line."""
        return [json.loads(line) for line in self.run(f"{_PYTHON} /run/lab-guest.py {' '.join(words)}").splitlines()]

    def start(self, *words: str) -> Remote:
        """Start guest.py, in the same folder."""
        return Remote(self.name, [*self._ssh, f"{_PYTHON} /run/lab-guest.py {' '.join(words)}"])

    def send(self, folder: Path, target: str) -> None:
        """Make a folder of the node equal to a local one; only differences are sent. VagrantError if it fails."""
        command = ["rsync", "-a", "--delete", "--rsync-path=sudo rsync", "-e", shlex.join(self._ssh[:-2])]
        done = subprocess.run(
            [*command, f"{folder}/", f"{self.name}:{target}/"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise VagrantError(f"{self.name}: rsync: {(done.stderr.strip() or 'no word').splitlines()[-1]}")


class Remote:
    """A process on a node, controlled by lines on its input."""

    def __init__(self, name: str, command: list[str]) -> None:
        self._name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin: IO[str] = self._process.stdin
        self._stdout: IO[str] = self._process.stdout

    def _say(self, word: str) -> None:
        try:
            self._stdin.write(word + "\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _ended(self) -> VagrantError:
        _, errors = self._process.communicate()
        return VagrantError(f"{self._name}: the load ended by itself: {(errors.strip() or 'no word').splitlines()[-1]}")

    def count(self) -> int:
        """How many requests its slowest part has made."""
        self._say("count")
        line = self._stdout.readline()
        if not line:
            raise self._ended()
        return int(json.loads(line))

    def wait_for(self, more: int, limit: float = 600) -> None:
        """Wait until every part has made so many more. VagrantError if that takes too long."""
        wanted, end = self.count() + more, time.monotonic() + limit
        while (have := self.count()) < wanted:
            if time.monotonic() > end:
                raise VagrantError(f"{self._name}: a part of the load stands still at {have}")
            threading.Event().wait(0.5)

    def stop(self) -> Iterator[list[Any]]:
        """End it; returns its rows."""
        self._say("stop")
        for line in self._stdout:
            yield json.loads(line)
        if self._process.wait():
            raise self._ended()

    def kill(self) -> None:
        """End it, whatever it does."""
        _end_one(self._process)


def _end_one(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
