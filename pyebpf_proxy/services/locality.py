# SPDX-License-Identifier: Apache-2.0
"""Service ports whose policy is Local where nobody is local, though there are endpoints elsewhere (spec/metrics §3)."""

from __future__ import annotations

from collections.abc import Mapping

from .model import IPFamily, ServicePort, ServicePortName


class NoLocal:
    """Their number, kept up to date by what changes."""

    def __init__(self) -> None:
        self._internal: dict[IPFamily, set[ServicePortName]] = {family: set() for family in IPFamily}
        self._external: dict[IPFamily, set[ServicePortName]] = {family: set() for family in IPFamily}

    def update(self, delta: Mapping[ServicePortName, ServicePort | None]) -> None:
        """Take in what the service ports are now; None for one that is gone."""
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
        """By traffic policy: ``internal`` and ``external``."""
        return {"internal": len(self._internal[family]), "external": len(self._external[family])}
