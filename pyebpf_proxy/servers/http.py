# SPDX-License-Identifier: Apache-2.0
"""Requests, answers, and the limits that connections share."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from email.utils import formatdate
from ipaddress import ip_address
from types import MappingProxyType
from typing import NamedTuple, Protocol

from pyebpf_proxy.servers.fair_clock import Debtor, FairClock

#: The share of one CPU for all other hosts and pods together, and what one source may owe (seconds). The node's own
#: addresses have a separate share of the same size, and so has the socket in the run folder (probes, commands).
SHARE = 0.15
BURST_SECONDS = 0.01
#: The share of one CPU, and the burst (seconds), of all other hosts and pods, if ever new sources use their bursts.
#: Beyond it, no connection is accepted for some time, but not longer than this (seconds).
ALL_SHARE = 2 * SHARE
ALL_BURST_SECONDS = 0.25
MOST_PAUSE = 1.0
#: The longest wait of a source (seconds): thousands of sources leave each so little that one scrape would cost minutes.
#: It is shorter than the usual interval of scrapes, and long enough that 128 connections with a scrape each stay within
#: the share of all sources.
MOST_WAIT = 10.0
#: After this wait (seconds) a source is looked at again: meanwhile others may have stopped, and left it more.
LOOK_SECONDS = 1.0
#: One source may have one part in this many of a pool's connections.
SOURCE_PART = 4
#: What an IPv6 /64 network may owe, in bursts of one source. Of this its addresses in debt have equal parts, and leave
#: one to an address that comes; but no part is smaller than one in this many.
NETWORK_BURSTS = 2
MOST_PARTS = 8
#: How long a network is remembered after its last use (seconds).
NETWORK_SECONDS = 1.0


class Request(NamedTuple):
    """One request. ``path`` is as sent, without the query; names of ``headers`` are in lower case."""

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = MappingProxyType({})
    body: bytes = b""


class Response(NamedTuple):
    """One answer. Date and Content-Length are added; after HEAD the body is left out."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


Handler = Callable[[Request], Response]


class Member(Protocol):
    """A connection, as its pool sees it."""

    @property
    def source(self) -> Source:
        """The source of the connection."""

    def abort(self) -> None:
        """Abort the connection."""

    def look(self, now: float) -> None:
        """Abort the connection if it takes too long; ``now`` is the loop's clock."""


