# SPDX-License-Identifier: Apache-2.0
"""Each device's XDP features, as reported by the kernel (generic netlink, family netdev, since 6.3)."""

from __future__ import annotations

import errno
import socket
import struct

from pyebpf_proxy.datapath.connections.rawlink import RawLink, attributes

# include/uapi/linux/netdev.h
BASIC, REDIRECT, NDO_XMIT, RX_SG, NDO_XMIT_SG = 1, 2, 4, 32, 64
_DEV_GET, _IFINDEX, _FEATURES = 1, 1, 3
# include/uapi/linux/genetlink.h
_NETLINK_GENERIC, _CONTROL, _GET_FAMILY = 16, 0x10, 3
_FAMILY_ID, _FAMILY_NAME, _GROUPS, _GROUP_NAME, _GROUP_ID = 1, 2, 7, 1, 2
_ADD_MEMBERSHIP, _SOL_NETLINK = 1, 270
_HEADER = struct.Struct("=BBH")
_NAME = b"netdev\0"


class Features:
    """``by_device``: bits by ifindex of this network namespace. Empty if the kernel is too old to report them.

    Add ``fileno`` to the loop with ``read`` as reader; without the family there is nothing to follow.
    """

    def __init__(self) -> None:
        self.by_device: dict[int, int] = {}
        self._events: socket.socket | None = None
        self._family, group = _family()
        if not self._family:
            return
        self._events = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, _NETLINK_GENERIC
        )
        try:
            self._events.bind((0, 0))
            self._events.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)
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
        """Process new messages; whether anything may have changed."""
        came = False
        while self._events is not None:
            try:
                self._events.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
            came = True
        if came:
            self.list()
        return came

    def list(self) -> None:
        """List the features of all devices. OSError."""
        found = {}
        with RawLink(_NETLINK_GENERIC) as link:
            for message in link.dump(self._family, _HEADER.pack(_DEV_GET, 1, 0)):
                values = {
                    kind: int.from_bytes(message[begin:end], "little")
                    for kind, begin, end in attributes(message, _HEADER.size, len(message))
                }
                found[values.get(_IFINDEX, 0)] = values.get(_FEATURES, 0)
        self.by_device = found

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def _family() -> tuple[int, int]:
    """Number of the family and of its multicast group; 0 if it does not exist."""
    number, group = 0, 0
    # All families: they are few, and each is a separate message.
    with RawLink(_NETLINK_GENERIC) as link:
        for message in link.dump(_CONTROL, _HEADER.pack(_GET_FAMILY, 1, 0)):
            parts = {kind & 0x3FFF: (begin, end) for kind, begin, end in attributes(message, 4, len(message))}
            begin, end = parts.get(_FAMILY_NAME, (0, 0))
            if message[begin:end] != _NAME:
                continue
            begin, end = parts[_FAMILY_ID]
            number = int.from_bytes(message[begin:end], "little")
            for _, begin, end in attributes(message, *parts.get(_GROUPS, (0, 0))):
                inner = {k & 0x3FFF: message[b:e] for k, b, e in attributes(message, begin, end)}
                if inner.get(_GROUP_NAME) == b"mgmt\0":
                    group = int.from_bytes(inner[_GROUP_ID], "little")
    return (number, group) if group else (0, 0)
