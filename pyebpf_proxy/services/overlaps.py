# SPDX-License-Identifier: Apache-2.0
"""Service addresses that are also addresses of Nodes.

This is allowed (spec/service-semantics §13): the Service uses its port, and the Node's own programs and NodePorts use
other ports. A program of the Node that listens on the Service's port becomes unreachable, so the overlap is logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from pyebpf_proxy.services.addresses import family_of, format_address_port
from pyebpf_proxy.services.claims import FIELDS, Claim, claim_of
from pyebpf_proxy.services.losses import LINES, LossMessage, LossReport
from pyebpf_proxy.services.model import Frontend, FrontendKind, IPFamily, ServicePort, ServicePortName

Key = tuple[str, str]


class Overlap(NamedTuple):
    """A service port's address that is also a Node's. ``str`` gives the message."""

    name: ServicePortName
    frontend: Frontend
    node: str

    def __str__(self) -> str:
        where = f"{format_address_port(self.frontend.address, self.frontend.port)}/{self.name.protocol.name}"
        which = f"Service {self.name.namespace}/{self.name.name}: {FIELDS[self.frontend.kind]}"
        return f"{which}: {where} is an address of Node {self.node}: processes that listen there are unreachable"


class Overlaps:
    """All overlaps. They are updated for each Service; a change of the Nodes' addresses checks all Services."""

    def __init__(self) -> None:
        self._owners: Mapping[bytes, str] = {}
        self._found: dict[Key, tuple[Overlap, ...]] = {}
        self._by_port: dict[tuple[IPFamily, Claim], set[ServicePortName]] = {}
        self._touched: dict[Key, None] = {}
        self._report = LossReport()
        #: The current number of overlaps.
        self.count = 0

    @property
    def all(self) -> frozenset[Overlap]:
        """The current overlaps."""
        return frozenset(overlap for of in self._found.values() for overlap in of)

    def at(self, node_port: Claim) -> Set[ServicePortName]:
        """Service ports with an address of a Node and the port and protocol of this NodePort."""
        family = family_of(node_port.address)
        return self._by_port.get((family, node_port._replace(address=b"")), frozenset())

    def new_messages(self) -> list[LossMessage]:
        """Log lines that have not been returned before."""
        touched, self._touched = self._touched, {}
        return [line for key in touched for line in self._report.new_lines(key, self._lines(key))]

    def service(self, key: Key, ports: Iterable[ServicePort]) -> None:
        """Set the ports of a Service; none if it is deleted."""
        owners = self._owners
        found = tuple(
            Overlap(port.name, frontend, owners[frontend.address])
            for port in ports
            for frontend in port.frontends
            if frontend.address in owners and frontend.kind is not FrontendKind.NODE_PORT
        )
        before = self._found.pop(key, ())
        if found:
            self._found[key] = found
        if found == before:
            return
        self._touched[key] = None
        self.count += len(found) - len(before)
        for overlap in before:
            names = self._by_port.get(_by_port(overlap), set())
            names.discard(overlap.name)
            if not names:
                self._by_port.pop(_by_port(overlap), None)
        for overlap in found:
            self._by_port.setdefault(_by_port(overlap), set()).add(overlap.name)

    def nodes(self, owners: Mapping[bytes, str], services: Iterable[tuple[Key, Iterable[ServicePort]]]) -> None:
        """Set the Node names by packed address, and check ``services``: all Services with their ports."""
        self._owners = owners
        for key, ports in services:
            self.service(key, ports)

    def _lines(self, key: Key) -> Iterable[LossMessage]:
        found = self._found.get(key, ())
        for overlap in found[:LINES]:
            yield LossMessage(*key, str(overlap))
        if len(found) > LINES:
            more = f"{len(found) - LINES} more of its addresses and ports are those of Nodes"
            yield LossMessage(*key, f"Service {key[0]}/{key[1]}: {more}")


def _by_port(overlap: Overlap) -> tuple[IPFamily, Claim]:
    return overlap.name.family, claim_of(overlap.name, overlap.frontend)._replace(address=b"")
