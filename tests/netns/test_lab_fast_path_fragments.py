# SPDX-License-Identifier: Apache-2.0
"""Fragmented datagrams of young flows: in both directions, of any size, in both families."""

from __future__ import annotations

import pytest

from pyebpf_proxy.lab.addresses import Dual, cluster_ip
from pyebpf_proxy.lab.client import ask
from pyebpf_proxy.lab.manifests import Port, service, slices
from pyebpf_proxy.lab.servers import Ports
from tests.support.fast_lab import FastWorld
from tests.support.lab_tools import wait_until

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

LARGE = {"same node": cluster_ip(25), "other node": cluster_ip(26)}


@pytest.fixture(scope="module")
def large(fast_world: FastWorld) -> FastWorld:
    ports = [Port("dns", 53, 5353, "UDP")]
    for number, (address, pod) in enumerate(zip(LARGE.values(), (fast_world.near, fast_world.far), strict=True)):
        pod.serve(Ports((), (), (5353,)))
        name = f"large-{number}"
        objects = [service(name, ports, address), *slices(name, ports, [(pod.address, pod.node.name)])]
        fast_world.node.agent.wait_synced(fast_world.lab.write(f"{name}.yaml", objects))
    return fast_world


@pytest.mark.parametrize("size", [4000, 8000])
@pytest.mark.parametrize("address", LARGE.values(), ids=LARGE)
def test_fragmented_answers(large: FastWorld, family: int, address: Dual, size: int) -> None:
    """Small requests that begin young flows, each with an answer that exceeds the MTU; then large requests too."""

    def young() -> bool:
        # The return path of a permit is learned from unfragmented replies.
        for _ in range(3):
            assert large.client.namespace.call(ask, address.of(family), 53, "udp").answer is not None
        before = large.count("new_flow_fast")
        outcome = large.client.namespace.call(ask, address.of(family), 53, "udp", reply_size=size, fragment=True)
        assert outcome.answer is not None, outcome
        assert outcome.size == size
        return large.count("new_flow_fast") > before

    for _ in range(5):
        wait_until(young, "the answer to a young flow's question")
    asked = large.client.namespace.call(ask, address.of(family), 53, "udp", size=size, reply_size=size, fragment=True)
    assert asked.answer is not None, asked
    assert (asked.answer.received, asked.size) == (size, size)
