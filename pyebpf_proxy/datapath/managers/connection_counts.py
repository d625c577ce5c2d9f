# SPDX-License-Identifier: Apache-2.0
"""The number of connections of each endpoint, for schedulers that use it (docs/ipvs-mode.md)."""

from __future__ import annotations

from pyebpf_proxy.common.bpf_constants import LEAST_CONNECTIONS
from pyebpf_proxy.datapath.connections.counts import Connections
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.managers.programs import Programs
from pyebpf_proxy.datapath.managers.service_maps import ServiceMaps
from pyebpf_proxy.services.node_facts import NodeFacts


class ConnectionCounts(Manager):
    """Counts connections about every second, if the scheduler uses the numbers."""

    def __init__(self, programs: Programs, service_maps: ServiceMaps) -> None:
        super().__init__()
        self._programs = programs
        self._service_maps = service_maps

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        loaded, writer = self._programs.loaded, self._service_maps.writer
        if loaded.settings.scheduler < LEAST_CONNECTIONS:
            return
        connections = Connections(loaded.maps, loaded.tc.btf, writer.backends_of, writer.has_backend)
        self._run(connections.run(), "connections")
