# SPDX-License-Identifier: Apache-2.0
"""Losses: addresses that a Service lists, but at which it is not served. Has the reasons and the log lines.

Lines are formatted only for changed Services, when new messages are requested. A Service with 20 000 conflicts costs
nothing while other Services change, and never logs more than a few lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import NamedTuple

from pyebpf_proxy.services.claims import FIELDS, Claim
from pyebpf_proxy.services.model import FrontendKind, ServicePortName

#: At most this many addresses of a Service are logged; of the others, only their number.
LINES = 8
#: The reason in an Event about an address that was refused.
REFUSED = "AddressRefused"
OVER_LIMIT = "OverLimit"


class LossMessage(NamedTuple):
    """A log line about a Service. ``reason``: that of the Event to record; empty: no Event."""

    namespace: str
    name: str
    text: str
    reason: str = ""


class Loss(NamedTuple):
    """A service port is not served at ``claim``, but ``winner`` is; None: the claim was refused, with the reason
    ``why``. ``str`` returns the message."""

    name: ServicePortName
    claim: Claim
    kind: FrontendKind
    winner: ServicePortName | None
    why: str = ""

    def __str__(self) -> str:
        which = f"Service {self.name.namespace}/{self.name.name}: {FIELDS[self.kind]}: {self.claim}"
        if self.winner is None:
            return f"{which} is {self.why}: refused, not served there"
        return f"{which} is already used by Service {self.winner.namespace}/{self.winner.name}, not served there"


class LossReport:
    """Remembers the log lines of Services. Each is logged once, and again if the problem has ended and returns."""

    def __init__(self) -> None:
        self._reported: dict[tuple[str, str], frozenset[LossMessage]] = {}

    def new_lines(self, key: tuple[str, str], lines: Iterable[LossMessage]) -> list[LossMessage]:
        """Those of ``lines`` that are new. ``lines`` are all current lines of a Service."""
        lines = list(lines)
        before = self._reported.pop(key, frozenset())
        if lines:
            self._reported[key] = frozenset(lines)
        return [line for line in lines if line not in before]

    def now(self) -> Mapping[tuple[str, str], frozenset[LossMessage]]:
        """The current lines of each Service that has some; a copy, safe in any thread."""
        return dict(self._reported)


_NONE: Mapping[Claim, Loss] = {}


class Losses:
    """All losses, by Service and service port."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], dict[ServicePortName, dict[Claim, Loss]]] = {}
        self._touched: dict[tuple[str, str], None] = {}
        self._report = LossReport()
        #: The current number of losses.
        self.count = 0
        #: Services over a limit, and what is not served, as ``field: what``.
        self.over: dict[tuple[str, str], tuple[str, ...]] = {}

    def set_over(self, key: tuple[str, str], what: tuple[str, ...]) -> None:
        """Set what is not served of a Service that is over a limit; empty if it is within its limits."""
        if self.over.pop(key, ()) != what:
            self._touched[key] = None
        if what:
            self.over[key] = what

    def __iter__(self) -> Iterator[Loss]:
        for ports in self._of.values():
            for lost in ports.values():
                yield from lost.values()

    def of(self, name: ServicePortName) -> Mapping[Claim, Loss]:
        """The losses of a service port."""
        ports = self._of.get((name.namespace, name.name))
        return _NONE if ports is None else ports.get(name, _NONE)

    def put(self, loss: Loss) -> None:
        """Add a loss, or replace its reason."""
        key = (loss.name.namespace, loss.name.name)
        lost = self._of.setdefault(key, {}).setdefault(loss.name, {})
        self.count += loss.claim not in lost
        lost[loss.claim] = loss
        self._touched[key] = None

    def drop(self, name: ServicePortName, claim: Claim) -> None:
        """Remove a loss, if there is one."""
        key = (name.namespace, name.name)
        lost = self._of.get(key, {}).get(name)
        if lost is None or lost.pop(claim, None) is None:
            return
        self.count -= 1
        self._touched[key] = None
        if not lost:
            del self._of[key][name]
            if not self._of[key]:
                del self._of[key]

    def new_messages(self) -> list[LossMessage]:
        """Log lines that have not been returned before."""
        touched, self._touched = self._touched, {}
        return [line for key in touched for line in self._report.new_lines(key, self._lines(key))]

    def messages_now(self) -> Mapping[tuple[str, str], frozenset[LossMessage]]:
        """The lines of the last :meth:`new_messages`, and earlier ones that still hold; safe in any thread."""
        return self._report.now()

    def _lines(self, key: tuple[str, str]) -> Iterator[LossMessage]:
        for what in self.over.get(key, ()):
            yield LossMessage(*key, f"Service {key[0]}/{key[1]}: {what}", OVER_LIMIT)
        ports = self._of.get(key, {})
        for loss in islice(chain.from_iterable(lost.values() for lost in ports.values()), LINES):
            yield LossMessage(*key, str(loss), REFUSED if loss.winner is None else "")
        more = sum(map(len, ports.values())) - LINES
        if more > 0:
            yield LossMessage(*key, f"Service {key[0]}/{key[1]}: {more} more of its addresses and ports are not served")
