# SPDX-License-Identifier: Apache-2.0
"""Takes over what maps, programs and settings of a former run still hold, then removes it."""

from __future__ import annotations

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.datapath.connections.drain import drain, unpin_programs
from pyebpf_proxy.datapath.loader import grace
from pyebpf_proxy.datapath.loader.programs import Loaded
from pyebpf_proxy.datapath.managers.bpffs import Bpffs
from pyebpf_proxy.datapath.managers.devices import NodeMaps
from pyebpf_proxy.datapath.managers.kernel_settings import FastPathSettings
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.managers.nft_table import NftTable
from pyebpf_proxy.datapath.managers.programs import Programs
from pyebpf_proxy.datapath.managers.service_maps import ServiceMaps
from pyebpf_proxy.datapath.managers.sockets import SocketPrograms
from pyebpf_proxy.datapath.maps.former_flows import drain_resized
from pyebpf_proxy.datapath.maps.other_layouts import OtherLayouts
from pyebpf_proxy.services.node_facts import NodeFacts

_log = Logger("datapath")


class TakeOver(Manager):
    """Takes over session affinity and flows from maps of other layouts, and flows from a table of another size.

    Drains the flow table of a former run if the new programs have no fast path, or fewer source ports for young flows.

    ``start`` sets ``others``.
    """

    others: OtherLayouts

    def __init__(self, bpffs: Bpffs, programs: Programs, service_maps: ServiceMaps) -> None:
        super().__init__()
        self._bpffs = bpffs
        self._programs = programs
        self._service_maps = service_maps

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        pins, loaded = self._bpffs.pins, self._programs.loaded
        self.others = OtherLayouts(pins, loaded, self._service_maps.writer)
        self.others.take_over()
        self.others.drain()
        drain_resized(pins, loaded.maps, loaded.tc.btf)
        # Not configured, or refused by the kernel: the new programs will not use the flows of a former run.
        # Fewer ports: conntrack will take the others, so no young flow may have them.
        if not loaded.settings.fast_path or _has_fewer_ports(loaded):
            drain(pins)


def _has_fewer_ports(loaded: Loaded) -> bool:
    """Whether young flows of a former run may have source ports that are not the programs' any more."""
    found = loaded.maps["fast_path"].lookup(bytes(4))
    former = loaded.tc.btf.struct("fast_path").unpack(found) if found else {}
    # All ranges begin at the same port.
    return int(former.get("snat_port_max", 0)) > loaded.settings.snat_port_max


class Retirement(Manager):
    """Removes what only a former run used. Starts when no program of that run is attached to a device any more."""

    def __init__(
        self,
        bpffs: Bpffs,
        nft: NftTable,
        programs: Programs,
        service_maps: ServiceMaps,
        node_maps: NodeMaps,
        sockets: SocketPrograms,
        fast_path_settings: FastPathSettings,
        take_over: TakeOver,
    ) -> None:
        super().__init__()
        self._bpffs = bpffs
        self._nft = nft
        self._programs = programs
        self._service_maps = service_maps
        self._node_maps = node_maps
        self._sockets = sockets
        self._fast_path_settings = fast_path_settings
        self._take_over = take_over

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        loaded, devices = self._programs.loaded, self._node_maps.node.attached
        self._sockets.detach_former()
        # Copies the entries that programs of a former run have written into maps that were resized meanwhile.
        loaded.attached()
        if not loaded.settings.fast_path:
            unpin_programs(self._bpffs.pins)
            self._fast_path_settings.restore()
        _log.info("attached", devices=len(devices), cgroup=self._sockets.cgroup, pins=self._bpffs.pins)
        self._take_over.others.retire()
        # A packet may still be in a program of the former run.
        grace.wait()
        self._nft.former_flows_gone()
        self._service_maps.remove_old_backends()
