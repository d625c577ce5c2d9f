# SPDX-License-Identifier: Apache-2.0
"""Decides which of its addresses a service port gets. Others may claim the same address, or the cluster may own it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyebpf_proxy.services.claims import Claim, Claims, claim_of
from pyebpf_proxy.services.guard import Check, Guard
from pyebpf_proxy.services.losses import Loss, Losses
from pyebpf_proxy.services.model import FrontendKind, ServicePort, ServicePortName
from pyebpf_proxy.services.overlaps import Overlaps

Remember = Callable[[ServicePortName], None]


class Disputes:
    """Settles claims. ``leave`` and ``enter`` record changes; ``settle`` ends an update.

    :param rank: orders claimants whose address is of the same kind; the smallest wins.
    :param wanted: all service ports, with all addresses that they list.
    :param health_port: as of ``Guard``.
    """

    def __init__(
        self,
        check: Check,
        rank: Callable[[ServicePortName], Any],
        wanted: Mapping[ServicePortName, ServicePort],
        overlaps: Overlaps,
        health_port: int = 0,
    ) -> None:
        self._wanted = wanted
        self._overlaps = overlaps
        self._claims = Claims(rank)
        #: Since the last ``settle``: claims that must be settled; NodePorts that were left or entered, and their
        #: holders before that; service ports that were entered.
        self._disputed: set[Claim] = set()
        self._node_ports: dict[Claim, ServicePortName | None] = {}
        self._entered: set[ServicePortName] = set()
        #: See :meth:`new_holders`.
        self._holders: set[tuple[str, str]] = set()
        self.losses = Losses()
        self.guard = Guard(check, self._claims.holder, health_port)

    def leave(self, port: ServicePort) -> None:
        """Record that a service port is deleted, or replaced by a new version."""
        for frontend in port.frontends:
            claim = claim_of(port.name, frontend)
            if frontend.kind is FrontendKind.NODE_PORT:
                self._node_ports.setdefault(claim, self._claims.holder(claim))
            lost = self.losses.of(port.name).get(claim)
            if lost is not None and lost.why:
                self.losses.drop(port.name, claim)
            elif self._claims.remove(claim, port.name):
                self._disputed.add(claim)

    def enter(self, port: ServicePort) -> None:
        """Record that a service port is added, with all addresses that it lists."""
        self._entered.add(port.name)
        for frontend in port.frontends:
            claim = claim_of(port.name, frontend)
            if frontend.kind is FrontendKind.NODE_PORT:
                self._node_ports.setdefault(claim, self._claims.holder(claim))
            if why := self.guard.why_not(port.name, frontend):
                self.losses.put(Loss(port.name, claim, frontend.kind, None, why))
            elif self._claims.add(claim, port.name):
                self._disputed.add(claim)

    def new_holders(self) -> set[tuple[str, str]]:
        """Services that have an address, or a health check node port, which the cluster has allocated to another one
        since the last call.

        The cluster allocates each only once: most likely, a change that frees it has not been planned yet.
        """
        holders = self._holders | self.guard.holders
        self._holders, self.guard.holders = set(), set()
        return holders

    def settle(self, remember: Remember) -> None:
        """Settle everything that changed. ``remember`` is called before a service port changes.

        NodePorts are settled first: who holds one decides whether another Service may use its port on a Node's address.
        """
        kinds: dict[ServicePortName, dict[Claim, FrontendKind]] = {}

        def kind_of(name: ServicePortName, claim: Claim) -> FrontendKind:
            if name not in kinds:
                kinds[name] = {claim_of(name, each): each.kind for each in self._wanted[name].frontends}
            return kinds[name][claim]

        for claim in self._disputed & self._node_ports.keys():
            self._settle(claim, kind_of, remember)
        health_checks = self.guard.changed_health_checks()
        if self.guard.changed:
            self.guard.changed = False
            concerned = set(self._wanted)
        else:
            concerned = set()
            for claim, before in self._node_ports.items():
                there = self._overlaps.at(claim)
                # The others know the holder. A tenant may let thousands of service ports claim this port of a Node.
                concerned |= there & self._entered if self._claims.holder(claim) == before else there
            concerned.update(*map(self._overlaps.at, health_checks))
        for name in concerned:
            self._review(name, remember)
        for claim in self._disputed - self._node_ports.keys():
            self._settle(claim, kind_of, remember)
        self._disputed, self._node_ports, self._entered = set(), {}, set()

    def _review(self, name: ServicePortName, remember: Remember) -> None:
        """Check the addresses of a service port against the cluster's own addresses again."""
        for frontend in self._wanted[name].frontends:
            claim = claim_of(name, frontend)
            lost = self.losses.of(name).get(claim)
            was = lost.why if lost is not None else ""
            why = self.guard.why_not(name, frontend)
            if why == was:
                continue
            remember(name)
            if not why:
                self.losses.drop(name, claim)
                if self._claims.add(claim, name):
                    self._disputed.add(claim)
                continue
            if not was and self._claims.remove(claim, name):
                self._disputed.add(claim)
            self.losses.put(Loss(name, claim, frontend.kind, None, why))

    def _settle(
        self, claim: Claim, kind_of: Callable[[ServicePortName, Claim], FrontendKind], remember: Remember
    ) -> None:
        """Settle a contested claim and record who does not get it."""
        verdict = self._claims.settle(claim, kind_of)
        for name in (*verdict.gone, *(() if verdict.winner is None else (verdict.winner,))):
            loss = self.losses.of(name).get(claim)
            if loss is not None and not loss.why:
                remember(name)
                self.losses.drop(name, claim)
        for loser in verdict.losers:
            loss = Loss(loser.name, claim, loser.kind, verdict.winner)
            before = self.losses.of(loser.name).get(claim)
            if before == loss:
                continue
            if before is None:
                # Another winner changes only the message.
                remember(loser.name)
            self.losses.put(loss)
            if verdict.winner is not None and loser.kind is not FrontendKind.EXTERNAL_IP:
                self._holders.add((verdict.winner.namespace, verdict.winner.name))
