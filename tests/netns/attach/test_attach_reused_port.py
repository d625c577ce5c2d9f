# SPDX-License-Identifier: Apache-2.0
"""What conntrack does when a client soon uses a port again: why ``tests/changes/checker.py`` excuses such an answer.

A client that resets its connection may have sent an acknowledgement just before, from another CPU, and the reset may
overtake it. The endpoint answers the late acknowledgement with its own reset. When the client's next SYN comes, the
kernel forgets the entry of the reset connection only if the client's reset was the last packet. Here it was not, so the
SYN is translated by the old entry. No BPF program is involved, only address translation by nftables: every proxy
behaves so.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing, suppress

import pytest

from pyebpf_proxy.datapath.netfilter.nft import Table
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour
from tests.netns.attach.datagrams import BACKEND, MARK, SECONDS, decide, packed
from tests.netns.attach.router import Router, Shell

pytestmark = [pytest.mark.needs_netns, pytest.mark.usefixtures("namespace")]

CLIENT_PORT = 40001
ACK, RST = 0x10, 0x04
_ETH_P_ALL = 3
_PACKET_OUTGOING = 4
_RESET = b"\1\0\0\0\0\0\0\0"  # struct linger: on, no time


def connects(router: Router, server: socket.socket) -> bool:
    """Connect to the VIP from a fixed port and receive a greeting; then the client resets the connection."""
    with router.inside("client"):
        client = socket.socket()
    with closing(client):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        client.bind((router.CLIENT[4], CLIENT_PORT))
        client.settimeout(SECONDS)
        try:
            client.connect((router.VIP[4], 80))
        except OSError:
            return False
        accepted, _ = server.accept()
        accepted.send(b"greeting")
        assert client.recv(100) == b"greeting"
    with closing(accepted), suppress(ConnectionResetError):
        accepted.settimeout(SECONDS)
        accepted.recv(1)
    return True


def flags(frame: bytes) -> int:
    """The flags of a TCP segment in an Ethernet frame without IP options."""
    return frame[14 + 20 + 13] if frame[12:14] == b"\x08\x00" and frame[23] == socket.IPPROTO_TCP else 0


def last_acknowledgement(watcher: socket.socket) -> bytes:
    """The client's last frame that was only an acknowledgement."""
    found = b""
    watcher.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            frame, address = watcher.recvfrom(2000)
            if address[2] == _PACKET_OUTGOING and flags(frame) == ACK:
                found = frame
    assert found
    return found


def wait_for_a_reset(watcher: socket.socket) -> None:
    """Wait for the endpoint's reset: it knows the connection no longer."""
    watcher.settimeout(SECONDS)
    while True:
        frame, address = watcher.recvfrom(2000)
        if address[2] != _PACKET_OUTGOING and flags(frame) & RST:
            return


@pytest.mark.parametrize("overtaken", [False, True], ids=["in order", "the reset was faster"])
def test_a_port_that_is_used_again(overtaken: bool, router: Router, table: Table, shell: Shell) -> None:
    table.ensure(Behaviour(MARK))
    table.update({BACKEND: (packed(router.SERVER[4]), 8080)})
    decide(shell, "meta priority set eb12:3456")
    shell(f"ip route add unreachable {router.VIP[4]}")
    with ExitStack() as stack:
        with router.inside("server"):
            server = stack.enter_context(closing(socket.create_server((router.SERVER[4], 8080))))
        with router.inside("client"):
            # So that a captured frame has its checksum, and can be sent again.
            shell("ethtool -K eth0 tx off")
            watcher = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        stack.enter_context(closing(watcher))
        watcher.bind(("eth0", _ETH_P_ALL))
        server.settimeout(SECONDS)
        assert connects(router, server)
        # The service is removed: this address is not translated any more.
        shell("nft delete table inet decision")
        if overtaken:
            watcher.send(last_acknowledgement(watcher))
            wait_for_a_reset(watcher)
        assert connects(router, server) == overtaken
