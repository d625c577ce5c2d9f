# SPDX-License-Identifier: Apache-2.0
"""A resolver uses its ports again every few seconds: its queries stay on the fast path, and meet every new rule."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator, Sequence

import pytest

from pyebpf_proxy.lab.addresses import Dual
from pyebpf_proxy.lab.cluster import Lab
from tests.netns.policies import policy
from tests.support.conversation import PORT
from tests.support.fast_lab import FAR, NEAR, FastWorld, build_fast_world
from tests.support.lab_tools import wait_until

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

#: conntrack keeps the flows of earlier tests, and rules may accept ESTABLISHED: each test has its own ports.
_first_ports = itertools.count(3_000, 50)
#: More than eight queries are promoted if they are one flow.
ROUNDS = 12
#: Longer than the pause after which a query is judged anew (docs/fast-path-flows.md).
PAUSE = 0.15

_new_ports = itertools.count(20_000)


@pytest.fixture(scope="module")
def world() -> Iterator[FastWorld]:
    with Lab() as lab:
        yield build_fast_world(lab)


def ask(address: str, ports: Sequence[int], timeout: float) -> list[int]:
    """A query from each of these ports; those that got no answer in time."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    unanswered = []
    asked = []
    for own in ports:
        sock = socket.socket(family, socket.SOCK_DGRAM)
        sock.bind(("", own))
        sock.connect((address, PORT))
        sock.send(b"%08d" % own)
        asked.append((own, sock))
    deadline = time.monotonic() + timeout
    for own, sock in asked:
        with sock:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                assert sock.recv(100) == b"%08d" % own
            except OSError:
                unanswered.append(own)
    return unanswered


def renew_permit(world: FastWorld, address: str) -> None:
    """Two new flows of the pair, as other processes of the pod have them."""
    for _ in range(2):
        assert world.client.namespace.call(ask, address, [next(_new_ports)], 10.0) == []


def begin(world: FastWorld, address: str) -> range:
    """Use new ports once, on the fast path."""
    first = next(_first_ports)
    ports = range(first, first + 50)

    def is_fast() -> bool:
        before = world.count("new_flow_fast")
        renew_permit(world, address)
        return world.count("new_flow_fast") > before

    wait_until(is_fast, "new flows on the fast path", 30.0)
    assert world.client.namespace.call(ask, address, ports, 10.0) == []
    return ports


@pytest.mark.parametrize("service", [NEAR, FAR], ids=["a pod of the node", "a pod of another node"])
def test_ports_that_are_used_again_stay_on_the_fast_path(world: FastWorld, service: Dual, family: int) -> None:
    address = service.of(family)
    ports = begin(world, address)
    counted = ("flow_promoted", "stack_not_confirmed", "drop_awaiting_promotion", "new_flow_netfilter")
    before = {name: world.count(name) for name in counted}
    for _ in range(ROUNDS):
        time.sleep(PAUSE)
        renew_permit(world, address)
        assert world.client.namespace.call(ask, address, ports, 10.0) == []
    # Two sweeps, which would ask for promotions.
    time.sleep(2.5)
    more = {name: world.count(name) - count for name, count in before.items()}
    assert more["drop_awaiting_promotion"] == 0
    # Without renewal each port would be promoted once. On a slow machine a permit may expire during a round.
    assert more["flow_promoted"] + more["new_flow_netfilter"] < len(ports) / 2, more
    assert more["stack_not_confirmed"] < len(ports), more


def test_new_queries_are_not_looked_up_in_conntrack(world: FastWorld) -> None:
    """The agent has noted what conntrack had (tests/packet/test_untracked_flows.py has the effect)."""
    pin = str(world.node.agent.pin("tracked_clients"))

    def complete() -> int:
        dump = json.loads(world.node.namespace.run("bpftool", "-j", "map", "dump", "pinned", pin))
        return int(dump[0]["formatted"]["value"]["complete"])

    assert wait_until(complete, "the agent has noted conntrack's flows")
    noted = complete()
    world.node.agent.kill()
    world.node.agent.start()
    world.node.agent.wait_synced()
    wait_until(lambda: complete() not in (0, noted), "they are noted for the new programs")


@pytest.mark.parametrize("kind", ["nft", "iptables-legacy"])
def test_a_rule_that_is_added_applies_to_ports_that_are_used_again(world: FastWorld, kind: str, family: int) -> None:
    """The rules accept ESTABLISHED, but conntrack does not know these flows."""
    address = NEAR.of(family)
    ports = begin(world, address)
    ends = world.client.address.of(family), world.near.address.of(family)

    def ask_again() -> list[int]:
        time.sleep(PAUSE)
        return world.client.namespace.call(ask, address, ports, 1.0)

    with policy(world.node.namespace, kind, family) as rules:
        rules.deny(*ends)
        wait_until(lambda: ask_again() == list(ports), "all queries denied", 30.0)
        before = world.count("flow_hit")
        assert ask_again() == list(ports)
        assert world.count("flow_hit") == before
    wait_until(lambda: ask_again() == [], "all queries answered", 30.0)
