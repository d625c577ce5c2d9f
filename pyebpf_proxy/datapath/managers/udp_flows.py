# SPDX-License-Identifier: Apache-2.0
"""UDP flows and sockets whose endpoint no longer serves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.connections.udp_cleanup import Cleaned, SocketPeers, UdpCleanup, addresses_in
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.managers.programs import Programs
from pyebpf_proxy.datapath.managers.service_maps import ServiceMaps
from pyebpf_proxy.services.addresses import Place
from pyebpf_proxy.services.node_facts import NodeFacts

#: Seconds between two looks at connected sockets. Less than conntrack's timeouts, and than it takes other sockets to
#: fill the maps of the socket programs.
LOOK_SECONDS = 10

_log = Logger("datapath")


class UdpFlows(Manager):
    """Ends such flows and sockets after changes of UDP services. ``on_cleaned`` is called after every clean-up."""

    def __init__(
        self,
        effective: Effective,
        programs: Programs,
        service_maps: ServiceMaps,
        on_cleaned: Callable[[Cleaned], None],
    ) -> None:
        super().__init__()
        self._sockets = effective.socket_lb != "off"
        self._programs = programs
        self._service_maps = service_maps
        self._on_cleaned = on_cleaned
        #: Called when serving endpoints of UDP services have changed.
        self.on_change: Callable[[], None] = lambda: None
        #: Serving endpoints have changed since the last clean-up.
        self._touched = False
        #: ``Writer.udp_moves``, as it was seen last.
        self._moves = 0

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        loaded = self._programs.loaded
        peers = SocketPeers(loaded.maps, loaded.sock.btf)
        self._udp = UdpCleanup(
            peers.find,
            addresses_in(loaded.maps) if self._sockets else None,
            loaded.settings.pod_sockets and not loaded.settings.conntrack_lookup,
            peers.keep if self._sockets else None,
        )
        self._udp.start(self._service_maps.former, wanted)
        self._touched = True
        self._moves = self._service_maps.writer.udp_moves
        self._run(self._look_again(), "look at sockets that conntrack translates")

    async def _look_again(self) -> None:
        """A socket that lives from an entry of conntrack is ended when that is gone. So is one that is connected to an
        address that a Service has got since.
        """
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            # A clean-up meets the same error, and reports it.
            with contextlib.suppress(OSError):
                await self._udp.keep()
            if not self._udp.waiting:
                continue
            self._touched = True
            try:
                await self.collect()
            except OSError as error:
                _log.error("sockets that conntrack translates could not be checked", error=str(error))

    def apply(self, delta: Delta, complete: bool) -> None:
        if self._udp.apply(delta, complete):
            self._touch()
        self._follow_maps()

    def is_stale(self, destination: Place, endpoint: Place) -> bool:
        """Whether a flow to ``destination`` that ``endpoint`` answers should be ended. Safe in any thread."""
        return self._udp.is_stale(destination, endpoint)

    def _touch(self) -> None:
        self._touched = True
        self.on_change()

    def _follow_maps(self) -> None:
        """The maps may get a change later than the plan: what they refused is written when there is space again."""
        moves = self._service_maps.writer.udp_moves
        if moves != self._moves:
            self._moves = moves
            self._touch()

    async def collect(self) -> None:
        self._follow_maps()
        while self._touched:
            self._touched = False
            try:
                outcome = await self._udp.clean()
            except BaseException:
                self._touched = True
                raise
            for cleaned in outcome.cleaned:
                self._report(cleaned)
            if outcome.refused:
                self._touched = True
                raise OSError(f"stale UDP flows: {'; '.join(outcome.refused)}")

    @property
    def problems(self) -> Collection[str]:
        return [self._udp.sockets_stay] if self._udp.sockets_stay else []

    def _report(self, cleaned: Cleaned) -> None:
        self._on_cleaned(cleaned)
        if cleaned.flows or cleaned.sockets:
            family = cleaned.family.name
            _log.info("stale UDP flows and sockets ended", family=family, flows=cleaned.flows, sockets=cleaned.sockets)
