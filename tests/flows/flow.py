# SPDX-License-Identifier: Apache-2.0
"""One flow in words, and its outcome: the same for every proxy, whatever addresses a run happens to choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

#: Where an untranslated address leads to: a host behind the nodes that answers for every address.
UNTOUCHED = "untouched"
DROPPED = "dropped"


class Ground(NamedTuple):
    """What holds for all flows of a scenario: the mode, and the other top-level fields of the configuration."""

    mode: str
    config: Mapping[str, Any]


class Flow(NamedTuple):
    """A client and a destination. ``source`` is a client of the lab by name; ``what`` describes the destination."""

    source: str
    what: str
    address: str
    port: int
    protocol: str
    #: Requests with nothing new, each from a new port, until no more is expected to come.
    count: int = 1
    #: Session affinity: which endpoint answers is a matter of chance, and then it is always that one.
    sticky: bool = False
    #: The address that the client's socket is bound to, if any.
    bound: str = ""
    #: The Service has externalTrafficPolicy Local.
    local: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """What is asked, by whom, how: names the flow within its scenario."""
        return self.what, self.source, f"{self.protocol}{self.family}"

    @property
    def family(self) -> int:
        return 6 if ":" in self.address else 4

    def __str__(self) -> str:
        return f"{self.source} → {self.what}, {self.protocol}, IPv{self.family}"


class Seen(NamedTuple):
    """The outcomes of a flow's requests: each different one, in words, sorted.

    An answer is ``POD:PORT <- SOURCE``: the server, its port, and the source that it saw: ``client``, when that was the
    address the request came from, ``node`` for an address of the node, else the address. Otherwise ``refused (…)`` with
    what refused it, ``dropped``, or ``untouched``.
    """

    outcomes: tuple[str, ...]

    def __str__(self) -> str:
        return " | ".join(self.outcomes)

    @classmethod
    def of(cls, outcomes: Any) -> Seen:
        return cls(tuple(sorted(set(outcomes))))
