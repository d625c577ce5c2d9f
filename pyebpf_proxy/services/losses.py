# SPDX-License-Identifier: Apache-2.0
"""Addresses that service ports name and are not served at: which, why, and what is said of them.

Texts are made for the Services that changed, when somebody asks for news: a Service with 20 000 conflicts costs
nothing while others change, and never more than a few lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import NamedTuple

from .claims import FIELDS, Claim
from .model import FrontendKind, ServicePortName

#: So many addresses of a Service are named; of more only the number is said.
LINES = 8
#: The reason of an Event about an address that was refused.
REFUSED = "AddressRefused"
OVER_LIMIT = "OverLimit"


class Said(NamedTuple):
    """A line about a Service. ``reason``: of the Event that it is worth, empty for none."""

    namespace: str
    name: str
    text: str
    reason: str = ""


class Loss(NamedTuple):
    """A service port is not served at ``claim``: ``winner`` is, or (None) it was refused. A text by ``str``."""

    name: ServicePortName
    claim: Claim
    kind: FrontendKind
    winner: ServicePortName | None
    why: str = ""

    def __str__(self) -> str:
        which = f"Service {self.name.namespace}/{self.name.name}: {FIELDS[self.kind]}: {self.claim}"
        if self.winner is None:
            return f"{which} is {self.why}: refused, is not served there"
        return f"{which} is that of Service {self.winner.namespace}/{self.winner.name} already, is not served there"


class News:
    """Lines of Services, each said once, and once more when it is over and comes back."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], frozenset[Said]] = {}

    def of(self, key: tuple[str, str], lines: Iterable[Said]) -> list[Said]:
        """What is new among the lines of a Service; they are all that there is to say of it now."""
        lines = list(lines)
        before = self._said.pop(key, frozenset())
        if lines:
            self._said[key] = frozenset(lines)
        return [line for line in lines if line not in before]


_NONE: Mapping[Claim, Loss] = {}


class Losses:
    """All of them, by Service and service port."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], dict[ServicePortName, dict[Claim, Loss]]] = {}
        self._touched: dict[tuple[str, str], None] = {}
        self._news = News()
        #: How many there are now.
        self.count = 0
        #: Services that have more than one may have, and what of it is left out, ``field: what``.
        self.over: dict[tuple[str, str], tuple[str, ...]] = {}

    def set_over(self, key: tuple[str, str], what: tuple[str, ...]) -> None:
        """This of a Service is left out because it is too much; nothing: it has no more than it may."""
        if self.over.pop(key, ()) != what:
            self._touched[key] = None
        if what:
            self.over[key] = what

    def __iter__(self) -> Iterator[Loss]:
        for ports in self._of.values():
            for lost in ports.values():
                yield from lost.values()

    def of(self, name: ServicePortName) -> Mapping[Claim, Loss]:
        """What a service port is not served at."""
        ports = self._of.get((name.namespace, name.name))
        return _NONE if ports is None else ports.get(name, _NONE)

    def put(self, loss: Loss) -> None:
        """A service port is not served there (now for another reason, perhaps)."""
        key = (loss.name.namespace, loss.name.name)
        lost = self._of.setdefault(key, {}).setdefault(loss.name, {})
        self.count += loss.claim not in lost
        lost[loss.claim] = loss
        self._touched[key] = None

    def drop(self, name: ServicePortName, claim: Claim) -> None:
        """That is over. Nothing happens if it was not so."""
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

    def news(self) -> list[Said]:
        """What is to be said that was not said before."""
        touched, self._touched = self._touched, {}
        return [line for key in touched for line in self._news.of(key, self._lines(key))]

    def _lines(self, key: tuple[str, str]) -> Iterator[Said]:
        for what in self.over.get(key, ()):
            yield Said(*key, f"Service {key[0]}/{key[1]}: {what}", OVER_LIMIT)
        ports = self._of.get(key, {})
        for loss in islice(chain.from_iterable(lost.values() for lost in ports.values()), LINES):
            yield Said(*key, str(loss), REFUSED if loss.winner is None else "")
        more = sum(map(len, ports.values())) - LINES
        if more > 0:
            yield Said(*key, f"Service {key[0]}/{key[1]}: {more} more of its addresses and ports are not served")
