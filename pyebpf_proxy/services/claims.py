# SPDX-License-Identifier: Apache-2.0
"""Who is served at an address that two service ports name.

The API server prevents most of it; with manifests, or with stale data, it happens. kube-proxy leaves the outcome to
the order of its writes (spec/service-semantics §8). Here the older object wins, then the first by namespace and name,
and the others are served as soon as the winner leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .addresses import format_address_port
from .model import Frontend, FrontendKind, Protocol, ServicePortName

#: Where in a Service an address of each kind stands, for messages.
FIELDS = {
    FrontendKind.CLUSTER_IP: "spec.clusterIPs",
    FrontendKind.EXTERNAL_IP: "spec.externalIPs",
    FrontendKind.LOAD_BALANCER: "status.loadBalancer.ingress",
    FrontendKind.NODE_PORT: "spec.ports.nodePort",
}


class Claim(NamedTuple):
    """An address of the data plane's frontend maps. A NodePort's address is all zero."""

    address: bytes
    port: int
    protocol: Protocol


class Conflict(NamedTuple):
    """One claim with more than one claimant; ``losers`` are not served at it. ``kinds``: what it is to each of them."""

    claim: Claim
    winner: ServicePortName
    losers: tuple[ServicePortName, ...]
    kinds: tuple[FrontendKind, ...] = ()

    def __str__(self) -> str:
        address, port, protocol = self.claim
        where = format_address_port(address, port) if any(address) else f"NodePort {port}"
        losers = ", ".join(
            f"Service {loser.namespace}/{loser.name}: {FIELDS[kind]}"
            for loser, kind in zip(self.losers, self.kinds, strict=True)
        )
        verb = "is" if len(self.losers) == 1 else "are"
        winner = f"Service {self.winner.namespace}/{self.winner.name}"
        return f"{losers}: {where}/{protocol.name} is that of {winner} already, {verb} not served there"


def claim_of(name: ServicePortName, frontend: Frontend) -> Claim:
    """The claim that a frontend of a service port makes."""
    return Claim(frontend.address, frontend.port, name.protocol)


class Claims:
    """Claimants of every address; only addresses with more than one cost more than a dictionary entry.

    :param rank: orders claimants, the smallest wins.
    """

    def __init__(self, rank: Callable[[ServicePortName], Any]) -> None:
        self._rank = rank
        self._holder: dict[Claim, ServicePortName] = {}
        self._contested: dict[Claim, set[ServicePortName]] = {}

    def add(self, claim: Claim, name: ServicePortName) -> bool:
        """Note a claimant. True if the claim is contested (now): settle it."""
        contenders = self._contested.get(claim)
        if contenders is not None:
            contenders.add(name)
            return True
        holder = self._holder.setdefault(claim, name)
        if holder == name:
            return False
        self._contested[claim] = {holder, name}
        return True

    def remove(self, claim: Claim, name: ServicePortName) -> bool:
        """Forget a claimant. True if the claim was contested: settle it."""
        contenders = self._contested.get(claim)
        if contenders is None:
            if self._holder.get(claim) == name:
                del self._holder[claim]
            return False
        contenders.discard(name)
        return True

    def settle(self, claim: Claim) -> Conflict | None:
        """Decide a contested claim: the conflict that remains, or None when one claimant (or none) is left."""
        contenders = self._contested.get(claim, set())
        if not contenders:
            self._contested.pop(claim, None)
            self._holder.pop(claim, None)
            return None
        winner, *losers = sorted(contenders, key=self._rank)
        self._holder[claim] = winner
        if losers:
            return Conflict(claim, winner, tuple(losers))
        del self._contested[claim]
        return None
