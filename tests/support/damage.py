# SPDX-License-Identifier: Apache-2.0
"""What several tests do to a node: they fill its conntrack table and detach programs."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.datapath.node import tc
from pyebpf_proxy.datapath.node.attachments import Attachments
from pyebpf_proxy.datapath.node.mounts import bpffs_candidates, holds_pins, tcx_directory
from pyebpf_proxy.lab.namespace import Namespace

#: Creating more entries than this takes too long.
MOST_ENTRIES = 1 << 18


class CannotBeMadeError(Exception):
    """This machine lacks what a fault needs."""


@contextmanager
def full_conntrack(
    namespace: Namespace, answered: bool = True, free: int = 0, seconds: int = 600, protocol: str = "tcp"
) -> Iterator[Callable[[], None]]:
    """Fill this namespace's conntrack table up to ``free`` entries. CannotBeMadeError: the limit is too high.

    Each entry lasts for ``seconds``; ``protocol``: tcp or udp. The result adds entries, to replace flows that have
    ended.

    The kernel evicts entries of unanswered flows when the table is full, but not those of answered ones. The limit
    belongs to the whole machine and is not changed: that would affect other tests.
    """
    limit = int(namespace.run("sysctl", "-n", "net.netfilter.nf_conntrack_max"))
    if limit > MOST_ENTRIES:
        raise CannotBeMadeError(f"nf_conntrack_max of this machine is {limit}: too many entries to make")
    ports = iter(range(9, 65536))

    def fill(entries: int) -> None:
        state = "-u SEEN_REPLY,ASSURED" if answered else ""
        if protocol == "tcp":
            state += " --state ESTABLISHED" if answered else " --state SYN_SENT"
        flow = f"-d 198.19.0.1 --dport {next(ports)} -t {seconds} {state}"
        begin = f"-I -p {protocol}"
        # One of them meets the limit.
        enter(namespace, (f"{begin} -s 198.18.{n >> 16}.1 --sport {n & 0xFFFF} {flow}" for n in range(entries)))

    fill(limit - free)
    try:
        yield lambda: fill(256)
    finally:
        namespace.run("conntrack", "-D", "-d", "198.19.0.1")


def enter(namespace: Namespace, lines: Iterable[str]) -> None:
    """Pass these lines to conntrack's tool; it skips entries that exist or do not fit."""
    namespace.call(enter_here, "\n".join(lines))


def enter_here(lines: str) -> None:
    """The same in this process's network namespace."""
    subprocess.run(["conntrack", "-R", "-"], input=lines, text=True, capture_output=True, check=False)


def has_program(device: str) -> bool:
    """Whether a device of this network namespace has a tc program at ingress, by tcx or by a filter."""
    index = socket.if_nametoindex(device)
    return bool((tcx.available() and tcx.chain(index, tcx.INGRESS)) or tc.filters(index, tc.INGRESS))


def detach_program(directory: Path, device: str) -> bool:
    """Detach the programs of the instance with this directory from one device."""
    for place in filter(holds_pins, bpffs_candidates(directory)):
        attachments = Attachments(directory, tcx_directory(place, directory))
        try:
            if attachments.detach(socket.if_nametoindex(device), device):
                return True
        finally:
            attachments.close()
    return False
