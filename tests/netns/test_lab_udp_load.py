# SPDX-License-Identifier: Apache-2.0
"""Datagrams and answers as fast as possible, each from a separate port: none is lost."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.cluster import Lab
from tests.support.conversation import PORT
from tests.support.fast_lab import FAR, NEAR, FastWorld, build_fast_world
from tests.support.new_flows import NewFlows, ending, wait_until_fast

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

EXCHANGES = 20_000
#: Each of these creates a conntrack entry, and the machine has a limited number.
SLOW_EXCHANGES = 10_000
AT_ONCE = 16


@pytest.fixture(scope="module", params=(True, False), ids=("fast", "slow"))
def fast(request: pytest.FixtureRequest) -> bool:
    """Whether the fast path is on."""
    value: bool = request.param
    return value


@pytest.fixture(scope="module")
def world(fast: bool) -> Iterator[FastWorld]:
    with Lab() as lab:
        world = build_fast_world(lab, {"fastPath": fast})
        if fast:
            # On a busy machine the agent opens the fast path some seconds after its first sync.
            flows = NewFlows(world.client.namespace, NEAR.v4, "udp")
            with ending(flows):
                wait_until_fast(world, flows)
        yield world


@pytest.mark.parametrize("origin", ["pod", "pod, far", "outside"])
def test_no_datagram_is_lost(world: FastWorld, fast: bool, origin: str, family: int) -> None:
    if origin == "outside":
        namespace, address, port = world.lab.client, world.node.address.of(family), 30007
    else:
        namespace, address, port = world.client.namespace, (FAR if "far" in origin else NEAR).of(family), PORT
    number = EXCHANGES if fast else SLOW_EXCHANGES
    before = {name: world.count(name) for name in ("new_flow_fast", "new_flow_netfilter")}
    lost = namespace.call(_exchange, address, port, number)
    assert lost == []
    more = {name: world.count(name) - count for name, count in before.items()}
    if fast:
        assert more["new_flow_fast"] > number // 2
    else:
        assert more == {"new_flow_fast": 0, "new_flow_netfilter": number}


def _exchange(address: str, port: int, count: int) -> list[str]:
    """Requests from ports 2000 to 32000, AT_ONCE of them at a time. Returns those without an answer in ten seconds."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    ports = itertools.cycle(range(2_000, 32_000))
    lost = []
    for begin in range(0, count, AT_ONCE):
        asked = []
        for number in range(begin, begin + AT_ONCE):
            sock = socket.socket(family, socket.SOCK_DGRAM)
            sock.settimeout(10)
            own = next(ports)
            sock.bind(("", own))
            sock.connect((address, port))
            sock.send(b"%08d" % number)
            asked.append((number, own, sock, time.monotonic()))
        for number, own, sock, begun in asked:
            with sock:
                try:
                    if sock.recv(100) != b"%08d" % number:
                        lost.append(f"{number} from {own}: another answer")
                except OSError as error:
                    lost.append(f"{number} from {own}: {error} after {time.monotonic() - begun:.3f} s")
        if len(lost) > 5:
            break
    return lost
