# SPDX-License-Identifier: Apache-2.0
"""The service maps, and the backends in the maps of the nftables table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.managers.nft_table import NftTable
from pyebpf_proxy.datapath.managers.programs import Programs
from pyebpf_proxy.datapath.maps.layouts import FrontendAddress
from pyebpf_proxy.datapath.maps.writer import Writer
from pyebpf_proxy.datapath.netfilter.nft_rules import port_key
from pyebpf_proxy.services.model import Protocol, ServicePort, ServicePortName
from pyebpf_proxy.services.node_facts import NodeFacts


class ServiceMaps(Manager):
    """Writes service ports for programs and netfilter. ``start`` sets ``writer``."""

    writer: Writer
    #: The UDP service ports that a former run has left in the maps, as ``start`` has found them.
    former: Mapping[ServicePortName, ServicePort] = {}

    def __init__(self, programs: Programs, nft: NftTable) -> None:
        super().__init__()
        self._programs = programs
        self._nft = nft
        self._backends: Mapping[int, tuple[bytes, int]] = {}

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        table = self._nft.table
        # Until the new programs are attached, those of a former run may use other maps with different ids.
        last_id = max(table.elements, default=0)
        self.writer = Writer(self._programs.loaded, table.update, last_id, self._change_frontends)
        names = (name for name in self.writer.names if name.protocol is Protocol.UDP)
        self.former = {name: self.writer[name] for name in names}
        # In one step: no entry of a former run may keep an address that belongs to another service by now.
        self.writer.apply(wanted, complete=True)
        # This includes ids that the writer has adopted. remove_old_backends() removes the other old elements.
        self._backends = self.writer.netfilter_backends
        table.update(self._backends)
        self._nft.frontends = lambda: _keys(self.writer.frontends)
        self._set_frontends()

    def remove_old_backends(self) -> None:
        """Remove backends of a former run. No program uses them any more: the new ones are attached everywhere."""
        self._nft.table.replace(self._backends)
        self._backends = {}

    def apply(self, delta: Delta, complete: bool) -> None:
        self.writer.apply(delta, complete)
        if complete:
            self._nft.table.replace(self.writer.netfilter_backends)
            self._set_frontends()

    def _change_frontends(self, added: Iterable[FrontendAddress], removed: Iterable[FrontendAddress]) -> None:
        self._nft.table.change_ports("frontends", _keys(added), _keys(removed))

    def _set_frontends(self) -> None:
        self._nft.table.set_ports("frontends", _keys(self.writer.frontends))

    def refresh(self) -> None:
        """Recount the clients with session affinity."""
        self.writer.recount_clients()

    async def collect(self) -> None:
        """Remove old versions once no program can be reading them."""
        await self.writer.collect_async()

    @property
    def problems(self) -> Collection[str]:
        return [str(problem) for problem in self.writer.problems.values()]


def _keys(frontends: Iterable[FrontendAddress]) -> Iterator[bytes]:
    return (port_key(address, protocol, port) for address, port, protocol in frontends)
