# SPDX-License-Identifier: Apache-2.0
"""Notices at once when somebody has changed the proxy's nftables table, such as ``nft flush ruleset`` of a firewall.

Without the table, netfilter translates nothing: new flows of the slow path fail, and established ones are answered with
resets. The kernel names the table in its notification of each commit. The proxy's own commits name it, too:
``Table.ensure`` tells them apart, by the generation of the rules.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Callable

from pyebpf_proxy.common.log import Logger

# include/uapi/linux/netlink.h, netfilter/nfnetlink_compat.h, netfilter/nf_tables.h
_NETLINK_NETFILTER, _ADD_MEMBERSHIP, _SOL_NETLINK = 12, 1, 270
_NFTABLES_GROUP = 7
#: NFTA_TABLE_NAME and the attributes that name the table of chains, rules, sets and elements have the same number.
_TABLE_ATTRIBUTE = 1
_RECEIVE_BYTES = 1 << 17
#: Minimum seconds from one check to the next: a firewall that rewrites its rules all the time must cost little.
INTERVAL = 0.5

_log = Logger("datapath")


class TableWatch:
    """Calls ``changed`` in the loop's thread after a commit to the table ``name``. OSError if it cannot subscribe.

    The socket's receive buffer stays small: if a large commit overflows it, the rest of the notifications is not read.
    """

    def __init__(self, name: str, changed: Callable[[], None]) -> None:
        text = name.encode() + b"\0"
        self._mark = struct.pack("=HH", 4 + len(text), _TABLE_ATTRIBUTE) + text
        self._changed = changed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._again = False
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, kind, _NETLINK_NETFILTER)
        try:
            self._socket.bind((0, 0))
            self._socket.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, _NFTABLES_GROUP)
        except BaseException:
            self._socket.close()
            raise

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch from now on, until ``close``."""
        self._loop = loop
        loop.add_reader(self._socket, self._read)

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._loop = None
        self._socket.close()

    def _read(self) -> None:
        if self._named():
            self._check()

    def _named(self) -> bool:
        """Reads all notifications: whether one names the table, or some were lost."""
        named = False
        while True:
            try:
                named |= self._mark in self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return named
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    _log.error("changes of nftables could not be followed", error=str(error))
                    return named
                named = True

    def _check(self) -> None:
        """At once, but no sooner than INTERVAL after the last time."""
        assert self._loop is not None
        if self._timer is not None:
            self._again = True
            return
        self._timer = self._loop.call_later(INTERVAL, self._rested)
        self._changed()

    def _rested(self) -> None:
        self._timer = None
        if self._again:
            self._again = False
            self._check()
