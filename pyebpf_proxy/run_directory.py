# SPDX-License-Identifier: Apache-2.0
"""The run folder of one instance: the lock that keeps a second agent out of it, the socket that commands ask by."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from pyebpf_proxy.errors import FatalError

#: Root alone may use it.
SOCKET = "agent.sock"


class RunDirectory:
    """Holds the lock from ``acquire`` to ``release``; the kernel drops it when the process dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = path / "lock"
        self._descriptor: int | None = None
        self._made: list[Path] = []

    def acquire(self) -> None:
        """Make the folder where it is missing and take the lock; FatalError if another agent has it."""
        try:
            self._make()
            while self._descriptor is None:
                self._descriptor = self._take()
        except OSError as error:
            self._remove_made()
            raise FatalError(
                f"run folder {self.path} cannot be used: {error.strerror}; name another one with --directory"
            ) from None

    def release(self, remove: bool = False) -> None:
        """Give the lock back. ``remove``: take the lock file and the folder away too, if nothing else is in it."""
        if self._descriptor is None:
            return
        if remove:
            self._lock.unlink(missing_ok=True)
            try:
                self.path.rmdir()
            except OSError:
                pass  # Somebody keeps something in it.
            self._made = [made for made in self._made if made != self.path]
            self._remove_made()
        os.close(self._descriptor)
        self._descriptor = None

    def _make(self) -> None:
        missing = [self.path, *self.path.parents]
        missing = missing[: next((i for i, path in enumerate(missing) if path.exists()), 0)]
        for path in reversed(missing):
            path.mkdir(mode=0o755)
            self._made.append(path)

    def _take(self) -> int | None:
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A clean-up may have removed the file between open and lock: then it is no lock any more.
            if self._lock.exists() and os.fstat(descriptor).st_ino == self._lock.stat().st_ino:
                os.truncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
                return descriptor
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise FatalError(
                f"another agent{f' (process {holder})' if holder else ''} runs on {self.path};"
                " stop it first, or give this one its own --directory"
            ) from None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def _remove_made(self) -> None:
        for path in reversed(self._made):
            try:
                path.rmdir()
            except OSError:
                break
        self._made.clear()


@contextlib.contextmanager
def _short(directory: Path) -> Iterator[str]:
    """A path of the socket that fits into its address, however long the folder's is."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def listening_socket(directory: Path) -> socket.socket:
    """A listening socket in the run folder; one that a killed agent left is replaced. OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        # bind() makes the file with the mode of the socket.
        os.fchmod(listener.fileno(), 0o600)
        remove_socket(directory)
        with _short(directory) as path:
            listener.bind(path)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def remove_socket(directory: Path) -> None:
    """Take the socket away, if it is there."""
    with contextlib.suppress(OSError):
        (directory / SOCKET).unlink()


def connected(directory: Path, timeout: float) -> socket.socket:
    """A connection to the agent of a run folder. OSError."""
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        asking.settimeout(timeout)
        with _short(directory) as path:
            asking.connect(path)
    except OSError:
        asking.close()
        raise
    return asking
