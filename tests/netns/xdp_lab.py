# SPDX-License-Identifier: Apache-2.0
"""A lab whose first node has XDP on eth0, with its prerequisites, and how to see that XDP served packets."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from pyebpf_proxy.lab.cluster import Node
from pyebpf_proxy.lab.namespace import Namespace
from tests.support.conversation import PORT, Conversation
from tests.support.fast_lab import ON, FastWorld
from tests.support.lab_tools import wait_until

XDP = {**ON, "xdpDevices": ["eth0"]}
NODE_PORT = 30007


def as_nics(world: FastWorld) -> FastWorld:
    """Like real NICs: senders compute their checksums, and the other end of the wire accepts frames."""
    offloads(world, "off")
    receive(world, "on")
    restart(world, XDP)
    wait_until(lambda: shown(world.node), "XDP on eth0")
    return world


def restart(world: FastWorld, own: dict[str, object]) -> None:
    if world.node.agent.process is not None:
        world.node.agent.stop()
    world.node.agent.start(own=own)
    world.node.agent.wait_synced()


def offloads(world: FastWorld, state: str) -> None:
    for namespace in (world.lab.client, *(pod.namespace for pod in (world.client, world.near, world.far))):
        namespace.run("ethtool", "-K", "eth0", "tx", state)


def receive(world: FastWorld, state: str) -> None:
    """Whether the wire's other end, in the core, accepts frames of XDP: a veth does with GRO."""
    world.lab.core.run("ethtool", "-K", world.node.name, "gro", state)


def shown(node: Node, device: str = "eth0") -> dict[str, object]:
    """The XDP program on a device, from iproute2's output; empty: none."""
    (link,) = json.loads(node.namespace.run("ip", "-j", "-d", "link", "show", "dev", device))
    found = link.get("xdp", {})
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def talking(
    namespace: Namespace, address: str, protocol: str, port: int = PORT, size: int = 100
) -> Iterator[Conversation]:
    conversation = Conversation(namespace, address, protocol, port, size)
    try:
        conversation.wait()
        yield conversation
    finally:
        conversation.end()


def counted(world: FastWorld, name: str, more: int = 10) -> None:
    before = world.count(name)
    wait_until(lambda: world.count(name) > before + more, name, 60.0)
