# SPDX-License-Identifier: Apache-2.0
"""The pins of this instance, also if others unmount their bpffs."""

from __future__ import annotations

import asyncio

from pyebpf_proxy.datapath.managers.bpffs import Bpffs
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.node.pins import KeptPins
from pyebpf_proxy.services.node_facts import NodeFacts


class Pins(Manager):
    """Restores the pins."""

    def __init__(self, bpffs: Bpffs) -> None:
        super().__init__()
        self._bpffs = bpffs
        self._kept: KeptPins | None = None

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        pins = self._bpffs.pins
        self._kept = KeptPins(self._bpffs.path, pins.parent, pins / "maps")
        self._opened.callback(self._kept.close)
        self._kept.follow(asyncio.get_running_loop())

    def refresh(self) -> None:
        if self._kept is not None:
            self._kept.check()

    @property
    def why_gone(self) -> str:
        """Why the pins are gone; empty: they are there. Safe in any thread."""
        return "" if self._kept is None else self._kept.why_not
