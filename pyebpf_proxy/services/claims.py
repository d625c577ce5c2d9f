# SPDX-License-Identifier: Apache-2.0
"""Which service port gets an address that several of them claim.

The API server prevents most conflicts. They occur with manifests, stale data and externalIPs. In kube-proxy the order
of writes decides (spec/service-semantics §8). Here the kind of address decides first: users may set any externalIP,
but only the cluster allocates the other kinds. Then the older object wins, then the first by namespace and name. The
losers are served as soon as the winner is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pyebpf_proxy.services.addresses import format_address_port
from pyebpf_proxy.services.model import Frontend, FrontendKind, Protocol, ServicePortName

#: The field of a Service for each kind of address, for messages.
FIELDS = {
    FrontendKind.CLUSTER_IP: "spec.clusterIPs",
    FrontendKind.EXTERNAL_IP: "spec.externalIPs",
    FrontendKind.LOAD_BALANCER: "status.loadBalancer.ingress",
    FrontendKind.NODE_PORT: "spec.ports.nodePort",
}
#: The smallest wins. Addresses that the cluster allocates come first, those that any user may set come last.
KIND_RANK = {
    FrontendKind.CLUSTER_IP: 0,
    FrontendKind.NODE_PORT: 1,
    FrontendKind.LOAD_BALANCER: 2,
    FrontendKind.EXTERNAL_IP: 3,
}


class Claim(NamedTuple):
    """A key of the data plane's frontend maps. A NodePort's address is all zero."""

    address: bytes
    port: int
    protocol: Protocol

    def __str__(self) -> str:
        where = format_address_port(self.address, self.port) if any(self.address) else f"NodePort {self.port}"
        return f"{where}/{self.protocol.name}"


class Conflict(NamedTuple):
    """A claim with several claimants. ``losers`` are not served at it; ``kinds``: the kind of address for each."""

    claim: Claim
    winner: ServicePortName
    losers: tuple[ServicePortName, ...]
    kinds: tuple[FrontendKind, ...]


def claim_of(name: ServicePortName, frontend: Frontend) -> Claim:
    """The claim that a frontend of a service port makes."""
    return Claim(frontend.address, frontend.port, name.protocol)


class Claims:
    """The claimants of every address. Only addresses with several of them cost more than a dictionary entry.

    :param rank: orders claimants of one kind, the smallest wins.
    """

    def __init__(self, rank: Callable[[ServicePortName], Any]) -> None:
        self._rank = rank
        self._holder: dict[Claim, ServicePortName] = {}
        self._contested: dict[Claim, set[ServicePortName]] = {}

    def holder(self, claim: Claim) -> ServicePortName | None:
        """The service port that is served there, as last settled."""
        return self._holder.get(claim)

    def add(self, claim: Claim, name: ServicePortName) -> bool:
        """Add a claimant. True if the claim is contested and must be settled."""
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
        """Remove a claimant. True if the claim was contested and must be settled."""
        contenders = self._contested.get(claim)
        if contenders is None:
            if self._holder.get(claim) == name:
                del self._holder[claim]
            return False
        contenders.discard(name)
        return True

    def settle(self, claim: Claim, kind_of: Callable[[ServicePortName, Claim], FrontendKind]) -> Conflict | None:
        """Decide a contested claim: the remaining conflict, or None if at most one claimant is left.

        ``kind_of`` gives the kind of address for a claimant.
        """
        contenders = self._contested.get(claim, set())
        if not contenders:
            self._contested.pop(claim, None)
            self._holder.pop(claim, None)
            return None
        kinds = {name: kind_of(name, claim) for name in contenders}
        winner, *losers = sorted(contenders, key=lambda name: (KIND_RANK[kinds[name]], self._rank(name)))
        self._holder[claim] = winner
        if losers:
            return Conflict(claim, winner, tuple(losers), tuple(kinds[name] for name in losers))
        del self._contested[claim]
        return None
