# SPDX-License-Identifier: Apache-2.0
"""The interface to record Events about Nodes and Services, as kube-proxy does. ``kube.api.recorder`` implements it."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

EventType = Literal["Normal", "Warning"]


class ObjectReference(NamedTuple):
    """The object that an event is about. A Node's namespace is empty."""

    kind: Literal["Node", "Service"]
    namespace: str
    name: str


class Recorder(Protocol):
    """Records events. Never blocks and never fails: an event that cannot be sent is dropped and logged."""

    def event(self, about: ObjectReference, event_type: EventType, reason: str, action: str, note: str) -> None:
        """Record one event; safe in any thread."""
