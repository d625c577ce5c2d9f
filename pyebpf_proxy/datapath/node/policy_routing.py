# SPDX-License-Identifier: Apache-2.0
"""Reads what chooses routes: which ip rules distinguish packets between the same two hosts, and which use marks; which
routes have several next hops, and whether the choice among them depends on the flow.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from pathlib import Path

from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import attribute, number, values, word
from pyebpf_proxy.datapath.netlink.request import RequestSocket

#: By attribute (FRA_*, include/uapi/linux/fib_rules.h): selectors by which another flow of the same hosts may differ.
_SELECTORS = {
    12: "a tunnel's id",
    20: "user id",
    22: "protocol",
    23: "source port",
    24: "destination port",
    25: "DSCP",
    26: "flow label",
    27: "flow label",
    28: "source port",
    29: "destination port",
    30: "DSCP",
}
#: GOTO, DST, SRC, IIFNAME, PRIORITY, FWMARK, FLOW, SUPPRESS_IFGROUP, SUPPRESS_PREFIXLEN, TABLE, FWMASK, OIFNAME, PAD,
#: L3MDEV, PROTOCOL: the path learned from one packet is also right for the next one.
_PLAIN = frozenset({1, 2, 3, 4, 6, 10, 11, 13, 14, 15, 16, 17, 18, 19, 21})
_WHOLE = bytes([0xFF] * 4)
_SYSCTLS: dict[int, Path] = {socket.AF_INET: Path("/proc/sys/net/ipv4"), socket.AF_INET6: Path("/proc/sys/net/ipv6")}
_HASH_POLICY, _HASH_FIELDS = "fib_multipath_hash_policy", "fib_multipath_hash_fields"
#: Values of the policy: by ports, and by the fields of the other setting.
_BY_PORTS, _BY_FIELDS = 1, 3
#: Fields in which flows of the same hosts differ: flow label and ports, also those of an inner packet
#: (FIB_MULTIPATH_HASH_FIELD_*, include/net/ip_fib.h).
_FLOW_FIELDS = 0x0008 | 0x0010 | 0x0020 | 0x0200 | 0x0400 | 0x0800


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """``selects``: the selector that distinguishes flows of the same hosts, else "". ``mask`` 0: it uses no mark."""

    priority: int
    selects: str = ""
    mark: int = 0
    mask: int = 0
    inverted: bool = False


def rules(family: int) -> list[RoutingRule]:
    """The rules of this network namespace for AF_INET or AF_INET6; none if the kernel has no ip rules. OSError."""
    try:
        with RequestSocket(uapi.NETLINK_ROUTE) as netlink:
            request = uapi.FIB_RULE_HDR.pack(family, *[0] * 8)
            return [parse(message) for message in netlink.dump(uapi.RTM_GETRULE, request)]
    except OSError as error:
        if error.errno in (errno.EAFNOSUPPORT, errno.EOPNOTSUPP):
            return []  # No such family here, or a kernel without ip rules.
        raise


def flow_hash(family: int) -> str:
    """The setting by which flows of the same hosts take different next hops, for AF_INET or AF_INET6; "": none does.

    The kernel reports no change of it. OSError.
    """
    policy = _number(_SYSCTLS[family] / _HASH_POLICY)
    fields = _number(_SYSCTLS[family] / _HASH_FIELDS) if policy == _BY_FIELDS else 0
    if policy != _BY_PORTS and not fields & _FLOW_FIELDS:
        return ""
    name = f"net.{_SYSCTLS[family].name}.{_HASH_POLICY} is {policy}"
    return f"{name}, and {_HASH_FIELDS} 0x{fields:x}" if fields else name


def several_next_hops(family: int) -> str:
    """The destination of a route with several next hops, in any table, for AF_INET or AF_INET6; "": none. OSError."""
    # There may be a million routes, which share an object.
    members = cache(_members)
    with RequestSocket(uapi.NETLINK_ROUTE) as netlink:
        for message in netlink.dump(uapi.RTM_GETROUTE, uapi.RTMSG.pack(family, *[0] * 8)):
            parts = values(message, uapi.RTMSG.size)
            hops = _hops(parts.get(uapi.RTA_MULTIPATH, b""))
            # With nexthop_compat_mode 0, the message has no next hops beside the object.
            if not hops and uapi.RTA_NH_ID in parts:
                hops = members(number(parts[uapi.RTA_NH_ID]))
            if hops > 1:
                return _destination(message)
    return ""


def may_have_several_next_hops(route: bytes) -> bool:
    """Whether the kernel's message of a route has several next hops, or a next hop object, which may be a group."""
    return not {uapi.RTA_MULTIPATH, uapi.RTA_NH_ID}.isdisjoint(values(route, uapi.RTMSG.size))


def _hops(data: bytes) -> int:
    at, count = 0, 0
    while at + uapi.RTNEXTHOP.size <= len(data):
        at += max(uapi.RTNEXTHOP.unpack_from(data, at)[0] + 3 & ~3, uapi.RTNEXTHOP.size)
        count += 1
    return count


def _members(next_hop: int) -> int:
    """How many members a next hop object has; 0: it is no group, or was removed meanwhile. OSError."""
    request = uapi.NHMSG.pack(*[0] * 5) + attribute(uapi.NHA_ID, word(next_hop))
    try:
        with RequestSocket(uapi.NETLINK_ROUTE) as netlink:
            parts = values(netlink.get(uapi.RTM_GETNEXTHOP, request), uapi.NHMSG.size)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return 0
        raise
    return len(parts.get(uapi.NHA_GROUP, b"")) // uapi.NEXTHOP_GRP.size


def _destination(route: bytes) -> str:
    length = uapi.RTMSG.unpack_from(route)[1]
    address = values(route, uapi.RTMSG.size).get(uapi.RTA_DST)
    return f"{ip_address(address)}/{length}" if address else "default"


def _number(setting: Path) -> int:
    try:
        return int(setting.read_text())
    except FileNotFoundError:
        return 0  # A kernel without routes that have several next hops, or without the family.


def parse(message: bytes) -> RoutingRule:
    """A rule from the kernel's message."""
    _, _, _, tos, _, _, _, _, flags = uapi.FIB_RULE_HDR.unpack_from(message)
    parts = values(message, uapi.FIB_RULE_HDR.size)
    selects = "TOS" if tos else ""
    for kind in parts:
        if kind not in _PLAIN:
            selects = _SELECTORS.get(kind, f"unknown attribute {kind}")
    mark = number(parts.get(uapi.FRA_FWMARK, b""))
    mask = number(parts.get(uapi.FRA_FWMASK, _WHOLE if uapi.FRA_FWMARK in parts else b""))
    priority = number(parts.get(uapi.FRA_PRIORITY, b""))
    return RoutingRule(priority, selects, mark, mask, bool(flags & uapi.FIB_RULE_INVERT))
