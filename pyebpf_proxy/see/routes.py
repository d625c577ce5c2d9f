# SPDX-License-Identifier: Apache-2.0
"""Route lookups in the kernel (rtnetlink)."""

from __future__ import annotations

import socket
import struct
import sys
from typing import NamedTuple

from pyebpf_proxy.datapath.connections.rawlink import RawLink, attribute, attributes

_ROUTE, _GETROUTE = 0, 26
_RTMSG = struct.Struct("=BBBBBBBBI")
_DST, _SRC, _IIF, _OIF, _GATEWAY, _VIA = 1, 2, 3, 4, 5, 18
# include/uapi/linux/rtnetlink.h
LOCAL = 2
_SENT = (1, LOCAL)  # unicast, to this node itself


class Way(NamedTuple):
    """A route: egress interface ``device``, ``gateway`` (b"": the destination is on-link). ``local``: to this node."""

    device: int
    gateway: bytes
    local: bool


def way(destination: bytes, source: bytes = b"", device: int = 0) -> Way | None:
    """The route of a packet from ``source`` to ``destination`` (packed) that entered by ``device``; None: no route.

    Without a device: of a packet that this node sends.
    """
    family = socket.AF_INET if len(destination) == 4 else socket.AF_INET6
    bits = 8 * len(destination)
    body = _RTMSG.pack(family, bits, bits if source else 0, 0, 0, 0, 0, 0, 0) + attribute(_DST, destination)
    body += attribute(_SRC, source) if source else b""
    body += attribute(_IIF, device.to_bytes(4, sys.byteorder)) if device else b""
    try:
        with RawLink(_ROUTE) as link:
            answer = link.get(_GETROUTE, body)
    except OSError:
        return None
    kind = _RTMSG.unpack_from(answer)[7]
    if kind not in _SENT:
        return None
    found = {name: answer[begin:end] for name, begin, end in attributes(answer, _RTMSG.size, len(answer))}
    gateway = found.get(_GATEWAY, b"") or found.get(_VIA, b"")[2:]
    return Way(int.from_bytes(found.get(_OIF, b""), sys.byteorder), gateway, kind == LOCAL)
