# SPDX-License-Identifier: Apache-2.0
"""Names of labs, and removal of what crashed labs have left.

A lab is called ``pep-<pid>-<n>``. Its folder in the temporary directory has a lock file that is locked while the lab
runs. If the lock can be taken, the lab is dead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.namespace import NETNS_FOLDER, batch

_TAG = re.compile(r"pep-(\d+)-(\d+)")
_MNT_DETACH = 2


class Claim:
    """The lock of a running lab."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        os.close(self._fd)


def new_tag(number: int) -> str:
    return f"pep-{os.getpid()}-{number}"


def folder_of(tag: str) -> Path:
    return Path(tempfile.gettempdir()) / tag


def claim(tag: str) -> Claim:
    """Create the lab's folder and take its lock. Raises FileExistsError if the folder exists."""
    folder = folder_of(tag)
    if folder.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    # Create the folder under another name first, so that a search for dead labs never sees it without the lock.
    aside = folder.with_name(f"new-{tag}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(mode=0o755)
    fd = os.open(aside / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    aside.rename(folder)
    # Children inherit the lock (flock belongs to the open file). They all die with this process, so the lock ends
    # with the last of them.
    return Claim(fd)


def is_dead(tag: str) -> bool:
    """True if no process runs this lab any more."""
    try:
        fd = os.open(folder_of(tag) / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return not os.path.exists(f"/proc/{tag.split('-')[1]}")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def all_tags() -> list[str]:
    """Every lab with a folder or a namespace."""
    names = [path.name for path in Path(tempfile.gettempdir()).glob("pep-*")]
    with contextlib.suppress(FileNotFoundError):
        names += os.listdir(NETNS_FOLDER)
    return sorted({found.group() for name in names if (found := _TAG.match(name))})


def namespaces_of(tag: str) -> list[str]:
    """Names of the lab's network namespaces."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(NETNS_FOLDER) if name.startswith(tag + "-"))
    return []


def remove(tag: str) -> None:
    """Remove a dead lab: remaining processes in its namespaces, the namespaces, mounts, files."""
    names = namespaces_of(tag)
    inodes = {os.stat(f"{NETNS_FOLDER}/{name}").st_ino for name in names}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            # The process may have ended, or be a kernel thread without namespaces.
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}/ns/net").st_ino in inodes:
                    os.kill(int(entry), signal.SIGKILL)
    for name in names:
        # Without a bpffs of the lab, the agent has pinned its programs in another one, which only --cleanup finds.
        state = folder_of(tag) / name.removeprefix(f"{tag}-") / "state"
        if state.exists() and not os.path.ismount(state / "bpf"):
            subprocess.run(
                ["ip", "netns", "exec", name, *command(), "--cleanup", "--directory", str(state)],
                stdout=subprocess.DEVNULL,
                check=False,  # its errors are printed; the namespace is removed in any case
            )
    if names:
        batch(f"netns del {name}" for name in names)
    remove_folder(folder_of(tag))


def remove_folder(folder: Path) -> None:
    """Unmount everything in a lab's folder, then delete it."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Other programs' mount points may have names that are not UTF-8.
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounts = [line.split(" ")[4] for line in file]
    for point in reversed([point for point in mounts if point.startswith(f"{folder}/")]):
        if libc.umount2(os.fsencode(point), _MNT_DETACH) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), point)
    shutil.rmtree(folder, ignore_errors=not folder.exists())


def clean() -> list[str]:
    """Remove every dead lab; returns their names."""
    dead = [tag for tag in all_tags() if is_dead(tag)]
    for tag in dead:
        remove(tag)
    return dead
