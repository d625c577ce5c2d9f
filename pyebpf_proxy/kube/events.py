# SPDX-License-Identifier: Apache-2.0
"""Events about Nodes and Services, as kube-proxy records them: an interface; who has an API server sends them there."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

EventType = Literal["Normal", "Warning"]


class About(NamedTuple):
    """The object that an event is about. A Node's namespace is empty."""

    kind: Literal["Node", "Service"]
    namespace: str
    name: str


class Recorder(Protocol):
    """Takes events. Never blocks and never fails: an event that can't be sent is lost, with a line in the log."""

    def event(self, about: About, event_type: EventType, reason: str, action: str, note: str) -> None:
        """Record one event; safe in any thread."""
