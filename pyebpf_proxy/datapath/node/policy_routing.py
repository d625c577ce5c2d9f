# SPDX-License-Identifier: Apache-2.0
"""Reads ip rules: which of them distinguish packets between the same two hosts, and which use marks."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import number, values
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
