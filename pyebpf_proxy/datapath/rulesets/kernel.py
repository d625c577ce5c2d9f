# SPDX-License-Identifier: Apache-2.0
"""Reads every ruleset of this network namespace from the kernel, without running tools, loading modules or creating
tables.

It needs CAP_NET_ADMIN. Tables of iptables-legacy are queried only if ``/proc/net/ip_tables_names`` (and
``ip6_tables_names``) lists them, because a query creates the table.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pyebpf_proxy.datapath.connections.rawlink import NETLINK_NETFILTER, RawLink, attribute, attributes
from pyebpf_proxy.datapath.node import policy_routing
from pyebpf_proxy.datapath.rulesets import legacy, nft
from pyebpf_proxy.datapath.rulesets.expressions import text
from pyebpf_proxy.datapath.rulesets.judge import Verdict, judge, sets_marks
from pyebpf_proxy.datapath.rulesets.model import Mark, Part, Rulesets, Table

_NFT = 10 << 8  # NFNL_SUBSYS_NFTABLES
_GETTABLE, _GETCHAIN, _GETRULE, _GETSET, _GETSETELEM = (_NFT | kind for kind in (1, 4, 7, 10, 13))
#: kube-proxy's tables in mode nftables. Those of this proxy's instances begin with the second word.
_KUBE_PROXY, _OURS = "kube-proxy", "pyebpf-proxy"
_PROC = {4: Path("/proc/net/ip_tables_names"), 6: Path("/proc/net/ip6_tables_names")}
_SOCKETS = {4: (socket.AF_INET, socket.IPPROTO_IP), 6: (socket.AF_INET6, socket.IPPROTO_IPV6)}
_GET_INFO, _GET_ENTRIES = 64, 65  # IPT_SO_GET_INFO, IPT_SO_GET_ENTRIES; the same numbers for IPv6
_ATTEMPTS = 5
# include/uapi/linux/rtnetlink.h, pkt_cls.h
_NETLINK_ROUTE, _GETLINK, _GETQDISC, _GETTFILTER = 0, 18, 38, 46
_TCMSG = struct.Struct("=BxxxiIII")
#: struct ifinfomsg, and its first fields: family, type.
_LINK_BYTES, _LINK = 16, struct.Struct("=BxH")
_LINK_NAME, _ETHERNET = 3, 1  # IFLA_IFNAME, ARPHRD_ETHER
_LINK_MASK, _SKIP_COUNTERS = 29, 8  # IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS
_KIND, _OPTIONS, _U32_MARK = 1, 2, 10
_EGRESS = 0xFFFFFFF3  # of clsact
_CLSACT = "clsact"
#: Qdiscs without filters.
_PLAIN_QDISCS = frozenset({"noqueue", "pfifo_fast", "pfifo", "bfifo", "fq", "mq", "mqprio", "tbf", "netem", "ingress"})

_libc = ctypes.CDLL(None, use_errno=True)
#: What reading rules may raise; the last two: a kernel sends other messages than those that this version knows.
UNREADABLE = (OSError, ValueError, LookupError, struct.error)
Info = dict[tuple[int, str], legacy.Info]
Digests = dict[tuple[int, str], bytes]


@dataclass(frozen=True, slots=True)
class Reading:
    """The state at one time."""

    verdicts: dict[int, Verdict]
    #: Verdict maps by family number of nftables, table and name: their elements are part of the judged rules.
    maps: frozenset[tuple[int, str, str]] = frozenset()
    #: Of iptables-legacy.
    tables: Info = field(default_factory=dict)
    digests: Digests = field(default_factory=dict)
    #: Whether any rule sets marks, so that users of marks matter.
    marks: bool = False
    #: Devices that the fast path never uses.
    slow_devices: frozenset[str] = frozenset()
    #: Something could not be read, which may be possible soon.
    unread: bool = False


def read() -> Reading:
    """Read and judge everything; takes some 10 µs per rule. Parts that could not be read are in the verdicts."""
    rulesets = Rulesets()
    maps: set[tuple[int, str, str]] = set()
    try:
        rulesets.tables += _nft(maps)
    except UNREADABLE as error:
        _unread(rulesets, (4, 6), f"nftables could not be read: {error}")
    tables: Info = {}
    digests: Digests = {}
    for family in (4, 6):
        try:
            rulesets.tables += _legacy(family, tables, digests)
        except UNREADABLE as error:
            _unread(rulesets, (family,), f"iptables-legacy could not be read: {error}")
    marks = sets_marks(rulesets)
    try:
        rulesets.slow_devices = _slow_devices() if rulesets.tables else frozenset()
        if marks:
            _add_marks(rulesets)
    except OSError as error:
        _unread(rulesets, (4, 6), f"devices and users of marks could not be read: {error}")
    unread = bool(rulesets.unread)
    return Reading(judge(rulesets), frozenset(maps), tables, digests, marks, rulesets.slow_devices, unread)


def legacy_info() -> Info:
    """The kernel's information about each table of iptables-legacy, without rules; takes microseconds. OSError."""
    found = {}
    for family in (4, 6):
        for name in _names(family):
            found[family, name] = _info(family, name)
    return found


