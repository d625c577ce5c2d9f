# SPDX-License-Identifier: Apache-2.0
"""The fast path: the state that opens and closes it, and the promotion of its flows."""

from __future__ import annotations

import asyncio

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.connections.promotion import Promoter, promoter
from pyebpf_proxy.datapath.managers.devices import NodeMaps, XdpPrograms
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.managers.nft_table import NftTable
from pyebpf_proxy.datapath.managers.programs import Programs
from pyebpf_proxy.datapath.managers.udp_flows import UdpFlows
from pyebpf_proxy.datapath.node.fast_path import FastPath
from pyebpf_proxy.services.node_facts import NodeFacts

_log = Logger("datapath")


class FastPathManager(Manager):
    """Opens the fast path, if the programs have one; without the agent it turns itself off."""

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
        btf, word = loaded.tc.btf, loaded.maps["fast_path"]
        reasons = btf.enum("slow_path_reason")
        fast_path = FastPath(word, btf.struct("fast_path"), reasons, self._nft.table.name, self._heed_rules)
        self.fast_path = fast_path
        # What a flow has learned depends on devices and endpoints.
        if self._xdp.frames is not None:
            self._xdp.frames.on_written = fast_path.devices_moved
        self._node_maps.node.on_devices = fast_path.devices_moved
        self._udp_flows.on_change = fast_path.moved
        self._opened.callback(fast_path.close)
        fast_path.follow(asyncio.get_running_loop())
        self.promoter = promoter(loaded.maps, loaded.tc.programs, btf)
        self._opened.callback(asyncio.create_task(self.promoter.run(), name="promoter").cancel)
        _log.info("flows take the fast path", entries=loaded.maps["flows"].max_entries)
