# SPDX-License-Identifier: Apache-2.0
"""The node's addresses and devices: in maps, and with the tc and XDP programs on the devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.connections.drain import pin_programs
from pyebpf_proxy.datapath.managers.bpffs import Bpffs
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.managers.nft_table import NftTable
from pyebpf_proxy.datapath.managers.programs import Programs
from pyebpf_proxy.datapath.node.devices import MAPS, Node
from pyebpf_proxy.datapath.node.xdp_devices import XdpDevices, attach_xdp
from pyebpf_proxy.datapath.repairs import Repair, repairs
from pyebpf_proxy.datapath.settings import node_config, xdp_config
from pyebpf_proxy.services.node_facts import NodeFacts

_log = Logger("datapath")


class NodeMaps(Manager):
    """Writes addresses and devices into maps. ``start`` sets ``node``."""

    node: Node

    def __init__(self, effective: Effective, bpffs: Bpffs, programs: Programs) -> None:
        super().__init__()
        self._effective = effective
        self._bpffs = bpffs
        self._programs = programs

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        loaded = self._programs.loaded
        config = node_config(self._effective, facts)
        maps = {name: loaded.maps[name] for name in MAPS}
        self.node = Node(self._effective.directory, config, maps, loaded.tc.btf, _log.error, self._bpffs.tcx)
        self._opened.callback(self.node.close)

    def node_changed(self, facts: NodeFacts) -> None:
        self.node.configure(node_config(self._effective, facts))

    def refresh(self) -> None:
        for name in self.node.read_back():
            _log.error("another program has changed a map; it was repaired", map=name)
            repairs.note(Repair.MAP)
        self.node.look()


class TcPrograms(Manager):
    """Attaches the tc programs, and from then on follows the devices."""

    def __init__(self, bpffs: Bpffs, programs: Programs, node_maps: NodeMaps, nft: NftTable) -> None:
        super().__init__()
        self._bpffs = bpffs
        self._programs = programs
        self._node_maps = node_maps
        self._nft = nft

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        loaded, node = self._programs.loaded, self._node_maps.node
        node.on_programs_behind = self._nft.check_destination
        if loaded.settings.fast_path:
            pin_programs(loaded.tc.programs, self._bpffs.pins)
        node.attach({name: program.fd for name, program in loaded.tc.programs.items()})
        self._opened.callback(node.follow(asyncio.get_running_loop(), _log.error))
        self._run(node.keep_looking(_log.error), "look at devices")


class XdpPrograms(Manager):
    """Attaches the XDP program to the configured devices, if there are any, and from then on follows their features."""

    def __init__(
        self,
        effective: Effective,
        bpffs: Bpffs,
        programs: Programs,
        node_maps: NodeMaps,
        release_former: Callable[[], None],
    ) -> None:
        """``release_former`` detaches the programs of other layouts, whose links cannot be updated."""
        super().__init__()
        self._effective = effective
        self._bpffs = bpffs
        self._programs = programs
        self._node_maps = node_maps
        self._release_former = release_former
        #: None: XDP is off.
        self.devices: XdpDevices | None = None

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        config, folder = xdp_config(self._effective), self._bpffs.pins / "xdp"
        self._release_former()
        self.devices = attach_xdp(self._programs.loaded, self._node_maps.node, config, folder)
        if self.devices is not None:
            self._opened.callback(self.devices.close)
            self.devices.follow(asyncio.get_running_loop())

    def refresh(self) -> None:
        """Retry on devices that had another XDP program."""
        if self.devices is not None:
            self.devices.look()

    def attached(self) -> Mapping[str, str]:
        """Devices that carry the program, and its mode. Safe in any thread."""
        return {} if self.devices is None else self.devices.attached()
