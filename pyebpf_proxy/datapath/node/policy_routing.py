# SPDX-License-Identifier: Apache-2.0
"""ip rules: which of them distinguish packets of the same two hosts, and which use marks."""

from __future__ import annotations

import errno
import struct
import sys
from dataclasses import dataclass

from pyebpf_proxy.datapath.connections.rawlink import RawLink, attributes

# include/uapi/linux/rtnetlink.h, fib_rules.h
_NETLINK_ROUTE, _GETRULE = 0, 34
_HEADER = struct.Struct("=BBBBBBBBI")  # struct fib_rule_hdr
_INVERT = 2
_PRIORITY, _MARK, _MARK_MASK = 6, 10, 16
#: By attribute: selectors by which another flow of the same hosts may differ.
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
        with RawLink(_NETLINK_ROUTE) as link:
            return [parse(message) for message in link.dump(_GETRULE, _HEADER.pack(family, *[0] * 8))]
    except OSError as error:
        if error.errno in (errno.EAFNOSUPPORT, errno.EOPNOTSUPP):
            return []  # No such family here, or a kernel without ip rules.
        raise


def parse(message: bytes) -> RoutingRule:
    """A rule from the kernel's message."""
    _, _, _, tos, _, _, _, _, flags = _HEADER.unpack_from(message)
    numbers = {}
    selects = "TOS" if tos else ""
    for kind, begin, end in attributes(message, _HEADER.size, len(message)):
        numbers[kind] = int.from_bytes(message[begin:end], sys.byteorder)
        if kind not in _PLAIN:
            selects = _SELECTORS.get(kind, f"unknown attribute {kind}")
    mark = numbers.get(_MARK, 0)
    mask = numbers.get(_MARK_MASK, 0xFFFFFFFF if _MARK in numbers else 0)
    return RoutingRule(numbers.get(_PRIORITY, 0), selects, mark, mask, bool(flags & _INVERT))
