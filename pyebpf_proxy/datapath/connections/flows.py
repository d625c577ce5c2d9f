# SPDX-License-Identifier: Apache-2.0
"""The kernel's connection table, counted: how many flows each endpoint has by each address that was asked for.

One dump by ctnetlink, read as bytes: pyroute2's messages take many times as long for each flow, and a table may hold
a million of them. The tuples stand where the kernel has put them since there is ctnetlink; an entry that looks
different is read attribute by attribute.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Container, Iterator
from typing import NamedTuple

from pyebpf_proxy.datapath.refused import RefusedError
from pyebpf_proxy.services.model import Protocol

_NETLINK_NETFILTER = 12
_CT_NEW, _CT_GET = 0x100, 0x101  # NFNL_SUBSYS_CTNETLINK << 8, IPCTNL_MSG_CT_NEW and _GET
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST, NLM_F_DUMP
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_FAMILY_HEADER = 4  # struct nfgenmsg
_ATTRIBUTE = struct.Struct("=HH")
_TYPE = 0x3FFF
_RECEIVE_BYTES = 1 << 18

# Attributes by their numbers in nfnetlink_conntrack.h.
_TUPLE_ORIG, _TUPLE_REPLY, _PROTOINFO = 1, 2, 4
_TUPLE_IP, _TUPLE_PROTO = 1, 2
_PROTO_NUM, _SRC_PORT, _DST_PORT = 1, 2, 3
_SOURCE, _DESTINATION = {1, 3}, {2, 4}  # IPv4, IPv6
# States of conntrack in which a connection is active, as IPVS has it: SCTP only when it is established.
_TCP_ACTIVE = {0, 1, 2, 3, 9}  # NONE, SYN_SENT, SYN_RECV, ESTABLISHED, SYN_SENT2
_SCTP_ACTIVE = {4}  # ESTABLISHED


class Route(NamedTuple):
    """What a client asked for and which endpoint it has. The same address twice: a node's socket, translated before."""

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

    Of this network namespace, both families; not a snapshot. Takes about a second per 150 000 flows. RefusedError.
    """
    # A table may be large: nothing is made for a flow that is only made to be added up.
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
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER) as netlink:
        netlink.bind((0, 0))
        request = bytes(_FAMILY_HEADER)  # AF_UNSPEC: both
        try:
            netlink.send(_HEADER.pack(_HEADER.size + len(request), _CT_GET, _REQUEST_DUMP, 1, 0) + request)
            while True:
                data = netlink.recv(_RECEIVE_BYTES)
                at = 0
                while at + _HEADER.size <= len(data):
                    length, kind, _, _, _ = _HEADER.unpack_from(data, at)
                    if kind == _CT_NEW:
                        yield data[at : at + length]
                    elif kind in (_ERROR, _DONE):
                        (code,) = struct.unpack_from("=i", data, at + _HEADER.size)
                        if code:
                            raise OSError(-code, os.strerror(-code))
                        return
                    at += (length + 3) & ~3
        except OSError as error:
            raise RefusedError(error.errno or 0, f"list of connections: {error.strerror}") from error


def _layout(size: int) -> struct.Struct:
    """A tuple of TCP, UDP or SCTP with addresses of ``size`` bytes: attribute headers and values in turn."""
    return struct.Struct(f"=12s{size}s4s{size}s8sB3x4s2s2x4s2s2x")


def _nested(size: int, kind: int) -> tuple[bytes, ...]:
    """The attribute headers of such a tuple."""
    nested, first = 0x8000, 1 if size == 4 else 3
    ip, proto = 4 + 2 * (4 + size), 28
    pack = _ATTRIBUTE.pack
    return (
        pack(4 + ip + proto, nested | kind) + pack(ip, nested | _TUPLE_IP) + pack(4 + size, first),
        pack(4 + size, first + 1),
        pack(proto, nested | _TUPLE_PROTO) + pack(5, _PROTO_NUM),
        pack(6, _SRC_PORT),
        pack(6, _DST_PORT),
    )


_FAST = {
    int(family): (_layout(size), _nested(size, _TUPLE_ORIG), _nested(size, _TUPLE_REPLY))
    for family, size in ((socket.AF_INET, 4), (socket.AF_INET6, 16))
}
_START = _HEADER.size + _FAMILY_HEADER


def _flow(message: bytes) -> tuple[bytes, _RawRoute, bool] | None:
    """Source, route, whether it is active; None for a protocol without ports."""
    fast = _FAST.get(message[_HEADER.size])
    if fast is None:
        return None
    layout, original, reply = fast
    end = _START + 2 * layout.size
    if len(message) >= end:
        a, source, b, destination, c, protocol, d, _, e, port = layout.unpack_from(message, _START)
        f, endpoint, g, _, h, _, i, endpoint_port, j, _ = layout.unpack_from(message, _START + layout.size)
        if (a, b, c, d, e) == original and (f, g, h, i, j) == reply and protocol in _PROTOCOLS:
            return source, (protocol, destination, port, endpoint, endpoint_port), _is_active(message, end, protocol)
    return _slow_flow(message)


_PROTOCOLS = frozenset(map(int, Protocol))
_TCP, _UDP = int(Protocol.TCP), int(Protocol.UDP)
_TCP_STATE = _ATTRIBUTE.pack(48, 0x8000 | _PROTOINFO) + _ATTRIBUTE.pack(44, 0x8001) + _ATTRIBUTE.pack(5, 1)
_USUAL_STATE = 52  # behind status, mark, id, use and timeout


def _attributes(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Type, begin and end of each attribute's value."""
    while at + 4 <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < 4:
            return
        yield kind & _TYPE, at + 4, min(at + length, end)
        at += (length + 3) & ~3


