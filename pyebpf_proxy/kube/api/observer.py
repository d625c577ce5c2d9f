# SPDX-License-Identifier: Apache-2.0
"""The source's reports for metrics. Methods are called in the source's threads and must not block."""

from __future__ import annotations

from typing import Protocol

from pyebpf_proxy.kube.source import Critic


class Observer(Critic, Protocol):
    """Receives what the metrics of the API client (spec/metrics §5, ``rest_client_*``) and of each resource count."""

    def requested(self, method: str, host: str, code: str, seconds: float) -> None:
        """A request was answered, or a watch was established. ``code``: the HTTP status, or ``<error>``."""

    def transferred(self, method: str, host: str, sent: int, received: int) -> None:
        """A request has ended; bytes of its bodies. Watches are not counted."""

    def limited(self, method: str, host: str, seconds: float) -> None:
        """A request has waited this long because of qps and burst."""

    def connected(self, resource: str, connected: bool) -> None:
        """The watch of the resource begins (``connected``) or ends."""

    def listed(self, resource: str) -> None:
        """A complete list of a resource was read."""

    def received(self, resource: str, at: float) -> None:
        """Events of a watch have arrived, including bookmarks. ``at``: Unix time."""

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

    def listed(self, resource: str) -> None:
        pass

    def received(self, resource: str, at: float) -> None:
        pass

    def retried(self, resource: str) -> None:
        pass

    def bad(self, kind: str, refused: int, in_part: int) -> None:
        pass
