# SPDX-License-Identifier: Apache-2.0
"""One flow and its outcome in words, independent of the proxy and of the addresses of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

#: An untranslated packet reaches this host behind the nodes, which has every address.
UNTOUCHED = "untouched"
DROPPED = "dropped"


class Ground(NamedTuple):
    """What applies to all flows of a scenario: the mode, and the other top-level fields of the configuration."""

    mode: str
    config: Mapping[str, Any]


class Flow(NamedTuple):
    """A client and a destination. ``source`` is a client of the lab by name; ``what`` describes the destination."""

    source: str
    what: str
    address: str
    port: int
    protocol: str
    #: How many requests without a new outcome, each from a new port, end the flow.
    count: int = 1
    #: Session affinity: the first endpoint is chance, and all later ones are the same.
    sticky: bool = False
    #: The address that the client's socket is bound to, if any.
    bound: str = ""
    #: The Service has externalTrafficPolicy Local.
    local: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """Destination, client and protocol: names the flow within its scenario."""
        return self.what, self.source, f"{self.protocol}{self.family}"

    @property
    def family(self) -> int:
        return 6 if ":" in self.address else 4

    def __str__(self) -> str:
        return f"{self.source} → {self.what}, {self.protocol}, IPv{self.family}"


class Seen(NamedTuple):
    """The outcomes of a flow's requests: each different one, in words, sorted.

    An answer is ``POD:PORT <- SOURCE``: the server, its port, and the source that it saw: ``client`` for the address of
    the request, ``node`` for an address of the node, otherwise the address. Other outcomes are ``refused (…)`` with
    what refused it, ``dropped``, or ``untouched``.
    """

    outcomes: tuple[str, ...]

    def __str__(self) -> str:
        return " | ".join(self.outcomes)

    @classmethod
    def of(cls, outcomes: Any) -> Seen:
        return cls(tuple(sorted(set(outcomes))))
