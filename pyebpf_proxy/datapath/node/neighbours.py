# SPDX-License-Identifier: Apache-2.0
"""Follows changes of neighbours' link addresses, which the fast path uses without a lookup for each packet.

The kernel reports every state change of a neighbour (a busy one goes stale and is probed once a minute). A change here
means that a known link address was replaced or is no longer valid.
"""

from __future__ import annotations

import socket
from itertools import chain

from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import messages, values
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.subscription import Subscription

#: Packets are sent to the address.
_VALID = uapi.NUD_REACHABLE | uapi.NUD_STALE | uapi.NUD_DELAY | uapi.NUD_PROBE | uapi.NUD_NOARP | uapi.NUD_PERMANENT
_Key = tuple[int, int, bytes]


class Neighbours:
    """The neighbours of the network namespace in which it is created. OSError; :meth:`close` it."""

    def __init__(self) -> None:
        self._known: dict[_Key, bytes] = {}
        #: Neighbours may be missing in ``_known``: list them again.
        self._stale = True
        #: Of what :meth:`read` has reported last: an address was replaced, or is not valid any more. Otherwise the
        #: kernel has forgotten neighbours for lack of use, as it does all the time with more than 128 of them.
        self.replaced = False
        self._events = Subscription(uapi.NETLINK_ROUTE, [uapi.RTNLGRP_NEIGH])
        try:
            self._list()
        except BaseException:
            self._events.close()
            raise

    def fileno(self) -> int:
        """For ``loop.add_reader``."""
        return self._events.fileno()

    def read(self) -> bool:
        """Process new messages: whether packets may still be sent to a wrong address.

        OSError: call it again later, also without messages.
        """
        stale, self._stale = self._stale, True  # until all that was received has been processed
        self.replaced = False
        received = list(self._events.received())
        if stale or None in received:  # Messages were lost.
            self._list()
            self.replaced = True
            return True
        moved = False
        for kind, _, _, message in chain.from_iterable(messages(data) for data in received if data):
            if kind in (uapi.RTM_NEWNEIGH, uapi.RTM_DELNEIGH):
                moved |= self.note(message, kind == uapi.RTM_DELNEIGH)
        self._stale = False
        return moved

    def note(self, message: bytes, gone: bool = False) -> bool:
        """Record a neighbour message. True: the link address was known, and now there is another one or none."""
        found = _read(message)
        if found is None:
            return False
        key, address = found
        before = self._known.pop(key, b"")
        if address and not gone:
            self._known[key] = address
        if not before or before == self._known.get(key):
            return False
        self.replaced |= address != before
        return True

    def close(self) -> None:
        """Stop following."""
        self._events.close()

    def _list(self) -> None:
        self._known.clear()
        with RequestSocket(uapi.NETLINK_ROUTE) as netlink:
            for message in netlink.dump(uapi.RTM_GETNEIGH, uapi.NDMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0, 0, 0)):
                self.note(message)
        self._stale = False


def _read(message: bytes) -> tuple[_Key, bytes] | None:
    """The neighbour, and its link address, empty if no valid one is known. None: not an IP neighbour."""
    family, _, _, device, state, _, _ = uapi.NDMSG.unpack_from(message)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    parts = values(message, uapi.NDMSG.size)
    address = parts.get(uapi.NDA_LLADDR, b"") if state & _VALID else b""
    return (device, family, parts.get(uapi.NDA_DST, b"")), address
