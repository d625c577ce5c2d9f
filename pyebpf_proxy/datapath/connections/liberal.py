# SPDX-License-Identifier: Apache-2.0
"""Connections of the fast path: conntrack has lost track of their sequence numbers and must tolerate that.

``nf_conntrack_tcp_be_liberal`` makes it tolerant for all. Before the setting is restored, these connections are made
liberal one by one. Otherwise conntrack would treat all their further packets as invalid and not translate them.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

from pyebpf_proxy.datapath.connections.ctnetlink import FAMILY_HEADER, GET, PROTOINFO, TUPLE_ORIG, read_tuple
from pyebpf_proxy.datapath.connections.rawlink import NETLINK_NETFILTER, RawLink, attribute, attributes

# IPCTNL_MSG_CT_NEW; include/uapi/linux/netfilter/nfnetlink_conntrack.h, nf_conntrack_tcp.h, nf_conntrack_common.h
_SET = 0x100
_STATUS, _ZONE = 3, 18
_FLAGS_ORIGINAL, _FLAGS_REPLY, _IN_TCP = 4, 5, 1
_BE_LIBERAL = 0x08
_DST_NAT = 1 << 5
_TCP = 6


def make_liberal() -> int:
    """Make every translated TCP connection of this network namespace liberal; returns how many. OSError."""
    flags = bytes([_BE_LIBERAL, _BE_LIBERAL])
    info = attribute(_FLAGS_ORIGINAL, flags) + attribute(_FLAGS_REPLY, flags)
    info = attribute(PROTOINFO, attribute(_IN_TCP, info, nested=True), nested=True)
    told = 0
    for family in (socket.AF_INET, socket.AF_INET6):
        header = struct.pack("=BBH", family, 0, 0)
        with RawLink(NETLINK_NETFILTER) as link:
            keys = list(_translated(link, header))
            for key in keys:
                number = link.request(_SET, header + key + info)
                if number not in (0, errno.ENOENT):
                    raise OSError(number, f"conntrack: a connection could not be changed: {os.strerror(number)}")
                told += number == 0
    return told


def _translated(link: RawLink, header: bytes) -> Iterator[bytes]:
    for message in link.dump(GET, header):
        key, status, protocol = b"", 0, 0
        for kind, begin, end in attributes(message, FAMILY_HEADER, len(message)):
            if kind == TUPLE_ORIG:
                found = read_tuple(message, begin, end)
                protocol = found.protocol if found else 0
                key += message[begin - 4 : (end + 3) & ~3]
            elif kind == _ZONE:
                key += message[begin - 4 : (end + 3) & ~3]
            elif kind == _STATUS:
                status = int.from_bytes(message[begin:end], "big")
        if protocol == _TCP and status & _DST_NAT:
            yield key
