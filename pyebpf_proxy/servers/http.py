# SPDX-License-Identifier: Apache-2.0
"""What a connection is given: requests, answers, and the bounds that it shares with others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import formatdate
from ipaddress import ip_address
from types import MappingProxyType
from typing import NamedTuple, Protocol

#: The share of one processor that other hosts and pods get when they ask for more, and what one of them may use in one
#: go (seconds). The node itself (its kubelet, commands) has a share of the same size of its own.
SHARE = 0.15
BURST_SECONDS = 0.01
#: The share is split between so many sources at least: a second one always has something left.
LEAST_SOURCES = 8
#: Of a pool's connections, one source may have this part.
SOURCE_PART = 4


class Request(NamedTuple):
    """One request. ``path`` is as it was sent, without the query; names of ``headers`` are in lower case."""

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
        """Who is at its other end."""

    def abort(self) -> None:
        """Cut it off."""

    def look(self, now: float) -> None:
        """Cut it off if it takes too long; ``now`` is the loop's clock."""


class Pool:
    """Connections that share a bound. A new one is always let in: the one that has rested longest goes for it."""

    def __init__(self, limit: int, kept_bytes: int = 4 << 20) -> None:
        """``kept_bytes``: of requests that are not complete; beyond it, only small requests are taken."""
        self.limit = limit
        self.kept_bytes = kept_bytes
        self.kept = 0
        # In the order of their last complete request.
        self._connections: dict[Member, None] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._connections))

    def add(self, connection: Member) -> None:
        """Let a connection in. It is another of the same source that goes if that has its part; the node's go last."""
        source = connection.source
        same = [each for each in self._connections if each.source is source]
        if len(same) >= self.most_of(source):
            self._drop(same[0])
        while len(self._connections) >= self.limit:
            others = (each for each in self._connections if not each.source.own)
            self._drop(next(others, next(iter(self._connections))))
        self._connections[connection] = None

    def most_of(self, source: Source) -> int:
        """How many connections one source may have: a part, the node itself all."""
        return self.limit if source.own else max(1, self.limit // SOURCE_PART)

    def _drop(self, connection: Member) -> None:
        del self._connections[connection]
        connection.abort()

    def touch(self, connection: Member) -> None:
        """A connection had a complete request."""
        if connection in self._connections:
            del self._connections[connection]
            self._connections[connection] = None

    def remove(self, connection: Member) -> None:
        """A connection is over."""
        self._connections.pop(connection, None)


class Source:
    """Who sends requests: the node itself, one IPv4 address, or one IPv6 network of 64 bits."""

    __slots__ = ("connections", "free", "own")

    def __init__(self, own: bool) -> None:
        self.own = own
        self.connections = 0
        #: When it has paid for what it used, by the loop's clock.
        self.free = 0.0

    def rest(self, now: float) -> float:
        """Seconds before it is served again; 0: it is now."""
        return max(0.0, self.free - now)


class Sources:
    """The processor time of each source. Who has used up its share waits; nobody else does."""

    def __init__(self, share: float = SHARE, burst: float = BURST_SECONDS) -> None:
        self._share = share
        self._burst = burst
        self._own = Source(own=True)
        self._others: dict[bytes, Source] = {}

    def __len__(self) -> int:
        return len(self._others)

    def of(self, peer: str | None, here: str | None) -> Source:
        """The source of a connection by the addresses of its ends; None: it came by a socket of this machine."""
        if peer is None or is_own(peer, here):
            return self._own
        key = address_key(peer)
        return self._others.setdefault(key, Source(own=False))

    def charge(self, source: Source, used: float, now: float) -> None:
        """``used``: seconds of processor time that were spent on a source."""
        rate = self._share if source.own else self._share / max(LEAST_SOURCES, len(self._others))
        source.free = max(source.free, now - self._burst / rate) + used / rate

    def forget(self, now: float) -> None:
        """Drop what is known of sources that have no connection and owe nothing."""
        idle = [key for key, source in self._others.items() if not source.connections and source.free <= now]
        for key in idle:
            del self._others[key]


def is_own(peer: str, here: str | None) -> bool:
    """Whether a peer is this node: it connects to an address of its own from that address, or from loopback."""
    address = ip_address(peer.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return peer == here or (mapped or address).is_loopback


def address_key(peer: str) -> bytes:
    """What tells sources apart. An IPv6 host has all addresses of its network."""
    address = ip_address(peer.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).packed[:8]


_date = ("", 0)


def http_date() -> str:
    """The Date header, made once a second."""
    global _date
    now = int(time.time())
    if _date[1] != now:
        _date = formatdate(now, usegmt=True), now
    return _date[0]