def legacy_digests() -> Digests:
    """A digest of the rules, without counters, of each table of iptables-legacy. OSError, ValueError."""
    found = {}
    for family in (4, 6):
        for name in _names(family):
            found[family, name] = legacy.digest(family, _entries(family, name)[1])
    return found


def _unread(rulesets: Rulesets, families: Collection[int], why: str) -> None:
    for family in families:
        rulesets.unread.setdefault(family, []).append(why)


# ---- nftables ------------------------------------------------------------------------------------------------------


def _nft(maps: set[tuple[int, str, str]]) -> list[Table]:
    known: dict[bytes, Part] = {}
    with RawLink(NETLINK_NETFILTER) as link:
        everything = _ask(link, _GETTABLE, 0)
        tables = {key: table for key, table in nft.tables(everything).items() if not _is_known(*key)}
        if not tables:
            return []
        nft.add_chains(tables, _ask(link, _GETCHAIN, 0))
        for (family, name), table in tables.items():
            if not any(chain.hook for chain in table.chains.values()):
                continue  # No chain that forwarded packets cross.
            of_table = attribute(1, name.encode() + b"\0")
            for each in nft.add_sets(table, _ask(link, _GETSET, family, of_table)):
                maps.add((family, name, each))
                nft.add_elements(
                    table, each, _ask(link, _GETSETELEM, family, of_table + attribute(2, each.encode() + b"\0"))
                )
            nft.add_rules(table, _ask(link, _GETRULE, family, of_table), known)
    return list(tables.values())


def _is_known(family: int, name: str) -> bool:
    if name == _KUBE_PROXY:
        return family in (nft.IPV4, nft.IPV6)
    return family == nft.INET and (name == _OURS or name.startswith(f"{_OURS}-"))


def _ask(link: RawLink, kind: int, family: int, of: bytes = b"") -> Iterator[bytes]:
    """All messages; none if the object is gone, for which the kernel may also return ENOENT.

    Must be read to the end before the next query.
    """
    try:
        yield from link.dump(kind, struct.pack("=BBH", family, 0, 0) + of)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise


# ---- iptables-legacy -----------------------------------------------------------------------------------------------


def _legacy(family: int, infos: Info, digests: Digests) -> list[Table]:
    known: dict[bytes, Part] = {}
    tables = []
    for name in _names(family):
        info, blob = _entries(family, name)
        infos[family, name], digests[family, name] = info, legacy.digest(family, blob)
        tables.append(legacy.table(family, info, blob, known))
    return tables


def _names(family: int) -> list[str]:
    try:
        return _PROC[family].read_text().split()
    except FileNotFoundError:
        return []  # This kernel has no iptables-legacy, or not for this family.


def _info(family: int, name: str) -> legacy.Info:
    ask = bytearray(name.encode().ljust(legacy.INFO.size, b"\0"))
    _getsockopt(family, _GET_INFO, ask)
    return legacy.info(ask)


