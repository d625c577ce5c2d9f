# SPDX-License-Identifier: Apache-2.0
"""Which endpoints are in the pod network, so that their flows may take the direct lane.

To an endpoint elsewhere (host network, the API server, another network) the CNI's own masquerade rules must apply,
and they do not see flows that BPF has made: such endpoints take the netfilter lane.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyebpf_proxy.config.addresses import Network
from pyebpf_proxy.services.model import Family


class PodNetwork:
    """The ranges pods have their addresses from, without the Nodes' addresses."""

    def __init__(self) -> None:
        #: Network numbers by family and mask: Nodes' ranges are many, their masks are few.
        self._ranges: dict[Family, dict[int, set[int]]] = {}
        self._nodes: frozenset[bytes] = frozenset()

    def update(self, ranges: Iterable[Network], nodes: Iterable[bytes]) -> bool:
        """Take new knowledge; True if it differs, so that endpoints may change their lane. ``nodes``: packed."""
        new: dict[Family, dict[int, set[int]]] = {}
        for network in ranges:
            by_mask = new.setdefault(Family(network.version), {})
            by_mask.setdefault(int(network.netmask), set()).add(int(network.network_address))
        nodes = frozenset(nodes)
        changed = new != self._ranges or nodes != self._nodes
        self._ranges, self._nodes = new, nodes
        return changed

    @property
    def families(self) -> frozenset[Family]:
        """The families of which a range is known."""
        return frozenset(self._ranges)

    def __call__(self, family: Family, address: bytes) -> bool:
        """Whether ``address`` (packed) is a pod's."""
        if address in self._nodes:
            return False
        number = int.from_bytes(address)
        for mask, networks in self._ranges.get(family, {}).items():  # noqa: SIM110 (a generator costs more than all else here)
            if number & mask in networks:
                return True
        return False
