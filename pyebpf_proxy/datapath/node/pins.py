# SPDX-License-Identifier: Apache-2.0
"""Keeps the pins when the bpffs is unmounted while the agent runs.

Without its last mount a bpffs ends, and with it every pin: programs are detached from devices, and commands find no
maps. So the agent holds a second, detached mount of it (open_tree(2)), which no process sees and which prevents no
unmounting. Without CAP_SYS_ADMIN it holds the mount itself, by a descriptor: ``umount`` fails then, and after ``umount
-l`` the file system stays, with its pins and programs, until the agent ends. The kernel reports changes of mounts by
poll(2) of mountinfo. If the pins are gone then, the agent mounts what it holds at the same place: the same file system,
with the pins of others too. If another bpffs is there by now, it pins its own objects there again, at the same paths.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import select
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.datapath.repairs import Repair, repairs

SYS_OPEN_TREE, SYS_MOVE_MOUNT = 428, 429  # the same on every architecture
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 4
AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000

_libc = ctypes.CDLL(None, use_errno=True)
_log = Logger("pins")


class _View(NamedTuple):
    """A mount namespace that must have the bpffs: the host's, or the agent's own.

    ``point``: the mount as the agent reaches it; ``target``: as a process in that namespace does.
    """

    host: bool
    point: Path
    target: Path


class KeptPins:
    """The pins below ``folder`` in the bpffs ``bpffs``, as ``mounts.ensure_bpffs`` has found it.

    ``marker``: a folder of pins that is always there. :attr:`why_not` is why the pins are gone; empty: they are there.
    """

    def __init__(self, bpffs: Path, folder: Path, marker: Path) -> None:
        point = bpffs if mounts.is_bpffs(bpffs) else bpffs / mounts.FOLDER
        self._views = _views(point)
        self._folder = folder.relative_to(point)
        self._marker = marker.relative_to(point)
        self._stack = ExitStack()
        self._held = -1
        self._why_not_held = "another file system was mounted there before the agent could hold it"
        self.why_not = ""
        self._hold(self._views[0])

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Follow the mounts from now on, until :meth:`close`."""
        # asyncio does not wait for POLLPRI, but an epoll descriptor is readable if one of those in it is ready.
        ready = self._stack.enter_context(select.epoll())
        tables = [Path("/proc/self/mountinfo")]
        if not mounts.in_namespace_of_init("mnt"):
            tables.append(mounts.root_of_host().parent / "mountinfo")
        for table in tables:
            try:
                file = self._stack.enter_context(table.open("rb"))
            except OSError:
                continue
            ready.register(file, select.EPOLLPRI | select.EPOLLERR)

        def changed() -> None:
            ready.poll(0)  # the kernel reports each change once to each descriptor
            self.check()

        loop.add_reader(ready.fileno(), changed)
        self._stack.callback(loop.remove_reader, ready.fileno())

    def check(self) -> None:
        """Restore the pins where they are gone."""
        gone = self._gone()
        if not gone:
            self.why_not = ""
            return
        problem = ""
        try:
            self._restore(gone)
        except OSError as error:
            problem = f"it cannot be mounted again: {error.strerror or error}"
        place = gone[0].target
        if not self._gone():
            self.why_not = ""
            repairs.note(Repair.PINS)
            _log.warning("the bpffs with the pins was unmounted, it is restored", place=place)
            return
        before, self.why_not = self.why_not, f"the bpffs at {place} was unmounted, and {problem or self._why_not_held}"
        if self.why_not != before:
            _log.error(f"the pins are gone: {self._consequence}, and commands find nothing", why=self.why_not)

    @property
    def _consequence(self) -> str:
        if self._held >= 0:
            return "traffic continues until the agent ends"
        return "programs were detached and are attached again, until the agent ends"

    def close(self) -> None:
        """Stop following; the pins stay as they are."""
        self._stack.close()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def _gone(self) -> list[_View]:
        return [view for view in self._views if not (view.point / self._marker).is_dir()]

    def _hold(self, view: _View, moved: int = -1) -> None:
        """Take a detached mount of the bpffs: of what is at the place, or of a mount that was just moved there."""
        try:
            held = _clone(view, moved)
        except OSError as error:
            try:
                held = os.open(view.point, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                self._why_not_held = f"the agent may not hold it: {error.strerror or error}"
                return
        if not (Path(f"/proc/self/fd/{held}") / self._marker).is_dir():
            # Another program was faster: another file system is mounted there by now.
            os.close(held)
            return
        if self._held >= 0:
            os.close(self._held)
        self._held = held

    def _restore(self, gone: list[_View]) -> None:
        for view in gone if self._held >= 0 else ():
            if not mounts.is_bpffs(view.point) and self._move_there(view):
                # The mount is no longer detached, and would keep others from unmounting it.
                self._hold(view, self._held)
                continue
            if not mounts.is_bpffs(view.point):
                _run(view.host, partial(mounts.mount_bpffs, view.target))
            _pin_again(Path(f"/proc/self/fd/{self._held}") / self._folder, view.point / self._folder)
            self._hold(view)

    def _move_there(self, view: _View) -> bool:
        """False: what the agent holds was mounted and unmounted before it had taken another mount of it."""
        try:
            _run(view.host, partial(_move, self._held, view.target))
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        return True


def _views(point: Path) -> list[_View]:
    root = mounts.root_of_host()
    if point.is_relative_to(root):
        return [_View(True, point, Path("/") / point.relative_to(root))]
    own = _View(False, point, point)
    if mounts.in_namespace_of_init("mnt"):
        return [own]
    target = root / point.absolute().relative_to("/")
    try:
        shared = os.stat(target).st_dev == os.stat(point).st_dev
    except OSError:
        shared = False
    return [own, _View(True, target, point)] if shared else [own]


def _run(host: bool, work: Callable[[], object]) -> None:
    if host:
        mounts.in_mount_namespace_of_init(work)
    else:
        work()


def _clone(view: _View, moved: int = -1) -> int:
    """A detached mount of a view's bpffs: its descriptor. OSError; EPERM without CAP_SYS_ADMIN."""
    if not view.host or mounts.in_namespace_of_init("mnt"):
        return _open_tree(view.target, moved)
    receiver, sender = socket.socketpair()
    with receiver, sender:
        # A mount can be cloned only from inside of its namespace.
        mounts.in_mount_namespace_of_init(lambda: socket.send_fds(sender, [b"\0"], [_open_tree(view.target, moved)]))
        _, found, _, _ = socket.recv_fds(receiver, 1, 1)
    os.set_inheritable(found[0], False)
    return found[0]


def _open_tree(target: Path, mount: int) -> int:
    """Clone the mount at ``target``, or that of the descriptor ``mount``, whatever covers it."""
    if mount >= 0:
        flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH
        return mounts.checked(_libc.syscall(SYS_OPEN_TREE, mount, b"", flags))
    return mounts.checked(
        _libc.syscall(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(target), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC)
    )


def _move(mount: int, target: Path) -> None:
    mounts.checked(
        _libc.syscall(SYS_MOVE_MOUNT, mount, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH),
    )


def _pin_again(inside: Path, folder: Path) -> None:
    """Pin every object below ``inside`` at the same path below ``folder``, in another bpffs. OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for entry in sorted(inside.iterdir()):
        copy = folder / entry.name
        if entry.is_symlink():
            copy.symlink_to(entry.readlink())
        elif entry.is_dir():
            _pin_again(entry, copy)
        elif not copy.exists():
            pinned = tcx.open_pinned(entry)
            try:
                tcx.pin(pinned, copy)
            finally:
                os.close(pinned)
