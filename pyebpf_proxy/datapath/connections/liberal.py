# SPDX-License-Identifier: Apache-2.0
"""Makes conntrack tolerate sequence numbers that it does not expect, for connections that used the fast path.

conntrack has not seen all their packets, so it cannot check their sequence numbers. ``nf_conntrack_tcp_be_liberal``
makes it tolerant for all connections. Before the setting is restored, these connections are made liberal one by one.
Otherwise conntrack would treat all their further packets as invalid and not translate them.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

from pyebpf_proxy.datapath.connections.ctnetlink import read_tuple
from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import attribute, attributes
from pyebpf_proxy.datapath.netlink.request import RequestSocket


def make_liberal() -> int:
    """Make every translated TCP connection of this network namespace liberal; returns how many. OSError."""
    # Also clears DATA_UNACKNOWLEDGED: conntrack has not seen the acknowledgement, and would shorten the timeout.
    changed_flags = uapi.IP_CT_TCP_FLAG_BE_LIBERAL | uapi.IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED
    flags = bytes([uapi.IP_CT_TCP_FLAG_BE_LIBERAL, changed_flags])  # the flags, and the mask of what to change
    info = attribute(uapi.CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, flags)
    info += attribute(uapi.CTA_PROTOINFO_TCP_FLAGS_REPLY, flags)
    info = attribute(uapi.CTA_PROTOINFO, attribute(uapi.CTA_PROTOINFO_TCP, info, nested=True), nested=True)
    changed = 0
    for family in (socket.AF_INET, socket.AF_INET6):
        header = uapi.NFGENMSG.pack(family, 0, 0)
        with RequestSocket(uapi.NETLINK_NETFILTER) as netlink:
            keys = list(_translated(netlink, header))
            for key in keys:
                number = netlink.request(uapi.IPCTNL_MSG_CT_NEW, header + key + info)
                if number not in (0, errno.ENOENT):
                    raise OSError(number, f"conntrack: a connection could not be changed: {os.strerror(number)}")
                changed += number == 0
    return changed


def _translated(netlink: RequestSocket, header: bytes) -> Iterator[bytes]:
    for message in netlink.dump(uapi.IPCTNL_MSG_CT_GET, header):
        key, status, protocol = b"", 0, 0
        for kind, begin, end in attributes(message, uapi.NFGENMSG.size, len(message)):
            if kind == uapi.CTA_TUPLE_ORIG:
                found = read_tuple(message, begin, end)
                protocol = found.protocol if found else 0
                key += message[begin - 4 : (end + 3) & ~3]
            elif kind == uapi.CTA_ZONE:
                key += message[begin - 4 : (end + 3) & ~3]
            elif kind == uapi.CTA_STATUS:
                status = int.from_bytes(message[begin:end], "big")
        if protocol == socket.IPPROTO_TCP and status & uapi.IPS_DST_NAT:
            yield key
