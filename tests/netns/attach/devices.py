# SPDX-License-Identifier: Apache-2.0
"""The programs on a device, and waiting for changes of devices."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable

from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.datapath.loader.kernel_objects import program_info
from pyebpf_proxy.datapath.node import tc
from pyebpf_proxy.datapath.node.devices import Node
from pyebpf_proxy.datapath.node.follower import Follower

DEADLINE = 30.0


def follow(node: Node | Follower, until: Callable[[], bool]) -> None:
    """Read events until the condition holds; checks it only after an event. Fails after a deadline."""
    node.read()
    end = time.monotonic() + DEADLINE
    while not until():
        left = end - time.monotonic()
        assert left > 0, "the awaited change did not come"
        if select.select([node.fileno()], [], [], left)[0]:
            node.read()


def carried(device: str) -> tuple[list[str], list[str]]:
    """Names of all BPF programs of a device in their order, at ingress and at egress."""
    index = socket.if_nametoindex(device)
    hooks = tc.qdiscs().get(index, tc.Qdiscs()).hooks
    found = []
    for chain, hook in ((tcx.INGRESS, tc.INGRESS), (tcx.EGRESS, tc.EGRESS)):
        numbers = list(tcx.chain(index, chain))
        if hooks and (hook == tc.INGRESS or hooks == "clsact"):
            numbers += [each.program for each in tc.filters(index, hook) if each.program]
        found.append([program_info(number).name for number in numbers])
    return found[0], found[1]
