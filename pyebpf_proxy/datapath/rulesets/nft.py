# SPDX-License-Identifier: Apache-2.0
"""Dumps of nftables, message by message, read into the model. Pure.

The tables of iptables-nft are here, too: as tables of the families ip and ip6, with extensions as expressions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pyebpf_proxy.datapath.netlink.messages import attributes, text, values
from pyebpf_proxy.datapath.netlink.uapi import (
    NFGENMSG,
    NFPROTO_BRIDGE,
    NFPROTO_INET,
    NFPROTO_IPV4,
    NFPROTO_IPV6,
    NFPROTO_NETDEV,
)
from pyebpf_proxy.datapath.rulesets.expressions import LOOKUP, expressions, number, verdict
from pyebpf_proxy.datapath.rulesets.model import BOTH, CONCERNS, Chain, Kind, Part, Rule, Table

INET, IPV4, NETDEV, BRIDGE, IPV6 = NFPROTO_INET, NFPROTO_IPV4, NFPROTO_NETDEV, NFPROTO_BRIDGE, NFPROTO_IPV6
FAMILIES = {
    INET: ("inet", BOTH),
    IPV4: ("ip", frozenset({4})),
    NETDEV: ("netdev", BOTH),
    BRIDGE: ("bridge", BOTH),
    IPV6: ("ip6", frozenset({6})),
}
_HEADER = NFGENMSG.size
_DORMANT, _OWNER = 1, 2
_TIMEOUT, _EVAL = 0x10, 0x20  # NFT_SET_TIMEOUT, NFT_SET_EVAL: flags timeout, flags dynamic
_NO_NAMED_SET = 0x1 | 0x8 | _TIMEOUT | _EVAL | 0x40  # or NFT_SET_ANONYMOUS, NFT_SET_MAP, NFT_SET_OBJECT
_VERDICTS = 0xFFFFFF00  # NFT_DATA_VERDICT
_OBJECT_COUNTER = 1
#: Hooks that a forwarded packet does not cross: input and output.
_NOT_CROSSED = {INET: {1, 3}, IPV4: {1, 3}, IPV6: {1, 3}}

Messages = Iterable[bytes]
Key = tuple[int, str]


def tables(messages: Messages) -> dict[Key, Table]:
    """Tables that are not dormant, by family and name, still empty."""
    found = {}
    for message in messages:
        parts = _parts(message)
        if message[0] in FAMILIES and not (number(parts.get(2)) or 0) & _DORMANT:
            word, families = FAMILIES[message[0]]
            name = text(parts[1])
            found[message[0], name] = Table(f"nftables table {word} {name}", families)
    return found


def owned(messages: Messages) -> frozenset[Key]:
    """Tables, by family and name, that end with the process that made them. The kernel does not report it."""
    found = ((message[0], _parts(message)) for message in messages)
    return frozenset((family, text(parts[1])) for family, parts in found if (number(parts.get(2)) or 0) & _OWNER)


def add_chains(into: dict[Key, Table], messages: Messages) -> None:
    """Chains of all tables, still empty."""
    for message in messages:
        parts = _parts(message)
        family = message[0]
        table = into.get((family, text(parts.get(1, b""))))
        if table is None:
            continue
        chain = Chain(text(parts[3]))
        if 4 in parts:
            hook = values(parts[4])
            chain.hook = number(hook.get(1)) not in _NOT_CROSSED.get(family, ())
            chain.nat = text(parts.get(7, b"")) == "nat"
            chain.policy_drops = 5 in parts and number(parts[5]) == 0
        table.chains[chain.name] = chain


def add_sets(table: Table, messages: Messages) -> list[str]:
    """Reads the relevant parts of a table's sets and maps; returns the names of those whose elements matter.

    These are verdict maps, and dynamic sets: each of their elements may have a state of its own.
    """
    maps = []
    for message in messages:
        parts = _parts(message)
        name = text(parts[2])
        table.has_sets = True
        of_elements = b"".join(parts.get(kind, b"") for kind in (17, 18))
        flags = number(parts.get(3)) or 0
        if flags & (_TIMEOUT | _EVAL):
            table.varying.add(name)
        if not flags & _NO_NAMED_SET:
            table.named.add(name)
        if number(parts.get(6)) == _VERDICTS or (not of_elements and flags & _EVAL):
            maps.append(name)
        if _limits(of_elements):
            table.stateful[name] = f"a limit or quota of each element of set {name}"
        if number(parts.get(15)) not in (None, _OBJECT_COUNTER):
            table.stateful[name] = f"objects of map {name}"
    return maps


def add_elements(table: Table, name: str, messages: Messages) -> None:
    """The target chains of a verdict map; whether elements of a dynamic set have limits."""
    chains = set()
    for message in messages:
        for element in _list(_parts(message).get(3, b"")):
            if _limits(_attribute(element, 7) + _attribute(element, 11)):
                table.stateful[name] = f"a limit or quota of an element of set {name}"
            data = _attribute(element, 2)
            found = verdict(_attribute(data, 2))
            if found.kind in (Kind.JUMP, Kind.GOTO):
                chains.add(found.target)
            elif found.kind is Kind.ACCEPT:
                chains.add("")
    table.maps[name] = frozenset(chains)


def add_rules(table: Table, messages: Messages, known: dict[bytes, Part]) -> None:
    """All rules of a table in order. ``known``: cache of decoded expressions, by their bytes."""
    for message in messages:
        chain = None
        place = ""
        for kind, begin, end in attributes(message, _HEADER, len(message)):
            if kind == 2:
                chain = table.chains.get(text(message[begin:end]))
            elif kind == 3:
                place = f"handle {int.from_bytes(message[begin:end], 'big')}"
            elif kind == 4 and chain is not None:
                parts = expressions(message, begin, end, known)
                if table.has_sets:
                    parts = tuple(each for part in parts for each in _of_set(part, table))
                chain.rules.append(Rule(place, parts))


def deciding_sets(table: Table) -> list[str]:
    """Named sets whose elements decide whether a rule that may close the fast path matches any packet."""
    rules = (rule for chain in table.chains.values() for rule in chain.rules)
    found = {
        part.target
        for rule in rules
        if any(part.kind in CONCERNS for part in rule.parts)
        for part in rule.parts
        if _is_lookup(part) and part.target in table.named
    }
    return sorted(found)


def has_elements(messages: Messages) -> bool:
    """Whether a set has any, from its elements; reads no further than needed."""
    return any(_list(_parts(message).get(3, b"")) for message in messages)


def remove_rules(table: Table, empty: str) -> None:
    """Remove the rules that match no packet, because they look it up in this empty set."""
    for chain in table.chains.values():
        chain.rules = [
            rule for rule in chain.rules if not any(_is_lookup(part) and part.target == empty for part in rule.parts)
        ]


def _is_lookup(part: Part) -> bool:
    return part.kind is Kind.CONDITION and part.words == LOOKUP


def _of_set(part: Part, table: Table) -> tuple[Part, ...]:
    """A lookup in a set or a map counts packets if its elements do, and varies if they expire."""
    if not part.target or part.kind in (Kind.JUMP, Kind.GOTO):
        return (part,)
    if part.target in table.varying:
        part = replace(part, varies=True)
    counts = table.stateful.get(part.target, "")
    if part.kind is Kind.MAP:
        return (Part(Kind.COUNTS, counts), part) if counts else (part,)
    if counts:
        return (replace(part, kind=Kind.COUNTS, words=counts),)
    return (replace(part, kind=Kind.IGNORED) if part.kind is Kind.COUNTS else part,)


def _limits(data: bytes) -> bool:
    """Whether there is a limit, quota or connlimit among these expressions."""
    return b"limit\0" in data or b"quota\0" in data


def _parts(message: bytes) -> dict[int, bytes]:
    return values(message, _HEADER)


def _list(data: bytes) -> list[bytes]:
    return [data[begin:end] for _, begin, end in attributes(data, 0, len(data))]


def _attribute(data: bytes, wanted: int) -> bytes:
    return next((data[begin:end] for kind, begin, end in attributes(data, 0, len(data)) if kind == wanted), b"")
