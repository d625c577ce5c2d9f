# SPDX-License-Identifier: Apache-2.0
"""The run folder of one instance: the lock, which prevents a second agent, and the socket that commands query.

Only root may write there. But a container of the agent has the folder, too, and commands on the node run with more
rights than it has. So they follow no links in the folder, and what they read there is bounded.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.printable import printable

#: Only root may use it.
SOCKET = "agent.sock"
LOCK = "lock"
#: Only root may open the lock: flock needs no write permission, so every process that can open it can also take it.
_FOLDER_MODE, _LOCK_MODE, _OTHERS = 0o700, 0o600, 0o077
#: The agent's files. A folder that contains other files keeps its mode: it also has another purpose.
_AGENT_FILES = frozenset((LOCK, SOCKET, "bpf", "clsact", "node-settings.json"))
_PROC = Path("/proc")
_COMMAND_CHARACTERS = 160
#: Bytes that must be free: all files of the agent together are smaller.
_LEAST_FREE = 1 << 16
#: More than any of these files has.
_MOST_BYTES = 1 << 16


class RunDirectory:
    """Holds the lock from ``acquire`` to ``release``; the kernel releases it when the process dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = path / LOCK
        self._descriptor: int | None = None
        self._made: list[Path] = []

    def acquire(self) -> None:
        """Create the folder if it is missing, and take the lock; FatalError if another agent has it."""
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
        """Release the lock. ``remove``: also remove the lock file, and the folder if it is empty then."""
        if self._descriptor is None:
            return
        if remove:
            self._lock.unlink(missing_ok=True)
            try:
                self.path.rmdir()
            except OSError:
                pass  # It contains other files.
            self._made = [made for made in self._made if made != self.path]
            self._remove_made()
        os.close(self._descriptor)
        self._descriptor = None

    def _make(self) -> None:
        missing = [self.path, *self.path.parents]
        missing = missing[: next((i for i, path in enumerate(missing) if path.exists()), 0)]
        for path in reversed(missing):
            path.mkdir(mode=_FOLDER_MODE if path == self.path else 0o755)
            self._made.append(path)
        if {entry.name for entry in os.scandir(self.path)} <= _AGENT_FILES:
            _restrict_to_owner(self.path, _FOLDER_MODE)

    def _take(self) -> int | None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self._lock, flags, _LOCK_MODE)
        try:
            was_open = _restrict_to_owner(descriptor, _LOCK_MODE)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Earlier releases created a lock that every user could open, and therefore hold.
                if not was_open or self._held_by_an_agent():
                    raise FatalError(
                        f"another agent{_holder(self._lock, descriptor)} runs on {self.path};"
                        " stop it first, or give this one its own --directory"
                    ) from None
                if self._is_still(descriptor):
                    self._lock.unlink()
            else:
                # If a clean-up has removed the file between open() and flock(), this lock is void.
                if self._is_still(descriptor):
                    # Only for people: a full file system must not keep the agent from starting.
                    with contextlib.suppress(OSError):
                        os.truncate(descriptor, 0)
                        os.write(descriptor, _note())
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def _is_still(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._lock.lstat())
        except FileNotFoundError:
            return False

    def _held_by_an_agent(self) -> bool:
        """Whether /proc shows that root holds the lock, or an agent answers on the socket, which only root creates."""
        pid = lock_holder(self._lock)
        try:
            if pid is not None and (_PROC / str(pid)).stat().st_uid == os.geteuid():
                return True
        except OSError:
            pass  # The process has ended; the descriptor may have another holder.
        try:
            connected(self.path, 1.0).close()
        except OSError:
            return False
        return True

    def _remove_made(self) -> None:
        for path in reversed(self._made):
            try:
                path.rmdir()
            except OSError:
                break
        self._made.clear()


def read_file(path: Path) -> bytes:
    """The content of a file in the run folder. ValueError if it is a link, no regular file, or too large. OSError."""
    try:
        # Non-blocking: a FIFO must not block the caller.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError("it is a symbolic link") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(_MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > _MOST_BYTES:
        raise ValueError("it is too large")
    return content


