# SPDX-License-Identifier: Apache-2.0
"""The programs for the node's own sockets, on the root of the cgroup2 hierarchy, with pinned links.

Pins keep the programs attached when the agent is gone; :meth:`Link.update` replaces a program atomically. A program
filters by its network namespace's cookie, so instances of several namespaces can share one cgroup.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

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


def attach(programs: Mapping[str, Program], cgroup_fd: int, folder: Path) -> None:
    """Attaches every one of :data:`PROGRAMS` and pins its link in ``folder``; replaces those of a former run.

    Raises BpfError; programs attached before that stay.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    hierarchy = os.fstat(cgroup_fd).st_ino
    for name in PROGRAMS:
        _attach(programs[name], cgroup_fd, hierarchy, folder / name)


def _attach(program: Program, cgroup_fd: int, hierarchy: int, pin: Path) -> None:
    if pin.exists():
        link = Link.open_pinned(pin)
        try:
            # The id of a cgroup is the inode number of its folder.
            if link.attached_to("cgroup_id") == hierarchy:
                link.update(program)
                return
        except BpfError:
            pass  # the cgroup of the link was removed, or the program has another type: create a new link
        finally:
            link.close()
    link = program.attach_cgroup(cgroup_fd)
    try:
        pin.unlink(missing_ok=True)
        link.pin(pin)
    finally:
        link.close()


def detached(folder: Path) -> list[str]:
    """Names of the programs whose pinned link has lost its cgroup: it was removed, or the link was detached."""
    found = []
    for name in attached(folder):
        try:
            link = Link.open_pinned(folder / name)
            try:
                if not link.attached_to("cgroup_id"):
                    found.append(name)
            finally:
                link.close()
        except OSError:
            continue  # the pin has just gone, or there is no descriptor: unknown
    return found


def attached(folder: Path) -> list[str]:
    """Names of the programs that have a pinned link."""
    return [name for name in PROGRAMS if (folder / name).exists()]


def detach(folder: Path) -> list[str]:
    """Removes the pins, and so the links; needs no libbpf. Returns the names that existed."""
    found = attached(folder)
    for name in found:
        (folder / name).unlink(missing_ok=True)
    return found
