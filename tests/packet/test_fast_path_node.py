# SPDX-License-Identifier: Apache-2.0
"""The flow cache on a node that is not as it was: what is unknown, closed, excluded or full sends nothing wrong."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from fast_world import REDIRECT, Flow, beyond_the_link, fast_node, flow_of, ip, neighbour, passage, say, track_many
from scapy.packet import Packet
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


def with_port(frame: Packet, at: int, port: int) -> bytes:
    """The frame with another number at this place behind its Ethernet and IP headers.

    Its checksum is not made anew: what the program adds to it does not depend on the number.
    """
    raw = bytearray(bytes(frame))
    place = 14 + (20 if raw[12:14] == b"\x08\x00" else 40) + at
    raw[place : place + 2] = port.to_bytes(2, "big")
    return bytes(raw)


def test_more_flows_than_the_cache_has_room_for(fast: World) -> None:
    """PEP_FLOWS (default 2000) flows through a cache of PEP_FLOW_CACHE (1024): slower, never wrong, and no larger.

    Entries of conntrack come and go in parts, so that the machine's own limit of them does not matter.
    """
    total, part = int(os.environ.get("PEP_FLOWS") or 2000), 2000
    makers = [Flow(fast), Flow(fast, endpoint="local", exit="pods")]
    request = makers[0].frame()
    replies, expected = [flow.frame(reply=True) for flow in makers], [flow.expected() for flow in makers]
    sent = again = 0
    for first in range(0, total, part):
        ports = [1024 + n % 60000 for n in range(first, min(total, first + part))]
        track_many(" ".join(replace(makers[port % 2], sport=port).words()) for port in ports)
        say(fast, generation=2 + first)
        for number, port in enumerate(ports):
            makers[port % 2].run(reply=True, frame=with_port(replies[port % 2], 2, port))
            # This one, and one of some time ago.
            for which in (port, ports[number * 7919 % (number + 1)]):
                frame = with_port(request, 0, which)
                found = makers[0].run(frame=frame)
                again += found.retval != REDIRECT
                if found.retval == GO_ON:
                    assert found.data == frame
                    continue
                sent += 1
                wanted = with_port(expected[which % 2], 0, which)
                assert beyond_the_link(found.data) == beyond_the_link(wanted)
        fast.forget_flows()
    assert sent >= total
    assert again, "the cache was never full"
    assert len(fast.object.maps["flows"].dump()[0]) // 40 <= SIZES["flows"]
