# SPDX-License-Identifier: Apache-2.0
"""The fast path: the state that opens and closes it, and the promotion of its flows."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from functools import partial

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.common.threads import in_thread
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.connections import masqueraded, tracked_clients, young_counts
from pyebpf_proxy.datapath.connections.promotion import Promoter, promoter, run_for_flow
from pyebpf_proxy.datapath.managers.devices import NodeMaps, XdpPrograms
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.managers.nft_table import NftTable
from pyebpf_proxy.datapath.managers.programs import Programs
from pyebpf_proxy.datapath.managers.udp_flows import UdpFlows
from pyebpf_proxy.datapath.node.fast_path import FastPath
from pyebpf_proxy.services.node_facts import NodeFacts

_log = Logger("datapath")

#: From one pass over conntrack's connections to the next: two fit into the time that a note lasts.
NOTE_SECONDS = tracked_clients.NOTED_SECONDS * 0.4
SOON_SECONDS = 5.0


class FastPathManager(Manager):
    """Opens the fast path, if the programs have one. Without an agent the fast path turns itself off."""

    def __init__(
        self,
        effective: Effective,
        nft: NftTable,
        programs: Programs,
        node_maps: NodeMaps,
        xdp: XdpPrograms,
        udp_flows: UdpFlows,
    ) -> None:
        super().__init__()
        self._heed_rules = effective.fast_path == "auto"
        self._nft = nft
        self._programs = programs
        self._node_maps = node_maps
        self._xdp = xdp
        self._udp_flows = udp_flows
        #: None: there is no fast path.
        self.fast_path: FastPath | None = None
        self.promoter: Promoter | None = None

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        loaded = self._programs.loaded
        if not loaded.settings.fast_path:
            return
        btf, state_map = loaded.tc.btf, loaded.maps["fast_path"]
        reasons = btf.enum("slow_path_reason")
        low, high = loaded.settings.snat_port_min, loaded.settings.snat_port_max
        ports = range(low, high + 1) if low else range(0)
        layout = btf.struct("fast_path")
        promotion = promoter(
            loaded.maps,
            loaded.tc.programs,
            btf,
            ports,
            lambda: fast_path.lasting,
            # As the programs do: they look at a flow again after a change.
            lambda generation, *places: generation != fast_path.generation and self._udp_flows.is_stale(*places),
        )
        fast_path = FastPath(
            state_map,
            layout,
            reasons,
            self._nft.table.name,
            self._heed_rules,
            holds=bool(ports) or not loaded.settings.conntrack_is_asked,
            snat_ports=ports,
            passes=lambda: promotion.statistics.passes,
            route_marks=loaded.maps["route_marks"],
        )
        self.fast_path, self.promoter = fast_path, promotion
        # What a flow has learned depends on devices and endpoints.
        if self._xdp.devices is not None:
            self._xdp.devices.on_written = fast_path.links_moved
        self._node_maps.node.on_devices = fast_path.links_moved
        self._udp_flows.on_change = fast_path.moved
        self._node_maps.node.on_gone = self._sources_gone
        self._node_maps.node.on_devices_gone = partial(young_counts.delete_gone, loaded.maps["young_counts"])
        # After the subscription: it reports each device that goes from now on.
        young_counts.keep_only(loaded.maps["young_counts"], self._node_maps.node.indexes)
        self._opened.callback(fast_path.close)
        fast_path.follow(asyncio.get_running_loop())
        self._sources_gone()
        self._run(promotion.run(), "promoter")
        # Otherwise a former run has done it, for the same flow table and these ports, and since then no other proxy has
        # opened a new flow.
        if fast_path.draining:
            self._run(self._enter(fast_path, ports), "conntrack's flows", may_end=True)
        if loaded.settings.conntrack_lookup:
            self._run(self._note_tracked(), "the filter of conntrack's flows", may_end=True)
        else:
            self._run(self._note_straight(), "flows straight to endpoints")
        _log.info("the fast path is ready", entries=loaded.maps["flows"].max_entries)

    async def _enter(self, fast_path: FastPath, ports: range) -> None:
        """Before any flow is young: flows that conntrack has masqueraded keep their source ports.

        If a program cannot look them up, UDP flows that conntrack has translated keep their endpoints, too.
        """
        loaded = self._programs.loaded
        addresses = {address.packed for address in self._node_maps.node.addresses}
        try:
            entered, complete = await in_thread(
                masqueraded.enter,
                addresses,
                ports,
                masqueraded.endpoint_test(loaded.maps, loaded.tc.btf),
                loaded.tc.btf,
                partial(run_for_flow, loaded.tc.programs["enter_flow"]),
                loaded.settings.flow_quota // 2,
                datagrams=not loaded.settings.conntrack_is_asked,
            )
        except (OSError, MemoryError) as error:
            _log.error("flows in conntrack could not be read; new flows may break them", error=str(error))
        else:
            if not complete:
                _log.warning("conntrack has more flows than fit; new flows may break some", known=entered)
            elif entered:
                _log.info("flows in conntrack keep their source ports and endpoints", flows=entered)
        fast_path.admit()

    async def _note_tracked(self) -> None:
        """Until this ends, the programs look up every new flow in conntrack."""
        loaded = self._programs.loaded
        note_flow = partial(run_for_flow, loaded.tc.programs["note_tracked_flow"])
        try:
            noted = await in_thread(tracked_clients.note, loaded.tc.btf, loaded.maps["tracked_clients"], note_flow)
        except (OSError, MemoryError) as error:
            _log.warning("flows in conntrack could not be listed; each new flow is looked up there", error=str(error))
        else:
            _log.debug("new flows are no longer looked up in conntrack", noted=noted)
            await self._note_connections(note_flow)

    async def _note_connections(self, note_flow: Callable[[bytes], bool]) -> None:
        """For ever: notes do not last as long as connections."""
        loaded = self._programs.loaded
        while True:
            await asyncio.sleep(NOTE_SECONDS)
            # The next pass comes before the notes expire.
            with contextlib.suppress(OSError, MemoryError):
                await in_thread(
                    tracked_clients.note_connections, loaded.tc.btf, loaded.maps["tracked_clients"], note_flow
                )

    async def _note_straight(self) -> None:
        """For ever. The maps have no endpoints before the first sync, so the second pass follows soon."""
        loaded = self._programs.loaded
        note = partial(
            tracked_clients.note_straight,
            loaded.tc.btf,
            partial(run_for_flow, loaded.tc.programs["note_tracked_flow"]),
            masqueraded.endpoint_test(loaded.maps, loaded.tc.btf),
        )
        for pause in itertools.chain((SOON_SECONDS,), itertools.repeat(NOTE_SECONDS)):
            with contextlib.suppress(OSError, MemoryError):
                await in_thread(note)
            await asyncio.sleep(pause)

    def _sources_gone(self) -> None:
        """Addresses have left the node: end the flows that are masqueraded to them."""
        node = self._node_maps.node
        gone, node.gone = node.gone, set()
        if gone and self.fast_path is not None and self.promoter is not None:
            # Permits are voided first: they contain the source address for masqueraded flows.
            self.fast_path.rules_moved()
            self.promoter.sources_gone(gone)
