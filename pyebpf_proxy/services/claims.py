# SPDX-License-Identifier: Apache-2.0
"""Decides which service port gets an address that several service ports claim.

The API server prevents most conflicts. They occur with manifests, stale data and externalIPs. In kube-proxy, the order
of writes decides (spec/service-semantics §8). Here, the kind of address decides first: users may set any externalIP,
but only the cluster allocates the other kinds. Then the older object wins, then the first by namespace and name. The
losers get the address as soon as the winner is gone.
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
#: The smallest rank wins. Addresses that the cluster allocates come first; those that any user may set come last.
KIND_RANK = {
    FrontendKind.CLUSTER_IP: 0,
    FrontendKind.NODE_PORT: 1,
    FrontendKind.LOAD_BALANCER: 2,
    FrontendKind.EXTERNAL_IP: 3,
}


class Claim(NamedTuple):
    """A key of the maps ``frontends4`` and ``frontends6``. The address of a NodePort is all zero."""

    address: bytes
    port: int
    protocol: Protocol

    def __str__(self) -> str:
        where = format_address_port(self.address, self.port) if any(self.address) else f"NodePort {self.port}"
        return f"{where}/{self.protocol.name}"


class Conflict(NamedTuple):
    """A claim of several service ports. The ``losers`` are not served there; ``kinds``: the kind of address of each."""

    claim: Claim
    winner: ServicePortName
    losers: tuple[ServicePortName, ...]
    kinds: tuple[FrontendKind, ...]


def claim_of(name: ServicePortName, frontend: Frontend) -> Claim:
    """The claim that a frontend of a service port makes."""
    return Claim(frontend.address, frontend.port, name.protocol)


class Claims:
    """The claimants of every address. An address with one claimant costs only a dictionary entry.

    :param rank: orders claimants whose address is of the same kind; the smallest wins.
    """

    def __init__(self, rank: Callable[[ServicePortName], Any]) -> None:
        self._rank = rank
        self._holder: dict[Claim, ServicePortName] = {}
        self._contested: dict[Claim, set[ServicePortName]] = {}

    def holder(self, claim: Claim) -> ServicePortName | None:
        """The service port that is served there, according to the last :meth:`settle`."""
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
        """Decide a contested claim. The result: the remaining conflict, or None if at most one claimant is left.

        ``kind_of`` returns the kind of the claimant's address.
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