def replace_file(path: Path, content: bytes) -> None:
    """Replace a text file in the run folder, by way of ``PATH.new``. OSError.

    On a full file system, a text that is no longer than the present one is written in its place, filled with spaces.
    """
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    try:
        # O_EXCL: a link of this name is not followed.
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
        fresh.replace(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _overwritten(path, content):
            raise
        fresh.unlink(missing_ok=True)


def _overwritten(path: Path, content: bytes) -> bool:
    """Whether a text could be written in the place of a longer one, with a single call. No link is followed."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        there = os.fstat(descriptor)
        if not stat.S_ISREG(there.st_mode) or there.st_nlink != 1 or there.st_size < len(content):
            return False
        return os.write(descriptor, content.ljust(there.st_size)) == there.st_size
    except OSError:
        return False
    finally:
        os.close(descriptor)


def obstacle(directory: Path) -> str:
    """Why the agent cannot write to its run folder; empty if it can, or if there is no folder."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return ""
    if found.f_flag & os.ST_RDONLY:
        return "it is read-only"
    # Count reserved blocks as free: root may use them.
    if found.f_blocks and found.f_bfree * found.f_frsize < _LEAST_FREE:
        return "its file system is full"
    if found.f_files and not found.f_ffree:
        return "its file system has no inode left"
    return ""


def lock_holder(lock: Path) -> int | None:
    """The PID that holds this lock; None if there is none, or if it is in another PID namespace."""
    try:
        status = lock.lstat()
        held = [line.split() for line in (_PROC / "locks").read_text().splitlines()]
    except OSError:
        return None
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    # A process that only waits for the lock has "->" in the second field.
    pid = next((line[4] for line in held if line[1:2] == ["FLOCK"] and line[5] == wanted), None)
    return int(pid) if pid is not None and int(pid) > 0 else None


def _restrict_to_owner(path: Path | int, mode: int) -> bool:
    """Remove the permissions of other users, if this user owns it. True: other users had permissions."""
    status = os.stat(path)
    if not status.st_mode & _OTHERS:
        return False
    if status.st_uid == os.geteuid():
        os.chmod(path, mode)
    return True


def _command(pid: int | str) -> str:
    """The command line of a process, on one line and truncated; "" if it cannot be read."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    return printable(" ".join(words))[:_COMMAND_CHARACTERS]


def _pid_namespace() -> str:
    try:
        return os.readlink(_PROC / "self" / "ns" / "pid")
    except OSError:
        return ""


def _note() -> bytes:
    """The contents of the lock file: PID, PID namespace and command line of the holder, which /proc may not show."""
    return f"{os.getpid()} {_pid_namespace() or '-'} {_command('self')}\n".encode(errors="replace")


def _holder(lock: Path, descriptor: int) -> str:
    """The lock's holder as text: ``" (process 12: …)"``. A PID of another PID namespace is not shown."""
    pid = lock_holder(lock)
    if pid is not None:
        command = _command(pid)
        return f" (process {pid}{f': {command}' if command else ''})"
    note = os.pread(descriptor, 1024, 0).decode(errors="replace").split(maxsplit=2)
    if not note:
        return ""
    number, namespace, command = (*(printable(word).strip() for word in note), "", "")[:3]
    if namespace == _pid_namespace():
        return f" (process {number})"
    return f" (in another container{f': {command}' if command else ''})"


@contextlib.contextmanager
def _short(directory: Path) -> Iterator[str]:
    """A path of the socket that is short enough for a socket address, even if the folder's path is not."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def listening_socket(directory: Path) -> socket.socket:
    """A listening socket in the run folder, in place of that of a killed agent. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        # bind() creates the file with the mode of the socket's descriptor.
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
    """Remove the socket, if it exists."""
    with contextlib.suppress(OSError):
        (directory / SOCKET).unlink()


def connected(directory: Path, timeout: float) -> socket.socket:
    """A connection to the agent of a run folder. Raises OSError, also if the socket is a link."""
    # connect() would follow a link, to a socket of another program. This descriptor names the file itself.
    descriptor = os.open(directory / SOCKET, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
        asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            asking.settimeout(timeout)
            asking.connect(f"/proc/self/fd/{descriptor}")
        except OSError:
            asking.close()
            raise
    finally:
        os.close(descriptor)
    return asking
