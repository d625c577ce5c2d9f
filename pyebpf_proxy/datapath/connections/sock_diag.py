# SPDX-License-Identifier: Apache-2.0
"""Connected UDP sockets of this network namespace: list them, end them (sock_diag)."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from pyebpf_proxy.services.model import Family

# include/uapi/linux/sock_diag.h, inet_diag.h
_NETLINK_SOCK_DIAG = 4
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_DUMP = 1, 4, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_BY_FAMILY, _DESTROY = 20, 21
_ESTABLISHED = 1 << 1
_UDP = 17
_MAPPED = bytes(10) + b"\xff\xff"
_ADDRESS_FAMILY = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
#: struct inet_diag_sockid: ports, source, destination, device, cookie (two words).
_ID = struct.Struct("!HH16s16s")
_ID_BYTES = 48
_RECEIVE_BYTES = 1 << 18


class Socket(NamedTuple):
    """A connected UDP socket. ``peer`` packed; of an IPv6 socket that talks IPv4, the IPv4 address."""

    peer: bytes
    peer_port: int
    cookie: int
    #: Of the socket, which may be IPv6 while the peer is IPv4.
    family: Family
    id: bytes


def connected_udp() -> Iterator[Socket]:
    """Every connected UDP socket of this network namespace. OSError if the kernel refuses."""
    for family, number in _ADDRESS_FAMILY.items():
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as sock:
            body = _REQUEST.pack(number, _UDP, 0, 0, _ESTABLISHED) + bytes(_ID_BYTES)
            flags = _NLM_F_REQUEST | _NLM_F_DUMP
            sock.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, flags, 1, 0) + body)
            yield from _read(sock, family)


def _read(sock: socket.socket, family: Family) -> Iterator[Socket]:
    while True:
        data = sock.recv(_RECEIVE_BYTES)
        offset = 0
        while offset < len(data):
            length, kind, *_ = _HEADER.unpack_from(data, offset)
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                number = -struct.unpack_from("=i", data, offset + _HEADER.size)[0]
                raise OSError(number, f"UDP sockets could not be listed: {os.strerror(number)}")
            # struct inet_diag_msg: family, state, timer, retransmissions; then the id.
            start = offset + _HEADER.size + 4
            identity = data[start : start + _ID_BYTES]
            _, port, _, peer = _ID.unpack_from(identity)
            cookie = struct.unpack_from("=Q", identity, 40)[0]
            if family is Family.IPV4:
                peer = peer[:4]
            elif peer.startswith(_MAPPED):
                peer = peer[12:]
            yield Socket(peer, port, cookie, family, identity)
            offset += (length + 3) & ~3


def destroy(found: Socket) -> bool:
    """End a socket: its owner's next call fails with ECONNABORTED. False if it is gone already.

    OSError if the kernel can't (CONFIG_INET_DIAG_DESTROY) or may not.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as sock:
        body = _REQUEST.pack(_ADDRESS_FAMILY[found.family], _UDP, 0, 0, 0xFFFFFFFF) + found.id
        flags = _NLM_F_REQUEST | _NLM_F_ACK
        sock.send(_HEADER.pack(_HEADER.size + len(body), _DESTROY, flags, 1, 0) + body)
        answer = sock.recv(_RECEIVE_BYTES)
    number: int = -struct.unpack_from("=i", answer, _HEADER.size)[0]
    if number not in (0, errno.ENOENT, errno.ESTALE):
        raise OSError(number, f"a UDP socket of a gone endpoint could not be ended: {os.strerror(number)}")
    return number == 0
