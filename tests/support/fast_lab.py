# SPDX-License-Identifier: Apache-2.0
"""A lab whose first node has the fast path on, with clients and servers; and which path packets took."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pyebpf_proxy.lab.addresses import cluster_ip
from pyebpf_proxy.lab.cluster import Lab, Pod
from pyebpf_proxy.lab.manifests import Port, node, service, slices
from pyebpf_proxy.lab.namespace import Namespace
from tests.support.conversation import PORT, Conversation, serve
from tests.support.lab_tools import reasons, wait_until
from tests.support.world import World

LIBERAL = "net.netfilter.nf_conntrack_tcp_be_liberal"
ON = {"fastPathEntries": 4096}
PORTS = [Port("tcp", PORT, PORT, "TCP", 30007), Port("udp", PORT, PORT, "UDP", 30007)]
FAR, NEAR = cluster_ip(7), cluster_ip(8)
Ask = Callable[..., Conversation]


class FastWorld(World):
    """Two nodes. ``client`` and ``near`` are pods of the first one, ``far`` is a pod of the second one."""

    def __init__(self, lab: Lab, client: Pod, near: Pod, far: Pod) -> None:
        super().__init__(lab)
        self.client, self.near, self.far = client, near, far

    def count(self, name: str) -> int:
        return reasons(self.node)[name]

    def fast(self, conversation: Conversation) -> None:
        """The conversation continues, on the fast path."""
        before = self.count("flow_hit")
        conversation.wait()
        wait_until(lambda: self.count("flow_hit") > before + 10, "packets sent by the cache", 60.0)


def build_fast_world(lab: Lab, own: dict[str, Any] = ON, enter: Sequence[str] = ()) -> FastWorld:
    """``own``, ``enter``: as for :meth:`Agent.start`."""
    first, second = lab.nodes
    world = FastWorld(
        lab,
        lab.add_pod("client-pod", first, serve=False),
        lab.add_pod("near", first, serve=False),
        lab.add_pod("far", second, serve=False),
    )
    for pod in (world.near, world.far):
        serve(pod)
    for name, address, pod in (("far", FAR, world.far), ("near", NEAR, world.near)):
        ports = PORTS if name == "far" else [Port("tcp", PORT, PORT), Port("udp", PORT, PORT, "UDP")]
        endpoints = [(pod.address, pod.node.name)]
        lab.write(f"{name}.yaml", [service(name, ports, address), *slices(name, ports, endpoints)])
    lab.write("nodes.yaml", [node(each.name, each.address, each.pod_cidr) for each in lab.nodes])
    first.agent.start(own=own, enter=enter)
    first.agent.wait_synced()
    return world


@contextlib.contextmanager
def open_conversations() -> Iterator[Ask]:
    """Start conversations; they end with the test."""
    with contextlib.ExitStack() as stack:

        def begin(
            namespace: Namespace, address: str, protocol: str = "tcp", port: int = PORT, size: int = 100
        ) -> Conversation:
            conversation = Conversation(namespace, address, protocol, port, size)
            stack.callback(conversation.end)
            conversation.wait()
            return conversation

        yield begin


#: A conversation that pauses for more seconds than this was stopped by more than a busy machine.
SLOWEST = 5.0


@contextlib.contextmanager
def without_pause(*conversations: Conversation) -> Iterator[None]:
    """No conversation pauses inside the block for longer than a second, or its equivalent on a busy machine."""
    for conversation in conversations:
        conversation.forget_pause()
    slow = slowness()
    yield
    for conversation in conversations:
        conversation.wait()
    slow = max(slow, slowness())
    for conversation in conversations:
        assert conversation.pause < 1.0 * slow, (
            f"paused for {conversation.pause:.2f} s on a machine that is {slow:.1f} times slower"
        )


def slowness() -> float:
    """How many times longer than an idle machine this one takes now: from 1.0 to SLOWEST.

    The median: a moment without CPU time does not count.
    """
    taken = []
    for _ in range(5):
        begun = time.monotonic()
        sum(number * number for number in range(160_000))
        taken.append(time.monotonic() - begun)
    return min(SLOWEST, max(1.0, statistics.median(taken) / 0.01))
