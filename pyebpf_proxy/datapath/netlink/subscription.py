# SPDX-License-Identifier: Apache-2.0
"""Notifications of the kernel by netlink."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Self

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.datapath.netlink.uapi import (
    NETLINK_ADD_MEMBERSHIP,
    NETLINK_GENERIC,
    NETLINK_NETFILTER,
    NETLINK_ROUTE,
    NETLINK_XFRM,
    SO_RCVBUFFORCE,
    SOL_NETLINK,
)

_RECEIVE_BYTES = 1 << 17
#: Of a subscription that many messages may come for at once.
LARGE_BUFFER = 8 << 20

#: Datagrams of one call of ``received``: a process that changes routes all the time must not hold up the loop.
_AT_ONCE = 1000
#: A datagram takes at least this many bytes of a receive buffer.
_LEAST_BYTES = 512

_NAMES = {
    NETLINK_ROUTE: "route",
    NETLINK_NETFILTER: "netfilter",
    NETLINK_GENERIC: "generic",
    NETLINK_XFRM: "xfrm",
}
_overruns = dict.fromkeys(_NAMES.values(), 0)

_log = Logger("datapath")


def overruns() -> Mapping[str, int]:
    """How often the kernel has dropped notifications because a buffer was full, by protocol; since the agent's start.

    The receiver lists again then. Safe in any thread.
    """
    return dict(_overruns)


class Subscription:
    """Multicast groups of one protocol, in the network namespace in which it is created; a context manager. OSError.

    ``optional``: groups that older kernels do not have. ``buffer``: bytes of the receive buffer, 0 for the default; a
    process without CAP_NET_ADMIN gets the default, which overflows earlier. List what the messages are about after the
    subscription: then no change is missed.
    """

    def __init__(self, protocol: int, groups: Iterable[int], optional: Iterable[int] = (), buffer: int = 0) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._name = _NAMES.get(protocol, str(protocol))
        self._socket = socket.socket(socket.AF_NETLINK, kind, protocol)
        #: Datagrams were dropped, and those before the gap may still be in the buffer.
        self._overrun = False
        try:
            if buffer:
                try:
                    self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, buffer)
                except PermissionError:
                    pass
            self._socket.bind((0, 0))
            for group in groups:
                self._join(group)
            for group in optional:
                try:
                    self._join(group)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def fileno(self) -> int:
        """For ``loop.add_reader``; call :meth:`received` when it is readable."""
        return self._socket.fileno()

    def close(self) -> None:
        """End the subscription."""
        self._socket.close()

    def received(self) -> Iterator[bytes | None]:
        """The datagrams that have arrived, without waiting; at most 1000, others with the next call. OSError.

        None, as the last one: the kernel dropped some. Those from before are void and discarded: list again.
        """
        for _ in range(_AT_ONCE):
            if self._overrun:
                self._discard()
                yield None
                return
            try:
                yield self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._note_overrun(error)

    def _note_overrun(self, error: OSError) -> None:
        if error.errno != errno.ENOBUFS:
            raise error
        self._overrun = True
        _overruns[self._name] = _overruns.get(self._name, 0) + 1

    def _discard(self) -> None:
        """Discard what was in the buffer before the gap, which would undo what a list says.

        That is no more than fits into the buffer, however fast others send.
        """
        self._overrun = False
        for _ in range(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // _LEAST_BYTES):
            try:
                self._socket.recv(1)
            except BlockingIOError:
                self._overrun = False
                return
            except OSError as error:
                self._note_overrun(error)

    def received_or_logged(self, what: str) -> list[bytes | None]:
        """:meth:`received` as a list. An error is logged as "``what`` could not be followed", and ends the list."""
        found: list[bytes | None] = []
        try:
            found.extend(self.received())
        except OSError as error:
            _log.error(f"{what} could not be followed", error=str(error))
        return found

    def _join(self, group: int) -> None:
        self._socket.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, group)
