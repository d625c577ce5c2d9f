# SPDX-License-Identifier: Apache-2.0
"""The kernel's table of UDP flows: list it, delete entries of it (ctnetlink).

Only the few attributes that are needed are read, and the kernel leaves out other protocols and families.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pyebpf_proxy.datapath.connections.rawlink import NETLINK_NETFILTER, RawLink, attribute, attributes
from pyebpf_proxy.services.model import IPFamily, Protocol

#: Messages by their numbers: NFNL_SUBSYS_CTNETLINK << 8, and IPCTNL_MSG_CT_*.
GET, DELETE = 0x101, 0x102
#: The bytes of struct nfgenmsg, before the attributes of every message.
FAMILY_HEADER = 4
# Attributes by their numbers in include/uapi/linux/netfilter/nfnetlink_conntrack.h.
TUPLE_ORIG, TUPLE_REPLY, PROTOINFO = 1, 2, 4
TUPLE_IP, TUPLE_PROTO = 1, 2
PROTO_NUM, SRC_PORT, DST_PORT = 1, 2, 3
_ID, _ZONE, _FILTER = 12, 18, 25
_FILTER_PROTO_NUM = 1 << 3
_SOURCE, _DESTINATION = {1, 3}, {2, 4}  # IPv4, IPv6
_ADDRESS_FAMILY = {IPFamily.IPV4: socket.AF_INET, IPFamily.IPV6: socket.AF_INET6}


class Flow(NamedTuple):
    """A tracked UDP flow. Addresses packed; ``replier`` is the source of replies: the endpoint of a translated flow."""

    family: IPFamily
    destination: bytes
    destination_port: int
    replier: bytes
    replier_port: int
    #: The reply tuple, zone and id as the kernel wrote them, which identify the entry. Not the original tuple: the
    #: flow's next entry, to another endpoint, has it too. Not the id alone: the kernel may reuse it.
    key: bytes


class Tuple(NamedTuple):
    """One direction of a flow: addresses and ports as they are in the message, in network order."""

    protocol: int
    source: bytes
    destination: bytes
    source_port: bytes
    destination_port: bytes


def udp_flows(family: IPFamily) -> Iterator[Flow]:
    """Every UDP flow of ``family`` that the kernel tracks in this network namespace.

    An interrupted dump returns what came until then, as in kube-proxy (spec/service-semantics §10).
    OSError if the kernel refuses.
    """
    with RawLink(NETLINK_NETFILTER) as link:
        try:
            yield from _flows(link, family, _only_udp())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            # Before Linux 5.8 the kernel returns all flows; they are filtered here.
            yield from _flows(link, family, b"")


def delete(flows: Iterable[Flow]) -> int:
    """Delete flows; the number of those that were still there. OSError if the kernel refuses one: that one stays.

    A flow that got another endpoint since it was listed is a different entry, and stays.
    """
    with RawLink(NETLINK_NETFILTER) as link:
        numbers = link.request_many(DELETE, 0, [_header(flow.family) + flow.key for flow in flows])
    for number in numbers:
        if number not in (0, errno.ENOENT):
            raise OSError(number, f"conntrack: a UDP flow could not be deleted: {os.strerror(number)}")
    return numbers.count(0)


def reply_of(link: RawLink, protocol: int, source: tuple[bytes, int], destination: tuple[bytes, int]) -> Tuple | None:
    """The reply tuple of the flow with this original (address, port) pair; None: there is no such flow.

    OSError if the kernel refuses.
    """
    four = len(source[0]) == 4
    addresses = attribute(1 if four else 3, source[0]) + attribute(2 if four else 4, destination[0])
    ports = attribute(SRC_PORT, source[1].to_bytes(2, "big")) + attribute(DST_PORT, destination[1].to_bytes(2, "big"))
    key = attribute(TUPLE_IP, addresses, nested=True)
    key += attribute(TUPLE_PROTO, attribute(PROTO_NUM, bytes([protocol])) + ports, nested=True)
    family = IPFamily.IPV4 if four else IPFamily.IPV6
    try:
        message = link.get(GET, _header(family) + attribute(TUPLE_ORIG, key, nested=True))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    for kind, begin, end in attributes(message, FAMILY_HEADER, len(message)):
        if kind == TUPLE_REPLY:
            return read_tuple(message, begin, end)
    return None


def read_tuple(message: bytes, begin: int, end: int) -> Tuple | None:
    """The tuple between ``begin`` and ``end`` of a message; None for a protocol without ports."""
    source = destination = b""
    fields: dict[int, bytes] = {}
    for kind, at, until in attributes(message, begin, end):
        for inner, value, stop in attributes(message, at, until):
            if kind == TUPLE_PROTO:
                fields[inner] = message[value:stop]
            elif kind == TUPLE_IP and inner in _SOURCE:
                source = message[value:stop]
            elif kind == TUPLE_IP and inner in _DESTINATION:
                destination = message[value:stop]
    if not fields.get(PROTO_NUM) or SRC_PORT not in fields or DST_PORT not in fields:
        return None
    return Tuple(fields[PROTO_NUM][0], source, destination, fields[SRC_PORT], fields[DST_PORT])


def _header(family: IPFamily) -> bytes:
    return struct.pack("=BBH", _ADDRESS_FAMILY[family], 0, 0)


def _only_udp() -> bytes:
    protocol = attribute(TUPLE_PROTO, attribute(PROTO_NUM, bytes([Protocol.UDP])), nested=True)
    wanted = attribute(1, struct.pack("=I", _FILTER_PROTO_NUM)) + attribute(2, struct.pack("=I", 0))
    return attribute(TUPLE_ORIG, protocol, nested=True) + attribute(_FILTER, wanted, nested=True)


def _flows(link: RawLink, family: IPFamily, wanted: bytes) -> Iterator[Flow]:
    try:
        for message in link.dump(GET, _header(family) + wanted):
            flow = _flow(family, message)
            if flow is not None:
                yield flow
    except OSError as error:
        if error.errno != errno.EINTR:
            number = error.errno or 0
            raise OSError(number, f"conntrack: UDP flows could not be listed: {os.strerror(number)}") from error


def _flow(family: IPFamily, message: bytes) -> Flow | None:
    original = reply = None
    key = b""
    for kind, begin, end in attributes(message, FAMILY_HEADER, len(message)):
        if kind == TUPLE_ORIG:
            original = read_tuple(message, begin, end)
        elif kind == TUPLE_REPLY:
            reply = read_tuple(message, begin, end)
            key += message[begin - 4 : (end + 3) & ~3]
        elif kind in (_ID, _ZONE):
            key += message[begin - 4 : (end + 3) & ~3]
    if original is None or reply is None or original.protocol != Protocol.UDP:
        return None
    return Flow(
        family,
        original.destination,
        int.from_bytes(original.destination_port, "big"),
        reply.source,
        int.from_bytes(reply.source_port, "big"),
        key,
    )
