# SPDX-License-Identifier: Apache-2.0
"""Datagrams and answers as fast as they go, each from a port of its own: none is lost."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.cluster import Lab
from tests.support.fast_lab import FAR, NEAR, FastWorld, made
from tests.support.talk import PORT

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

EXCHANGES = 20_000
AT_ONCE = 16


@pytest.fixture(scope="module")
def world() -> Iterator[FastWorld]:
    with Lab() as lab:
        yield made(lab, {})


@pytest.mark.parametrize("who", ["pod", "pod, far", "outside"])
def test_no_datagram_is_lost(world: FastWorld, who: str, family: int) -> None:
    if who == "outside":
        namespace, address, port = world.lab.client, world.node.address.of(family), 30007
    else:
        namespace, address, port = world.client.namespace, (FAR if "far" in who else NEAR).of(family), PORT
    before = world.count("new_flow_fast")
    lost = namespace.call(_exchange, address, port)
    assert lost == []
    assert world.count("new_flow_fast") > before + EXCHANGES // 2


def _exchange(address: str, port: int) -> list[str]:
    """Questions from ports 2000 to 32000, AT_ONCE of them in flight; those without an answer in ten seconds."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    ports = itertools.cycle(range(2_000, 32_000))
    lost = []
    for begin in range(0, EXCHANGES, AT_ONCE):
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
