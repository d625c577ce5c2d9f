# SPDX-License-Identifier: Apache-2.0
"""Service addresses that are addresses of Nodes too.

Nothing is wrong with that (spec/service-semantics §13): at that port the service is served, at others the Node's own
programs, and NodePorts. But what listens there at the same port is not reached any more, so it is worth a line.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from .addresses import format_address_port
from .claims import FIELDS
from .model import Frontend, FrontendKind, ServicePort, ServicePortName


class Overlap(NamedTuple):
    """A service port's address that is also a Node's. A text for people by ``str``."""

    name: ServicePortName
    frontend: Frontend
    node: str

    def __str__(self) -> str:
        where = f"{format_address_port(self.frontend.address, self.frontend.port)}/{self.name.protocol.name}"
        which = f"Service {self.name.namespace}/{self.name.name}: {FIELDS[self.frontend.kind]}"
        return f"{which}: {where} is an address of Node {self.node}: what listens there itself is not reached"


class Overlaps:
    """Kept up to date service by service; a change of the Nodes' addresses looks at all of them."""

    def __init__(self) -> None:
        self._owners: Mapping[bytes, str] = {}
        self._found: dict[Hashable, tuple[Overlap, ...]] = {}

    @property
    def all(self) -> frozenset[Overlap]:
        """Those that there are now."""
        return frozenset(overlap for of in self._found.values() for overlap in of)

    def service(self, key: Hashable, ports: Iterable[ServicePort]) -> None:
        """A Service has these ports now; none: it is gone."""
        found = tuple(
            Overlap(port.name, frontend, self._owners[frontend.address])
            for port in ports
            for frontend in port.frontends
            if frontend.address in self._owners and frontend.kind is not FrontendKind.NODE_PORT
        )
        if found:
            self._found[key] = found
        else:
            self._found.pop(key, None)

    def nodes(self, owners: Mapping[bytes, str], services: Iterable[tuple[Hashable, Iterable[ServicePort]]]) -> None:
        """The Nodes have these addresses now, by packed address; ``services`` are all there are, with their ports."""
        self._owners = owners
        for key, ports in services:
            self.service(key, ports)
