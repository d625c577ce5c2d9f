# SPDX-License-Identifier: Apache-2.0
"""Neighbours change while XDP sends to them from the flow table: no packet is lost or delayed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.cluster import Lab, Node
from tests.netns.xdp_lab import NODE_PORT, as_nics, counted, talking
from tests.support.conversation import Conversation
from tests.support.fast_lab import FastWorld, build_fast_world, without_pause
from tests.support.lab_tools import Capture, wait_until

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_bpf, pytest.mark.needs_netns]

OTHER = "02:00:00:00:0e:02"


@pytest.fixture(scope="module")
def outside() -> Iterator[FastWorld]:
    with Lab() as lab:
        yield as_nics(build_fast_world(lab))


@pytest.fixture
def far(outside: FastWorld, protocol: str) -> Iterator[Conversation]:
    """The outside client's conversation with a pod on the other node, sent back by XDP."""
    with talking(outside.lab.client, outside.node.address.v4, protocol, NODE_PORT) as conversation:
        counted(outside, "xdp_flow_hit")
        yield conversation


def test_a_neighbour_has_another_link_address(outside: FastWorld, far: Conversation) -> None:
    other = outside.lab.nodes[1]
    old = other.namespace.run("cat", "/sys/class/net/eth0/address").strip()

    def becomes(address: str) -> None:
        """As a machine does that has taken an address over and announces it."""
        other.namespace.ip(f"link set dev eth0 address {address}")
        outside.node.namespace.ip(f"neigh replace {other.address.v4} lladdr {address} dev eth0 nud reachable")

    try:
        with without_pause(far):
            becomes(OTHER)
        counted(outside, "xdp_flow_hit")
        former = bytes.fromhex(old.replace(":", ""))
        stray = Capture(other.namespace, "eth0", lambda frame: frame[:6] == former, deadline=1.0)
        far.wait()
        assert stray.frame() is None, "packets still go to the old link address"
    finally:
        becomes(old)
    counted(outside, "xdp_flow_hit")


@pytest.mark.parametrize("how", ["del {} dev eth0", "replace {} lladdr 02:00:00:00:0e:03 dev eth0 nud failed"])
def test_a_neighbours_entry_is_deleted(outside: FastWorld, far: Conversation, how: str) -> None:
    with without_pause(far):
        outside.node.namespace.ip("neigh " + how.format(outside.lab.nodes[1].address.v4))
    counted(outside, "xdp_flow_hit")


def test_the_flow_table_is_updated(outside: FastWorld, far: Conversation) -> None:
    """At once, and not only when the entry's second is over."""
    node = outside.node
    address = outside.lab.nodes[1].address.v4
    neighbour = next(iter(node.namespace.run("ip", "neigh", "show", address, "dev", "eth0").split("lladdr ")[1:]))
    before = generation(node)
    node.namespace.ip(f"neigh replace {address} lladdr {neighbour.split()[0]} dev eth0 nud stale")
    node.namespace.ip("neigh add 192.0.2.77 lladdr 02:00:00:00:0e:07 dev eth0 nud reachable")
    node.namespace.ip("neigh del 192.0.2.77 dev eth0")
    wait_until(lambda: generation(node) != before, "an obsolete link address is reported")
    assert generation(node) == before + 1, "messages without news are ignored"
    counted(outside, "xdp_flow_hit")


def generation(node: Node) -> int:
    """The generation that the programs read."""
    dump = node.namespace.run("bpftool", "-j", "map", "dump", "pinned", str(node.agent.pin("fast_path")))
    return int(json.loads(dump)[0]["formatted"]["value"]["generation"])
