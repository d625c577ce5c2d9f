# SPDX-License-Identifier: Apache-2.0
"""The state of a service at one moment, and the servers that may then answer a connection. Pure.

Written only from spec/service-semantics §§3, 5: its result is compared with the agent's behaviour.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pyebpf_proxy.lab.rules import Destination, SourceClass, decide

REFUSED = "refused"
UNREACHABLE = "unreachable"
SILENT = "timed out"
#: The outcomes for an address that belongs to no Service: anything but an answer.
UNANSWERED = frozenset({REFUSED, UNREACHABLE, SILENT})


class Endpoint(NamedTuple):
    """One endpoint of the slices. ``zone``: the zone of its hint; empty: none."""

    pod: str
    node: str
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    zone: str = ""

    def ending(self) -> Endpoint:
        """It terminates, and still serves."""
        return self._replace(ready=False, serving=True, terminating=True)

    def starting(self) -> Endpoint:
        """It is not ready yet."""
        return self._replace(ready=False, serving=False)


class Addresses(NamedTuple):
    """The numbers of the service in the lab's address plan (``lab.addresses``), and its ports."""

    cluster_ip: int
    vip: int
    external_ip: int
    port: int
    node_port: int


class State(NamedTuple):
    """The whole of one service, and the zone of the node that serves it."""

    addresses: Addresses
    endpoints: tuple[Endpoint, ...]
    target_port: int = 8080
    internal_local: bool = False
    external_local: bool = False
    affinity: bool = False
    exists: bool = True
    zone: str = ""


class Target(NamedTuple):
    """One kind of connection: client and destination. ``number``: of the address, as in :class:`Addresses`."""

    source: SourceClass
    kind: Destination
    family: int
    number: int
    port: int
    service: str

    def __str__(self) -> str:
        return f"IPv{self.family}, {self.source} to {self.service}'s {self.kind} {self.number or ''}:{self.port}"


class Allowed(NamedTuple):
    """The allowed outcomes of a connection: an answer by one of these (``pod:port``), or one of these ends."""

    names: frozenset[str]
    ends: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return " or ".join([*sorted(self.names), *sorted(self.ends)])


def is_served(state: State, target: Target) -> bool:
    """Whether the target is an address of the service at that moment."""
    a = state.addresses
    if not state.exists:
        return False
    if target.kind == "NodePort":
        return target.port == a.node_port
    number = {"ClusterIP": a.cluster_ip, "LoadBalancer": a.vip, "ExternalIP": a.external_ip}[target.kind]
    return (target.number, target.port) == (number, a.port)


def allowed(state: State, target: Target, node: str) -> Allowed:
    """The rule for a new connection that ``node`` handles."""
    if not is_served(state, target):
        return Allowed(frozenset(), UNANSWERED)
    cluster, local = _cluster(state.endpoints, state.zone), _local(state.endpoints, node)
    if not _usable(state.endpoints):
        # In mode iptables the node's own packets to external addresses are not refused (§5).
        elsewhere = target.source == "node" and target.kind in ("LoadBalancer", "ExternalIP")
        return Allowed(frozenset(), UNANSWERED if elsewhere else frozenset({REFUSED}))
    decision = decide(
        target.kind, target.source, external_local=state.external_local, internal_local=state.internal_local
    )
    chosen = cluster if decision.endpoints == "cluster" else local
    if not chosen:
        return Allowed(frozenset(), frozenset({SILENT}))
    return Allowed(frozenset(f"{each.pod}:{state.target_port}" for each in chosen))


def _cluster(endpoints: Iterable[Endpoint], zone: str) -> list[Endpoint]:
    """The cluster list of §3."""
    every = list(endpoints)
    ready = [each for each in every if each.ready]
    if not ready:
        return _last_resort(every)
    if zone and all(each.zone for each in ready):
        return [each for each in ready if each.zone == zone] or ready
    return ready


def _local(endpoints: Iterable[Endpoint], node: str) -> list[Endpoint]:
    """The local list of §3; hints do not count."""
    here = [each for each in endpoints if each.node == node]
    return [each for each in here if each.ready] or _last_resort(here)


def _last_resort(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    return [each for each in endpoints if each.serving and each.terminating]


def _usable(endpoints: Iterable[Endpoint]) -> bool:
    """Whether §3's "any endpoints" exist: every service here is reachable from outside, so both lists are used."""
    return any(each.ready or (each.serving and each.terminating) for each in endpoints)
