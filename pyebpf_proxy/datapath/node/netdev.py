# SPDX-License-Identifier: Apache-2.0
"""Each device's XDP features, as reported by the kernel (generic netlink, family netdev, since 6.3)."""

from __future__ import annotations

from pyebpf_proxy.datapath.netlink import genetlink, uapi
from pyebpf_proxy.datapath.netlink.messages import number, values
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.subscription import Subscription

# include/uapi/linux/netdev.h
BASIC, REDIRECT, NDO_XMIT, RX_SG, NDO_XMIT_SG = 1, 2, 4, 32, 64
_DEV_GET, _IFINDEX, _FEATURES = 1, 1, 3
_FAMILY, _GROUP = "netdev", "mgmt"


class Features:
    """``by_device``: bits by ifindex of this network namespace. Empty if the kernel is too old to report them.

    Add ``fileno`` to the loop with ``read`` as reader; without the family there is nothing to follow.
    """

    def __init__(self) -> None:
        self.by_device: dict[int, int] = {}
        #: A message came, and the features were not listed since.
        self._stale = False
        self._events: Subscription | None = None
        family = genetlink.family(_FAMILY)
        if family is None or _GROUP not in family.groups:
            return
        self._family = family.number
        self._events = Subscription(uapi.NETLINK_GENERIC, [family.groups[_GROUP]])
        try:
            self.list()
        except BaseException:
            self._events.close()
            raise

    @property
    def known(self) -> bool:
        """Whether the kernel reports features at all."""
        return self._events is not None

    def fileno(self) -> int:
        """-1: there is nothing to follow."""
        return -1 if self._events is None else self._events.fileno()

    def read(self) -> bool:
        """Process new messages; whether anything may have changed. OSError: call it again, also without messages."""
        for _ in self._events.received() if self._events is not None else ():
            self._stale = True
        if not self._stale:
            return False
        self.list()
        return True

    def list(self) -> None:
        """List the features of all devices. OSError."""
        found = {}
        with RequestSocket(uapi.NETLINK_GENERIC) as netlink:
            for message in netlink.dump(self._family, uapi.GENLMSGHDR.pack(_DEV_GET, 1, 0)):
                parts = values(message, uapi.GENLMSGHDR.size)
                found[number(parts.get(_IFINDEX, b""))] = number(parts.get(_FEATURES, b""))
        self.by_device = found
        self._stale = False

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