class Pool:
    """Connections that share a limit. A new one is always admitted: at the limit, the longest idle one is closed."""

    def __init__(self, limit: int, kept_bytes: int = 4 << 20) -> None:
        """``kept_bytes``: limit of buffered incomplete requests; beyond it, only small requests are accepted."""
        self.limit = limit
        self.kept_bytes = kept_bytes
        self.kept = 0
        # Ordered by their last complete request.
        self._connections: dict[Member, None] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._connections))

    def add(self, connection: Member) -> None:
        """Admit a connection. A source at its limit loses one of its own; connections of the node are closed last.

        An IPv6 network at its limit loses one of the address that has most.
        """
        source = connection.source
        same = [each for each in self._connections if each.source.whole is source.whole]
        if len(same) >= self.most_of(source):
            number = Counter([source, *(each.source for each in same)])
            most = max(number.values())
            self._drop(next(each for each in same if number[each.source] == most))
        while len(self._connections) >= self.limit:
            others = (each for each in self._connections if not each.source.own)
            self._drop(next(others, next(iter(self._connections))))
        self._connections[connection] = None

    def most_of(self, source: Source) -> int:
        """How many connections one source may have: a part of the limit; the node itself may have all."""
        return self.limit if source.own else max(1, self.limit // SOURCE_PART)

    def _drop(self, connection: Member) -> None:
        del self._connections[connection]
        connection.abort()

    def touch(self, connection: Member) -> None:
        """Record a complete request of a connection."""
        if connection in self._connections:
            del self._connections[connection]
            self._connections[connection] = None

    def remove(self, connection: Member) -> None:
        """Remove a connection."""
        self._connections.pop(connection, None)


class Waiting(Protocol):
    """A connection of a source that has used up its share."""

    def go_on(self) -> None:
        """Answer some requests. Not called if the connection has been removed from ``Source.waiting``."""


class Source(Debtor):
    """A source of requests: the node itself, one IPv4 address, one IPv6 address, or the /64 network of these.

    A host may use all addresses of an IPv6 /64, so the network has the share of one source. But its addresses may also
    be those of several hosts, such as all pods of a node: this share is divided among them.
    """

    __slots__ = (
        "_burst",
        "_clock",
        "_timer",
        "_used",
        "addresses",
        "connections",
        "members",
        "network",
        "own",
        "waiting",
    )

    def __init__(
        self,
        own: bool,
        network: Source | None = None,
        clock: FairClock | None = None,
        burst: float = BURST_SECONDS,
    ) -> None:
        """``network``: the /64 network of an IPv6 address. ``clock``: divides the share. ``burst``: what it may owe."""
        super().__init__()
        self.own = own
        self.network = network
        #: How many addresses of a network are known, and the clock that divides its part among them.
        self.members = 0
        self.addresses: FairClock | None = None
        self.connections = 0
        #: The connections with requests, in the order in which they are served.
        self.waiting: dict[Waiting, None] = {}
        self._clock = clock or FairClock(SHARE)
        self._burst = burst
        self._used = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    @property
    def whole(self) -> Source:
        """What has one share: the network of an IPv6 address, or the source."""
        return self if self.network is None else self.network

    def rest(self, now: float) -> float:
        """Seconds until the source is served again, as far as known; 0 means now."""
        rest = self.own_rest(now)
        return rest if self.network is None else max(rest, self.network.own_rest(now))

    def own_rest(self, now: float) -> float:
        """The same without regard to the network of an IPv6 address."""
        most = self._burst
        debt = self._clock.debt(self, now)
        if self.network is not None:
            # With one part more than there are debtors, something remains for another address.
            most /= min(self._clock.debtors + 1, MOST_PARTS)
        return max(0.0, min(self._clock.wait(debt - most), self._used + MOST_WAIT - now))

    def charge(self, used: float, now: float) -> None:
        """Charge the source, and its network, for CPU time."""
        self._used = now
        self._clock.charge(self, used, now)
        if self.network is not None:
            self.network.charge(used, now)

    def may_be_forgotten(self, moment: float) -> bool:
        """Whether nothing depends on the source any more: it has no connections, and need not wait.

        An address is forgotten with what it owes, but its network is not: with ever new addresses, it would never wait.
        """
        used = self.addresses is None or self._used + NETWORK_SECONDS <= moment
        return not self.connections and not self.members and used and self.own_rest(moment) == 0

    def forget(self) -> None:
        """Forget what the source owes."""
        self._clock.remove(self)

    def count(self, more: int) -> None:
        """Count new connections, or those that are closed (-1)."""
        self.connections += more
        if self.network is not None:
            self.network.connections += more

    def wait(self, connection: Waiting, loop: asyncio.AbstractEventLoop) -> None:
        """Call ``go_on`` of a connection when the source may be served and those before it have been."""
        self.waiting[connection] = None
        if self._timer is None:
            self._wake_later(loop)

    def _wake_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(min(self.rest(loop.time()), LOOK_SECONDS), self._wake, loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve one connection: if all went on at once, most of them would only find that they must wait again."""
        self._timer = None
        try:
            if self.waiting and self.rest(loop.time()) == 0:
                first = next(iter(self.waiting))
                del self.waiting[first]
                first.go_on()
        finally:
            if self.waiting and self._timer is None:
                self._wake_later(loop)


class Sources:
    """The CPU time of each source.

    While all together use less than the share, no source waits. Else each gets an equal part, and one that needs less
    leaves the rest to the others (fair_clock.py). A source that has used up its part waits; the others do not.
    """

    def __init__(self, share: float = SHARE, burst: float = BURST_SECONDS) -> None:
        self._burst = burst
        self._own = Source(own=True, clock=FairClock(share), burst=burst)
        #: Any user of the node can flood its own addresses, but only root can use the socket.
        self._socket = Source(own=True, clock=FairClock(share), burst=burst)
        self._clock = FairClock(share)
        #: IPv4 addresses and IPv6 networks; and the addresses of these networks.
        self._others: dict[bytes, Source] = {}
        self._addresses: dict[bytes, Source] = {}
        #: When no connection of another host may be accepted before, because of the CPU time of all of them.
        self._free = 0.0

    def __len__(self) -> int:
        return len(self._others)

    def of(self, peer: str | None, here: str | None) -> Source:
        """The source of a connection with these two addresses; None for those of a Unix socket."""
        if peer is None:
            return self._socket
        if is_own(peer, here):
            return self._own
        address = packed(peer)
        if len(address) == 4:
            found = self._others.get(address)
            if found is None:
                found = self._others[address] = Source(False, clock=self._clock, burst=self._burst)
            return found
        found = self._addresses.get(address)
        if found is None:
            network = self._network(address[:8])
            network.members += 1
            found = self._addresses[address] = Source(
                False, network, network.addresses, burst=NETWORK_BURSTS * self._burst
            )
        return found

    def _network(self, prefix: bytes) -> Source:
        found = self._others.get(prefix)
        if found is None:
            found = self._others[prefix] = Source(False, clock=self._clock, burst=NETWORK_BURSTS * self._burst)
            found.addresses = FairClock(parent=self._clock)
        return found

    def charge(self, source: Source, used: float, now: float) -> None:
        """Charge a source for CPU time. ``used``: seconds."""
        source.charge(used, now)
        self.charge_all(source, used, now)

    def charge_all(self, source: Source, used: float, now: float) -> None:
        """Charge all other hosts together, if the source is one. The caller charges the source itself later."""
        if not source.own:
            free = max(self._free, now - ALL_BURST_SECONDS / ALL_SHARE) + used / ALL_SHARE
            self._free = min(free, now + MOST_PAUSE)

    def pause(self, now: float) -> float:
        """Seconds until further connections may be accepted; 0 means now.

        Each new source may use its burst at once, and one IPv6 host may have thousands of /64 networks.
        """
        return max(0.0, self._free - now)

    def forget(self, now: float) -> None:
        """Forget sources that have no connections and need not wait."""
        for key in [key for key, source in self._addresses.items() if source.may_be_forgotten(now)]:
            source = self._addresses.pop(key)
            source.whole.members -= 1
            source.forget()
        for key in [key for key, source in self._others.items() if source.may_be_forgotten(now)]:
            self._others.pop(key).forget()


def is_own(peer: str, here: str | None) -> bool:
    """Whether the peer is this node: source and destination address are the same, or the source is loopback."""
    address = ip_address(peer.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return peer == here or (mapped or address).is_loopback


def packed(peer: str) -> bytes:
    """The bytes of a source's address."""
    address = ip_address(peer.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).packed


_date = ("", 0)


def http_date() -> str:
    """The Date header, built once per second."""
    global _date
    now = int(time.time())
    if _date[1] != now:
        _date = formatdate(now, usegmt=True), now
    return _date[0]
