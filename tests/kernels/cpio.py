# SPDX-License-Identifier: Apache-2.0
"""Archives in the format of an initramfs ("newc", uncompressed). The kernel accepts several in a row."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO


class Archive:
    """Writes one archive; :meth:`close` ends it. All files belong to root, the guest's only user."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._inode = 0
        self._folders: set[str] = set()

    def close(self) -> None:
        """The end mark, padded to 512 bytes, where the kernel finds the next archive."""
        self._entry("TRAILER!!!", 0, b"")
        self._file.write(bytes(-self._file.tell() % 512))

    def data(self, name: str, content: bytes, mode: int = 0o644, modified: int = 0) -> None:
        """A file with this content. Python's compiled files are valid only with the time of their source."""
        self._parents(name)
        self._entry(name, stat.S_IFREG | mode, content, modified)

    def folder(self, name: str) -> None:
        """A folder and its parents."""
        name = name.strip("/")
        if name and name not in self._folders:
            self._parents(name)
            self._folders.add(name)
            self._entry(name, stat.S_IFDIR | 0o755, b"")

    def link(self, name: str, target: str) -> None:
        """A symbolic link."""
        self._parents(name)
        self._entry(name, stat.S_IFLNK | 0o777, os.fsencode(target))

    def add(self, source: Path, name: str) -> None:
        """One file or link; other types (sockets, devices) are left out: devtmpfs has the devices."""
        status = source.lstat()
        if stat.S_ISLNK(status.st_mode):
            self.link(name, os.readlink(source))
        elif stat.S_ISREG(status.st_mode):
            self.data(name, source.read_bytes(), stat.S_IMODE(status.st_mode), int(status.st_mtime))

    def tree(self, source: Path, name: str, leave_out: Callable[[str], bool] = lambda path: False) -> None:
        """A folder with its contents. ``leave_out`` is called with each path below ``source``."""
        for folder, folders, files in os.walk(source):
            below = os.path.relpath(folder, source)
            here = "" if below == "." else below + "/"
            links = [entry for entry in folders if os.path.islink(os.path.join(folder, entry))]
            folders[:] = sorted(entry for entry in folders if entry not in links and not leave_out(here + entry))
            self.folder(f"{name}/{here}")
            for entry in sorted([*files, *links]):
                if not leave_out(here + entry):
                    self.add(Path(folder, entry), f"{name}/{here}{entry}")

    def _parents(self, name: str) -> None:
        self.folder(os.path.dirname(name.strip("/")))

    def _entry(self, name: str, mode: int, content: bytes, modified: int = 0) -> None:
        self._inode += 1
        path = os.fsencode(name.strip("/")) + b"\0"
        links = 2 if stat.S_ISDIR(mode) else 1
        fields = (self._inode, mode, 0, 0, links, modified, len(content), 0, 0, 0, 0, len(path), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
        self._file.write(head + bytes(-len(head) % 4) + content + bytes(-len(content) % 4))


def join(parts: Iterable[Path], target: Path) -> None:
    """Several archives as one file."""
    with target.open("wb") as file:
        for part in parts:
            with part.open("rb") as source:
                while os.sendfile(file.fileno(), source.fileno(), None, 1 << 26):
                    pass
