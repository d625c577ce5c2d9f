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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import attribute, attributes, text, values, zero_terminated
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.rtnetlink import WITHOUT_STATISTICS
from pyebpf_proxy.datapath.node import policy_routing
from pyebpf_proxy.datapath.rulesets import legacy, nft
from pyebpf_proxy.datapath.rulesets.judge import Verdict, judge, lasting, looks_up_ipsets, sets_marks
from pyebpf_proxy.datapath.rulesets.model import Mark, Part, Rulesets, Table

#: kube-proxy's tables in mode nftables. Those of this proxy's instances begin with the second word.
_KUBE_PROXY, _OURS = "kube-proxy", "pyebpf-proxy"
_PROC = {4: Path("/proc/net/ip_tables_names"), 6: Path("/proc/net/ip6_tables_names")}
_SOCKETS = {4: (socket.AF_INET, socket.IPPROTO_IP), 6: (socket.AF_INET6, socket.IPPROTO_IPV6)}
_GET_INFO, _GET_ENTRIES = 64, 65  # IPT_SO_GET_INFO, IPT_SO_GET_ENTRIES; the same numbers for IPv6
_ATTEMPTS = 5
_ETHERNET = 1  # ARPHRD_ETHER
_CLSACT = "clsact"
#: Qdiscs without filters.
_PLAIN_QDISCS = frozenset({"noqueue", "pfifo_fast", "pfifo", "bfifo", "fq", "mq", "mqprio", "tbf", "netem", "ingress"})
#: They list flows as classes, which have no filters.
_LIST_FLOWS = frozenset({"fq_codel", "sfq", "cake"})

_libc = ctypes.CDLL(None, use_errno=True)
#: What reading rules may raise; the last two: a kernel sends other messages than those that this version knows.
UNREADABLE = (OSError, ValueError, LookupError, struct.error)
Info = dict[tuple[int, str], legacy.Info]
Digests = dict[tuple[int, str], bytes]


@dataclass(frozen=True, slots=True)
class Reading:
    """The state at one time."""

    verdicts: dict[int, Verdict]
    #: Sets and maps by family number of nftables, table and name whose elements are part of the judged rules: verdict
    #: maps, dynamic sets, and sets whose elements a rule that may close the fast path is for.
    maps: frozenset[tuple[int, str, str]] = frozenset()
    #: Of iptables-legacy.
    tables: Info = field(default_factory=dict)
    digests: Digests = field(default_factory=dict)
    #: Whether any rule sets marks, so that users of marks matter.
    marks: bool = False
    #: Devices that the fast path never uses.
    slow_devices: frozenset[str] = frozenset()
    #: Tables of nftables that end with a process.
    owned: frozenset[nft.Key] = frozenset()
    #: Something could not be read, which may be possible soon.
    unread: bool = False
    #: Families in which every change of the rules is reported at once.
    lasting: frozenset[int] = frozenset()


def read() -> Reading:
    """Read and judge everything; takes some 10 µs per rule. Parts that could not be read are in the verdicts."""
    rulesets = Rulesets()
    maps: set[tuple[int, str, str]] = set()
    owned: frozenset[nft.Key] = frozenset()
    try:
        owned = owned_tables()  # first: one that ends meanwhile is missed at the next look
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
    try:
        if looks_up_ipsets(rulesets):
            rulesets.ipset_ports = _ipset_ports()
    except UNREADABLE as error:
        _unread(rulesets, (4, 6), f"the types of ipsets could not be read: {error}")
    unread = bool(rulesets.unread)
    verdicts, slow = judge(rulesets), rulesets.slow_devices
    # The kernel reports neither a change of iptables-legacy nor the end of a table that ends with its process.
    reported = frozenset[int]() if owned else lasting(rulesets) - {family for family, _ in tables}
    return Reading(verdicts, frozenset(maps), tables, digests, marks, slow, owned, unread, reported)


def owned_tables() -> frozenset[nft.Key]:
    """The tables of nftables that end with a process; takes microseconds. OSError."""
    with RequestSocket(uapi.NETLINK_NETFILTER) as netlink:
        return nft.owned(_of_all_tables(netlink, uapi.NFT_MSG_GETTABLE))


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
    with RequestSocket(uapi.NETLINK_NETFILTER) as netlink:
        everything = _of_all_tables(netlink, uapi.NFT_MSG_GETTABLE)
        tables = {key: table for key, table in nft.tables(everything).items() if not _is_known(*key)}
        if not tables:
            return []
        nft.add_chains(tables, _of_all_tables(netlink, uapi.NFT_MSG_GETCHAIN))
        for (family, name), table in tables.items():
            if not any(chain.hook for chain in table.chains.values()):
                continue  # No chain that forwarded packets cross.
            of_table = attribute(uapi.NFTA_SET_TABLE, zero_terminated(name))
            for each in nft.add_sets(table, _ask(netlink, uapi.NFT_MSG_GETSET, family, of_table)):
                maps.add((family, name, each))
                of_set = of_table + attribute(uapi.NFTA_SET_NAME, zero_terminated(each))
                nft.add_elements(table, each, _ask(netlink, uapi.NFT_MSG_GETSETELEM, family, of_set))
            nft.add_rules(table, _ask(netlink, uapi.NFT_MSG_GETRULE, family, of_table), known)
            for each in nft.deciding_sets(table):
                maps.add((family, name, each))
                if not _has_elements(family, of_table + attribute(uapi.NFTA_SET_NAME, zero_terminated(each))):
                    nft.remove_rules(table, each)
    return list(tables.values())


def _has_elements(family: int, of_set: bytes) -> bool:
    """Has a socket of its own, because it does not read all of a large set."""
    with RequestSocket(uapi.NETLINK_NETFILTER) as netlink:
        return nft.has_elements(_ask(netlink, uapi.NFT_MSG_GETSETELEM, family, of_set))


