# SPDX-License-Identifier: Apache-2.0
"""Which UDP flows are stale: a pure index of the UDP service ports (spec/service-semantics §10)."""

from __future__ import annotations

from collections.abc import Mapping

from pyebpf_proxy.services.addresses import Place
from pyebpf_proxy.services.model import FrontendKind, IPFamily, Protocol, ServicePort, ServicePortName, with_removals


class UdpServices:
    """The UDP service ports by their frontends, kept up to date from the plan's changes."""

    def __init__(self) -> None:
        self._ports: dict[ServicePortName, ServicePort] = {}
        self._places: dict[Place, frozenset[Place]] = {}
        self._node_ports: dict[tuple[IPFamily, int], frozenset[Place]] = {}
        self._kinds: dict[Place, FrontendKind] = {}
        #: Whether the last changes gave endpoints to a service address that had none (:meth:`kind_of`).
        self.gained = False
        #: Endpoints that no longer serve, since the last clean-up.
        self._lost: dict[ServicePortName, set[Place]] = {}

    def __bool__(self) -> bool:
        return bool(self._ports)

    def apply(self, delta: Mapping[ServicePortName, ServicePort | None], complete: bool = False) -> bool:
        """Apply changes; ``complete``: there are no other ports. True if the serving endpoints of a port change."""
        touched = False
        new: list[ServicePort] = []
        had: set[Place] = set()
        if complete:
            delta = with_removals(delta, self._ports)
        for name, plan in delta.items():
            if name.protocol is not Protocol.UDP:
                continue
            old = self._ports.pop(name, None)
            if old is not None:
                had |= self._kinds.keys() & _addresses(old)
                self._forget(old)
            if plan is not None:
                self._ports[name] = plan
                new.append(plan)
            touched |= (old.serving if old else ()) != (plan.serving if plan else ())
            self._lose(name, _serving(old) if old else frozenset(), _serving(plan) if plan else None)
        # After all old ports are removed: an address may have moved from one to another.
        for plan in new:
            self._learn(plan)
        self.gained = any(place in self._kinds and place not in had for plan in new for place in _addresses(plan))
        return touched

    def is_stale(self, family: IPFamily, destination: Place, endpoint: Place) -> bool:
        """Whether a flow to ``destination`` that ``endpoint`` answers should be ended.

        False if no service port has this destination, or if it has no serving endpoint at all: those flows stay.
        """
        serving = self._places.get(destination)
        if serving is None:
            serving = self._node_ports.get((family, destination[1]))
        return bool(serving) and endpoint not in serving  # type: ignore[operator]

    def kind_of(self, address: Place) -> FrontendKind | None:
        """The kind of a service address that has endpoints; None: it is none. NodePorts do not count."""
        return self._kinds.get(address)

    def lost(self) -> frozenset[Place]:
        """Endpoints that no longer serve a service port, while others do. Until :meth:`forget_lost`."""
        return frozenset().union(*(places for name, places in self._lost.items() if self._ports[name].serving))

    def forget_lost(self, places: frozenset[Place]) -> None:
        """Nothing sends to these any more."""
        for name in [name for name in self._lost if self._ports[name].serving]:
            self._lost[name] -= places
            if not self._lost[name]:
                del self._lost[name]

    def is_frontend(self, family: IPFamily, destination: Place) -> bool:
        """Whether flows to there are a service port's, as for :meth:`is_stale`."""
        return destination in self._places or (family, destination[1]) in self._node_ports

    def _lose(self, name: ServicePortName, before: frozenset[Place], now: frozenset[Place] | None) -> None:
        if now is None:
            # The flows of a deleted Service stay.
            self._lost.pop(name, None)
            return
        lost = (self._lost.pop(name, set()) | before) - now
        if lost:
            self._lost[name] = lost

    def _learn(self, plan: ServicePort) -> None:
        serving = _serving(plan)
        for frontend in plan.frontends:
            if frontend.kind is FrontendKind.NODE_PORT:
                self._node_ports[plan.name.family, frontend.port] = serving
            else:
                self._places[frontend.address, frontend.port] = serving
                if plan.any_endpoints and serving:
                    self._kinds[frontend.address, frontend.port] = frontend.kind

    def _forget(self, plan: ServicePort) -> None:
        for frontend in plan.frontends:
            if frontend.kind is FrontendKind.NODE_PORT:
                self._node_ports.pop((plan.name.family, frontend.port), None)
            else:
                self._places.pop((frontend.address, frontend.port), None)
                self._kinds.pop((frontend.address, frontend.port), None)


def _addresses(plan: ServicePort) -> set[Place]:
    return {(frontend.address, frontend.port) for frontend in plan.frontends}


def _serving(plan: ServicePort) -> frozenset[Place]:
    return frozenset((endpoint.address, endpoint.port) for endpoint in plan.serving)
