# SPDX-License-Identifier: Apache-2.0
"""Stale UDP flows among ten thousand: exactly those are deleted, only by ctnetlink, and quickly."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator

import pytest

from pyebpf_proxy.datapath.connections import ctnetlink, sock_diag, udp_cleanup
from pyebpf_proxy.datapath.connections.create import Entry
from pyebpf_proxy.datapath.connections.udp_cleanup import Cleaned, UdpCleanup
from pyebpf_proxy.lab.namespace import Namespace
from pyebpf_proxy.services.model import IPFamily, Protocol
from tests.support.conntrack import create_now

pytestmark = pytest.mark.needs_netns

FLOWS = 10_000
ADDRESSES = {
    IPFamily.IPV4: tuple(bytes([10, n, 0, 1]) for n in range(4)),
    IPFamily.IPV6: tuple(bytes([0xFD, n]) + bytes(13) + b"\1" for n in range(4)),
}


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    namespace = Namespace(f"pep-udp-{os.getpid()}")
    namespace.create()
    yield namespace
    namespace.remove()


class _Services:
    """A service port with one serving endpoint."""

    def __init__(self, frontend: bytes, serving: bytes) -> None:
        self._frontend, self._serving = frontend, serving

    def __bool__(self) -> bool:
        return True

    def lost(self) -> frozenset[tuple[bytes, int]]:
        return frozenset()

    def forget_lost(self, places: frozenset[tuple[bytes, int]]) -> None:
        assert not places

    def kind_of(self, address: tuple[bytes, int]) -> None:
        return None

    def is_stale(self, family: IPFamily, destination: tuple[bytes, int], endpoint: tuple[bytes, int]) -> bool:
        return destination == (self._frontend, 53) and endpoint != (self._serving, 5353)


def _course(family: IPFamily, stale_each: int) -> tuple[set[int], list[Cleaned], float, set[int]]:
    """Client ports of the stale flows, what was done and how long it took, client ports of the remaining flows."""
    client, frontend, gone, serving = ADDRESSES[family]
    stale = set(range(1024, 1024 + FLOWS, stale_each))
    create_now(
        Entry(Protocol.UDP, (client, port), (frontend, 53), (gone if port in stale else serving, 5353))
        for port in range(1024, 1024 + FLOWS)
    )
    cleanup = UdpCleanup(lambda cookie, place: None)
    cleanup._services = _Services(frontend, serving)  # type: ignore[assignment]
    begin = time.monotonic()
    done = cleanup.clean_now().cleaned
    seconds = time.monotonic() - begin
    return stale, done, seconds, {_client_port(flow) for flow in ctnetlink.udp_flows(family)}


def _refused_sockets(number: int) -> tuple[udp_cleanup.Outcome, str, int]:
    """A clean-up on a kernel that refuses to list sockets: its outcome, and how many flows are left."""

    def refuse() -> Iterator[sock_diag.Socket]:
        raise OSError(number, os.strerror(number))

    client, frontend, gone, serving = ADDRESSES[IPFamily.IPV4]
    create_now([Entry(Protocol.UDP, (client, 1024), (frontend, 53), (gone, 5353))])
    cleanup = UdpCleanup(lambda cookie, place: None)
    cleanup._services = _Services(frontend, serving)  # type: ignore[assignment]
    listed, sock_diag.connected_udp = sock_diag.connected_udp, refuse
    try:
        outcome = cleanup.clean_now()
    finally:
        sock_diag.connected_udp = listed
    return outcome, cleanup.sockets_stay, len(list(ctnetlink.udp_flows(IPFamily.IPV4)))


@pytest.mark.parametrize(
    ("number", "is_repeated"), [(errno.EMFILE, True), (errno.ENOENT, False), (errno.EOPNOTSUPP, False)]
)
def test_flows_end_even_if_sockets_cannot(namespace: Namespace, number: int, is_repeated: bool) -> None:
    outcome, stay, left = namespace.call(_refused_sockets, number)
    assert left == 0
    assert [cleaned.flows for cleaned in outcome.cleaned] == [1, 0]
    assert bool(outcome.refused) is is_repeated
    assert bool(stay) is not is_repeated


def _client_port(flow: ctnetlink.Flow) -> int:
    answer = ctnetlink.read_tuple(flow.key, 4, len(flow.key))
    assert answer is not None
    return int.from_bytes(answer.destination_port, "big")


@pytest.mark.alone
@pytest.mark.parametrize("stale_each", [10, 1], ids=["a tenth", "all"])
@pytest.mark.parametrize("family", list(IPFamily), ids=lambda family: family.name)
def test_exactly_the_stale_flows_are_deleted_and_quickly(
    namespace: Namespace, family: IPFamily, stale_each: int
) -> None:
    stale, done, seconds, left = namespace.call(_course, family, stale_each)
    print(f"{len(stale)} of {FLOWS} in {seconds * 1000:.0f} ms")
    assert left == set(range(1024, 1024 + FLOWS)) - stale
    assert {cleaned.family: cleaned.flows for cleaned in done}[family] == len(stale)
    assert seconds < 1.0
