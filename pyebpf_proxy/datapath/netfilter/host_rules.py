# SPDX-License-Identifier: Apache-2.0
"""Rules of the proxy's nft table for packets that the node itself sends to Services. Pure; ``nft.Table`` writes them.

Connections of the node's own processes are translated by programs at their sockets. The kernel does not run these for
SCTP, and ``socketLB: off`` has none; after the output hook it is too late for address translation. So nftables decides
here as kube-proxy's nftables mode does: with a chain for each kind of address of a service port
(spec/service-semantics §5), one for each endpoint of this node, and with session affinity one for each endpoint, and a
set of its clients. These are limited for each namespace, since the kernel's work grows with their square.
``decide()`` of bpf/policy.h is the same table for packets from the node.

==================  =======================  ===============================================================
chain               hook                     what it does
==================  =======================  ===============================================================
host_output         output, nat, -100        looks service addresses up, then NodePorts (§2, §8)
host_unserved       input, filter, 0         iptables mode: REJECT and DROP of NodePorts at addresses that serve none,
                                             when the packet comes in again, as with kube-proxy. Not in the output
                                             chain, where the sender would get an error from a DROP
host_reject         –                        port unreachable
host_drop           –                        §5, §7
host4/…, host6/…    –                        of a service port: ``/cluster``, ``/outside``, ``/vip-PORT``, endpoints
==================  =======================  ===============================================================

Without service ports of these protocols none of these chains exist. A change rewrites only the chains that differ.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from pyebpf_proxy.common.bpf_constants import NOT_ON_LOOPBACK, ON_ALL_LOOPBACK, ON_LOCALHOST
from pyebpf_proxy.services.model import (
    Endpoint,
    FrontendKind,
    IPFamily,
    Protocol,
    ServicePort,
    ServicePortName,
    with_removals,
)
from pyebpf_proxy.services.nodes import Network, merged

K = TypeVar("K")
V = TypeVar("V")
#: The table's chains with a hook; iptables mode has both.
OUTPUT, UNSERVED = "host_output", "host_unserved"
#: Names in older versions, which served only SCTP in this way.
_OLDER = ("own_sctp", "sctp")
_OLDER_MAPS = tuple(f"sctp_{what}{number}" for what in ("services", "node_ports", "unserved") for number in (4, 6))
_REJECT, _DROP = "host_reject", "host_drop"
_IP = {IPFamily.IPV4: "ip", IPFamily.IPV6: "ip6"}
_ADDRESS = {IPFamily.IPV4: "ipv4_addr", IPFamily.IPV6: "ipv6_addr"}
_LOOPBACK = {IPFamily.IPV4: "127.0.0.0/8", IPFamily.IPV6: "::1"}
_LOOPBACK_NODE_PORTS = {ON_ALL_LOOPBACK: _LOOPBACK[IPFamily.IPV4], ON_LOCALHOST: "127.0.0.1"}
#: Up to this many endpoints are chosen by one rule each.
_FEW = 16
#: Chains of endpoints that the service ports of one namespace may have. A service port beyond it, those with the most
#: endpoints first, has none: without session affinity, and without masquerading of the node's packets to itself.
MOST_CHAINS = 1024
#: Maximum length of a chain's name without the endpoint's address; the kernel's limit is 255.
_LONGEST = 180


class HostTraffic(NamedTuple):
    """The configuration for packets that the node sends."""

    masquerade_mark: int
    nft_mode: bool = False
    masquerade_all: bool = False
    #: Families that have a detector, with its range if it uses one: for the node's packets only that range is pods.
    detectors: Mapping[IPFamily, Network | None] = {}
    #: Networks whose addresses serve NodePorts; a family without an entry: all of the node's addresses.
    node_ports: Mapping[IPFamily, Sequence[Network]] = {}
    #: ``enum loopback_node_ports``.
    localhost_node_ports: int = NOT_ON_LOOPBACK
    #: The protocols that no socket program serves.
    protocols: frozenset[Protocol] = frozenset({Protocol.SCTP})


@dataclass
class _Rules:
    """The rules of one service port: rules by chain, sets of clients, and verdicts by (map, key)."""

    with_chains: bool = True
    chains: dict[str, list[str]] = field(default_factory=dict)
    sets: dict[str, str] = field(default_factory=dict)
    elements: dict[tuple[str, str], str] = field(default_factory=dict)


class Existing(NamedTuple):
    """The chains and sets of these rules that the table already has."""

    chains: Collection[str] = ()
    sets: Collection[str] = ()


NOTHING = Existing()


def is_own(name: str) -> bool:
    """Whether a chain, set or map of the table belongs to these rules."""
    return name.startswith(("host_", "host4/", "host6/", *_OLDER))


class HostRules:
    """The rules of every service port, and the commands that change the table from one state to the next."""

    def __init__(self, traffic: HostTraffic) -> None:
        self._traffic = traffic
        self._plans: dict[ServicePortName, ServicePort] = {}
        self._rules: dict[ServicePortName, _Rules] = {}
        #: The number of chains of endpoints that each service port needs, by namespace.
        self._needs: dict[str, dict[ServicePortName, int]] = {}
        #: Service ports that get none of them.
        self.crowded: frozenset[ServicePortName] = frozenset()

    def __bool__(self) -> bool:
        return bool(self._rules)

    def after(self, delta: Mapping[ServicePortName, ServicePort | None], complete: bool = False) -> HostRules | None:
        """A copy with changes applied; ``complete``: there are no other ports. None if nothing changes."""
        wanted: Mapping[ServicePortName, ServicePort | None]
        wanted = {name: plan for name, plan in delta.items() if name.protocol in self._traffic.protocols}
        if complete:
            wanted = with_removals(wanted, self._plans)
        changed = {name: plan for name, plan in wanted.items() if self._plans.get(name) != plan}
        if not changed:
            return None
        new = HostRules(self._traffic)
        new._plans = {**self._plans}
        new._rules = {**self._rules}
        new._needs = {**self._needs}
        for name, plan in changed.items():
            if plan is None:
                del new._plans[name], new._rules[name]
            else:
                new._plans[name] = plan
        new._share(changed, self.crowded)
        for name in [*changed, *sorted((new.crowded ^ self.crowded) - changed.keys())]:
            if name in new._plans:
                new._rules[name] = _rules(new._plans[name], self._traffic, name not in new.crowded)
        return new

    def _share(self, changed: Iterable[ServicePortName], crowded: Collection[ServicePortName]) -> None:
        """Bring ``_needs`` and ``crowded``, before the change ``crowded``, up to date with the changed plans."""
        namespaces: dict[str, list[ServicePortName]] = {}
        for name in changed:
            namespaces.setdefault(name.namespace, []).append(name)
        found = {name for name in crowded if name.namespace not in namespaces}
        for namespace, names in namespaces.items():
            needs = {**self._needs.get(namespace, {})}
            for name in names:
                needs.pop(name, None)
                if name in self._plans and (number := _chains_of_endpoints(self._plans[name])):
                    needs[name] = number
            self._needs[namespace] = needs
            if not needs:
                del self._needs[namespace]
            found.update(_beyond(needs))
        self.crowded = frozenset(found)

    def with_traffic(self, traffic: HostTraffic) -> HostRules | None:
        """The same service ports with another configuration; None if it is the same."""
        if traffic == self._traffic:
            return None
        return HostRules(traffic).after(self._plans) or HostRules(traffic)

    def definition(self, table: str, existing: Existing = NOTHING) -> list[str]:
        """Commands that make the table hold exactly this, whatever it has; remembered clients stay."""
        chains, sets = self._all_chains(), self._all_sets()
        old = [name for name in existing.chains if is_own(name)]
        commands = []
        if self:
            commands += [f"add map inet {table} {name} {{ {shape} }}" for name, shape in self._maps()]
            commands += [f"flush map inet {table} {name}" for name, _ in self._maps()]
        elif old:
            commands += _away(table, "flush chain", [name for name in old if name in (OUTPUT, UNSERVED)])
            commands += _away(table, "delete map", [name for name, _ in self._maps() if name in existing.sets])
        commands += [f"add set inet {table} {name} {{ {shape} }}" for name, shape in sets.items()]
        commands += [f"add chain inet {table} {name}{shape}" for name, shape in self._bases()]
        commands += [f"add chain inet {table} {name}" for name in chains if name not in (OUTPUT, UNSERVED)]
        commands += _away(table, "flush chain", {**dict.fromkeys(old), **dict.fromkeys(chains)})
        commands += _away(table, "delete chain", [name for name in old if name not in chains])
        clients = [name for name in existing.sets if "/" in name]
        commands += _away(table, "delete map", [name for name in _OLDER_MAPS if name in existing.sets])
        commands += _away(table, "delete set", [name for name in clients if name not in sets])
        commands += [f"add rule inet {table} {name} {rule}" for name, rules in chains.items() for rule in rules]
        return commands + _put(table, "add", self._elements())

    def change(self, table: str, new: HostRules) -> list[str]:
        """Commands that change the table from this state to ``new``: only the differences."""
        if not self or not new or self._traffic != new._traffic:
            return new.definition(table, Existing(self._all_chains(), [*self._all_sets(), *dict(self._maps())]))
        names = [name for name in {**self._rules, **new._rules} if self._rules.get(name) is not new._rules.get(name)]
        nothing = _Rules()
        before = [self._rules.get(name, nothing) for name in names]
        after = [new._rules.get(name, nothing) for name in names]
        old_chains, chains = _joined(r.chains for r in before), _joined(r.chains for r in after)
        old_sets, sets = _joined(r.sets for r in before), _joined(r.sets for r in after)
        old_elements, elements = _joined(r.elements for r in before), _joined(r.elements for r in after)
        changed = {name: rules for name, rules in chains.items() if old_chains.get(name) != rules}
        gone = [name for name in old_chains if name not in chains]
        moved = {key: verdict for key, verdict in elements.items() if old_elements.get(key) != verdict}
        commands = [f"add set inet {table} {name} {{ {sets[name]} }}" for name in sets if name not in old_sets]
        commands += [f"add chain inet {table} {name}" for name in changed if name not in old_chains]
        commands += _put(table, "delete", {key: "" for key in old_elements if key not in elements or key in moved})
        commands += _away(table, "flush chain", [name for name in (*changed, *gone) if name in old_chains])
        commands += [f"add rule inet {table} {name} {rule}" for name, rules in changed.items() for rule in rules]
        commands += _put(table, "add", moved)
        commands += _away(table, "delete chain", gone)
        return commands + _away(table, "delete set", [name for name in old_sets if name not in sets])

    def _all_chains(self) -> dict[str, list[str]]:
        if not self:
            return {}
        chains = {OUTPUT: list(_lookups(self._traffic))}
        if not self._traffic.nft_mode:
            chains[UNSERVED] = list(_unserved())
        chains |= {_REJECT: ["counter reject with icmpx type port-unreachable"], _DROP: ["counter drop"]}
        return chains | _joined(rules.chains for rules in self._rules.values())

    def _all_sets(self) -> dict[str, str]:
        return _joined(rules.sets for rules in self._rules.values())

    def _elements(self) -> dict[tuple[str, str], str]:
        return _joined(rules.elements for rules in self._rules.values())

    def _bases(self) -> Iterator[tuple[str, str]]:
        if self:
            yield OUTPUT, " { type nat hook output priority -100 ; policy accept ; }"
            if not self._traffic.nft_mode:
                yield UNSERVED, " { type filter hook input priority 0 ; policy accept ; }"

    @staticmethod
    def _maps() -> Iterator[tuple[str, str]]:
        for family in IPFamily:
            yield f"host_services{family.value}", f"type {_ADDRESS[family]} . inet_proto . inet_service : verdict ;"
            yield f"host_node_ports{family.value}", "type inet_proto . inet_service : verdict ;"
            yield f"host_unserved{family.value}", "type inet_proto . inet_service : verdict ;"


def _joined(parts: Iterable[Mapping[K, V]]) -> dict[K, V]:
    found: dict[K, V] = {}
    for part in parts:
        found.update(part)
    return found


def _away(table: str, verb: str, names: Iterable[str]) -> list[str]:
    command, kind = verb.split()
    return [f"{command} {kind} inet {table} {name}" for name in names]


def _put(table: str, verb: str, elements: Mapping[tuple[str, str], str]) -> list[str]:
    by_map: dict[str, list[str]] = {}
    for (name, key), verdict in elements.items():
        by_map.setdefault(name, []).append(f"{key} : {verdict}" if verdict else key)
    return [f"{verb} element inet {table} {name} {{ {', '.join(texts)} }}" for name, texts in by_map.items()]


# ---- lookups for packets of the node -----------------------------------------------------------------------------


def _lookups(traffic: HostTraffic) -> Iterator[str]:
    yield f"meta l4proto != {{ {', '.join(sorted(map(_protocol, traffic.protocols)))} }} return"
    for family, ip in _IP.items():
        yield f"{ip} daddr . meta l4proto . th dport vmap @host_services{family.value}"
    for family, ip in _IP.items():
        ports = f"meta l4proto . th dport vmap @host_node_ports{family.value}"
        if family is IPFamily.IPV4 and (loopback := _LOOPBACK_NODE_PORTS.get(traffic.localhost_node_ports)):
            yield f"ip daddr {loopback} {ports}"
        networks = traffic.node_ports.get(family, ())
        everywhere = not networks or any(not network.prefixlen for network in networks)
        accepted = "" if everywhere else f"{ip} daddr {{ {_texts(networks)} }} "
        yield f"{ip} daddr != {_LOOPBACK[family]} {accepted}fib daddr type local {ports}"


def _unserved() -> Iterator[str]:
    """Rules for NodePorts at own addresses that serve none. At others the packet is already translated or refused."""
    for family in IPFamily:
        new = f"meta nfproto ipv{family.value} ct state new ct status & dnat == 0"
        yield f"iif lo {new} meta l4proto . th dport vmap @host_unserved{family.value}"


def _protocol(protocol: Protocol) -> str:
    return protocol.name.lower()


def _texts(networks: Iterable[Network]) -> str:
    """As elements of a set."""
    return ", ".join(map(str, merged(networks)))


# ---- one service port ---------------------------------------------------------------------------------------------


def _chains_of_endpoints(plan: ServicePort) -> int:
    """The number of chains of endpoints that ``_choice`` makes."""
    if plan.affinity_seconds:
        return len({*plan.cluster, *plan.local})
    return sum(endpoint.local for endpoint in {*plan.cluster, *plan.local})


def _beyond(needs: Mapping[ServicePortName, int]) -> Iterator[ServicePortName]:
    """The service ports of a namespace that get no chains of endpoints; those with the most endpoints first."""
    if sum(needs.values()) <= MOST_CHAINS:
        return
    left = MOST_CHAINS
    for name in sorted(needs, key=lambda name: (needs[name], name)):
        left -= needs[name]
        if left < 0:
            yield name


def _rules(plan: ServicePort, traffic: HostTraffic, with_chains: bool) -> _Rules:
    """The rows of spec/service-semantics §5 for packets from the node; one function for each kind of address.

    ``with_chains``: endpoints may have chains.
    """
    made = _Rules(with_chains=with_chains)
    family = plan.name.family
    base, protocol = _base(plan.name), _protocol(plan.name.protocol)
    for frontend in plan.frontends:
        if frontend.kind is FrontendKind.NODE_PORT:
            port = f"{protocol} . {frontend.port}"
            key = (f"host_node_ports{family.value}", port)
            if not traffic.nft_mode and (verdict := _refusal_anywhere(plan)):
                made.elements[f"host_unserved{family.value}", port] = verdict
        else:
            address = ipaddress.ip_address(frontend.address)
            key = (f"host_services{family.value}", f"{address} . {protocol} . {frontend.port}")
        if frontend.kind is FrontendKind.CLUSTER_IP:
            made.elements[key] = _cluster_ip(plan, traffic, base, made)
        elif frontend.kind is FrontendKind.LOAD_BALANCER and plan.source_ranges:
            made.elements[key] = _guarded_vip(plan, traffic, base, frontend.port, made)
        else:
            made.elements[key] = _outside(plan, traffic, base, frontend.kind, made)
    return made


def _base(name: ServicePortName) -> str:
    text = f"{_protocol(name.protocol)}/{name.namespace}/{name.name}/{name.port}"
    if len(text) > _LONGEST:
        text = hashlib.sha256(text.encode()).hexdigest()
    return f"host{name.family.value}/{text}"


def _refusal_anywhere(plan: ServicePort) -> str:
    """``refuse_unserved()`` of bpf/policy.h: the refusals that also apply at addresses that serve no NodePorts."""
    if not plan.any_endpoints:
        return f"goto {_REJECT}"
    return f"goto {_DROP}" if plan.external_local and not plan.local else ""


def _cluster_ip(plan: ServicePort, traffic: HostTraffic, base: str, made: _Rules) -> str:
    if not plan.any_endpoints:
        return f"goto {_REJECT}"
    listed = plan.local if plan.internal_local else plan.cluster
    if not listed:
        return f"goto {_DROP if plan.internal_local else _REJECT}"
    family = plan.name.family
    masquerade = []
    if traffic.masquerade_all:
        masquerade = [_mark(traffic)]
    elif family in traffic.detectors:
        masquerade = [_unless_pod(family, traffic)]
    name = f"{base}/cluster"
    made.chains[name] = [*masquerade, *_choice(plan, listed, traffic, base, made)]
    return f"goto {name}"


def _outside(plan: ServicePort, traffic: HostTraffic, base: str, kind: FrontendKind, made: _Rules) -> str:
    """externalIPs, VIPs and NodePorts; the node gets the cluster list, whatever the policy."""
    name = f"{base}/outside"
    if not plan.any_endpoints:
        if traffic.nft_mode or kind is FrontendKind.NODE_PORT:
            return f"goto {_REJECT}"
        # leaves_unfiltered(): the node is refused only at one of its own addresses.
        made.chains[name] = [f"fib daddr type local goto {_REJECT}", "accept"]
    elif not plan.cluster:
        return f"goto {_REJECT}"
    else:
        masquerade = _unless_pod(plan.name.family, traffic) if plan.external_local else _mark(traffic)
        made.chains[name] = [masquerade, *_choice(plan, plan.cluster, traffic, base, made)]
    return f"goto {name}"


def _guarded_vip(plan: ServicePort, traffic: HostTraffic, base: str, port: int, made: _Rules) -> str:
    """§7: iptables mode checks for endpoints first (§14)."""
    onward = _outside(plan, traffic, base, FrontendKind.LOAD_BALANCER, made)
    if not plan.any_endpoints and not traffic.nft_mode:
        return onward
    allowed = [ipaddress.ip_network((each.address, each.prefix_length)) for each in plan.source_ranges]
    if plan.vip_source_allowed:
        vips = [one for one in plan.frontends if one.kind is FrontendKind.LOAD_BALANCER and one.port == port]
        allowed += [ipaddress.ip_network(one.address) for one in vips]
    name = f"{base}/vip-{port}"
    made.chains[name] = [f"{_IP[plan.name.family]} saddr != {{ {_texts(allowed)} }} goto {_DROP}", onward]
    return f"goto {name}"


def _mark(traffic: HostTraffic) -> str:
    return f"meta mark set meta mark or {traffic.masquerade_mark:#x}"


def _unless_pod(family: IPFamily, traffic: HostTraffic) -> str:
    """A wide pod range may include the node's address (§5); no device detects the node's own packets (§6)."""
    pods = traffic.detectors.get(family)
    return f"{_IP[family]} saddr != {pods} {_mark(traffic)}" if pods is not None else _mark(traffic)


def _choice(
    plan: ServicePort, listed: Sequence[Endpoint], traffic: HostTraffic, base: str, made: _Rules
) -> Iterator[str]:
    """§4: the remembered endpoint, else a random one."""
    ip = _IP[plan.name.family]
    chained: Sequence[Endpoint] = listed
    others: Sequence[Endpoint] = ()
    if not (made.with_chains and plan.affinity_seconds):
        # In a large cluster almost every endpoint is on another node, and a chain for each takes minutes. Only an
        # endpoint on this node can have one of its addresses, and hairpin.
        chained = [endpoint for endpoint in listed if endpoint.local and made.with_chains]
        others = [endpoint for endpoint in listed if not (endpoint.local and made.with_chains)]
    chains = [_endpoint(plan, endpoint, traffic, base, made) for endpoint in chained]
    if made.with_chains and plan.affinity_seconds:
        yield from (f"{ip} saddr @{chain} goto {chain}" for chain in chains)
    if len(chains) <= _FEW:
        # An anonymous map is slow: to name it the kernel walks all of the table's, half a minute for thousands.
        yield from (f"{_chance(len(listed) - number)}goto {chain}" for number, chain in enumerate(chains))
    else:
        verdicts = ", ".join(f"{number} : goto {chain}" for number, chain in enumerate(chains))
        yield f"numgen random mod {len(listed)} vmap {{ {verdicts} }}"
    protocol = _protocol(plan.name.protocol)
    texts = [(ipaddress.ip_address(endpoint.address), endpoint.port) for endpoint in others]
    if len(texts) <= _FEW:
        for number, (address, port) in enumerate(texts):
            to = f"[{address}]" if ip == "ip6" else str(address)
            yield f"meta l4proto {protocol} {_chance(len(texts) - number)}dnat {ip} to {to}:{port}"
    else:
        numbered = ", ".join(f"{number} : {address} . {port}" for number, (address, port) in enumerate(texts))
        yield f"meta l4proto {protocol} dnat {ip} to numgen random mod {len(texts)} map {{ {numbered} }}"


def _chance(left: int) -> str:
    """The beginning of a rule that matches one of ``left`` packets, at random."""
    return f"numgen random mod {left} 0 " if left > 1 else ""


def _endpoint(plan: ServicePort, endpoint: Endpoint, traffic: HostTraffic, base: str, made: _Rules) -> str:
    """The chain of an endpoint; the set of its clients has the same name."""
    ip = _IP[plan.name.family]
    address = ipaddress.ip_address(endpoint.address)
    name = f"{base}/{str(address).replace(':', '-')}.{endpoint.port}"
    if name not in made.chains:
        rules = [f"{ip} saddr {address} {_mark(traffic)}"]
        if plan.affinity_seconds:
            made.sets[name] = f"type {_ADDRESS[plan.name.family]} ; flags dynamic,timeout ;"
            rules.append(f"update @{name} {{ {ip} saddr timeout {plan.affinity_seconds}s }}")
        to = f"[{address}]" if ip == "ip6" else str(address)
        made.chains[name] = [*rules, f"meta l4proto {_protocol(plan.name.protocol)} dnat {ip} to {to}:{endpoint.port}"]
    return name
