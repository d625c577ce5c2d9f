# SPDX-License-Identifier: Apache-2.0
"""What the agent knows about connected UDP sockets of the node, in maps that all sockets share."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.connections import sock_diag
from pyebpf_proxy.datapath.connections.udp_cleanup import SocketPeers
from pyebpf_proxy.datapath.loader.programs import Loaded, Settings, load
from pyebpf_proxy.datapath.managers import udp_flows
from pyebpf_proxy.datapath.managers.programs import Programs
from pyebpf_proxy.datapath.managers.service_maps import ServiceMaps
from pyebpf_proxy.datapath.managers.udp_flows import UdpFlows
from pyebpf_proxy.services.model import IPFamily, Protocol
from pyebpf_proxy.services.node_facts import NodeFacts
from tests.packet.service_maps import SIZES

pytestmark = pytest.mark.needs_bpf

SIZE = 1024
PLACES = {
    4: ((bytes([10, 0, 0, 1]), 5353), (bytes([10, 96, 0, 1]), 53)),
    6: ((b"\xfd" + bytes(15), 5353), (b"\xfe" + bytes(15), 53)),
}


@pytest.fixture(scope="module")
def shared(bpf_objects: Path) -> Iterator[Loaded]:
    sizes = SIZES | dict.fromkeys(("socket_revnat4", "socket_revnat6"), SIZE)
    loaded = load(Settings(netns_cookie=1), sizes=sizes, objects=bpf_objects)
    yield loaded
    loaded.close()


def connect(loaded: Loaded, family: int, cookies: range, protocol: Protocol) -> None:
    """Enter these sockets, as connect() does."""
    (endpoint, port), (address, original_port) = PLACES[family]
    name, btf = f"socket_revnat{family}", loaded.sock.btf
    value = btf.struct(f"{name}_value").pack(address=address, port=original_port)
    pack = btf.struct(f"{name}_key").pack
    for cookie in cookies:
        loaded.maps[name].update(pack(cookie=cookie, address=endpoint, port=port, protocol=int(protocol)), value)


@pytest.fixture
def one_cpu() -> Iterator[None]:
    """An LRU map keeps the newest entries of each CPU: all of them are to be of the same."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usual)})
    yield
    os.sched_setaffinity(0, usual)


@pytest.mark.usefixtures("one_cpu")
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("family", [4, 6])
def test_other_sockets_do_not_evict_a_connected_one(
    shared: Loaded, monkeypatch: pytest.MonkeyPatch, family: int, kept: bool
) -> None:
    """A program reads its entry only if its owner wants to know its peer. The agent keeps it."""
    endpoint, original = PLACES[family]
    cookie, looked = 1 + kept, threading.Event()

    def connected() -> Iterator[sock_diag.Socket]:
        looked.set()
        yield sock_diag.Socket(*endpoint, cookie, IPFamily(family), b"", bytes(len(endpoint[0])), 40000)

    async def fill() -> None:
        flows = UdpFlows(cast(Effective, SimpleNamespace(socket_lb="node")), programs, maps, lambda cleaned: None)
        if kept:
            flows.start(NodeFacts(), {})
        for begin in range(1000, 1000 + 20 * SIZE, SIZE // 4):
            # At the beginning of the second look the first one has ended.
            for _ in range(2 * kept):
                looked.clear()
                assert await asyncio.to_thread(looked.wait, 10), "the agent looks at the sockets"
            connect(shared, family, range(begin, begin + SIZE // 4), Protocol.TCP)
        flows.close()

    monkeypatch.setattr(sock_diag, "connected_udp", connected)
    monkeypatch.setattr(udp_flows, "LOOK_SECONDS", 0.001)
    programs = cast(Programs, SimpleNamespace(loaded=shared))
    maps = cast(ServiceMaps, SimpleNamespace(former={}, writer=SimpleNamespace(udp_moves=0)))
    connect(shared, family, range(cookie, cookie + 1), Protocol.UDP)
    asyncio.run(fill())
    found = SocketPeers(shared.maps, shared.sock.btf).find(cookie, endpoint)
    assert found == (original if kept else None)


@pytest.mark.parametrize("family", [4, 6])
def test_no_entry_is_made_for_another_socket(shared: Loaded, family: int) -> None:
    endpoint, _ = PLACES[family]
    peers = SocketPeers(shared.maps, shared.sock.btf)
    peers.keep(99, endpoint)
    assert peers.find(99, endpoint) is None
