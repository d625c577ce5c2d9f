# SPDX-License-Identifier: Apache-2.0
"""The programs for the node's own sockets, on the root of the cgroup2 hierarchy, with pinned links.

Pins keep the programs attached when the agent is gone; :meth:`Link.update` replaces a program atomically. While the
agent runs it also holds the links open, so that they outlive their pins. A program
filters by its network namespace's cookie, so instances of several namespaces can share one cgroup.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.datapath.loader.libbpf import BpfError, Link, Program

# The names of the programs in bpf/sock.bpf.c; their ELF sections define where each is attached.
PROGRAMS = (
    "connect4",
    "connect6",
    "sendmsg4",
    "sendmsg6",
    "recvmsg4",
    "recvmsg6",
    "getpeername4",
    "getpeername6",
)


class SocketLinks:
    """The links of :data:`PROGRAMS`, pinned in ``folder`` and held open until :meth:`close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Link] = {}

    def close(self) -> None:
        """Release the links; what is pinned stays attached."""
        for link in self._held.values():
            link.close()
        self._held.clear()

    def attach(self, programs: Mapping[str, Program], cgroup_fd: int) -> None:
        """Attach and pin every program; replace those of a former run.

        BpfError, OSError of the folder: programs attached before that stay, as long as they are held.
        """
        hierarchy = os.fstat(cgroup_fd).st_ino
        for name in PROGRAMS:
            if not self._update(name, programs[name], hierarchy):
                link = programs[name].attach_cgroup(cgroup_fd)
                with contextlib.suppress(OSError):
                    (self._folder / name).unlink()  # of a link that has lost its cgroup
                self._hold(name, link)
        self.pin()

    def pin(self) -> list[str]:
        """Pin the links whose pins are missing: their names. BpfError, OSError of the folder."""
        missing = [name for name in self._held if not os.path.exists(f"{self._folder}/{name}")]
        if missing:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in missing:
            # libbpf would refuse to pin a link a second time.
            tcx.pin(self._held[name].fd, self._folder / name)
        return missing

    def detached(self) -> list[str]:
        """Names of the programs whose link has lost its cgroup: it was removed, or the link was detached."""
        return [name for name in PROGRAMS if name not in self._held or _is_detached(self._held[name])]

    def _update(self, name: str, program: Program, hierarchy: int) -> bool:
        """Replace the program of the existing link. False: there is none on this cgroup."""
        pin = self._folder / name
        if name not in self._held and pin.exists():
            self._hold(name, Link.open_pinned(pin))
        link = self._held.get(name)
        if link is None:
            return False
        try:
            # The id of a cgroup is the inode number of its folder.
            if link.attached_to("cgroup_id") == hierarchy:
                link.update(program)
                return True
        except BpfError:
            pass  # its cgroup was removed, or the program has another type: create a new link
        return False

    def _hold(self, name: str, link: Link) -> None:
        if name in self._held:
            self._held[name].close()
        self._held[name] = link


def _is_detached(link: Link) -> bool:
    try:
        return not link.attached_to("cgroup_id")
    except OSError:
        return False  # there is no descriptor: unknown


def attached(folder: Path) -> list[str]:
    """Names of the programs that have a pinned link."""
    return [name for name in PROGRAMS if (folder / name).exists()]


def detach(folder: Path) -> list[str]:
    """Removes the pins, and so the links; needs no libbpf. Returns the names that existed."""
    found = attached(folder)
    for name in found:
        (folder / name).unlink(missing_ok=True)
    return found
