# SPDX-License-Identifier: Apache-2.0
"""Which chains and jumps of a saved iptables ruleset are kube-proxy's. Text in, text out.

The names are those that kube-proxy v1.36.3 itself removes, for its modes iptables and ipvs together
(spec/configuration §6). Kubelet's chains (KUBE-FIREWALL, KUBE-IPTABLES-HINT, KUBE-KUBELET-CANARY) are not included:
kubelet still needs them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

#: kube-proxy creates it in every table it uses, to notice when the rules have been flushed.
CANARY = "KUBE-PROXY-CANARY"
#: Called from the built-in chain FORWARD; accepts packets of services.
FORWARD = "KUBE-FORWARD"
#: The chain of table nat that leads to all Services, in modes iptables and ipvs.
SERVICES = "KUBE-SERVICES"
#: Called from the built-in chain INPUT, in mode iptables and in mode ipvs; they accept health check node ports.
HEALTH_CHECKS = ("KUBE-NODEPORTS", "KUBE-NODE-PORT")
#: By table; every table also has the canary, and mangle has only that.
CHAINS: Mapping[str, frozenset[str]] = {
    "nat": frozenset(
        {
            "KUBE-SERVICES",
            "KUBE-NODEPORTS",
            "KUBE-POSTROUTING",
            "KUBE-MARK-MASQ",
            "KUBE-NODE-PORT",
            "KUBE-LOAD-BALANCER",
        }
    ),
    "filter": frozenset(
        {
            "KUBE-SERVICES",
            "KUBE-EXTERNAL-SERVICES",
            FORWARD,
            *HEALTH_CHECKS,
            "KUBE-PROXY-FIREWALL",
            "KUBE-SOURCE-RANGES-FIREWALL",
            "KUBE-IPVS-FILTER",
            "KUBE-IPVS-OUT-FILTER",
        }
    ),
}
#: Name prefixes of the chains of single service ports and endpoints, in table nat.
PREFIXES = ("KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-FW-", "KUBE-EXT-")
#: Chains that only mode ipvs makes.
IPVS_CHAINS = frozenset({"KUBE-NODE-PORT", "KUBE-LOAD-BALANCER", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER"})
#: The comments of the jumps from the built-in chains.
COMMENTS = frozenset(
    {
        "kubernetes service portals",
        "kubernetes externally-visible service portals",
        "kubernetes health check service ports",
        "kubernetes health check rules",
        "kubernetes forwarding rules",
        "kubernetes postrouting rules",
        "kubernetes load balancer firewall",
        "kube-proxy firewall rules",
        "kubernetes ipvs access filter",
    }
)

#: A rule that matches every packet, as iptables-save writes it: it has no match but comments.
_UNCONDITIONAL = re.compile(r'\S+(?: -m comment --comment (?:"(?:[^"\\]|\\.)*"|[^\s"]+))* (-j|-g) (\S+)')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_PORT = re.compile(r" --dport ([0-9]{1,5})(?= )")
_TARGET = re.compile(r" (?:-j|-g|--jump|--goto) (\S+)")
_COMMENT = re.compile(r'--comment ("(?:[^"\\]|\\.)*"|\S+)')


@dataclass
class Plan:
    """The input for ``iptables-restore --noflush``; an empty script: there is nothing to do."""

    script: str = ""
    chains: int = 0
    jumps: int = 0
    #: Whether some of them were made by mode ipvs.
    ipvs: bool = False
    #: Whether the built-in chain FORWARD drops by default, so that kube-proxy's accept rules matter.
    forward_drops: bool = False
    #: Whether the built-in chain INPUT drops by default, and rules that accept health check node ports are removed.
    input_drops: bool = False
    #: These ports, as far as the rules name them: mode ipvs has them in an ipset.
    health_check_ports: list[int] = field(default_factory=list)
    #: Chains that stay because rules of other software need them, one line each.
    kept: list[str] = field(default_factory=list)


@dataclass
class _Table:
    name: str
    policies: dict[str, str] = field(default_factory=dict)
    chains: list[str] = field(default_factory=list)
    rules: list[tuple[str, str]] = field(default_factory=list)  # chain and the line without "-A "


def is_kube_proxys(table: str, chain: str) -> bool:
    """Whether kube-proxy's clean-up would remove this chain."""
    if chain == CANARY or chain in CHAINS.get(table, ()):
        return True
    return table == "nat" and chain.startswith(PREFIXES)


def plan(saved: str, *, keep_forward: bool = False) -> Plan:
    """How to remove kube-proxy's part of a ruleset as written by ``iptables-save`` (without counters).

    ``keep_forward``: if FORWARD drops by default, KUBE-FORWARD stays. It accepts established connections and packets
    marked for masquerading, by this proxy as by kube-proxy (spec/service-semantics §5.1); no other table could do that.
    """
    result = Plan()
    for table in _tables(saved):
        result.script += _plan_table(table, result, keep_forward)
    return result


