# SPDX-License-Identifier: Apache-2.0
"""What a connection is given: requests, answers, and the bounds that it shares with others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import formatdate
from types import MappingProxyType
from typing import NamedTuple, Protocol

#: The share of one processor that clients get when they ask for more, and how much they may use in one go (seconds).
SHARE = 0.15
BURST_SECONDS = 0.01


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
        """Let a connection in."""
        while len(self._connections) >= self.limit:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.abort()
        self._connections[connection] = None

    def touch(self, connection: Member) -> None:
        """A connection had a complete request."""
        if connection in self._connections:
            del self._connections[connection]
            self._connections[connection] = None

    def remove(self, connection: Member) -> None:
        """A connection is over."""
        self._connections.pop(connection, None)


class Share:
    """Keeps the thread's use of the processor at ``share``, by sleeping when clients want more."""

    def __init__(self, share: float = SHARE, burst: float = BURST_SECONDS) -> None:
        self._share = share
        self._burst = burst
        self._used = self._since = 0.0

    def breathe(self) -> None:
        """To be called before each piece of work."""
        used, now = time.thread_time(), time.monotonic()
        rest = self.rest(used, now)
        if rest > 0:
            time.sleep(rest)

    def rest(self, used: float, now: float) -> float:
        """Seconds to sleep. ``used``: seconds of processor time of the thread so far."""
        spent, elapsed = used - self._used, now - self._since
        if spent < self._burst:
            if elapsed > 1:
                self._used, self._since = used, now
            return 0.0
        rest = spent / self._share - elapsed
        self._used, self._since = used, now + max(rest, 0.0)
        return max(rest, 0.0)


_date = ("", 0)


def http_date() -> str:
    """The Date header, made once a second."""
    global _date
    now = int(time.time())
    if _date[1] != now:
        _date = formatdate(now, usegmt=True), now
    return _date[0]
