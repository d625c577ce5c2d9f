# SPDX-License-Identifier: Apache-2.0
"""The interface of every source of objects: it delivers batches of changes.

A source guarantees that objects are valid (``kube.validation``) and have the API server's defaults. It delivers a
change only if the object differs from the one delivered before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from pyebpf_proxy.kube.objects import EndpointSlice, Node, Service, ServiceCIDR

Kind = Literal["Service", "EndpointSlice", "Node", "ServiceCIDR"]
Object = Service | EndpointSlice | Node | ServiceCIDR


class Change(NamedTuple):
    """The new state of one object; ``object`` is None if it is deleted. Nodes and ServiceCIDRs have no namespace."""

    kind: Kind
    namespace: str
    name: str
    object: Object | None


class Batch(NamedTuple):
    """Changes to apply together. ``complete``: including this batch, all existing objects have been delivered once.

    ``unchanged``: Services and slices after an event of the API server that changed nothing. They are only counted.
    """

    changes: list[Change]
    complete: bool
    unchanged: Sequence[Change] = ()


class Critic(Protocol):
    """Receives the numbers of invalid objects. Called in the source's threads; must not block."""

    def bad(self, kind: str, refused: int, in_part: int) -> None:
        """How many objects of a kind are refused, and how many are used without their invalid parts."""


class Source(Protocol):
    """Delivers objects until it is cancelled."""

    async def run(self, deliver: Callable[[Batch], None]) -> None:
        """Deliver batches, in order, from the event loop's thread, until cancelled."""
        ...
