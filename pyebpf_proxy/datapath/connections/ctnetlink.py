# SPDX-License-Identifier: Apache-2.0
"""The kernel's table of UDP flows: list it, delete entries of it (ctnetlink).

pyroute2 can do this too, at some 100 µs for each entry; a busy DNS server has 100 000 of them. Here only the few
attributes that are needed are read, and the kernel leaves out other protocols and families.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from pyebpf_proxy.services.model import Family

# include/uapi/linux/netlink.h, netfilter/nfnetlink_conntrack.h
_NETLINK_NETFILTER = 12
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_DUMP = 1, 4, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_GET, _DELETE = 1 << 8 | 1, 1 << 8 | 2
_TUPLE_ORIG, _TUPLE_REPLY, _ZONE, _FILTER = 1, 2, 18, 25
_TUPLE_IP, _TUPLE_PROTO = 1, 2
_PROTO_NUM = 1
_FILTER_PROTO_NUM = 1 << 3
_NESTED = 0x8000
_UDP = 17
_ADDRESS_FAMILY = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_PORT = struct.Struct(">H")
_RECEIVE_BYTES = 1 << 18


class Flow(NamedTuple):
    """A tracked UDP flow. Addresses packed; ``replier`` is who answers: the endpoint, if the flow is translated."""

    family: Family
    destination: bytes
    destination_port: int
    replier: bytes
    replier_port: int
    #: The original tuple and zone as the kernel wrote them: what names the entry.
    key: bytes


def udp_flows(family: Family) -> Iterator[Flow]:
    """Every UDP flow of ``family`` that the kernel tracks in this network namespace.

    A dump that the kernel interrupts gives what came until then, as in kube-proxy (spec/service-semantics §10).
    OSError if the kernel refuses.
    """
    with _open() as sock:
        try:
            _ask(sock, family, _only_udp())
            yield from _read(sock, family)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            # Older than 5.8: everything comes, and is left out here.
            _ask(sock, family, b"")
            yield from _read(sock, family)


def delete(flow: Flow) -> bool:
    """Delete a flow; False if it was gone already. OSError if the kernel refuses."""
    with _open() as sock:
        message = _message(_DELETE, _NLM_F_REQUEST | _NLM_F_ACK, flow.family, flow.key)
        sock.send(message)
        answer = sock.recv(_RECEIVE_BYTES)
    number: int = -struct.unpack_from("=i", answer, _HEADER.size)[0]
    if number not in (0, errno.ENOENT):
        raise OSError(number, f"conntrack: a UDP flow could not be deleted: {os.strerror(number)}")
    return number == 0


def _open() -> socket.socket:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)


def _ask(sock: socket.socket, family: Family, attributes: bytes) -> None:
    sock.send(_message(_GET, _NLM_F_REQUEST | _NLM_F_DUMP, family, attributes))


def _message(kind: int, flags: int, family: Family, attributes: bytes) -> bytes:
    body = struct.pack("=BBH", _ADDRESS_FAMILY[family], 0, 0) + attributes
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(4 + len(value), kind) + value + bytes(-len(value) % 4)


def _only_udp() -> bytes:
    protocol = _attribute(_NESTED | _TUPLE_PROTO, _attribute(_PROTO_NUM, bytes([_UDP])))
    wanted = _attribute(1, struct.pack("=I", _FILTER_PROTO_NUM)) + _attribute(2, struct.pack("=I", 0))
    return _attribute(_NESTED | _TUPLE_ORIG, protocol) + _attribute(_NESTED | _FILTER, wanted)


def _read(sock: socket.socket, family: Family) -> Iterator[Flow]:
    while True:
        data = sock.recv(_RECEIVE_BYTES)
        offset = 0
        while offset < len(data):
            length, kind, *_ = _HEADER.unpack_from(data, offset)
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                number = -struct.unpack_from("=i", data, offset + _HEADER.size)[0]
                if number == errno.EINTR:
                    return
                raise OSError(number, f"conntrack: UDP flows could not be listed: {os.strerror(number)}")
            flow = _flow(family, data, offset + _HEADER.size + 4, offset + length)
            if flow is not None:
                yield flow
            offset += (length + 3) & ~3


def _flow(family: Family, data: bytes, offset: int, end: int) -> Flow | None:
    original = reply = None
    key = b""
    while offset + 4 <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        kind &= ~_NESTED
        if kind in (_TUPLE_ORIG, _ZONE):
            key += data[offset : offset + ((length + 3) & ~3)]
        if kind == _TUPLE_ORIG:
            original = _tuple(family, data, offset + 4, offset + length)
        elif kind == _TUPLE_REPLY:
            reply = _tuple(family, data, offset + 4, offset + length)
        offset += (length + 3) & ~3
    if original is None or reply is None:
        return None
    return Flow(family, original.destination, original.destination_port, reply.source, reply.source_port, key)


class _Tuple(NamedTuple):
    source: bytes
    destination: bytes
    source_port: int
    destination_port: int


def _tuple(family: Family, data: bytes, offset: int, end: int) -> _Tuple | None:
    """None: not UDP."""
    source = destination = b""
    ports = {}
    size = 4 if family is Family.IPV4 else 16
    while offset + 4 <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        inner = offset + 4
        while inner + 4 <= offset + length:
            inner_length, inner_kind = _ATTRIBUTE.unpack_from(data, inner)
            value = inner + 4
            if kind & ~_NESTED == _TUPLE_IP:
                # CTA_IP_V4_SRC, V4_DST, V6_SRC, V6_DST: 1 to 4
                if inner_kind & 1:
                    source = data[value : value + size]
                else:
                    destination = data[value : value + size]
            elif kind & ~_NESTED == _TUPLE_PROTO:
                if inner_kind == _PROTO_NUM:
                    if data[value] != _UDP:
                        return None
                else:
                    ports[inner_kind] = _PORT.unpack_from(data, value)[0]
            inner += (inner_length + 3) & ~3
        offset += (length + 3) & ~3
    return _Tuple(source, destination, ports.get(2, 0), ports.get(3, 0))
