# SPDX-License-Identifier: Apache-2.0
"""Service ports with policy Local that have endpoints on other nodes, but no local ones (spec/metrics §3)."""

from __future__ import annotations

from collections.abc import Mapping

from pyebpf_proxy.services.model import IPFamily, ServicePort, ServicePortName


class NoLocal:
    """Counts these service ports, incrementally."""

    def __init__(self) -> None:
        self._internal: dict[IPFamily, set[ServicePortName]] = {family: set() for family in IPFamily}
        self._external: dict[IPFamily, set[ServicePortName]] = {family: set() for family in IPFamily}

    def update(self, delta: Mapping[ServicePortName, ServicePort | None]) -> None:
        """Update service ports; None for a deleted one."""
        for name, port in delta.items():
            lacks = port is not None and port.any_endpoints and not port.local
            for names, local in (
                (self._internal[name.family], port is not None and port.internal_local),
                (self._external[name.family], port is not None and port.external_local),
            ):
                if lacks and local:
                    names.add(name)
                else:
                    names.discard(name)

    def counts(self, family: IPFamily) -> dict[str, int]:
        """The numbers by traffic policy: ``internal`` and ``external``."""
        return {"internal": len(self._internal[family]), "external": len(self._external[family])}
