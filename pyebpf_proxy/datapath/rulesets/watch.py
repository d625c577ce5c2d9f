# SPDX-License-Identifier: Apache-2.0
"""Follows the rulesets of this network namespace: reports each change at once, and reads the rules again soon after.

nftables (and so iptables-nft) notifies about each commit. iptables-legacy does not: it is checked every two seconds,
and so are tables of nftables that end with a process.
Contents of ipsets are not checked: no rule closes the fast path because of them, and permits last one second anyway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.common.memory import give_back
from pyebpf_proxy.common.threads import in_daemon_thread
from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import attributes, messages, text
from pyebpf_proxy.datapath.netlink.subscription import LARGE_BUFFER, Subscription
from pyebpf_proxy.datapath.rulesets import kernel, nft
from pyebpf_proxy.datapath.rulesets.kernel import Reading

#: Minimum seconds from the beginning of one reading to the next.
INTERVAL = 0.25
#: Also at least this many times the CPU time of the last reading: constantly changing rulesets cost a tenth of a CPU.
SHARE = 10
#: Maximum of that.
LONGEST = 5.0
#: After a reading that took this many seconds, memory is returned to the system.
_LARGE = 0.05
#: Seconds between two checks of the number and size of iptables-legacy's rules; and between two checks of their
#: contents, because a rule may be replaced by another one of the same size.
LOOK_SECONDS = 2.0
CLOSE_LOOK_SECONDS = 30.0

_log = Logger("datapath")


class Commits:
    """Interprets nfnetlink notifications: which commits were not of the table ``inet <own>``, and what they changed.

    Pure except for its state.
    """

    def __init__(self, own: str) -> None:
        self._own = (nft.INET, own)
        self._begin()

    def _begin(self) -> None:
        self._others = self._mine = self._rules = False

    def take(self, data: bytes, maps: frozenset[tuple[int, str, str]]) -> tuple[bool, bool]:
        """Parses received messages: whether others have committed a change, and whether it was more than elements.

        ``maps``: verdict maps, whose elements count as rules: family, table, name.
        """
        changed = rules = False
        for kind, _, _, message in messages(data):
            if kind == uapi.NFT_MSG_NEWGEN:
                # The end of a commit. A commit without messages was made by others.
                if self._others or not self._mine:
                    changed = True
                    rules |= self._rules or not self._others
                self._begin()
            elif kind >> 8 == uapi.NFNL_SUBSYS_NFTABLES:
                self._note(kind, message, maps)
        return changed, rules

    def _note(self, kind: int, message: bytes, maps: frozenset[tuple[int, str, str]]) -> None:
        family = message[0]
        names = {}
        for attribute, begin, end in attributes(message, uapi.NFGENMSG.size, len(message)):
            if attribute > 2:
                break
            names[attribute] = message[begin:end]
        table = text(names.get(1, b""))
        if (family, table) == self._own:
            self._mine = True
            return
        self._others = True
        elements = kind in (uapi.NFT_MSG_NEWSETELEM, uapi.NFT_MSG_DELSETELEM)
        if not elements or (family, table, text(names.get(2, b""))) in maps:
            self._rules = True


class Watch:
    """The rulesets of the network namespace in which it is created, read once at creation. OSError.

    ``own``: the name of this instance's table, whose changes do not count. ``on_commit`` is called for every change by
    others, before anything is read; ``on_reading`` after each reading, including the first. Both in the loop's thread.
    """

    def __init__(self, own: str, on_commit: Callable[[], None], on_reading: Callable[[Reading], None]) -> None:
        self._commits = Commits(own)
        self._on_commit = on_commit
        self._on_reading = on_reading
        self._events = Subscription(uapi.NETLINK_NETFILTER, [uapi.NFNLGRP_NFTABLES], buffer=LARGE_BUFFER)
        try:
            self._filters = Subscription(uapi.NETLINK_ROUTE, [uapi.RTNLGRP_TC], buffer=LARGE_BUFFER)
        except BaseException:
            self._events.close()
            raise
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading = False
        self._wanted = False
        try:
            self._began = self._looked = time.clock_gettime(time.CLOCK_MONOTONIC)
            before = time.thread_time()
            self.reading = kernel.read()
            self._took = time.thread_time() - before
            on_reading(self.reading)
        except BaseException:
            self._close_sockets()
            raise

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch from now on, until ``close``."""
        self._loop = loop
        loop.add_reader(self._events, self._read_commits)
        loop.add_reader(self._filters, self._read_filters)
        self._look()

    def again(self) -> None:
        """Read again soon: something that the verdict depends on has changed."""
        self._wanted = True
        if self._loop is None or self._reading or "read" in self._timers:
            return
        now = time.clock_gettime(time.CLOCK_MONOTONIC)
        wait = max(0.0, self._began + min(max(INTERVAL, SHARE * self._took), LONGEST) - now)
        self._timers["read"] = self._loop.call_later(wait, self._start)

    @property
    def lasting(self) -> frozenset[int]:
        """Families in which every change of the rules calls ``on_commit`` at once; none while rules are read again."""
        being_read = self._reading or self._wanted or "read" in self._timers
        return frozenset() if being_read else self.reading.lasting

    def close(self) -> None:
        """Stop watching."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for task in self._tasks:
            task.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self._events)
            self._loop.remove_reader(self._filters)
            self._loop = None
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._events.close()
        self._filters.close()

    # ---- notifications of the kernel ---------------------------------------------------------------------------

    def _read_commits(self) -> None:
        changed = rules = False
        for data in self._events.received_or_logged("changes of nftables"):
            if data is None:  # Messages were lost.
                changed = rules = True
                continue
            one, other = self._commits.take(data, self.reading.maps)
            changed |= one
            rules |= other
        # The reading that has begun may find more sets whose elements matter.
        rules |= changed and self._reading
        if changed:
            self._on_commit()
        if rules:
            self.again()

    def _read_filters(self) -> None:
        seen = self._filters.received_or_logged("changes of tc filters")
        if seen and self.reading.marks:
            self.again()

    def _look(self) -> None:
        """Check iptables-legacy, and tables that end with a process."""
        assert self._loop is not None
        self._timers["look"] = self._loop.call_later(LOOK_SECONDS, self._look)
        try:
            tables = kernel.legacy_info()
            owned = kernel.owned_tables() if self.reading.owned else self.reading.owned
        except OSError as error:
            _log.debug("rulesets could not be checked", error=str(error))
            self.again()  # which reports the error
            return
        if tables != self.reading.tables or owned != self.reading.owned:
            self._on_commit()
            self.again()
        elif tables and time.clock_gettime(time.CLOCK_MONOTONIC) - self._looked > CLOSE_LOOK_SECONDS:
            self._looked = time.clock_gettime(time.CLOCK_MONOTONIC)
            self._run(self._compare())

    async def _compare(self) -> None:
        try:
            found = await in_daemon_thread("rulesets", kernel.legacy_digests)
        except kernel.UNREADABLE:
            found = None
        if found != self.reading.digests:
            self._on_commit()
            self.again()

    # ---- reading in a thread -----------------------------------------------------------------------------------

    def _start(self) -> None:
        self._timers.pop("read", None)
        self._reading, self._wanted = True, False
        self._began = time.clock_gettime(time.CLOCK_MONOTONIC)
        self._run(self._read())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self) -> None:
        try:
            found, self._took = await in_daemon_thread("rulesets", lambda: (kernel.read(), time.thread_time()))
        except Exception as error:
            _log.error("rulesets could not be read", error=str(error))
            self._reading = False
            self._took = LONGEST  # the longest pause
            self.again()
            return
        self._reading = False
        if self._took > _LARGE:
            give_back()
        self.reading = found
        self._on_reading(found)
        if self._wanted:
            self.again()