def _tables(saved: str) -> list[_Table]:
    tables: list[_Table] = []
    for line in saved.splitlines():
        if line.startswith("*"):
            tables.append(_Table(line[1:].strip()))
        elif line.startswith(":") and tables:
            name, policy = line[1:].split()[:2]
            if policy == "-":
                tables[-1].chains.append(name)
            else:
                tables[-1].policies[name] = policy
        elif line.startswith("-A ") and tables:
            tables[-1].rules.append((line.split(" ", 2)[1], line[3:]))
    return tables


def _plan_table(table: _Table, result: Plan, keep_forward: bool) -> str:
    doomed = {chain for chain in table.chains if is_kube_proxys(table.name, chain)}
    if table.name == "filter" and FORWARD in doomed and _drops(table, "FORWARD"):
        result.forward_drops = True
        if keep_forward:
            doomed.discard(FORWARD)
    if not doomed:
        return ""
    jumps = []
    needed: dict[str, str] = {}
    for chain, rule in table.rules:
        if chain in doomed or (target := _target(rule)) not in doomed:
            continue
        if chain in table.policies and _comment(rule) in COMMENTS:
            jumps.append(rule)
        else:
            needed.setdefault(target, rule)
    for chain, rule in needed.items():
        why = "because a rule of another program uses it"
        result.kept.append(f"table {table.name}: chain {chain} stays, {why}: {rule}")
    gone = sorted(doomed - _reached(table, needed, doomed))
    if table.name == "filter" and (accepts := _health_checks(table, gone, jumps)) and _drops(table, "INPUT"):
        result.input_drops = True
        result.health_check_ports += sorted({int(port) for rule in accepts for port in _PORT.findall(_bare(rule))})
    result.chains += len(gone)
    result.jumps += len(jumps)
    result.ipvs |= not IPVS_CHAINS.isdisjoint(gone)
    # First all chains are emptied, so that none refers to another; a restore is one transaction per table.
    lines = [f":{chain} - [0:0]" for chain in gone]
    lines += [f"-D {rule}" for rule in jumps]
    lines += [f"-X {chain}" for chain in gone]
    return "\n".join([f"*{table.name}", *lines, "COMMIT", ""]) if lines else ""


def _health_checks(table: _Table, gone: Collection[str], jumps: Iterable[str]) -> list[str]:
    """The rules that accept health check node ports and are removed, with their chain and its jump from INPUT."""
    entered = {_target(rule) for rule in jumps if rule.startswith("INPUT ")}.intersection(gone, HEALTH_CHECKS)
    return [rule for chain, rule in table.rules if chain in entered and _target(rule) == "ACCEPT"]


def _drops(table: _Table, built_in: str) -> bool:
    """Whether a built-in chain drops packets that no rule with a condition has decided about.

    By its policy, or by a rule that matches everything, as in some distributions; also in a chain that every packet
    enters.
    """
    if table.policies.get(built_in) == "DROP":
        return True  # a rule that accepts everything may be there only for a while
    steps: dict[str, list[tuple[str, str]]] = {}
    for chain, rule in table.rules:
        if found := _UNCONDITIONAL.match(rule):
            steps.setdefault(chain, []).append((found[1], found[2]))
    way = [iter(steps.get(built_in, ()))]  # the chain in which the packet is, after those to which it returns
    entered = {built_in}
    while way:
        jump, target = next(way[-1], ("-j", "RETURN"))
        if target in ("DROP", "REJECT"):
            return True
        if target == "ACCEPT":
            return False
        if target == "RETURN" or jump == "-g":
            way.pop()
        # From a chain that was entered before, the packet has returned, and would return again.
        if target != "RETURN" and target not in entered:
            entered.add(target)
            way.append(iter(steps.get(target, ())))
    return False


def _reached(table: _Table, start: Collection[str], within: Collection[str]) -> set[str]:
    """The chains of ``within`` that packets can reach from ``start``, including ``start``."""
    if not start:
        return set()
    edges: dict[str, set[str]] = {}
    for chain, rule in table.rules:
        target = _target(rule)
        if chain in within and target in within:
            edges.setdefault(chain, set()).add(target)
    found: set[str] = set()
    todo = list(start)
    while todo:
        chain = todo.pop()
        if chain not in found:
            found.add(chain)
            todo += edges.get(chain, ())
    return found


def _target(rule: str) -> str:
    """The target of a rule's jump; empty if none."""
    found = _TARGET.search(_bare(rule))
    return found.group(1) if found else ""


def _bare(rule: str) -> str:
    """A rule without its quoted text: a comment may contain anything."""
    return _QUOTED.sub('""', rule)


def _comment(rule: str) -> str:
    found = _COMMENT.search(rule)
    return found.group(1).strip('"') if found else ""