def _entries(family: int, name: str) -> tuple[legacy.Info, bytes]:
    """A table's information and entries; retried if it changes in between."""
    for _ in range(_ATTEMPTS):
        info = _info(family, name)
        ask = bytearray(legacy.ENTRIES.size + info.size)
        legacy.ENTRIES.pack_into(ask, 0, name.encode(), info.size)
        try:
            size = _getsockopt(family, _GET_ENTRIES, ask)
            return info, bytes(memoryview(ask)[legacy.ENTRIES.size : size])
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
    raise OSError(errno.EAGAIN, f"table {name} changed while it was read, {_ATTEMPTS} times in a row")


def _getsockopt(family: int, option: int, ask: bytearray) -> int:
    """Unlike Python's own it passes the request to the kernel; the answer replaces it, and its size is returned.

    The socket is not a raw one, so CAP_NET_RAW is not needed.
    """
    kind, level = _SOCKETS[family]
    size = ctypes.c_uint32(len(ask))
    buffer = (ctypes.c_char * len(ask)).from_buffer(ask)
    with socket.socket(kind, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as asked:
        if _libc.getsockopt(asked.fileno(), level, option, buffer, ctypes.byref(size)):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    return size.value


# ---- users of marks ------------------------------------------------------------------------------------------------


def _add_marks(rulesets: Rulesets) -> None:
    filters = [Mark(0, 0xFFFFFFFF, inverted=True, words="a tc filter")] if _has_mark_filters() else []
    for family, number in ((4, socket.AF_INET), (6, socket.AF_INET6)):
        rules = [
            Mark(rule.mark, rule.mask, rule.inverted, f"ip rule {rule.priority}")
            for rule in policy_routing.rules(number)
            if rule.mask
        ]
        rulesets.marks[family] = rules + filters


def _has_mark_filters() -> bool:
    """Whether a tc filter at the egress of any device uses the mark."""
    with RawLink(_NETLINK_ROUTE) as link:
        places = set()
        for message in list(link.dump(_GETQDISC, _TCMSG.pack(0, 0, 0, 0, 0))):
            _, device, handle, _, _ = _TCMSG.unpack_from(message)
            kind = _kind(message)
            if kind not in _PLAIN_QDISCS:
                places.add((device, _EGRESS if kind == _CLSACT else handle))
        for device, parent in sorted(places):
            try:
                filters = list(link.dump(_GETTFILTER, _TCMSG.pack(0, device, 0, parent, 0)))
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.ENODEV, errno.ENOENT, errno.EOPNOTSUPP):
                    continue  # It is gone, or its kind has no filters.
                raise
            if any(goes_by_mark(each) for each in filters):
                return True
    return False


def _kind(message: bytes) -> str:
    parts = attributes(message, _TCMSG.size, len(message))
    return next((text(message[begin:end]) for kind, begin, end in parts if kind == _KIND), "")


def goes_by_mark(message: bytes) -> bool:
    """Whether a tc filter, from the kernel's description, uses packets' marks or may use them."""
    kind = _kind(message)
    if kind in ("fw", "flow", "basic"):  # the last two may
        return True
    return kind == "u32" and any(
        inner == _U32_MARK
        for option, begin, end in attributes(message, _TCMSG.size, len(message))
        if option == _OPTIONS
        for inner, _, _ in attributes(message, begin, end)
    )


# ---- devices -------------------------------------------------------------------------------------------------------


def device(message: bytes) -> tuple[str, bool]:
    """The device's name, and whether it is an Ethernet device, from a link message without its netlink header."""
    _, kind = _LINK.unpack_from(message)
    parts = attributes(message, _LINK_BYTES, len(message))
    name = next((text(message[begin:end]) for kind, begin, end in parts if kind == _LINK_NAME), "")
    return name, kind == _ETHERNET


def _slow_devices() -> frozenset[str]:
    with RawLink(_NETLINK_ROUTE) as link:
        ask = bytes(_LINK_BYTES) + attribute(_LINK_MASK, struct.pack("=I", _SKIP_COUNTERS))
        return frozenset(name for name, fast in map(device, link.dump(_GETLINK, ask)) if not fast)
