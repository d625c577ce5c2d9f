# SPDX-License-Identifier: Apache-2.0
"""What a device carries, and waiting for what changes it."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable

from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.datapath.loader.kernel_objects import program_info
from pyebpf_proxy.datapath.node import tc
from pyebpf_proxy.datapath.node.follower import Follower
from pyebpf_proxy.datapath.node.links import Node

DEADLINE = 30.0


def follow(node: Node | Follower, until: Callable[[], bool]) -> None:
    """Reads events until the condition holds; looks again only when one has come. Fails after a deadline."""
    node.read()
    end = time.monotonic() + DEADLINE
    while not until():
        left = end - time.monotonic()
        assert left > 0, "the awaited change did not come"
        if select.select([node.fileno()], [], [], left)[0]:
            node.read()


def carried(device: str) -> tuple[list[str], list[str]]:
    """Names of all BPF programs that a device runs, in their order: at ingress and at egress."""
    index = socket.if_nametoindex(device)
    hooks = tc.qdiscs().get(index, tc.Qdiscs()).hooks
    found = []
    for chain, hook in ((tcx.INGRESS, tc.INGRESS), (tcx.EGRESS, tc.EGRESS)):
        numbers = list(tcx.chain(index, chain))
        if hooks and (hook == tc.INGRESS or hooks == "clsact"):
            numbers += [each.program for each in tc.filters(index, hook) if each.program]
        found.append([program_info(number).name for number in numbers])
    return found[0], found[1]
