# SPDX-License-Identifier: Apache-2.0
"""Whether the proxy applies changes in time (spec/service-semantics §11.2), and ``/healthz`` and ``/livez``.

:class:`Health` is pure: every method receives the current :class:`Moment`. The syncing thread writes it, and the
servers' thread reads it. Each step is one operation on a dict, so no lock is needed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from pyebpf_proxy.servers.http import Request, Response
from pyebpf_proxy.services.model import IPFamily

FAMILIES = {IPFamily.IPV4: "IPv4", IPFamily.IPV6: "IPv6"}
JSON_HEADERS = (("Content-Type", "application/json"), ("X-Content-Type-Options", "nosniff"))
TEXT_HEADERS = (("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff"))
NOT_FOUND = Response(404, TEXT_HEADERS, b"404 page not found\n")

_NEVER = "0001-01-01T00:00:00Z"


class Moment(NamedTuple):
    """A point in time on both clocks: monotonic seconds, and nanoseconds since 1970."""

    monotonic: float
    wall: int

    @classmethod
    def now(cls) -> Moment:
        """The current moment."""
        return cls(time.monotonic(), time.time_ns())

    def text(self) -> str:
        """RFC 3339 in UTC, without trailing zeros in the fraction, as in Go."""
        seconds, fraction = divmod(self.wall, 1_000_000_000)
        date = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        digits = f".{fraction:09}".rstrip("0").rstrip(".")
        return f"{date}{digits}Z"


class FamilyHealth(NamedTuple):
    """One family: when it was last synced, and whether changes are applied in time."""

    last_updated: Moment
    healthy: bool


class Report(NamedTuple):
    """The health of the proxy at one moment. ``families`` has only families that have finished a sync."""

    now: Moment
    families: dict[IPFamily, FamilyHealth]

    @property
    def healthy(self) -> bool:
        """Whether changes of every family are applied in time."""
        return all(family.healthy for family in self.families.values())


class Health:
    """Requested changes that are not yet written, by family."""

    def __init__(self, timeout: float, families: Collection[IPFamily] = tuple(IPFamily)) -> None:
        """``timeout``: how many seconds a change may wait until the proxy is unhealthy, 2 × syncPeriod.

        ``families``: those that this node has.
        """
        self._timeout = timeout
        self.families = families
        self._oldest: dict[IPFamily, float] = {}
        self._updated: dict[IPFamily, Moment] = {}

    def queued(self, family: IPFamily, now: Moment) -> None:
        """Record a change, and start the family's timer if it does not run."""
        self._oldest.setdefault(family, now.monotonic)

    def updated(self, family: IPFamily, now: Moment) -> None:
        """Record that all changes are written."""
        self._oldest.pop(family, None)
        self._updated[family] = now

    @property
    def programmed(self) -> bool:
        """Whether everything was written once, for each family."""
        return self._updated.keys() >= set(self.families)

    def report(self, now: Moment) -> Report:
        """The current health."""
        oldest = self._oldest.copy()
        families = {
            family: FamilyHealth(updated, now.monotonic - oldest.get(family, now.monotonic) < self._timeout)
            if family in oldest
            else FamilyHealth(updated, True)
            for family, updated in sorted(self._updated.copy().items())
        }
        return Report(now, families)


class HealthPages:
    """The two paths of the health server."""

    def __init__(
        self,
        health: Health,
        eligible: Callable[[], bool],
        count: Callable[[str, int], None],
        clock: Callable[[], Moment] = Moment.now,
    ) -> None:
        """``eligible``: whether the Node may get traffic; ``count`` is called with path and code of every answer."""
        self._health = health
        self._eligible = eligible
        self._count = count
        self._clock = clock

    def __call__(self, request: Request) -> Response:
        """Answer one request of any method."""
        if request.path == "/healthz":
            eligible = self._eligible()
        elif request.path == "/livez":
            eligible = None
        else:
            return NOT_FOUND
        report = self._health.report(self._clock())
        code = 200 if report.healthy and eligible is not False else 503
        self._count(request.path, code)
        return Response(code, JSON_HEADERS, _body(report, eligible, code == 200))


def _body(report: Report, eligible: bool | None, good: bool) -> bytes:
    """The JSON as Go marshals it. In a good answer, ``lastUpdated`` is the current time, as in old releases."""
    latest = max((family.last_updated for family in report.families.values()), key=lambda m: m.wall, default=None)
    last_updated = report.now.text() if good else _NEVER if latest is None else latest.text()
    answer: dict[str, object] = {"lastUpdated": last_updated, "currentTime": report.now.text()}
    if eligible is not None:
        answer["nodeEligible"] = eligible
    answer["healthy"] = report.healthy
    if report.families:
        answer["status"] = {
            FAMILIES[family]: {"lastUpdated": its.last_updated.text(), "healthy": its.healthy}
            for family, its in report.families.items()
        }
    return json.dumps(answer, separators=(",", ":")).encode()
