# SPDX-License-Identifier: Apache-2.0
"""Neighbours' link addresses, which the fast path uses without a lookup for each packet: whether one has changed.

The kernel reports every state change of a neighbour (a busy one goes stale and is probed once a minute). A change here
means that a known link address was replaced or is no longer valid.
"""

from __future__ import annotations

import errno
import socket
import struct

from pyebpf_proxy.datapath.connections.rawlink import RawLink, attributes

# include/uapi/linux/netlink.h, rtnetlink.h, neighbour.h
_NETLINK_ROUTE, _SOL_NETLINK, _ADD_MEMBERSHIP, _NEIGHBOUR_GROUP = 0, 270, 1, 3
_NEWNEIGH, _DELNEIGH, _GETNEIGH = 28, 29, 30
_MESSAGE = struct.Struct("=IHHII")
_NEIGHBOUR = struct.Struct("=BBHiHBB")  # struct ndmsg
_DESTINATION, _LINK_ADDRESS = 1, 2
#: NUD_REACHABLE, STALE, DELAY, PROBE, NOARP, PERMANENT: packets are sent to the address.
_VALID = 0x02 | 0x04 | 0x08 | 0x10 | 0x40 | 0x80
_RECEIVE_BYTES = 1 << 17
_Key = tuple[int, int, bytes]


class Neighbours:
    """The neighbours of the network namespace in which it is created. OSError; :meth:`close` it."""

    def __init__(self) -> None:
        self._known: dict[_Key, bytes] = {}
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, kind, _NETLINK_ROUTE)
        try:
            self._socket.bind((0, 0))
            self._socket.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, _NEIGHBOUR_GROUP)
            self._list()
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """For ``loop.add_reader``."""
        return self._socket.fileno()

    def read(self) -> bool:
        """Process new messages: whether packets may still be sent to a wrong address. OSError."""
        moved = False
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return moved
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                self._list()  # Messages were lost.
                moved = True
                continue
            at = 0
            while at + _MESSAGE.size <= len(data):
                length, kind, _, _, _ = _MESSAGE.unpack_from(data, at)
                if kind in (_NEWNEIGH, _DELNEIGH):
                    moved |= self.note(data[at + _MESSAGE.size : at + length], kind == _DELNEIGH)
                at += max(length + 3 & ~3, _MESSAGE.size)

    def note(self, message: bytes, gone: bool = False) -> bool:
        """One neighbour message: whether its link address was known, and is now another one or none."""
        found = _read(message)
        if found is None:
            return False
        key, address = found
        before = self._known.pop(key, b"")
        if address and not gone:
            self._known[key] = address
        return bool(before) and before != self._known.get(key)

    def close(self) -> None:
        """Stop following."""
        self._socket.close()

    def _list(self) -> None:
        self._known.clear()
        with RawLink(_NETLINK_ROUTE) as link:
            for message in link.dump(_GETNEIGH, _NEIGHBOUR.pack(socket.AF_UNSPEC, 0, 0, 0, 0, 0, 0)):
                self.note(message)


def _read(message: bytes) -> tuple[_Key, bytes] | None:
    """The neighbour, and its link address, empty if no valid one is known. None: not an IP neighbour."""
    family, _, _, device, state, _, _ = _NEIGHBOUR.unpack_from(message)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    parts = {kind: message[begin:end] for kind, begin, end in attributes(message, _NEIGHBOUR.size, len(message))}
    address = parts.get(_LINK_ADDRESS, b"") if state & _VALID else b""
    return (device, family, parts.get(_DESTINATION, b"")), address
