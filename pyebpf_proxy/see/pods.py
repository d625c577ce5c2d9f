# SPDX-License-Identifier: Apache-2.0
"""Names of pods by their addresses: the agent's to say, or of a source of objects that is named."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyebpf_proxy.see import local, model
from pyebpf_proxy.services.addresses import parse_address

if TYPE_CHECKING:
    from pyebpf_proxy.see.wanted import Wanted

#: More addresses than that are not asked for: it would take seconds.
MOST = 2000
#: Seconds: an older name is asked for again, for an address may have gone to another pod.
_KEPT = 10.0
#: Of its time a command that goes on may wait so much for names, and so many seconds at the beginning.
_PART, _AT_FIRST = 0.05, 1.0
_ROOM = 32768


def known_to(directory: Path, wanted: Wanted | None) -> Callable[[Collection[bytes]], Mapping[bytes, str]]:
    """Who says ``namespace/name`` of the pods that have addresses: what was read of a source, or else the agent."""
    return wanted.pods if wanted is not None else partial(local.pods, directory)


View = model.EndpointView | model.BackendView | model.ChoiceView | model.TopBackend


def tell(views: Iterable[View], names: Callable[[Collection[bytes]], Mapping[bytes, str]]) -> None:
    """Put names beside these addresses, all or, if they are too many, none."""
    addresses = [(view, parse_address(view.address.rpartition(":")[0].strip("[]")) or b"") for view in views]
    found = names({address for _, address in addresses}) if len(addresses) <= MOST else {}
    for view, address in addresses:
        view.pod = found.get(address, "")


class Pods:
    """Names for a command that goes on. What is not known yet is asked for by :meth:`look`, as time allows."""

    def __init__(
        self,
        ask: Callable[[Collection[bytes]], Mapping[bytes, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._names: dict[bytes, tuple[str, float]] = {}
        self._credit = _AT_FIRST
        self._at = clock()

    def look(self, addresses: Iterable[bytes]) -> None:
        """Ask for those of these addresses that are not known, or not any more."""
        now = self._clock()
        self._credit = min(_AT_FIRST, self._credit + (now - self._at) * _PART)
        self._at = now
        if self._credit <= 0:
            return
        new = {each for each in addresses if now - self._names.get(each, ("", now - _KEPT))[1] >= _KEPT}
        if not new:
            return
        found = self._ask(new)
        if len(self._names) > _ROOM:
            self._names.clear()
        self._names |= {each: (found.get(each, ""), now) for each in new}
        self._at = self._clock()
        self._credit -= self._at - now

    def name(self, address: bytes) -> str:
        """As it was when it was asked for last; "" for what is no pod's, or not known."""
        return self._names.get(address, ("", 0.0))[0]

    def names(self, addresses: Collection[bytes]) -> Mapping[bytes, str]:
        """What is known of these addresses, after a look."""
        self.look(addresses)
        return {address: self.name(address) for address in addresses}