def _is_known(family: int, name: str) -> bool:
    if name == _KUBE_PROXY:
        return family in (nft.IPV4, nft.IPV6)
    return family == nft.INET and (name == _OURS or name.startswith(f"{_OURS}-"))


def _ask(netlink: RequestSocket, kind: int, family: int, of: bytes) -> Iterator[bytes]:
    """All messages; none if the object is gone, for which the kernel may also return ENOENT.

    Must be read to the end before the next query.
    """
    try:
        yield from netlink.dump(kind, uapi.NFGENMSG.pack(family, 0, 0) + of)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise


def _of_all_tables(netlink: RequestSocket, kind: int) -> list[bytes]:
    """The same for the objects of all tables. The kernel skips some if others, before them, are removed meanwhile.

    A change of a foreign table causes another reading, but a change of the agent's own table causes none.
    """
    for _ in range(_ATTEMPTS):
        try:
            return list(netlink.dump(kind, uapi.NFGENMSG.pack(0, 0, 0), whole=True))
        except OSError as error:
            if error.errno != errno.EINTR:
                raise
    raise OSError(errno.EAGAIN, f"chains changed while they were read, {_ATTEMPTS} times in a row")


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


# ---- ipsets --------------------------------------------------------------------------------------------------------


def _ipset_ports() -> dict[int, int]:
    """``Rulesets.ipset_ports`` of all ipsets; their elements are not read."""
    ask = attribute(uapi.IPSET_ATTR_PROTOCOL, bytes([uapi.IPSET_PROTOCOL]))
    ask += attribute(uapi.IPSET_ATTR_FLAGS, struct.pack(">I", uapi.IPSET_FLAG_LIST_HEADER))
    kinds = {}
    with RequestSocket(uapi.NETLINK_NETFILTER) as netlink:
        for message in _ask(netlink, uapi.IPSET_MSG_LIST, socket.AF_INET, ask):
            one = values(message, uapi.NFGENMSG.size)
            index = int.from_bytes(one[uapi.IPSET_ATTR_INDEX], "big")
            kinds[index] = text(one[uapi.IPSET_ATTR_TYPENAME])
    return ports_of_ipsets(kinds)


def ports_of_ipsets(kinds: Mapping[int, str]) -> dict[int, int]:
    """``Rulesets.ipset_ports`` of sets of these types, by index."""
    # Of members that have a port it is the second part, except for these.
    of_lists = 1 << 2 | (1 << 1 if "bitmap:port" in kinds.values() else 0)
    return {index: of_lists if kind == "list:set" else ports_of_ipset(kind) for index, kind in kinds.items()}


def ports_of_ipset(kind: str) -> int:
    """Which parts of an element are ports, by the type of the set, which is no list of sets."""
    parts = kind.partition(":")[2].split(",")
    return sum(1 << place for place, part in enumerate(parts, 1) if part == "port")


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
    with RequestSocket(uapi.NETLINK_ROUTE) as netlink:
        places = set()
        with_classes = set()
        for message in list(netlink.dump(uapi.RTM_GETQDISC, uapi.TCMSG.pack(0, 0, 0, 0, 0))):
            _, device, handle, _, _ = uapi.TCMSG.unpack_from(message)
            kind = _kind(message)
            if kind == _CLSACT:
                places.add((device, uapi.TC_H_CLSACT_EGRESS))
            elif kind not in _PLAIN_QDISCS:
                places.add((device, handle))
                if kind not in _LIST_FLOWS:
                    with_classes.add(device)
        for device in with_classes:
            for message in list(netlink.dump(uapi.RTM_GETTCLASS, uapi.TCMSG.pack(0, device, 0, 0, 0))):
                if _kind(message) not in _LIST_FLOWS:
                    places.add((device, uapi.TCMSG.unpack_from(message)[2]))
        for device, parent in sorted(places):
            try:
                filters = list(netlink.dump(uapi.RTM_GETTFILTER, uapi.TCMSG.pack(0, device, 0, parent, 0)))
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.ENODEV, errno.ENOENT, errno.EOPNOTSUPP):
                    continue  # It is gone, or its kind has no filters.
                raise
            if any(goes_by_mark(each) for each in filters):
                return True
    return False


def _kind(message: bytes) -> str:
    return text(values(message, uapi.TCMSG.size).get(uapi.TCA_KIND, b""))


def goes_by_mark(message: bytes) -> bool:
    """Whether a tc filter, from the kernel's description, uses packets' marks or may use them."""
    kind = _kind(message)
    if kind in ("fw", "flow", "basic"):  # the last two may
        return True
    options = values(message, uapi.TCMSG.size).get(uapi.TCA_OPTIONS, b"")
    return kind == "u32" and uapi.TCA_U32_MARK in values(options)


# ---- devices -------------------------------------------------------------------------------------------------------


def device(message: bytes) -> tuple[str, bool]:
    """The device's name, and whether it is an Ethernet device, from a link message without its netlink header."""
    _, kind, _, _, _ = uapi.IFINFOMSG.unpack_from(message)
    parts = attributes(message, uapi.IFINFOMSG.size, len(message))
    name = next((text(message[begin:end]) for kind, begin, end in parts if kind == uapi.IFLA_IFNAME), "")
    return name, kind == _ETHERNET


def _slow_devices() -> frozenset[str]:
    with RequestSocket(uapi.NETLINK_ROUTE) as netlink:
        ask = bytes(uapi.IFINFOMSG.size) + WITHOUT_STATISTICS
        return frozenset(name for name, fast in map(device, netlink.dump(uapi.RTM_GETLINK, ask)) if not fast)
