# SPDX-License-Identifier: Apache-2.0
"""Lookups of routes and neighbours in the kernel (rtnetlink)."""

from __future__ import annotations

import socket
from typing import NamedTuple

from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import attribute, number, values, word
from pyebpf_proxy.datapath.netlink.request import RequestSocket

_SENT = (uapi.RTN_UNICAST, uapi.RTN_LOCAL)


class Route(NamedTuple):
    """A route by egress interface ``device``. ``gateway``: b"" if on-link. ``local``: the destination is this node."""

    device: int
    gateway: bytes
    local: bool


def lookup_route(destination: bytes, source: bytes = b"", device: int = 0) -> Route | None:
    """The route of a packet from ``source`` to ``destination`` (packed) that came in by ``device``; None: no route.

    ``device`` is 0 for a packet that this node sends.
    """
    family = socket.AF_INET if len(destination) == 4 else socket.AF_INET6
    bits = 8 * len(destination)
    body = uapi.RTMSG.pack(family, bits, bits if source else 0, 0, 0, 0, 0, 0, 0) + attribute(uapi.RTA_DST, destination)
    body += attribute(uapi.RTA_SRC, source) if source else b""
    body += attribute(uapi.RTA_IIF, word(device)) if device else b""
    try:
        with RequestSocket(uapi.NETLINK_ROUTE) as netlink:
            answer = netlink.get(uapi.RTM_GETROUTE, body)
    except OSError:
        return None
    return read(answer)


def read(answer: bytes) -> Route | None:
    """A route from the kernel's message."""
    kind = uapi.RTMSG.unpack_from(answer)[7]
    if kind not in _SENT:
        return None
    found = values(answer, uapi.RTMSG.size)
    gateway = found.get(uapi.RTA_GATEWAY, b"") or found.get(uapi.RTA_VIA, b"")[2:]
    return Route(number(found.get(uapi.RTA_OIF, b"")), gateway, kind == uapi.RTN_LOCAL)


def is_failed(device: int, neighbour: bytes) -> bool:
    """Whether the kernel has asked for the neighbour's link address in vain, and does not try again at this moment."""
    family = socket.AF_INET if len(neighbour) == 4 else socket.AF_INET6
    body = uapi.NDMSG.pack(family, 0, 0, device, 0, 0, 0) + attribute(uapi.NDA_DST, neighbour)
    try:
        with RequestSocket(uapi.NETLINK_ROUTE) as netlink:
            answer = netlink.get(uapi.RTM_GETNEIGH, body)
    except OSError:
        return False  # not asked lately, or a device without neighbours
    return bool(uapi.NDMSG.unpack_from(answer)[4] & uapi.NUD_FAILED)
