# SPDX-License-Identifier: Apache-2.0
"""Starts agents without the cost of Python's start and imports, which is a third of a start's CPU time.

A process in the node's namespaces has imported the agent. It forks one child for each start. The child runs the same
main function as the command, with its arguments, in a session and a mount namespace of its own; nothing else of the
agent has run before. It is killed, and ends, like the command's process. What is not like it: the agents of one server
share the seed of Python's hashes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from pyebpf_proxy.lab.namespace import LabError, Namespace, die_with_parent
from tests import ROOT

#: What an agent with a folder of manifests imports until it is ready. What is missing here is imported by each child.
_MODULES = (
    "pyebpf_proxy.cli",
    "pyebpf_proxy.agent.run",
    "pyebpf_proxy.config.complete",
    "pyebpf_proxy.config.datapath_config",
    "pyebpf_proxy.kube.manifests",
    "pyebpf_proxy.servers.source_metrics",
    "nftables",
)
_CLONE_NEWNS = 0x20000


class Preloaded:
    """A server that starts agents in one namespace, one at a time. A context manager."""

    def __init__(self, namespace: Namespace) -> None:
        self._server = subprocess.Popen(
            ["ip", "netns", "exec", namespace.name, sys.executable, "-m", "tests.model.preloaded"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd=ROOT,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        self._agent: Forked | None = None

    def __enter__(self) -> Preloaded:
        return self

    def __exit__(self, *what: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server. Its agent ends with it."""
        self._server.kill()
        if self._agent is not None:
            self._agent.wait()
        self._server.communicate()

    def start(self, arguments: Sequence[str], log: Path) -> Forked:
        """Start an agent, after the former one has ended."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._server.stdin.write(json.dumps({"arguments": list(arguments), "log": str(log)}).encode() + b"\n")
        answer = self._server.stdout.readline()
        if not answer:
            raise LabError(f"the server of agents has ended with {self._server.wait()}")
        self._agent = Forked(int(answer), self._server.stdout)
        return self._agent


class Forked:
    """The process of an agent, with the methods of ``subprocess.Popen`` that the lab uses."""

    def __init__(self, pid: int, answers: IO[bytes]) -> None:
        self.pid = pid
        self._answers = answers
        # The number could belong to another process after the end.
        self._fd = os.pidfd_open(pid)
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; ``subprocess.TimeoutExpired`` after so many seconds."""
        status = self._read(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"agent {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self, timeout: float | None) -> int | None:
        if self._status is None and select.select([self._answers], [], [], timeout)[0]:
            # No answer: the server has been killed, and the agent with it.
            self._status = int(self._answers.readline() or -signal.SIGKILL)
            os.close(self._fd)
        return self._status


def serve() -> list[str]:
    """Fork a child for each request and report its pid and its status. Returns in the child: the agent's arguments."""
    for request in sys.stdin.buffer:
        wanted = json.loads(request)
        pid = os.fork()
        if pid == 0:
            _become_agent(Path(wanted["log"]))
            arguments: list[str] = wanted["arguments"]
            return arguments
        _answer(pid)
        _answer(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    sys.exit(0)


def _answer(number: int) -> None:
    os.write(1, b"%d\n" % number)


def _become_agent(log: Path) -> None:
    """What ``ip netns exec`` and the lab do for a process that runs the command."""
    die_with_parent()
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    files = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for target, source in ((0, files[0]), (1, files[1]), (2, files[1])):
        os.dup2(source, target)
    for file in files:
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)


def main() -> int:
    for name in _MODULES:
        importlib.import_module(name)
    arguments = serve()
    from pyebpf_proxy.cli import main as agent

    sys.argv = ["pyebpf-proxy", *arguments]
    return agent(arguments)


if __name__ == "__main__":
    sys.exit(main())