def _slow_flow(message: bytes) -> tuple[bytes, _RawRoute, bool] | None:
    found = {}
    for kind, begin, end in _attributes(message, _START, len(message)):
        if kind in (_TUPLE_ORIG, _TUPLE_REPLY):
            found[kind] = _tuple(message, begin, end)
    original, reply = found.get(_TUPLE_ORIG), found.get(_TUPLE_REPLY)
    if original is None or reply is None:
        return None
    protocol, source, destination, _, port = original
    _, endpoint, _, endpoint_port, _ = reply
    return source, (protocol, destination, port, endpoint, endpoint_port), _is_active(message, _START, protocol)


def _tuple(message: bytes, begin: int, end: int) -> tuple[int, bytes, bytes, bytes, bytes] | None:
    source = destination = b""
    fields: dict[int, bytes] = {}
    for kind, at, until in _attributes(message, begin, end):
        for inner, value, stop in _attributes(message, at, until):
            if kind == _TUPLE_PROTO:
                fields[inner] = message[value:stop]
            elif kind == _TUPLE_IP and inner in _SOURCE:
                source = message[value:stop]
            elif kind == _TUPLE_IP and inner in _DESTINATION:
                destination = message[value:stop]
    protocol = int.from_bytes(fields.get(_PROTO_NUM, b""), "big")
    if protocol not in _PROTOCOLS or _SRC_PORT not in fields or _DST_PORT not in fields:
        return None
    return protocol, source, destination, fields[_SRC_PORT], fields[_DST_PORT]


def _is_active(message: bytes, at: int, protocol: int) -> bool:
    if protocol == _UDP:
        return True
    active = _TCP_ACTIVE if protocol == _TCP else _SCTP_ACTIVE
    # Where it stands with the options of most kernels; the state is the first attribute of its one section.
    state = at + _USUAL_STATE
    if message[state - len(_TCP_STATE) : state] == _TCP_STATE and protocol == _TCP:
        return message[state] in active
    for kind, begin, end in _attributes(message, at, len(message)):
        if kind == _PROTOINFO:
            for _, section, section_end in _attributes(message, begin, end):
                for _, value, _ in _attributes(message, section, section_end):
                    return message[value] in active
    return False
