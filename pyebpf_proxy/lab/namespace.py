# SPDX-License-Identifier: Apache-2.0
"""Network namespaces, and code that runs inside them.

Namespaces are named (``/run/netns/NAME``), so ``ip netns exec`` also works. Python code runs in forked children that
enter the namespace with setns: one persistent worker per namespace for short calls (well under a millisecond each), and
a separate child for each call that runs concurrently with the caller. Every child dies with its parent.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

NETNS_FOLDER = "/run/netns"
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)
_fork = multiprocessing.get_context("fork")


class LabError(RuntimeError):
    """An operation of the lab failed. The text names it and the cause."""


def set_network_namespace(path: str) -> None:
    """Move the calling thread into the network namespace at ``path``. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(fd, CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), path)
    finally:
        os.close(fd)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def batch(lines: Iterable[str], namespace: str | None = None) -> None:
    """Run lines of the ``ip`` command in one process (``ip -batch``). Raises LabError with ip's message."""
    text = "\n".join(lines) + "\n"
    command = ["ip", *(["-n", namespace] if namespace else []), "-batch", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        where = f" in {namespace}" if namespace else ""
        raise LabError(f"ip -batch{where}: {done.stderr.strip()}\n{text}")


class Task(Generic[T]):
    """A call that runs in its own process, inside a namespace, concurrently with the caller."""

    def __init__(self, path: str, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._receive, send = _fork.Pipe(duplex=False)
        self._process = _fork.Process(target=_run_task, args=(path, send, function, args, kwargs), daemon=True)
        self._process.start()
        send.close()
        self._outcome: tuple[str, Any, str] | None = None

    @property
    def pid(self) -> int:
        return cast(int, self._process.pid)

    def done(self) -> bool:
        """Whether the result is available, or the process has ended."""
        return self._outcome is not None or self._receive.poll(0)

    def result(self, timeout: float = 60.0) -> T:
        """Wait for the function's result, or raise its exception. ``timeout`` in seconds."""
        if self._outcome is None:
            if not self._receive.poll(timeout):
                self.stop()
                raise LabError(f"no result within {timeout} s")
            try:
                self._outcome = self._receive.recv()
            except EOFError:
                self._process.join(5)
                raise LabError(f"the process ended without a result (exit code {self._process.exitcode})") from None
            self._process.join(5)
        return cast(T, _unpack(self._outcome))

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join(5)


def _run_task(path: str, send: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    _enter_child(path)
    send.send(_pack(function, args, kwargs))


def _run_worker(path: str, channel: Connection) -> None:
    _enter_child(path)
    while True:
        try:
            function, args, kwargs = channel.recv()
        except EOFError:
            return
        channel.send(_pack(function, args, kwargs))


def _enter_child(path: str) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and cleans up
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    set_network_namespace(path)


def _pack(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[str, Any, str]:
    try:
        return ("value", function(*args, **kwargs), "")
    except BaseException as error:
        return ("error", error, traceback.format_exc())


def _unpack(outcome: tuple[str, Any, str]) -> Any:
    kind, value, text = outcome
    if kind == "error":
        value.add_note(f"inside the namespace:\n{text}")
        raise value
    return value


class Namespace:
    """One named network namespace. It exists from ``create`` to ``remove``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = f"{NETNS_FOLDER}/{name}"
        self._channel: Connection | None = None
        self._worker: Any = None

    def create(self) -> None:
        batch([f"netns add {self.name}"])
        batch(["link set lo up"], self.name)

    def remove(self) -> None:
        """End the worker and remove the name; the kernel removes the namespace with its last process."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.join(5)
            self._worker = None
            if self._channel is not None:
                self._channel.close()
                self._channel = None
        if os.path.exists(self.path):
            batch([f"netns del {self.name}"])

    def ip(self, *lines: str) -> None:
        """Run ``ip`` commands inside, one per line."""
        batch(lines, self.name)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a module-level function in the namespace's worker; returns its result or raises its exception."""
        if self._channel is None:
            self._channel, other = _fork.Pipe()
            self._worker = _fork.Process(target=_run_worker, args=(self.path, other), daemon=True)
            self._worker.start()
            other.close()
        self._channel.send((function, args, kwargs))
        try:
            return cast(T, _unpack(self._channel.recv()))
        except EOFError:
            raise LabError(f"the worker of {self.name} died") from None

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Task[T]:
        """Run a function inside, concurrently with the caller. Closures work: the child is forked."""
        return Task(self.path, function, args, kwargs)

    def run(self, *command: str, check: bool = True, stdin: str | None = None) -> str:
        """Run a program inside and return its output. Raises LabError with its error text if it fails."""
        done = self.call(_run_program, command, stdin)
        if check and done.returncode != 0:
            raise LabError(f"{' '.join(command)} in {self.name}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def sysctl(self, settings: Mapping[str, str | int]) -> None:
        """Set kernel settings of this namespace, e.g. ``{"net.ipv4.ip_forward": 1}``."""
        self.call(_write_sysctls, {name: str(value) for name, value in settings.items()})


def _run_program(command: tuple[str, ...], stdin: str | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def _write_sysctls(settings: dict[str, str]) -> None:
    # /proc/sys/net shows the namespace of the process that opens it, so no mount is needed here.
    for name, value in settings.items():
        with open("/proc/sys/" + name.replace(".", "/"), "w", encoding="ascii") as file:
            file.write(value)


def note(text: str) -> None:
    """Print one line on stderr."""
    print(text, file=sys.stderr, flush=True)
