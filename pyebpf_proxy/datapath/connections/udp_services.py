# SPDX-License-Identifier: Apache-2.0
"""Which UDP flows are stale: a pure index of the UDP service ports (spec/service-semantics §10)."""

from __future__ import annotations

from collections.abc import Mapping

from pyebpf_proxy.services.model import FrontendKind, IPFamily, Protocol, ServicePort, ServicePortName

#: Packed address and port.
Place = tuple[bytes, int]


class UdpServices:
    """The UDP service ports by their frontends, kept up to date from the plan's changes."""

    def __init__(self) -> None:
        self._ports: dict[ServicePortName, ServicePort] = {}
        self._places: dict[Place, frozenset[Place]] = {}
        self._node_ports: dict[tuple[IPFamily, int], frozenset[Place]] = {}

    def __bool__(self) -> bool:
        return bool(self._ports)

    def apply(self, delta: Mapping[ServicePortName, ServicePort | None], complete: bool = False) -> bool:
        """Apply changes; ``complete``: there are no other ports. True if the serving endpoints of a port change."""
        touched = False
        new: list[ServicePort] = []
        if complete:
            delta = {**{name: None for name in self._ports if name not in delta}, **delta}
        for name, plan in delta.items():
            if name.protocol is not Protocol.UDP:
                continue
            old = self._ports.pop(name, None)
            if old is not None:
                self._forget(old)
            if plan is not None:
                self._ports[name] = plan
                new.append(plan)
            touched |= (old.serving if old else ()) != (plan.serving if plan else ())
        # After all old ports are removed, because an address may have moved from one to another.
        for plan in new:
            self._learn(plan)
        return touched

    def is_stale(self, family: IPFamily, destination: Place, endpoint: Place) -> bool:
        """Whether a flow to ``destination`` that ``endpoint`` answers should be ended.

        False if no service port has this destination, or if it has no serving endpoint at all: those flows stay.
        """
        serving = self._places.get(destination)
        if serving is None:
            serving = self._node_ports.get((family, destination[1]))
        return bool(serving) and endpoint not in serving  # type: ignore[operator]

    def _learn(self, plan: ServicePort) -> None:
        serving = frozenset((endpoint.address, endpoint.port) for endpoint in plan.serving)
        for frontend in plan.frontends:
            if frontend.kind is FrontendKind.NODE_PORT:
                self._node_ports[plan.name.family, frontend.port] = serving
            else:
                self._places[frontend.address, frontend.port] = serving

    def _forget(self, plan: ServicePort) -> None:
        for frontend in plan.frontends:
            if frontend.kind is FrontendKind.NODE_PORT:
                self._node_ports.pop((plan.name.family, frontend.port), None)
            else:
                self._places.pop((frontend.address, frontend.port), None)
