# SPDX-License-Identifier: Apache-2.0
"""Requests, answers, and the limits that connections share."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from email.utils import formatdate
from ipaddress import ip_address
from types import MappingProxyType
from typing import NamedTuple, Protocol

#: The share of one CPU for all other hosts and pods together, and the burst of one source (seconds). The node's own
#: addresses have a separate share of the same size, and so has the socket in the run folder (probes, commands).
SHARE = 0.15
BURST_SECONDS = 0.01
#: The share is divided by the number of sources, but at least by this: so something remains for a second source.
LEAST_SOURCES = 8
#: The share of one CPU, and the burst (seconds), of all other hosts and pods, if ever new sources use their bursts.
#: Beyond it, no connection is accepted for some time, but not longer than this (seconds).
ALL_SHARE = 2 * SHARE
ALL_BURST_SECONDS = 0.25
MOST_PAUSE = 1.0
#: The longest wait of a source (seconds): thousands of sources leave each so little that one scrape would cost minutes.
#: It is shorter than the usual interval of scrapes, and long enough that 128 connections with a scrape each stay within
#: the share of all sources.
MOST_WAIT = 10.0
#: One source may have one part in this many of a pool's connections.
SOURCE_PART = 4
#: How many addresses of an IPv6 /64 network share its part of the CPU, at most; and its burst, in bursts of one source.
MOST_PARTS = 7
NETWORK_BURSTS = 2


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


class Source:
    """A source of requests: the node itself, one IPv4 address, one IPv6 address, or the /64 network of these.

    A host may use all addresses of an IPv6 /64, so the network has the share of one source. But its addresses may also
    be those of several hosts, such as all pods of a node: each of them has a part of this share.
    """

    __slots__ = ("connections", "free", "members", "network", "own")

    def __init__(self, own: bool, network: Source | None = None) -> None:
        """``network``: the /64 network of an IPv6 address."""
        self.own = own
        self.network = network
        #: How many addresses of a network are known.
        self.members = 0
        self.connections = 0
        #: The source is served again at this time of the loop's clock, because of the CPU time that it has used.
        self.free = 0.0

    @property
    def whole(self) -> Source:
        """What has one share: the network of an IPv6 address, or the source."""
        return self if self.network is None else self.network

    def rest(self, now: float) -> float:
        """Seconds until the source is served again; 0 means now."""
        return max(0.0, self.free - now, self.whole.free - now)

    def may_be_forgotten(self, moment: float) -> bool:
        """Whether nothing depends on the source any more: it has no connections, and did not have to wait then."""
        return not self.connections and not self.members and self.free <= moment

    def count(self, more: int) -> None:
        """Count new connections, or those that are closed (-1)."""
        self.connections += more
        if self.network is not None:
            self.network.connections += more


class Sources:
    """The CPU time of each source. A source that has used up its share waits; the others do not."""

    def __init__(self, share: float = SHARE, burst: float = BURST_SECONDS) -> None:
        self._share = share
        self._burst = burst
        self._own = Source(own=True)
        #: Any user of the node can flood its own addresses, but only root can use the socket.
        self._socket = Source(own=True)
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
        found = self._addresses.get(address)
        if found is None:
            found = self._others.setdefault(address[:8], Source(own=False))
            if len(address) > 8:
                found.members += 1
                found = self._addresses[address] = Source(False, found)
        return found

    def charge(self, source: Source, used: float, now: float) -> None:
        """Charge a source for CPU time. ``used``: seconds."""
        rate = self._share if source.own else self._share / max(LEAST_SOURCES, len(self._others))
        if source.network is None:
            _charge(source, used, now, rate, self._burst)
        else:
            # With one part more than there are addresses, they do not use up what the network has.
            parts = min(source.network.members, MOST_PARTS) + 1
            _charge(source, used, now, rate / parts, self._burst)
            _charge(source.network, used, now, rate, NETWORK_BURSTS * self._burst)
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
            self._addresses.pop(key).whole.members -= 1
        # The addresses of a network are forgotten before, each with its burst: that of the network must not return.
        restored = now - NETWORK_BURSTS * self._burst * LEAST_SOURCES / self._share
        moments = {4: now, 8: restored}
        for key in [key for key, source in self._others.items() if source.may_be_forgotten(moments[len(key)])]:
            del self._others[key]


def _charge(source: Source, used: float, now: float, rate: float, burst: float) -> None:
    source.free = min(max(source.free, now - burst / rate) + used / rate, now + MOST_WAIT)


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
