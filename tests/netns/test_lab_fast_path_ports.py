# SPDX-License-Identifier: Apache-2.0
"""One port of a client, two connections to one endpoint: straight, and through a Service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.addresses import cluster_ip
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.manifests import Port, service, slices
from tests.netns.tcp_ends import End, exchange_data
from tests.support import without_lookup
from tests.support.fast_lab import FastWorld, build_fast_world
from tests.support.lab_tools import wait_until

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

PORT = 7400
ADDRESS = cluster_ip(13)
#: Ports of the client with two connections, and the others.
SHARED, OTHERS = range(21_000, 21_005), iter(range(22_000, 30_000))


@pytest.fixture(scope="module", params=["conntrack lookup", "no lookup"])
def world(request: pytest.FixtureRequest) -> Iterator[FastWorld]:
    with Lab() as lab:
        lookup = request.param == "conntrack lookup"
        world = build_fast_world(lab, enter=() if lookup else without_lookup.command(lab.nodes[0].namespace.name))
        assert ("conntrack lookup" in world.node.agent.log()) is not lookup
        End(world.near.namespace).listen(PORT)
        ports = [Port("tcp", PORT, PORT)]
        objects = [service("shared", ports, ADDRESS), *slices("shared", ports, [(world.near.address, world.node.name)])]
        world.node.agent.wait_synced(lab.write("shared.yaml", objects))
        yield world


def begin(world: FastWorld, name: str, address: str, own_port: int) -> tuple[End, End]:
    """A new connection of the pod to ``near``: both ends."""
    client, server = End(world.client.namespace, name), End(world.near.namespace, name)
    client.connect(address, PORT, own_port)
    server.accept(PORT)
    exchange_data(client, server, 3)
    return client, server


def wait_for_permit(world: FastWorld, family: int) -> None:
    """Wait until a connection through the Service is young."""

    def opened_young() -> bool:
        before = world.count("new_flow_fast")
        client, _ = begin(world, "other", ADDRESS.of(family), next(OTHERS))
        client.reset()
        return world.count("new_flow_fast") > before

    wait_until(opened_young, "a young flow")


def test_a_connection_straight_to_the_endpoint_keeps_its_port(world: FastWorld, family: int) -> None:
    """With the same port, the endpoint would take the second SYN for one of the first connection, and reset it."""
    refused = world.count("slow_no_port")
    for own_port in SHARED:
        straight = begin(world, "straight", world.near.address.of(family), own_port)
        wait_for_permit(world, family)
        through_service = begin(world, "through the Service", ADDRESS.of(family), own_port)
        for _ in range(3):
            exchange_data(*straight, 3)
            exchange_data(*through_service, 3)
        for client, _ in (straight, through_service):
            client.reset()
    assert world.count("slow_no_port") > refused
