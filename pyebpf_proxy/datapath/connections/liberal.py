# SPDX-License-Identifier: Apache-2.0
"""Makes conntrack tolerate sequence numbers that it does not expect, for connections that used the fast path.

conntrack has not seen all their packets, so it cannot check their sequence numbers. ``nf_conntrack_tcp_be_liberal``
makes it tolerant for all connections. Before the setting is restored, these connections are made liberal one by one.
Otherwise conntrack would treat all their further packets as invalid and not translate them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from pyebpf_proxy.datapath.connections.ctnetlink import header, read_tuple
from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import attribute, attributes
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.services.model import IPFamily, Protocol


def make_liberal() -> int:
    """Make every translated TCP connection of this network namespace liberal; returns how many. OSError."""
    # Also clears DATA_UNACKNOWLEDGED: conntrack has not seen the acknowledgement, and would shorten the timeout.
    changed_flags = uapi.IP_CT_TCP_FLAG_BE_LIBERAL | uapi.IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED
    flags = bytes([uapi.IP_CT_TCP_FLAG_BE_LIBERAL, changed_flags])  # the flags, and the mask of what to change
    info = attribute(uapi.CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, flags)
    info += attribute(uapi.CTA_PROTOINFO_TCP_FLAGS_REPLY, flags)
    info = attribute(uapi.CTA_PROTOINFO, attribute(uapi.CTA_PROTOINFO_TCP, info, nested=True), nested=True)
    changed = 0
    for family in IPFamily:
        with RequestSocket(uapi.NETLINK_NETFILTER) as netlink:
            for key in list(_translated(netlink, family)):
                number = netlink.request(uapi.IPCTNL_MSG_CT_NEW, header(family) + key + info)
                if number not in (0, errno.ENOENT):
                    raise OSError(number, f"conntrack: a connection could not be changed: {os.strerror(number)}")
                changed += number == 0
    return changed


def _translated(netlink: RequestSocket, family: IPFamily) -> Iterator[bytes]:
    """The original tuple and the zone of each translated TCP connection, as the kernel wrote them."""
    for message in netlink.dump(uapi.IPCTNL_MSG_CT_GET, header(family)):
        key, status, protocol = b"", 0, 0
        for kind, begin, end in attributes(message, uapi.NFGENMSG.size, len(message)):
            if kind == uapi.CTA_TUPLE_ORIG:
                found = read_tuple(message, begin, end)
                protocol = found.protocol if found else 0
            elif kind == uapi.CTA_STATUS:
                status = int.from_bytes(message[begin:end], "big")
            if kind in (uapi.CTA_TUPLE_ORIG, uapi.CTA_ZONE):
                key += message[begin - 4 : (end + 3) & ~3]
        if protocol == Protocol.TCP and status & uapi.IPS_DST_NAT:
            yield key
