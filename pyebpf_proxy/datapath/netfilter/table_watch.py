# SPDX-License-Identifier: Apache-2.0
"""Notices at once when another program changes the proxy's nftables table, such as a firewall's ``nft flush ruleset``.

Without the table, netfilter translates nothing: new flows of the slow path fail, and established ones are answered with
resets. The kernel names the table in its notification of each commit. The proxy's own commits name it, too:
``Table.ensure`` tells them apart, by the generation of the rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pyebpf_proxy.common.rate_limit import RateLimit
from pyebpf_proxy.common.retry import Retry
from pyebpf_proxy.datapath.netlink.messages import attribute_header, zero_terminated
from pyebpf_proxy.datapath.netlink.subscription import Subscription
from pyebpf_proxy.datapath.netlink.uapi import NETLINK_NETFILTER, NFNLGRP_NFTABLES, NFTA_TABLE_NAME

#: Minimum seconds from one check to the next: a firewall that rewrites its rules all the time must cost little.
INTERVAL = 0.5
#: After a check that failed, the next one follows after INTERVAL, then after twice as long, at most after this: a large
#: table that the kernel refuses costs a second each time.
LONGEST_RETRY = 8.0


class TableWatch:
    """Calls ``changed`` in the loop's thread after a commit to the table ``name``, and again if that returns False.

    OSError if it cannot subscribe.
    The socket's receive buffer stays small: if a large commit overflows it, the rest of the notifications is not read.
    """

    def __init__(self, name: str, changed: Callable[[], bool]) -> None:
        # The attributes that name the table of chains, rules, sets and elements have the same number.
        value = zero_terminated(name)
        self._mark = attribute_header(NFTA_TABLE_NAME, len(value)) + value
        self._changed = changed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limit = RateLimit(self._check, burst=1, per_second=1 / INTERVAL)
        self._retry = Retry(self._limit.call, INTERVAL, LONGEST_RETRY)
        self._subscription = Subscription(NETLINK_NETFILTER, [NFNLGRP_NFTABLES])

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch from now on, until ``close``."""
        self._loop = loop
        self._limit.follow(loop)
        self._retry.follow(loop)
        loop.add_reader(self._subscription, self._read)

    def close(self) -> None:
        """Stop watching."""
        self._retry.close()
        self._limit.close()
        if self._loop is not None:
            self._loop.remove_reader(self._subscription)
            self._loop = None
        self._subscription.close()

    def _read(self) -> None:
        # After a failure, the next attempt checks this change, too.
        if self._named() and not self._retry.due:
            self._limit.call()

    def _named(self) -> bool:
        """Reads all notifications: whether one names the table, or some were lost."""
        received = self._subscription.received_or_logged("changes of nftables")
        return any(datagram is None or self._mark in datagram for datagram in received)

    def _check(self) -> None:
        if self._changed():
            self._retry.succeeded()
        else:
            self._retry.failed()
