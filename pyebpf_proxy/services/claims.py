# SPDX-License-Identifier: Apache-2.0
"""Decides which service port gets an address that several service ports claim.

The API server prevents most conflicts. They occur with manifests, stale data and externalIPs. In kube-proxy, the order
of writes decides (spec/service-semantics §8). Here, the kind of address decides first: users may set any externalIP,
but only the cluster allocates the other kinds. Then the older object wins, then the first by namespace and name. The
losers get the address as soon as the winner is gone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
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


class Contender(NamedTuple):
    """A claimant of a contested claim. The smallest ``order`` wins; it is different for each name."""

    order: tuple[int, Any]
    name: ServicePortName
    kind: FrontendKind


class Verdict(NamedTuple):
    """The result for a contested claim: who is served there; None if no claimant is left.

    ``losers``: the others, if they have a new winner or were added since the last verdict. ``gone``: the claimants that
    were removed since then.
    """

    winner: ServicePortName | None
    losers: list[Contender]
    gone: set[ServicePortName]


def claim_of(name: ServicePortName, frontend: Frontend) -> Claim:
    """The claim that a frontend of a service port makes."""
    return Claim(frontend.address, frontend.port, name.protocol)


class _Contest:
    """The claimants of a contested claim: sorted, and those that were added or removed since the last verdict."""

    __slots__ = ("gone", "new", "of", "sorted")

    def __init__(self, holder: ServicePortName) -> None:
        self.sorted: list[Contender] = []
        self.of: dict[ServicePortName, Contender] = {}
        self.new = {holder}
        self.gone: set[ServicePortName] = set()

    def add(self, name: ServicePortName) -> None:
        self.gone.discard(name)
        if name not in self.of:
            self.new.add(name)

    def remove(self, name: ServicePortName) -> None:
        self.gone.add(name)
        self.new.discard(name)
        contender = self.of.pop(name, None)
        if contender is not None:
            del self.sorted[bisect_left(self.sorted, contender)]


class Claims:
    """The claimants of every address. An address with one claimant costs only a dictionary entry.

    A tenant may let ten thousands of Services claim one address. So the claimants of a contested one stay sorted: what
    one of them changes costs about as much as with two of them, unless another one wins.

    :param rank: orders claimants whose address is of the same kind; the smallest wins. It is different for each name,
        and stays the same while a name is a claimant.
    """

    def __init__(self, rank: Callable[[ServicePortName], Any]) -> None:
        self._rank = rank
        self._holder: dict[Claim, ServicePortName] = {}
        self._contested: dict[Claim, _Contest] = {}

    def holder(self, claim: Claim) -> ServicePortName | None:
        """The service port that is served there, according to the last :meth:`settle`."""
        return self._holder.get(claim)

    def add(self, claim: Claim, name: ServicePortName) -> bool:
        """Add a claimant. True if the claim is contested and must be settled."""
        contest = self._contested.get(claim)
        if contest is None:
            holder = self._holder.setdefault(claim, name)
            if holder == name:
                return False
            contest = self._contested[claim] = _Contest(holder)
        contest.add(name)
        return True

    def remove(self, claim: Claim, name: ServicePortName) -> bool:
        """Remove a claimant. True if the claim was contested and must be settled."""
        contest = self._contested.get(claim)
        if contest is None:
            if self._holder.get(claim) == name:
                del self._holder[claim]
            return False
        contest.remove(name)
        return True

    def settle(self, claim: Claim, kind_of: Callable[[ServicePortName, Claim], FrontendKind]) -> Verdict:
        """Decide a contested claim. ``kind_of`` returns the kind of the claimant's address."""
        contest = self._contested[claim]
        new, gone = [], contest.gone
        for name in contest.new:
            kind = kind_of(name, claim)
            contender = contest.of[name] = Contender((KIND_RANK[kind], self._rank(name)), name, kind)
            insort(contest.sorted, contender)
            new.append(contender)
        contest.new, contest.gone = set(), set()
        if len(contest.sorted) < 2:
            del self._contested[claim]
        if not contest.sorted:
            del self._holder[claim]
            return Verdict(None, [], gone)
        winner = contest.sorted[0].name
        losers = contest.sorted[1:] if winner != self._holder[claim] else sorted(new)
        self._holder[claim] = winner
        return Verdict(winner, [loser for loser in losers if loser.name != winner], gone)
