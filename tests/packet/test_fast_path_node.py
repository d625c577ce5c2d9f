# SPDX-License-Identifier: Apache-2.0
"""The flow cache on a node that is not as it was: what is unknown, closed, excluded or full sends nothing wrong."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from fast_world import REDIRECT, Flow, beyond_the_link, fast_node, flow_of, ip, neighbour, passage, say, track_many
from world import GO_ON, SIZES, World

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


@pytest.fixture
def fast(node: World) -> World:
    return fast_node(node)


def test_an_unknown_neighbour(fast: World) -> None:
    flow = flow_of(fast)
    neighbour(fast, "del", "gateway", "nic")
    assert flow.run(reply=True).retval == REDIRECT, "the way to the pod is known"
    assert flow.run().retval == GO_ON
    neighbour(fast, "replace", "gateway", "nic")


def test_nobody_watches(fast: World) -> None:
    flow = flow_of(fast)
    flow.learn()
    say(fast, trust=-1)
    assert flow.run().retval == GO_ON
    assert fast.reasons()["STACK_NO_AGENT"] == 1


@pytest.mark.parametrize("why", ["STACK_IPSEC", "STACK_POLICY_ROUTED"])
def test_the_agent_closes_it(fast: World, why: str) -> None:
    flow = flow_of(fast)
    flow.learn()
    say(fast, closed=why)
    assert flow.run().retval == GO_ON
    assert fast.reasons()[why] == 1


@pytest.mark.parametrize("device", ["nic", "pods"])
def test_an_excluded_device(fast: World, device: str) -> None:
    flow = flow_of(fast)
    flow.learn()
    passage(fast, device, how=0)
    say(fast, generation=2)
    for reply in (False, True):
        assert flow.run(reply).retval == GO_ON
    assert fast.reasons()["STACK_DEVICE"] == 2


def test_from_another_device_it_is_not_the_flows(fast: World) -> None:
    flow = flow_of(fast)
    flow.learn()
    flow.entrance = "nic"
    assert flow.run().retval == GO_ON
    assert fast.reasons()["STACK_OTHER_DEVICE"] == 1


def test_whoever_speaks_for_another_is_not_learned(fast: World) -> None:
    """A reply by another device than the way to its sender."""
    flow = flow_of(fast)
    flow.exit = "pods"
    assert flow.run(reply=True).retval == GO_ON
    assert fast.reasons()["STACK_OTHER_DEVICE"] == 1


def test_what_somebody_else_translates(fast: World) -> None:
    """To an address of no service: once the endpoint has answered, its packets are looked for."""
    flow = Flow(fast, frontend="elsewhere", port=4433)
    flow.track()
    assert flow.run().retval == GO_ON
    flow.learn()
    found = flow.run()
    assert found.retval == REDIRECT
    assert beyond_the_link(found.data) == beyond_the_link(bytes(flow.expected()))


def test_what_a_datagram_to_a_node_port_made_known_stays_known(fast: World) -> None:
    """No answer has come by, and nobody else knows the node's address as a service's."""
    flow = Flow(fast, "udp", client="client", frontend="node", port=30080, masquerade="node", entrance="nic")
    flow.track()
    neighbour(fast, "replace", "client", "nic")
    for hits in range(3):
        found = flow.run()
        assert found.retval == REDIRECT, fast.reasons()
        counted = fast.reasons()
        assert (counted["FLOW_STALE"], counted["FLOW_HIT"]) == (1, hits + 1), "asked of the kernel once"


def test_no_route(fast: World) -> None:
    flow = flow_of(fast)
    flow.learn()
    route = ["unreachable", fast.address("remote") + ("/32" if fast.family == 4 else "/128")]
    ip(f"-{fast.family}", "route", "add", *route)
    try:
        say(fast, generation=2)
        assert flow.run().retval == GO_ON
        assert fast.reasons()["STACK_NO_ROUTE"] == 1
    finally:
        ip(f"-{fast.family}", "route", "del", *route)


def with_port(frame: bytes, at: int, port: int) -> bytes:
    """The frame with another number at this place behind its Ethernet and IP headers.

    Its checksum is not made anew: what the program adds to it does not depend on the number.
    """
    place = 14 + (20 if frame[12:14] == b"\x08\x00" else 40) + at
    return frame[:place] + port.to_bytes(2, "big") + frame[place + 2 :]


PORTS = 60_000


class Caller:
    """One pod's flows to two endpoints, told apart by its port: half of them each."""

    def __init__(self, fast: World, client: str) -> None:
        neighbour(fast, "replace", client, "pods")
        self.flows = [Flow(fast, client=client), Flow(fast, client=client, endpoint="local", exit="pods")]
        self.replies = [bytes(flow.frame(reply=True)) for flow in self.flows]
        self.request = bytes(self.flows[0].frame())
        self.expected = [bytes(flow.expected()) for flow in self.flows]

    def track(self, ports: Iterable[int]) -> None:
        """The kernel knows these flows."""
        track_many(" ".join(replace(self.flows[port % 2], sport=port).words()) for port in ports)

    def answer(self, port: int) -> None:
        """A packet of the endpoint's."""
        self.flows[port % 2].run(reply=True, frame=with_port(self.replies[port % 2], 2, port))

    def ask(self, port: int) -> bool:
        """A packet of the pod's: sent as it must be, or left as it was."""
        frame = with_port(self.request, 0, port)
        found = self.flows[0].run(frame=frame)
        if found.retval == GO_ON:
            assert found.data == frame
            return False
        assert found.retval == REDIRECT
        assert beyond_the_link(found.data) == beyond_the_link(with_port(self.expected[port % 2], 0, port))
        return True


def test_more_flows_than_the_cache_has_room_for(fast: World) -> None:
    """PEP_FLOWS (default 2000) flows through a cache of PEP_FLOW_CACHE (1024): slower, never wrong, and no larger.

    60 000 are alive at once, those of one pod: the machine's own limit of conntrack's entries does not matter.
    """
    total = int(os.environ.get("PEP_FLOWS") or 2000)
    sent = left = 0
    chance = random.Random(total)
    for number, first in enumerate(range(0, total, PORTS)):
        caller = Caller(fast, f"caller{number}")
        ports = [1024 + n for n in range(min(PORTS, total - first))]
        caller.track(ports)
        say(fast, generation=2 + number)
        for at, port in enumerate(ports):
            caller.answer(port)
            # This one, and one of some time ago.
            for which in (port, ports[chance.randrange(at + 1)]):
                if caller.ask(which):
                    sent += 1
                else:
                    left += 1
        fast.forget_flows()
    assert sent >= total
    assert left, "the cache was never full"
    assert len(fast.object.maps["flows"].dump()[0]) // 40 <= SIZES["flows"]
