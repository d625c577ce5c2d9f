# SPDX-License-Identifier: Apache-2.0
"""Every period of the client, seconds. Tests take shorter ones."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Defaults follow client-go v0.36 where it has such a period."""

    connect: float = 10.0
    #: From asking to the answer's first byte; the API server itself gives up after 60 s.
    answer: float = 70.0
    #: While an answer or an event is being read, ``window_bytes`` must come in each ``window``, or it is given up.
    window: float = 30.0
    window_bytes: int = 32 * 1024
    #: How long a watch may go on (the server ends it), at least and at most.
    watch: tuple[float, float] = (300.0, 600.0)
    #: So much later than the server should have ended it, a watch is dead.
    grace: float = 30.0
    #: Bookmarks come every minute; once one has come, so long without anything and the watch is dead.
    bookmarks: float = 180.0
    #: Between tries: from the first to the second, doubled each time, and each up to twice as long by chance.
    backoff: tuple[float, float] = (0.8, 30.0)
    #: A server that does not know a resource, or forbids it, is asked again no sooner than this.
    forbidden: float = 5.0
    #: A watch that was taken up again is right again when it has gone on for so long; longer than ``window`` and a bit.
    settle: float = 60.0
    #: For so long after an outage, what is forbidden or missing may be a server that is starting.
    starting: float = 15.0
    #: How long the Node may lack addresses before we go on without (spec/configuration §5.3).
    node: float = 30.0
    #: How often it is looked whether something takes too long.
    look: float = 5.0

    def watch_seconds(self) -> int:
        """How long the next watch is to go on."""
        return max(1, int(random.uniform(*self.watch)))

    def delay(self, failures: int) -> float:
        """The wait after so many failures in a row, 1 at least."""
        first, last = self.backoff
        return float(min(last, first * 2.0 ** min(failures - 1, 20)) * random.uniform(1.0, 2.0))
