# SPDX-License-Identifier: Apache-2.0
"""Lists and deletes conntrack entries (ctnetlink), mainly of UDP flows.

Only the few attributes that are needed are read, and the kernel leaves out other protocols and families.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from pyebpf_proxy.datapath.netlink.messages import attribute, attributes, word
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.uapi import (
    CTA_FILTER,
    CTA_FILTER_ORIG_FLAGS,
    CTA_FILTER_REPLY_FLAGS,
    CTA_ID,
    CTA_IP_V4_DST,
    CTA_IP_V4_SRC,
    CTA_IP_V6_DST,
    CTA_IP_V6_SRC,
    CTA_PROTO_DST_PORT,
    CTA_PROTO_NUM,
    CTA_PROTO_SRC_PORT,
    CTA_PROTOINFO,
    CTA_PROTOINFO_TCP_STATE,
    CTA_TIMEOUT,
    CTA_TUPLE_IP,
    CTA_TUPLE_ORIG,
    CTA_TUPLE_PROTO,
    CTA_TUPLE_REPLY,
    CTA_ZONE,
    IPCTNL_MSG_CT_DELETE,
    IPCTNL_MSG_CT_GET,
    NETLINK_NETFILTER,
    NFGENMSG,
)
from pyebpf_proxy.services.addresses import Place, family_of
from pyebpf_proxy.services.model import IPFamily, Protocol

# include/linux/netfilter/nf_conntrack_common.h
_FILTER_PROTO_NUM = 1 << 3
_SOURCE, _DESTINATION = {CTA_IP_V4_SRC, CTA_IP_V6_SRC}, {CTA_IP_V4_DST, CTA_IP_V6_DST}
_ADDRESS_FAMILY = {IPFamily.IPV4: socket.AF_INET, IPFamily.IPV6: socket.AF_INET6}


class Flow(NamedTuple):
    """A tracked UDP flow. Addresses packed; ``replier`` is the source of replies: the endpoint of a translated flow."""

    family: IPFamily
    destination: bytes
    destination_port: int
    replier: bytes
    replier_port: int
    #: The reply tuple, zone and id as the kernel wrote them, which identify the entry. The original tuple is
    #: not enough: the flow's next entry, to another endpoint, has it too. Nor is the id alone: the kernel may reuse it.
    key: bytes


class Tuple(NamedTuple):
    """One direction of a flow: addresses and ports as they are in the message, in network order."""

    protocol: int
    source: bytes
    destination: bytes
    source_port: bytes
    destination_port: bytes

    @property
    def ends(self) -> tuple[Place, Place]:
        """Source and destination."""
        source_port = int.from_bytes(self.source_port, "big")
        return (self.source, source_port), (self.destination, int.from_bytes(self.destination_port, "big"))


class TrackedEntry(NamedTuple):
    """An entry: both directions, and what identifies it (:attr:`Flow.key`). None: a protocol without ports."""

    original: Tuple | None
    reply: Tuple | None
    key: bytes
    #: enum tcp_conntrack; 0: not TCP.
    tcp_state: int = 0
    #: Timeout.
    seconds: int = 0


def udp_flows(family: IPFamily) -> Iterator[Flow]:
    """Every UDP flow of ``family`` that the kernel tracks in this network namespace.

    An interrupted dump returns what came until then, as in kube-proxy (spec/service-semantics §10).
    OSError if the kernel refuses.
    """
    try:
        for entry in _udp_entries(family):
            assert entry.original is not None
            if entry.reply is not None:
                yield Flow(family, *entry.original.ends[1], *entry.reply.ends[0], entry.key)
    except OSError as error:
        if error.errno != errno.EINTR:
            raise


def entries(
    family: IPFamily, protocols: Collection[int] | None = (Protocol.TCP, Protocol.UDP), wanted: bytes = b""
) -> Iterator[TrackedEntry]:
    """Every entry of ``family`` and ``protocols`` in this network namespace; each has its ``original``. None: all.

    ``wanted``: attributes by which the kernel may leave others out. Since Linux 5.8 it does, before it returns all.
    OSError if the kernel refuses; EINTR at the end of a dump that may lack entries.
    """
    with RequestSocket(NETLINK_NETFILTER) as netlink:
        try:
            yield from _entries(netlink, family, wanted, protocols)
        except OSError as error:
            if not wanted or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            yield from _entries(netlink, family, b"", protocols)


def _udp_entries(family: IPFamily) -> Iterator[TrackedEntry]:
    return entries(family, (Protocol.UDP,), _only_udp())


def delete(flows: Iterable[Flow]) -> int:
    """Delete flows; the number of those that were still there. OSError if the kernel refuses one: that one stays.

    A flow that got another endpoint since it was listed is a different entry, and stays.
    """
    return delete_entries(((flow.family, flow.key) for flow in flows), "a UDP flow")


def delete_entries(entries: Iterable[tuple[IPFamily, bytes]], what: str = "a flow") -> int:
    """As :func:`delete`, for any protocol. ``entries``: family and :attr:`TrackedEntry.key`; ``what``: in the error."""
    with RequestSocket(NETLINK_NETFILTER) as netlink:
        numbers = netlink.request_many(IPCTNL_MSG_CT_DELETE, 0, [header(family) + key for family, key in entries])
    for number in numbers:
        if number not in (0, errno.ENOENT):
            raise OSError(number, f"conntrack: {what} could not be deleted: {os.strerror(number)}")
    return numbers.count(0)


def lookup(netlink: RequestSocket, protocol: int, source: Place, destination: Place) -> TrackedEntry | None:
    """The entry that a packet between these two places belongs to, in either direction; None: there is none.

    OSError if the kernel refuses.
    """
    family = family_of(source[0])
    try:
        key = tuple_of(CTA_TUPLE_ORIG, protocol, source, destination)
        return read_entry(netlink.get(IPCTNL_MSG_CT_GET, header(family) + key))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise


def tuple_of(kind: int, protocol: int, source: Place, destination: Place) -> bytes:
    """CTA_TUPLE_ORIG or CTA_TUPLE_REPLY."""
    v4 = len(source[0]) == 4
    addresses = attribute(CTA_IP_V4_SRC if v4 else CTA_IP_V6_SRC, source[0])
    addresses += attribute(CTA_IP_V4_DST if v4 else CTA_IP_V6_DST, destination[0])
    transport = attribute(CTA_PROTO_NUM, bytes([protocol]))
    transport += attribute(CTA_PROTO_SRC_PORT, source[1].to_bytes(2, "big"))
    transport += attribute(CTA_PROTO_DST_PORT, destination[1].to_bytes(2, "big"))
    parts = attribute(CTA_TUPLE_IP, addresses, nested=True) + attribute(CTA_TUPLE_PROTO, transport, nested=True)
    return attribute(kind, parts, nested=True)


def read_tuple(message: bytes, begin: int, end: int) -> Tuple | None:
    """The tuple between ``begin`` and ``end`` of a message; None for a protocol without ports."""
    source = destination = b""
    fields: dict[int, bytes] = {}
    for kind, at, until in attributes(message, begin, end):
        for inner, value, stop in attributes(message, at, until):
            if kind == CTA_TUPLE_PROTO:
                fields[inner] = message[value:stop]
            elif kind == CTA_TUPLE_IP and inner in _SOURCE:
                source = message[value:stop]
            elif kind == CTA_TUPLE_IP and inner in _DESTINATION:
                destination = message[value:stop]
    if not fields.get(CTA_PROTO_NUM) or CTA_PROTO_SRC_PORT not in fields or CTA_PROTO_DST_PORT not in fields:
        return None
    return Tuple(fields[CTA_PROTO_NUM][0], source, destination, fields[CTA_PROTO_SRC_PORT], fields[CTA_PROTO_DST_PORT])


def read_entry(message: bytes) -> TrackedEntry:
    """The entry that a message of a dump describes."""
    original = reply = None
    key = b""
    state = seconds = 0
    for kind, begin, end in attributes(message, NFGENMSG.size, len(message)):
        if kind == CTA_TUPLE_ORIG:
            original = read_tuple(message, begin, end)
        elif kind in (CTA_TUPLE_REPLY, CTA_ID, CTA_ZONE):
            key += message[begin - 4 : (end + 3) & ~3]
            if kind == CTA_TUPLE_REPLY:
                reply = read_tuple(message, begin, end)
        elif kind == CTA_TIMEOUT:
            seconds = int.from_bytes(message[begin:end], "big")
        elif kind == CTA_PROTOINFO:
            state = _tcp_state(message, begin, end)
    return TrackedEntry(original, reply, key, state, seconds)


def _tcp_state(message: bytes, begin: int, end: int) -> int:
    for _, section, section_end in attributes(message, begin, end):
        for kind, value, stop in attributes(message, section, section_end):
            if kind == CTA_PROTOINFO_TCP_STATE:
                return int.from_bytes(message[value:stop][:1], "big")
    return 0


def header(family: IPFamily) -> bytes:
    """struct nfgenmsg of a message about this family."""
    return NFGENMSG.pack(_ADDRESS_FAMILY[family], 0, 0)


def _only_udp() -> bytes:
    protocol = attribute(CTA_TUPLE_PROTO, attribute(CTA_PROTO_NUM, bytes([Protocol.UDP])), nested=True)
    wanted = attribute(CTA_FILTER_ORIG_FLAGS, word(_FILTER_PROTO_NUM)) + attribute(CTA_FILTER_REPLY_FLAGS, word(0))
    return attribute(CTA_TUPLE_ORIG, protocol, nested=True) + attribute(CTA_FILTER, wanted, nested=True)


def _entries(
    netlink: RequestSocket, family: IPFamily, wanted: bytes, protocols: Collection[int] | None
) -> Iterator[TrackedEntry]:
    try:
        for message in netlink.dump(IPCTNL_MSG_CT_GET, header(family) + wanted):
            entry = read_entry(message)
            if entry.original is not None and (protocols is None or entry.original.protocol in protocols):
                yield entry
    except OSError as error:
        number = error.errno or 0
        raise OSError(number, f"conntrack: flows could not be listed: {os.strerror(number)}") from error
