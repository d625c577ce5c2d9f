# SPDX-License-Identifier: Apache-2.0
"""Counts the conntrack entries: how many flows each endpoint has, by original destination.

One ctnetlink dump of a table that may hold a million flows. The tuples are read at the offsets where the kernel has
always put them. An entry that looks different is read attribute by attribute.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Container, Iterator
from typing import NamedTuple

from pyebpf_proxy.datapath.connections import ctnetlink
from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import attribute_header, attributes
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.uapi import (
    CTA_IP_V4_DST,
    CTA_IP_V4_SRC,
    CTA_IP_V6_DST,
    CTA_IP_V6_SRC,
    CTA_PROTO_DST_PORT,
    CTA_PROTO_NUM,
    CTA_PROTO_SRC_PORT,
    CTA_PROTOINFO,
    CTA_PROTOINFO_TCP,
    CTA_PROTOINFO_TCP_STATE,
    CTA_TUPLE_IP,
    CTA_TUPLE_ORIG,
    CTA_TUPLE_PROTO,
    CTA_TUPLE_REPLY,
    NETLINK_NETFILTER,
    NFGENMSG,
)
from pyebpf_proxy.datapath.refused import RefusedError
from pyebpf_proxy.services.model import Protocol

_HEADER = NFGENMSG.size
# Conntrack states in which a connection is active, as in IPVS: SCTP only when it is established.
_TCP_ACTIVE = {0, 1, 2, 3, 9}  # NONE, SYN_SENT, SYN_RECV, ESTABLISHED, SYN_SENT2
_SCTP_ACTIVE = {4}  # ESTABLISHED


class Route(NamedTuple):
    """A flow's original destination and its endpoint. Equal for a node's socket, which was translated earlier."""

    protocol: int
    address: bytes
    port: int
    endpoint: bytes
    endpoint_port: int


class Count(NamedTuple):
    """Connections that are active, and others: closing or closed."""

    active: int
    inactive: int


def count(own: Container[bytes]) -> dict[Route, Count]:
    """All translated flows, and the untranslated ones that come from an ``own`` (packed) address of this node.

    In this network namespace, both families; not a snapshot. Takes about a second per 150 000 flows. RefusedError.
    """
    # A table may be large: no objects are created for flows that are only added up.
    counts: tuple[dict[_RawRoute, int], dict[_RawRoute, int]] = {}, {}
    for message in _dump():
        flow = _flow(message)
        if flow is None:
            continue
        source, route, active = flow
        if route[1:3] == route[3:] and source not in own:
            continue
        of = counts[active]
        of[route] = of.get(route, 0) + 1
    inactive, actives = counts
    return {_route(raw): Count(actives.get(raw, 0), inactive.get(raw, 0)) for raw in actives.keys() | inactive.keys()}


#: A Route with its ports as they are in the message.
_RawRoute = tuple[int, bytes, bytes, bytes, bytes]


def _route(raw: _RawRoute) -> Route:
    protocol, address, port, endpoint, endpoint_port = raw
    return Route(protocol, address, int.from_bytes(port, "big"), endpoint, int.from_bytes(endpoint_port, "big"))


def _dump() -> Iterator[bytes]:
    with RequestSocket(NETLINK_NETFILTER) as netlink:
        try:
            yield from netlink.dump(uapi.IPCTNL_MSG_CT_GET, bytes(_HEADER))  # AF_UNSPEC: both
        except OSError as error:
            raise RefusedError(error.errno or 0, f"list of connections: {error.strerror}") from error


def _layout(size: int) -> struct.Struct:
    """A tuple of TCP, UDP or SCTP with addresses of ``size`` bytes: attribute headers and values in turn."""
    return struct.Struct(f"=12s{size}s4s{size}s8sB3x4s2s2x4s2s2x")


def _nested(size: int, kind: int) -> tuple[bytes, ...]:
    """The attribute headers of a tuple with this layout."""
    first, second = (CTA_IP_V4_SRC, CTA_IP_V4_DST) if size == 4 else (CTA_IP_V6_SRC, CTA_IP_V6_DST)
    ip, proto = 2 * (4 + size), 24
    header = attribute_header
    return (
        header(kind, 4 + ip + 4 + proto, nested=True) + header(CTA_TUPLE_IP, ip, nested=True) + header(first, size),
        header(second, size),
        header(CTA_TUPLE_PROTO, proto, nested=True) + header(CTA_PROTO_NUM, 1),
        header(CTA_PROTO_SRC_PORT, 2),
        header(CTA_PROTO_DST_PORT, 2),
    )


_FAST = {
    int(family): (_layout(size), _nested(size, CTA_TUPLE_ORIG), _nested(size, CTA_TUPLE_REPLY))
    for family, size in ((socket.AF_INET, 4), (socket.AF_INET6, 16))
}


def _flow(message: bytes) -> tuple[bytes, _RawRoute, bool] | None:
    """Source, route, whether it is active; None for a protocol without ports."""
    fast = _FAST.get(message[0])
    if fast is None:
        return None
    layout, original, reply = fast
    end = _HEADER + 2 * layout.size
    if len(message) >= end:
        a, source, b, destination, c, protocol, d, _, e, port = layout.unpack_from(message, _HEADER)
        f, endpoint, g, _, h, _, i, endpoint_port, j, _ = layout.unpack_from(message, _HEADER + layout.size)
        if (a, b, c, d, e) == original and (f, g, h, i, j) == reply and protocol in _PROTOCOLS:
            return source, (protocol, destination, port, endpoint, endpoint_port), _is_active(message, end, protocol)
    return _slow_flow(message)


_PROTOCOLS = frozenset(map(int, Protocol))
_TCP, _UDP = int(Protocol.TCP), int(Protocol.UDP)
_TCP_STATE = (
    attribute_header(CTA_PROTOINFO, 44, nested=True)
    + attribute_header(CTA_PROTOINFO_TCP, 40, nested=True)
    + attribute_header(CTA_PROTOINFO_TCP_STATE, 1)
)
_USUAL_STATE = 52  # after status, mark, id, use and timeout


def _slow_flow(message: bytes) -> tuple[bytes, _RawRoute, bool] | None:
    found = {
        kind: ctnetlink.read_tuple(message, begin, end)
        for kind, begin, end in attributes(message, _HEADER, len(message))
        if kind in (CTA_TUPLE_ORIG, CTA_TUPLE_REPLY)
    }
    original, reply = found.get(CTA_TUPLE_ORIG), found.get(CTA_TUPLE_REPLY)
    if original is None or reply is None or original.protocol not in _PROTOCOLS:
        return None
    route = (
        original.protocol,
        original.destination,
        original.destination_port,
        reply.source,
        reply.source_port,
    )
    return original.source, route, _is_active(message, _HEADER, original.protocol)


def _is_active(message: bytes, at: int, protocol: int) -> bool:
    if protocol == _UDP:
        return True
    active = _TCP_ACTIVE if protocol == _TCP else _SCTP_ACTIVE
    # Its place with the options of most kernels; the state is the first attribute of its one section.
    state = at + _USUAL_STATE
    if message[state - len(_TCP_STATE) : state] == _TCP_STATE and protocol == _TCP:
        return message[state] in active
    for kind, begin, end in attributes(message, at, len(message)):
        if kind == CTA_PROTOINFO:
            for _, section, section_end in attributes(message, begin, end):
                for _, value, _ in attributes(message, section, section_end):
                    return message[value] in active
    return False
