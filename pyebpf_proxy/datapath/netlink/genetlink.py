# SPDX-License-Identifier: Apache-2.0
"""Generic netlink: families and their multicast groups by name."""

from __future__ import annotations

from typing import NamedTuple

from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import number, text, values
from pyebpf_proxy.datapath.netlink.request import RequestSocket


class Family(NamedTuple):
    """A family's number, and its multicast groups by name."""

    number: int
    groups: dict[str, int]


def family(name: str) -> Family | None:
    """The family with this name; None: this kernel does not have it. OSError."""
    found = None
    # All families: they are few, and each is a separate message. A query by name would load a module.
    with RequestSocket(uapi.NETLINK_GENERIC) as netlink:
        for message in netlink.dump(uapi.GENL_ID_CTRL, uapi.GENLMSGHDR.pack(uapi.CTRL_CMD_GETFAMILY, 1, 0)):
            parts = values(message, uapi.GENLMSGHDR.size)
            if text(parts.get(uapi.CTRL_ATTR_FAMILY_NAME, b"")) == name:
                groups = [values(each) for each in values(parts.get(uapi.CTRL_ATTR_MCAST_GROUPS, b"")).values()]
                found = Family(
                    number(parts[uapi.CTRL_ATTR_FAMILY_ID]),
                    {
                        text(each[uapi.CTRL_ATTR_MCAST_GRP_NAME]): number(each[uapi.CTRL_ATTR_MCAST_GRP_ID])
                        for each in groups
                    },
                )
    return found
