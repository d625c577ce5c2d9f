# SPDX-License-Identifier: Apache-2.0
"""Names of pods by their addresses, from the agent or from the source on the command line."""

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

#: Larger sets of addresses are not looked up, because this would take seconds.
MOST = 2000
#: Seconds after which a name is looked up again: another pod may have received the address.
_KEPT = 10.0
#: A running command may wait for names for this share of its time, plus these seconds at its start.
_PART, _AT_FIRST = 0.05, 1.0
_MOST_NAMES = 32768


def pod_name_lookup(directory: Path, wanted: Wanted | None) -> Callable[[Collection[bytes]], Mapping[bytes, str]]:
    """The lookup of pod names, ``namespace/name``, by address: in ``wanted``, else in the agent."""
    return wanted.pods if wanted is not None else partial(local.pods, directory)


View = model.EndpointView | model.BackendView | model.ChoiceView | model.TopBackend


def fill_pod_names(views: Iterable[View], names: Callable[[Collection[bytes]], Mapping[bytes, str]]) -> None:
    """Fill in the pod names of these views, unless there are too many views."""
    addresses = [(view, parse_address(view.address.rpartition(":")[0].strip("[]")) or b"") for view in views]
    found = names({address for _, address in addresses}) if len(addresses) <= MOST else {}
    for view, address in addresses:
        view.pod = found.get(address, "")


class Pods:
    """Names for a command that keeps running. :meth:`look` looks up unknown names, as time allows."""

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
        """Look up the addresses that are unknown or outdated."""
        now = self._clock()
        self._credit = min(_AT_FIRST, self._credit + (now - self._at) * _PART)
        self._at = now
        if self._credit <= 0:
            return
        new = {each for each in addresses if now - self._names.get(each, ("", now - _KEPT))[1] >= _KEPT}
        if not new:
            return
        found = self._ask(new)
        if len(self._names) > _MOST_NAMES:
            self._names.clear()
        self._names |= {each: (found.get(each, ""), now) for each in new}
        self._at = self._clock()
        self._credit -= self._at - now

    def name(self, address: bytes) -> str:
        """The name from the last lookup; "" if the address is not a pod's, or unknown."""
        return self._names.get(address, ("", 0.0))[0]

    def names(self, addresses: Collection[bytes]) -> Mapping[bytes, str]:
        """The names of these addresses, after a lookup."""
        self.look(addresses)
        return {address: self.name(address) for address in addresses}
