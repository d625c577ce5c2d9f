# SPDX-License-Identifier: Apache-2.0
"""Pinned links of socket programs, as a test attaches them and finds them in the kernel."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

from pyebpf_proxy.datapath.loader.libbpf import BpfError, Link, Program
from pyebpf_proxy.datapath.node.cgroups import PROGRAMS, SocketLinks


def attach(programs: Mapping[str, Program], cgroup_fd: int, folder: Path) -> None:
    """Attach the programs to the cgroup, and keep only their pins."""
    links = SocketLinks(folder)
    try:
        links.attach(programs, cgroup_fd)
    finally:
        links.close()


def detached(folder: Path) -> list[str]:
    """Names of the programs without a pinned link, or whose link has lost its cgroup."""
    return [name for name in PROGRAMS if _is_detached(folder / name)]


def _is_detached(pin: Path) -> bool:
    try:
        link = Link.open_pinned(pin)
    except BpfError as error:
        if error.errno == errno.ENOENT:
            return True
        raise
    try:
        return not link.attached_to("cgroup_id")
    finally:
        link.close()
