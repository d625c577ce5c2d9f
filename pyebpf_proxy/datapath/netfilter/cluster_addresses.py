# SPDX-License-Identifier: Apache-2.0
"""The existing cluster IPs and their ports, kept up to date from the plan's changes (spec/service-semantics §9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from pyebpf_proxy.datapath.netfilter.nft_rules import port_key
from pyebpf_proxy.services.model import FrontendKind, ServicePort, ServicePortName, with_removals


class Moved(NamedTuple):
    """New and removed cluster IPs, packed, and the keys of their new and removed ports (``nft_rules.port_key``)."""

    added: set[bytes]
    removed: set[bytes]
    ports_added: set[bytes]
    ports_removed: set[bytes]


class ClusterAddresses:
    """Every cluster IP with the number of service ports that have it. Pure."""

    def __init__(self) -> None:
        self._of: dict[ServicePortName, tuple[bytes, bytes]] = {}
        self._users: Counter[bytes] = Counter()
        self._port_users: Counter[bytes] = Counter()

    @property
    def all(self) -> set[bytes]:
        """Every cluster IP, packed."""
        return set(self._users)

    @property
    def ports(self) -> set[bytes]:
        """The keys of their defined ports."""
        return set(self._port_users)

    def apply(self, delta: Mapping[ServicePortName, ServicePort | None], complete: bool = False) -> Moved:
        """Apply changes; returns which addresses and ports they add and remove. ``complete``: there are no others."""
        if complete:
            delta = with_removals(delta, self._of)
        before, ports_before = Counter[bytes](), Counter[bytes]()
        after, ports_after = Counter[bytes](), Counter[bytes]()
        for name, plan in delta.items():
            old, new = self._of.pop(name, None), _cluster_ip(name, plan)
            if old is not None:
                before[old[0]] += 1
                ports_before[old[1]] += 1
            if new is not None:
                after[new[0]] += 1
                ports_after[new[1]] += 1
                self._of[name] = new
        return Moved(*_count(self._users, before, after), *_count(self._port_users, ports_before, ports_after))


def _count(users: Counter[bytes], before: Counter[bytes], after: Counter[bytes]) -> tuple[set[bytes], set[bytes]]:
    added = {key for key in after if not users[key]}
    for key, number in before.items():
        users[key] -= number
    users.update(after)
    removed = {key for key in before if not users[key]}
    for key in (*removed, *(key for key in added if not users[key])):
        del users[key]
    return added, removed


def _cluster_ip(name: ServicePortName, plan: ServicePort | None) -> tuple[bytes, bytes] | None:
    if plan is None:
        return None
    for one in plan.frontends:
        if one.kind is FrontendKind.CLUSTER_IP:
            return one.address, port_key(one.address, name.protocol, one.port)
    return None
