# SPDX-License-Identifier: Apache-2.0
"""All timeouts and intervals of the client, in seconds. Tests use shorter ones."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """The defaults are those of client-go v0.36, if it has one."""

    connect: float = 10.0
    #: Longest time from the request to the first byte of the answer; the API server itself ends requests after 60 s.
    answer: float = 70.0
    #: While an answer or an event is read, ``window_bytes`` must arrive in each ``window``; otherwise it is aborted.
    window: float = 30.0
    window_bytes: int = 32 * 1024
    #: Minimum and maximum duration of a watch (the server ends it).
    watch: tuple[float, float] = (300.0, 600.0)
    #: A watch that lasts this much longer than requested is dead.
    grace: float = 30.0
    #: Bookmarks arrive every minute. After the first one, a watch without data for this long is dead.
    bookmarks: float = 180.0
    #: First and longest delay between attempts. It doubles each time, and is randomly up to twice as long.
    backoff: tuple[float, float] = (0.8, 30.0)
    #: Minimum delay before the next request for a resource that the server forbids or does not know.
    forbidden: float = 5.0
    #: The same for a resource that is optional.
    optional: float = 300.0
    #: A resumed watch counts as recovered after this time; longer than ``window``.
    settle: float = 60.0
    #: For this time after an outage, "forbidden" or "not found" may come from a server that is still starting.
    starting: float = 15.0
    #: How long the Node may lack addresses before the agent continues without (spec/configuration §5.3).
    node: float = 30.0
    #: Interval of the check for requests that take too long.
    look: float = 5.0

    def watch_seconds(self) -> int:
        """The duration of the next watch."""
        return max(1, int(random.uniform(*self.watch)))

    def delay(self, failures: int) -> float:
        """The delay after this many failures in a row (at least 1)."""
        first, last = self.backoff
        return float(min(last, first * 2.0 ** min(failures - 1, 20)) * random.uniform(1.0, 2.0))
