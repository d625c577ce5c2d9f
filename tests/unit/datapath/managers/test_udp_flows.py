# SPDX-License-Identifier: Apache-2.0
"""When UDP flows are cleaned up: after changes of the plan, and of the maps, which may follow later."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import cast

import pytest

from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.connections.udp_cleanup import Outcome, UdpCleanup
from pyebpf_proxy.datapath.managers.programs import Programs
from pyebpf_proxy.datapath.managers.service_maps import ServiceMaps
from pyebpf_proxy.datapath.managers.udp_flows import UdpFlows
from pyebpf_proxy.services.model import (
    Endpoint,
    Frontend,
    FrontendKind,
    IPFamily,
    Protocol,
    ServicePort,
    ServicePortName,
)

NAME = ServicePortName("ns", "dns", "", Protocol.UDP, IPFamily.IPV4)
VIP, POD = bytes([10, 96, 0, 1]), bytes([10, 0, 0, 1])


class Flows(UdpFlows):
    """Counts clean-ups and changes of the generation. ``fails``: of the next clean-ups."""

    def __init__(self) -> None:
        self.maps = SimpleNamespace(former={}, writer=SimpleNamespace(udp_moves=1))
        effective = cast(Effective, SimpleNamespace(socket_lb="off"))
        super().__init__(effective, cast(Programs, None), cast(ServiceMaps, self.maps), lambda cleaned: None)
        self._moves = 1
        self.cleaned = self.moved = 0
        self.fails: list[Exception] = []
        self._udp = UdpCleanup(lambda cookie, endpoint: None)
        self._udp.clean = self._clean  # type: ignore[method-assign]
        self.on_change = self._count

    def _count(self) -> None:
        self.moved += 1

    async def _clean(self) -> Outcome:
        if self.fails:
            raise self.fails.pop()
        self.cleaned += 1
        return Outcome([], [])


def dns() -> ServicePort:
    return ServicePort(NAME, (Frontend(FrontendKind.CLUSTER_IP, VIP, 53),), serving=(Endpoint(POD, 53, True),))


def test_what_the_maps_refused_is_followed_when_they_get_it() -> None:
    """No memory for a map: the flows of that moment keep the endpoint that the programs still had."""
    flows = Flows()
    flows.apply({NAME: dns()}, complete=False)
    asyncio.run(flows.collect())
    assert (flows.moved, flows.cleaned) == (1, 1)
    flows.maps.writer.udp_moves += 1
    flows.apply({NAME: dns()}, complete=False)  # the same plan again
    asyncio.run(flows.collect())
    assert (flows.moved, flows.cleaned) == (2, 2)
    flows.maps.writer.udp_moves += 1  # by the writer's own collect(), which has freed entries
    asyncio.run(flows.collect())
    assert (flows.moved, flows.cleaned) == (3, 3)
    asyncio.run(flows.collect())
    assert (flows.moved, flows.cleaned) == (3, 3)


@pytest.mark.parametrize("error", [OSError(errno.EAGAIN, "no thread"), ValueError("any other")])
def test_a_clean_up_that_fails_is_tried_again(error: Exception) -> None:
    flows = Flows()
    flows.apply({NAME: dns()}, complete=False)
    flows.fails = [error]
    with pytest.raises(type(error)):
        asyncio.run(flows.collect())
    asyncio.run(flows.collect())
    assert flows.cleaned == 1
