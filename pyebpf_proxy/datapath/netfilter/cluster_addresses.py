# SPDX-License-Identifier: Apache-2.0
"""Which cluster IPs there are, kept up to date from the plan's changes (nftables mode, spec/service-semantics §9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pyebpf_proxy.services.model import FrontendKind, ServicePort, ServicePortName


class ClusterAddresses:
    """Every cluster IP with the number of service ports that have it. Pure."""

    def __init__(self) -> None:
        self._of: dict[ServicePortName, bytes] = {}
        self._ports: Counter[bytes] = Counter()

    @property
    def all(self) -> set[bytes]:
        """Every cluster IP, packed."""
        return set(self._ports)

    def apply(self, delta: Mapping[ServicePortName, ServicePort | None]) -> tuple[set[bytes], set[bytes]]:
        """Take changes in; returns the cluster IPs that are new, and those that are gone."""
        was: dict[bytes, bool] = {}
        for name, plan in delta.items():
            old = self._of.pop(name, None)
            new = _cluster_ip(plan)
            if old is not None:
                was.setdefault(old, True)
                self._ports[old] -= 1
            if new is not None:
                was.setdefault(new, self._ports[new] > 0)
                self._ports[new] += 1
                self._of[name] = new
        added = {address for address, had in was.items() if not had and self._ports[address]}
        removed = {address for address, had in was.items() if had and not self._ports[address]}
        for address in was:
            if not self._ports[address]:
                del self._ports[address]
        return added, removed


def _cluster_ip(plan: ServicePort | None) -> bytes | None:
    if plan is None:
        return None
    return next((one.address for one in plan.frontends if one.kind is FrontendKind.CLUSTER_IP), None)
