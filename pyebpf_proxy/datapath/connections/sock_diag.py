# SPDX-License-Identifier: Apache-2.0
"""Connected UDP sockets of this network namespace: lists and destroys them (sock_diag)."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.uapi import NETLINK_SOCK_DIAG, SOCK_DESTROY, SOCK_DIAG_BY_FAMILY
from pyebpf_proxy.services.model import IPFamily, Protocol

# include/uapi/linux/inet_diag.h
_ESTABLISHED, _ANY_STATE = 1 << 1, 0xFFFFFFFF
_MAPPED = bytes(10) + b"\xff\xff"
_ADDRESS_FAMILY = {IPFamily.IPV4: socket.AF_INET, IPFamily.IPV6: socket.AF_INET6}
_REQUEST = struct.Struct("=BBBBI")
#: Of struct inet_diag_msg, before the id: family, state, timer, retransmissions.
_BEFORE_ID = 4
#: struct inet_diag_sockid: ports, source, destination, device, cookie (two words).
_ID = struct.Struct("!HH16s16s")
_ID_BYTES = 48


class Socket(NamedTuple):
    """A connected UDP socket. ``peer`` packed; the IPv4 address if an IPv6 socket uses IPv4."""

    peer: bytes
    peer_port: int
    cookie: int
    #: Of the socket, which may be IPv6 while the peer is IPv4.
    family: IPFamily
    id: bytes
    #: Where it sends from, as ``peer``.
    source: bytes
    source_port: int


def connected_udp() -> Iterator[Socket]:
    """Every connected UDP socket of this network namespace. OSError if the kernel refuses."""
    for family in IPFamily:
        with RequestSocket(NETLINK_SOCK_DIAG) as netlink:
            try:
                for message in netlink.dump(SOCK_DIAG_BY_FAMILY, _request(family, _ESTABLISHED, bytes(_ID_BYTES))):
                    yield _socket(family, message[_BEFORE_ID : _BEFORE_ID + _ID_BYTES])
            except OSError as error:
                number = error.errno or 0
                raise OSError(number, f"UDP sockets could not be listed: {os.strerror(number)}") from error


def destroy(found: Socket) -> bool:
    """End a socket: its owner's next call fails with ECONNABORTED. False if it is gone already.

    OSError if the kernel cannot do it (CONFIG_INET_DIAG_DESTROY) or does not allow it.
    """
    with RequestSocket(NETLINK_SOCK_DIAG) as netlink:
        number = netlink.request(SOCK_DESTROY, _request(found.family, _ANY_STATE, found.id))
    if number not in (0, errno.ENOENT, errno.ESTALE):
        raise OSError(
            number, f"a UDP socket that sends to a removed endpoint could not be destroyed: {os.strerror(number)}"
        )
    return number == 0


def _request(family: IPFamily, states: int, identity: bytes) -> bytes:
    return _REQUEST.pack(_ADDRESS_FAMILY[family], Protocol.UDP, 0, 0, states) + identity


def _socket(family: IPFamily, identity: bytes) -> Socket:
    source_port, port, source, peer = _ID.unpack_from(identity)
    (cookie,) = struct.unpack_from("=Q", identity, 40)
    if family is IPFamily.IPV4:
        source, peer = source[:4], peer[:4]
    elif peer.startswith(_MAPPED):
        source, peer = source[12:], peer[12:]
    return Socket(peer, port, cookie, family, identity, source, source_port)
