# SPDX-License-Identifier: Apache-2.0
"""A directory of Kubernetes manifests as a source of objects, watched by inotify.

Files are ``*.yaml``, ``*.yml`` and ``*.json`` of the directory itself; hidden files and subdirectories are ignored. An
event causes only its file to be read. All files are checked only when ``..data`` is replaced (this is how a ConfigMap
volume replaces all files at once), when the directory or a symbolic link in its path is replaced, or when the kernel's
queue overflows. Of these, only files with a changed inode, time or size are read.

Large files are decoded in another thread, since libyaml and Python need seconds for each MiB. Other files go on, but no
object is removed meanwhile: it may be in the large file by now.

Writes to the target of a symbolic link that leads out of the directory are not detected.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from inotify_simple import INotify, flags

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.common.threads import in_daemon_thread
from pyebpf_proxy.common.waiting import wait_briefly
from pyebpf_proxy.kube.catalogue import Catalogue
from pyebpf_proxy.kube.source import Batch, Change, Critic

#: A file counts as deleted only if it is missing for this time: editors rename the old file before they write the new
#: one, and this must not interrupt a service.
DELETION_DELAY = 0.2

#: Temporary errors, such as a lack of file descriptors: no inotify event reports their end, so the file is read again.
_PASSING = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EINTR, errno.EIO, errno.ENOSPC}
)
RETRY_SECONDS = 0.5

#: A file that was modified less than these seconds ago may change again without a new timestamp: the clock is coarse.
_TOO_YOUNG = 0.1

#: Size limit of one file: more than ten thousand Services need.
MAX_FILE_BYTES = 64 << 20

#: Larger files are decoded in another thread: YAML of this size takes up to 0.3 s.
LARGE_BYTES = 64 << 10

#: The kernel follows no more links in one path (MAXSYMLINKS).
_MOST_LINKS = 40

_SUFFIXES = (".yaml", ".yml", ".json")
_FILES_PER_TURN = 20

_FOLDER_EVENTS = (
    flags.CLOSE_WRITE
    | flags.MOVED_TO
    | flags.MOVED_FROM
    | flags.CREATE
    | flags.DELETE
    | flags.ATTRIB
    | flags.DELETE_SELF
    | flags.MOVE_SELF
    | flags.ONLYDIR
    | flags.MASK_ADD
)
_PARENT_EVENTS = (
    flags.CREATE
    | flags.MOVED_TO
    | flags.MOVED_FROM
    | flags.DELETE
    | flags.DELETE_SELF
    | flags.MOVE_SELF
    | flags.ONLYDIR
    | flags.MASK_ADD
)


class _Stamp(NamedTuple):
    device: int
    inode: int
    modified: int
    changed: int
    size: int


class _Events(NamedTuple):
    """Events since the last call: files to read, files that may be gone, or a request to check everything."""

    written: set[str]
    gone: set[str]
    everything: bool


class _Watches(NamedTuple):
    """Numbers of watches, None for a missing directory. ``links``: names of links in the path, by their directories."""

    folder: int | None
    parent: int | None
    links: dict[int, frozenset[str]]

    @property
    def numbers(self) -> set[int]:
        return {number for number in (self.folder, self.parent, *self.links) if number is not None}


def is_manifest(name: str) -> bool:
    """Whether a file of this name is read."""
    return name.endswith(_SUFFIXES) and not name.startswith(".")


class ManifestSource:
    """Reads and watches the directory.

    ``report`` is called with one line for each problem that the user should fix, ``note`` for what is ignored.
    ``critic`` receives the numbers of invalid objects.
    """

    def __init__(
        self,
        directory: Path,
        report: Callable[[str], None],
        note: Callable[[str], None] | None = None,
        critic: Critic | None = None,
    ) -> None:
        self._directory = Path(os.path.abspath(directory))
        self._report = report
        self._critic = critic
        self._catalogue = Catalogue(report, note or Logger("manifests").info)
        self._stamps: dict[str, _Stamp] = {}
        self._unreadable: dict[str, str] = {}
        self._leaving: dict[str, float] = {}  # missing files, and when they count as deleted
        self._again: set[str] = set()  # files, and directories by path, to retry
        self._again_at = 0.0
        self._large: dict[str, None] = {}  # files to decode in another thread, in this order
        self._decoding = ""  # the file whose decoded text is still wanted
        self._decoder: asyncio.Task[None] | None = None
        self._inotify: INotify
        self._watches = _Watches(None, None, {})
        self._missing = False

    async def run(self, deliver: Callable[[Batch], None]) -> None:
        """Deliver the directory's objects, then every change, until cancelled."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        try:
            self._inotify = INotify(nonblocking=True)
        except OSError as error:
            what = f"{self._directory}: cannot be watched: {error.strerror}"
            raise FatalError(f"{what}; raise fs.inotify.max_user_instances, or the limit of open files") from None
        with self._inotify:
            loop.add_reader(self._inotify.fileno(), readable.set)
            try:
                self._watch()
                # A missing directory does not mean that its objects are deleted.
                complete = self._watches.folder is not None
                await self._check_all_files()
                await self._decode_large()
                deliver(Batch(self._changes(), complete))
                while True:
                    await self._wait(readable)
                    readable.clear()
                    events = self._read_events()
                    again = self._take_retries()
                    if events.everything or any("/" in name for name in again):
                        self._watch()
                        await self._check_all_files()
                    for names in _portions(events.written | {name for name in again if "/" not in name}):
                        for name in names:
                            self._read(name)
                        await asyncio.sleep(0)
                    self._miss(events.gone)
                    self._remove_missing()
                    self._go_on_decoding(readable)
                    changes = self._changes()
                    first_complete = not complete and self._watches.folder is not None and self._decoder is None
                    complete |= first_complete
                    if changes or first_complete:
                        deliver(Batch(changes, complete))
            finally:
                loop.remove_reader(self._inotify.fileno())
                if self._decoder is not None:
                    self._decoder.cancel()

    def _changes(self) -> list[Change]:
        if self._critic is not None:
            for kind, (refused, in_part) in self._catalogue.bad.items():
                self._critic.bad(kind, refused, in_part)
        return self._catalogue.changes(self._leaving, removals=self._decoder is None)

    async def _wait(self, readable: asyncio.Event) -> None:
        """Wait until there are events, a missing file counts as deleted, or a retry is due."""
        moments = [*self._leaving.values(), *([self._again_at] if self._again else ())]
        if not moments:
            await readable.wait()
            return
        await wait_briefly(readable, min(moments) - time.monotonic())

    def _take_retries(self) -> set[str]:
        """Files and directories to read again now."""
        if not self._again or time.monotonic() < self._again_at:
            return set()
        again, self._again = self._again, set()
        return again

    # ---- events ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Watch the directory, its nearest existing ancestor and the symbolic links in its path, to detect creation,
        deletion and replacement.
        """
        watches = self._add_watches()
        # Repeat until the watches are stable: a directory may appear between the check and the watch.
        while (again := self._add_watches()) != watches:
            watches = again
        for old in self._watches.numbers - watches.numbers:
            try:
                self._inotify.rm_watch(old)
            except OSError:
                pass  # the kernel removed it together with the directory
        self._watches = watches
        if self._watches.folder is None and not self._missing:
            self._report(f"{self._directory}: the manifests folder is not there; what was in it stays until it is back")
        self._missing = self._watches.folder is None

    def _add_watches(self) -> _Watches:
        folder = self._add_watch(self._directory, _FOLDER_EVENTS)
        above = self._directory.parent
        parent = self._add_watch(above, _PARENT_EVENTS)
        while parent is None and above != above.parent:
            above = above.parent
            parent = self._add_watch(above, _PARENT_EVENTS)
        links: dict[int, frozenset[str]] = {}
        for place, name in _links(self._directory):
            # The last one has the watch of its parent already.
            if (watch := self._add_watch(place, _PARENT_EVENTS)) is not None:
                links[watch] = links.get(watch, frozenset()) | {name}
        return _Watches(folder, parent, links)

    def _add_watch(self, path: Path, mask: int) -> int | None:
        try:
            return int(self._inotify.add_watch(path, mask))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                self._cannot(str(path), "watched", error)
            return None

    def _read_events(self) -> _Events:
        written: set[str] = set()
        gone: set[str] = set()
        everything = False
        for watch, mask, _, name in self._inotify.read(timeout=0):
            lost = mask & (flags.Q_OVERFLOW | flags.DELETE_SELF | flags.MOVE_SELF | flags.UNMOUNT)
            if lost or name in self._watches.links.get(watch, ()):
                everything = True
            elif watch == self._watches.parent and watch != self._watches.folder:
                # While the directory is missing, any entry of the watched ancestor may be a part of its path.
                everything |= self._watches.folder is None or name == self._directory.name
            elif watch != self._watches.folder:
                continue
            elif name == "..data":
                everything |= bool(mask & (flags.MOVED_TO | flags.CREATE))
            elif is_manifest(name):
                if mask & (flags.DELETE | flags.MOVED_FROM):
                    gone.add(name)
                    written.discard(name)
                elif mask & flags.ATTRIB:
                    if name in self._unreadable:  # perhaps only the permissions changed
                        written.add(name)
                elif not mask & flags.CREATE or self._is_complete(name):
                    written.add(name)
        return _Events(written, gone - written, everything)

    def _is_complete(self, name: str) -> bool:
        """Whether a new file is complete. Only links are; any other file causes another event when it is closed."""
        try:
            status = os.lstat(self._directory / name)
        except OSError:
            return False
        return stat.S_ISLNK(status.st_mode) or status.st_nlink > 1

    # ---- files -------------------------------------------------------------------------------------------------

    async def _check_all_files(self) -> None:
        """Read all files with a changed stamp, and note the missing ones."""
        if self._watches.folder is None:
            return
        try:
            names = sorted(name for name in os.listdir(self._directory) if is_manifest(name))
        except OSError as error:
            self._cannot(str(self._directory), "listed", error)
            return
        for portion in _portions(names):
            for name in portion:
                if not self._is_unchanged(name):
                    self._read(name)
            await asyncio.sleep(0)
        self._miss(set(self._catalogue.files) - set(names))

    def _is_unchanged(self, name: str) -> bool:
        stamp = self._stamps.get(name)
        if stamp is None:
            return False
        try:
            return stamp == _stamp(os.stat(self._directory / name))
        except OSError:
            return False

    def _read(self, name: str) -> None:
        """Read one file and pass its text on; a large one has its turn later."""
        try:
            large = os.stat(self._directory / name).st_size > LARGE_BYTES
        except OSError:
            large = False  # _load reports it
        if large:
            self._leaving.pop(name, None)
            self._large[name] = None
            return
        self._large.pop(name, None)
        data = self._load(name)
        if data is not None:
            self._forget_decoding(name)
            self._catalogue.read(name, data)

    def _forget_decoding(self, name: str) -> None:
        """The text of this file that is being decoded is out of date."""
        if self._decoding == name:
            self._decoding = ""

    def _go_on_decoding(self, readable: asyncio.Event) -> None:
        """Start to decode the large files that wait, if there are any. ``readable`` is set for each that is decoded."""
        if self._decoder is not None and self._decoder.done():
            self._decoder.result()
            self._decoder = None
        if self._large and self._decoder is None:
            self._decoder = asyncio.create_task(self._decode_large(readable.set), name="decode manifests")
            self._decoder.add_done_callback(lambda _: readable.set())

    async def _decode_large(self, decoded: Callable[[], None] = lambda: None) -> None:
        """Decode the large files that wait, one after the other: each may need much memory."""
        while self._large:
            name = next(iter(self._large))
            del self._large[name]
            data = self._load(name)
            if data is not None:
                self._decoding = name
                try:
                    found = await in_daemon_thread("manifests", partial(self._catalogue.decode, name, data))
                except OSError as error:
                    found = None
                    self._cannot(name, "decoded", error)
                del data
                if self._decoding == name and found is not None:
                    self._catalogue.take(name, found)
                self._decoding = ""
            # Also for a file that is missing or is tried again: both have a time.
            decoded()

    def _load(self, name: str) -> bytes | None:
        """The text of a file. An unreadable file, or one that is not regular, is reported once."""
        try:
            # Non-blocking: the file may be a FIFO.
            descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            self._miss({name})
            return None
        except OSError as error:
            self._cannot(name, "read", error)
            return None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                self._cannot(name, "read", "not a regular file")
                return None
            data = b""
            if status.st_size <= MAX_FILE_BYTES:
                with open(descriptor, "rb", closefd=False) as file:
                    data = file.read(MAX_FILE_BYTES + 1)
            if max(status.st_size, len(data)) > MAX_FILE_BYTES:
                self._cannot(name, "read", f"larger than {MAX_FILE_BYTES >> 20} MiB; split it into several files")
                return None
        except OSError as error:
            self._cannot(name, "read", error)
            return None
        finally:
            os.close(descriptor)
        self._unreadable.pop(name, None)
        self._leaving.pop(name, None)
        if time.time() - status.st_mtime > _TOO_YOUNG:
            self._stamps[name] = _stamp(status)
        else:
            self._stamps.pop(name, None)
        return data

    def _cannot(self, name: str, what: str, error: OSError | str) -> None:
        """Report once that something cannot be read, listed or watched. Its objects stay."""
        self._stamps.pop(name, None)
        self._leaving.pop(name, None)
        if isinstance(error, OSError) and error.errno in _PASSING:
            self._again.add(name)
            self._again_at = time.monotonic() + RETRY_SECONDS
        why = error if isinstance(error, str) else error.strerror or str(error)
        if self._unreadable.get(name) != why:
            self._unreadable[name] = why
            self._report(f"{name}: cannot be {what}: {why}; the objects that were in it stay")

    def _miss(self, names: Iterable[str]) -> None:
        for name in names:
            self._leaving.setdefault(name, time.monotonic() + DELETION_DELAY)

    def _remove_missing(self) -> None:
        """Remove files that have been missing long enough. A file that reappears causes an event of its own."""
        now = time.monotonic()
        for name in [name for name, final in self._leaving.items() if final <= now]:
            del self._leaving[name]
            if self._watches.folder is not None and self._is_gone(name):
                self._stamps.pop(name, None)
                self._unreadable.pop(name, None)
                self._forget_decoding(name)
                self._catalogue.remove(name)

    def _is_gone(self, name: str) -> bool:
        try:
            os.stat(self._directory / name)
        except FileNotFoundError:
            return True
        except OSError:
            return False  # it exists, but is not accessible
        return False


def _links(path: Path) -> list[tuple[Path, str]]:
    """The symbolic links that lead to an absolute path, each as its directory and its name."""
    found: list[tuple[Path, str]] = []
    here = Path("/")
    left = list(reversed(path.parts[1:]))
    while left and len(found) < _MOST_LINKS:
        name = left.pop()
        if name == "..":
            here = here.parent
            continue
        try:
            target = (here / name).readlink()
        except OSError:  # no link, or missing
            here /= name
            continue
        found.append((here, name))
        if target.is_absolute():
            here = Path("/")
        left += [part for part in reversed(target.parts) if part != "/"]
    return found


def _stamp(status: os.stat_result) -> _Stamp:
    return _Stamp(status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)


def _portions(names: Iterable[str]) -> Iterator[list[str]]:
    """Iterate in order, in portions between which other tasks may run."""
    ordered = sorted(names)
    for start in range(0, len(ordered), _FILES_PER_TURN):
        yield ordered[start : start + _FILES_PER_TURN]
