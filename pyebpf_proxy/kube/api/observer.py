# SPDX-License-Identifier: Apache-2.0
"""The source's reports for metrics. Methods are called in the source's threads and must not block."""

from __future__ import annotations

from typing import Protocol

from pyebpf_proxy.kube.source import Critic


class Observer(Critic, Protocol):
    """Numbers of the API client (spec/metrics §5, names ``rest_client_*``) and of each resource that is followed."""

    def requested(self, method: str, host: str, code: str, seconds: float) -> None:
        """A request was answered, a watch established. ``code``: the HTTP status, or ``<error>``."""

    def transferred(self, method: str, host: str, sent: int, received: int) -> None:
        """Bodies of a request that ended, in bytes. Watches are not counted."""

    def limited(self, method: str, host: str, seconds: float) -> None:
        """The time that a request waited for qps and burst."""

    def connected(self, resource: str, connected: bool) -> None:
        """Whether the resource is watched now."""

    def listed(self, resource: str, objects: int) -> None:
        """A complete list of a resource was read."""

    def received(self, resource: str, events: int, at: float) -> None:
        """Events of a watch arrived (also bookmarks). ``at``: Unix time."""

    def retried(self, resource: str) -> None:
        """A list or watch failed and will be retried."""


class Silent:
    """Ignores all reports."""

    def requested(self, method: str, host: str, code: str, seconds: float) -> None:
        pass

    def transferred(self, method: str, host: str, sent: int, received: int) -> None:
        pass

    def limited(self, method: str, host: str, seconds: float) -> None:
        pass

    def connected(self, resource: str, connected: bool) -> None:
        pass

    def listed(self, resource: str, objects: int) -> None:
        pass

    def received(self, resource: str, events: int, at: float) -> None:
        pass

    def retried(self, resource: str) -> None:
        pass

    def bad(self, kind: str, refused: int, in_part: int) -> None:
        pass
