# SPDX-License-Identifier: Apache-2.0
"""The interface of every source of objects: batches of changes, nothing else.

A source guarantees: objects are valid (``kube.validation``), defaulted as the API server would, and a change is
delivered only when the object really differs from what was delivered before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from .objects import EndpointSlice, Node, Service, ServiceCIDR

Kind = Literal["Service", "EndpointSlice", "Node", "ServiceCIDR"]
Object = Service | EndpointSlice | Node | ServiceCIDR


class Change(NamedTuple):
    """One object as it is now; ``object`` is None when it is gone. The namespace of a Node or ServiceCIDR is empty."""

    kind: Kind
    namespace: str
    name: str
    object: Object | None


class Batch(NamedTuple):
    """Changes to apply together. ``complete``: with this batch everything that exists has been delivered once."""

    changes: list[Change]
    complete: bool


class Critic(Protocol):
    """Who is told how many objects have something wrong in them. Called in the source's threads; must not block."""

    def bad(self, kind: str, refused: int, in_part: int) -> None:
        """So many objects of a kind are not used as they are now, and so many are without what is wrong in them."""


class Source(Protocol):
    """Something that delivers objects until it is cancelled."""

    async def run(self, deliver: Callable[[Batch], None]) -> None:
        """Deliver batches, in order, from the event loop's thread, until cancelled."""
        ...
