# SPDX-License-Identifier: Apache-2.0
"""The managers of the data plane: one that fails does not keep the others from their part."""

from __future__ import annotations

import asyncio

import pytest

from pyebpf_proxy.common.errors import DatapathError
from pyebpf_proxy.config import flags
from pyebpf_proxy.config.complete import complete
from pyebpf_proxy.config.effective import effective
from pyebpf_proxy.datapath.datapath import Datapath
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.services.node_facts import NodeFacts


class Part(Manager):
    """Notes its calls; fails with ``error``, if it has one."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self._error = error
        self.calls: list[str] = []

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if self._error:
            raise OSError(self._error)

    def apply(self, delta: Delta, complete: bool) -> None:
        self._called("apply")

    def node_changed(self, facts: NodeFacts) -> None:
        self._called("node_changed")

    def refresh(self) -> None:
        self._called("refresh")

    async def collect(self) -> None:
        self._called("collect")


class Writer:
    """The service maps: others have written into them."""

    def was_overwritten(self) -> bool:
        return True


@pytest.mark.parametrize("fails", [False, True])
def test_every_manager_gets_its_turn_though_others_fail(fails: bool) -> None:
    datapath = Datapath(effective(complete(flags.parse([]), lambda text, file: None), flags.parse([])))
    parts = [Part("no nft" * fails), Part(), Part("no map" * fails), Part()]
    datapath._managers = list(parts)
    datapath._service_maps.writer = Writer()  # type: ignore[assignment]
    datapath._running = True
    calls = [
        lambda: datapath.apply({}),
        lambda: datapath.node_changed(NodeFacts()),
        lambda: datapath.refresh(),
        lambda: asyncio.run(datapath.collect()),
    ]
    for call in calls:
        if fails:
            with pytest.raises(DatapathError, match=r"^no nft; no map$"):
                call()
        else:
            call()
    assert [part.calls for part in parts] == [["apply", "node_changed", "refresh", "collect"]] * 4
