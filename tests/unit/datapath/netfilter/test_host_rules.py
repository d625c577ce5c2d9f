# SPDX-License-Identifier: Apache-2.0
"""The chains of endpoints that Services may cause: bounded for each namespace."""

from __future__ import annotations

import msgspec

from pyebpf_proxy.datapath.netfilter.host_rules import MOST_CHAINS, HostRules, HostTraffic
from pyebpf_proxy.services.model import (
    Endpoint,
    Frontend,
    FrontendKind,
    IPFamily,
    Protocol,
    ServicePort,
    ServicePortName,
)

PORT = 36412


def service(name: str, remote: int, local: int = 0, affinity: int = 0, namespace: str = "tenant") -> ServicePort:
    key = ServicePortName(namespace, name, "", Protocol.SCTP, IPFamily.IPV4)
    ends = tuple(Endpoint((0x0A000000 + n).to_bytes(4), 3868, n < local) for n in range(remote + local))
    frontends = (Frontend(FrontendKind.CLUSTER_IP, bytes([10, 96, 0, len(name)]), PORT),)
    return ServicePort(key, frontends, ends, ends[:local], any_endpoints=True, affinity_seconds=affinity)


def after(rules: HostRules, *plans: ServicePort, gone: ServicePort | None = None) -> HostRules:
    delta: dict[ServicePortName, ServicePort | None] = {plan.name: plan for plan in plans}
    if gone is not None:
        delta[gone.name] = None
    changed = rules.after(delta)
    assert changed is not None
    return changed


def chains(rules: HostRules, name: str) -> list[str]:
    """The chains of a Service's endpoints."""
    marker = f"/{name}//"
    return [chain for chain in rules._all_chains() if marker in chain and ".3868" in chain]


NOTHING = HostRules(HostTraffic(0x4000))


def test_only_endpoints_of_this_node_have_chains() -> None:
    rules = after(NOTHING, service("a", remote=5000, local=3))
    assert len(chains(rules, "a")) == 3
    assert not rules.crowded
    assert len(rules.definition("t")) < 50


def test_a_namespace_has_a_limited_number_of_chains_and_sets() -> None:
    small, large = service("small", 20, affinity=60), service("a-large-one", 32768, affinity=60)
    other = service("others", 500, affinity=60, namespace="else")
    rules = after(NOTHING, small, large, other)
    assert rules.crowded == {large.name}
    assert len(chains(rules, "small")) == len([s for s in rules._all_sets() if "/small/" in s]) == 20
    assert len(chains(rules, "others")) == 500
    assert chains(rules, "a-large-one") == []
    # The result depends on the Services, not on their order.
    one_by_one = after(after(after(NOTHING, large), other), small)
    assert one_by_one._all_chains() == rules._all_chains()
    assert one_by_one._elements() == rules._elements()
    # Within the limit again.
    rules = after(rules, msgspec.structs.replace(large, cluster=large.cluster[:500]))
    assert not rules.crowded
    assert len(chains(rules, "a-large-one")) == 500
    rules = after(rules, gone=small)
    assert chains(rules, "small") == []


def test_endpoints_that_only_say_to_be_of_this_node_are_limited_too() -> None:
    rules = after(NOTHING, service("a", remote=0, local=MOST_CHAINS + 1))
    assert rules.crowded
    assert chains(rules, "a") == []
