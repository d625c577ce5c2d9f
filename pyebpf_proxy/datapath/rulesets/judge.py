# SPDX-License-Identifier: Apache-2.0
"""Finds the rules that must see or change every packet of a family: they close the fast path. Pure.

The fast path learns from packets that crossed every chain. This is enough for a rule that only accepts, drops or
translates by fields of a packet: what it drops is never learned. Rules that count packets, log them, redirect them,
inspect their contents or rewrite them must see each of them.

These do not close it:

* chains that a forwarded packet does not cross (input, output, and chains that only those jump to);
* rules for protocols that the fast path does not carry (ICMP, for example);
* choices among translations in nat chains (statistic, recent), because these see only the first packet of a flow;
* a rule that logs, or limits a log, if the packets that it matches are dropped afterwards ("log prefix … drop", ufw's
  BLOCK, kube-router's log of packets that a policy refuses): none of them are on the fast path;
* rules for a device, by its whole name, that the fast path never uses (the usual TCPMSS for PPP or a tunnel);
* marks, as long as no ip rule and no tc filter uses the value that is set;
* marks that are restored from flows and used so, if all flows of a pair have the same (AWS VPC CNI). Flows with these
  marks stay in netfilter: conntrack has none for a flow that was promoted;
* marks and labels of flows, as long as no rule compares them. conntrack has none for a flow that was promoted;
* a rule for the elements of an nftables set that has none, and a rule that only accepts what the rest of its chain
  would accept as well (kindnet's, while no pod has a network policy).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pyebpf_proxy.datapath.rulesets.model import (
    ACCOUNTING,
    BOTH,
    CONCERNS,
    VERDICTS,
    Chain,
    Field,
    Kind,
    Mark,
    Part,
    Rule,
    Rulesets,
    Table,
)

#: Further rules are only counted.
SHOWN = 5
_CARRIED = {6, 17}  # TCP, UDP
_ALL = 0xFFFFFFFF
_DEPTH = 16
_FAMILY = {2: frozenset({4}), 10: frozenset({6})}
_ETHERTYPE = {0x0800: frozenset({4}), 0x86DD: frozenset({6})}
#: In nat chains these choose a translation.
_CHOOSES = {"statistic", "recent", "numgen", "meta random", "symhash"}
_NOTHING = frozenset[int]()
_DROPS, _THROUGH, _MAYBE = "drops", "through", "maybe"

#: Bytes of the IP header that all packets of the fast path between two hosts have in common: of IPv4 version, header
#: length, fragments, protocol and addresses; of IPv6 next header and addresses.
_SAME = {4: {0, 6, 7, 9, *range(12, 20)}, 6: {6, *range(8, 40)}}
#: Parts of a rule that do nothing to a packet.
_NO_EFFECT = {"", "comment", "counter", "last", "no target"}
_NEW = 8  # NF_CT_STATE_BIT(IP_CT_NEW)

Conditions = frozenset[tuple[bytes, ...]]


@dataclass(frozen=True, slots=True)
class Reason:
    """A rule that closes the fast path for a family."""

    table: str
    chain: str
    place: str
    words: str

    def __str__(self) -> str:
        return f"{self.table}, chain {self.chain}, rule {self.place}: {self.words}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one family."""

    reasons: tuple[Reason, ...] = ()
    #: How many more rules close the fast path.
    more: int = 0
    #: What could not be read.
    unread: tuple[str, ...] = ()
    #: Bits of packets' marks that rules restore from flows and that choose routes: such packets prove nothing.
    marks: int = 0

    @property
    def closes(self) -> bool:
        return bool(self.reasons or self.unread)

    def __str__(self) -> str:
        words = [str(reason) for reason in self.reasons]
        words += [f"and {self.more} more rules"] if self.more else []
        return "; ".join([*words, *self.unread])


def judge(rulesets: Rulesets) -> dict[int, Verdict]:
    """By family: whether the fast path is closed, and by which rules."""
    found: dict[int, list[Reason]] = {4: [], 6: []}
    memory = _memory(rulesets.tables)
    marks = _route_marks(rulesets) if memory.marks else {}
    readers = [_Reader(table, rulesets, memory) for table in rulesets.tables]
    bits = marks.get(4, 0) | marks.get(6, 0)
    memory.of_pairs = bool(bits) and all(reader.marks_pairs(bits) for reader in readers)
    for reader in readers:
        for families, reason in reader.reasons():
            for family in families:
                found[family].append(reason)
    return {
        family: Verdict(
            tuple(reasons[:SHOWN]),
            max(0, len(reasons) - SHOWN),
            tuple(rulesets.unread.get(family, ())),
            marks.get(family, 0),
        )
        for family, reasons in found.items()
    }


def sets_marks(rulesets: Rulesets) -> bool:
    """Whether any rule sets packets' marks, so that users of marks matter."""
    return any(part.kind in (Kind.MARK, Kind.RESTORE) for part in _parts(rulesets.tables))


def looks_up_ipsets(rulesets: Rulesets) -> bool:
    """Whether any rule looks the packet's source up in an ipset, so that the sets' types matter."""
    return any(part.field is Field.IPSET for part in _parts(rulesets.tables))


def lasting(rulesets: Rulesets) -> frozenset[int]:
    """The families in which nothing but a commit changes what the rules do to a new flow of the same pair.

    A rule that compares the time, an ipset, or a set whose elements expire may deny a pair later. Rules that count, log
    or inspect packets need not be looked at: those that a forwarded packet meets close the family.
    """
    varying = (table.families for table in rulesets.tables if any(part.varies for part in _parts([table])))
    return BOTH.difference(*varying) - rulesets.unread.keys()


def _parts(tables: Iterable[Table]) -> Iterable[Part]:
    return (part for table in tables for chain in table.chains.values() for rule in chain.rules for part in rule.parts)


@dataclass(slots=True)
class _Memory:
    """What rules keep in conntrack: the bits of flows' marks that they set, and of packets' marks that they restore."""

    marks: int = 0
    restored: int = 0
    labels: bool = False
    #: The restored bits that choose routes are the same for all flows of a pair.
    of_pairs: bool = False


def _memory(tables: Iterable[Table]) -> _Memory:
    found = _Memory()
    for rule in (rule for table in tables for chain in table.chains.values() for rule in chain.rules):
        for number, part in enumerate(rule.parts):
            if part.kind is Kind.CONNMARK and part.field is Field.LABEL:
                found.labels = True
            elif part.kind is Kind.CONNMARK:
                found.marks |= _ALL if part.number is None else part.number
            elif part.kind in (Kind.MARK, Kind.RESTORE):
                restored = _mark(rule.parts, number)
                if restored.kind is Kind.RESTORE:
                    found.restored |= _ALL if restored.number is None else restored.number
    if not found.marks:
        found.restored = 0
    return found


def _route_marks(rulesets: Rulesets) -> dict[int, int]:
    """By family: the bits of packets' marks that rules restore from flows, and that an ip rule or tc filter uses."""
    found: dict[int, int] = {}
    for table in rulesets.tables:
        for rule in (rule for chain in table.chains.values() for rule in chain.rules):
            for number in range(len(rule.parts)):
                part = _mark(rule.parts, number)
                if part.kind is not Kind.RESTORE:
                    continue
                changed = _changed(part)
                for family in table.families:
                    used = (mark.mask for mark in rulesets.marks.get(family, ()) if _matters(part, changed, mark))
                    for mask in used:
                        found[family] = found.get(family, 0) | mask & changed
    return found


@dataclass(slots=True)
class _Reach:
    """For which families packets reach a chain: through chains that see all packets, and through nat chains."""

    packets: frozenset[int] = _NOTHING
    flows: frozenset[int] = _NOTHING


class _Reader:
    """Reads one table."""

    def __init__(self, table: Table, rulesets: Rulesets, memory: _Memory) -> None:
        self._table = table
        self._marks = rulesets.marks
        self._slow = rulesets.slow_devices
        self._ipset_ports = rulesets.ipset_ports
        self._memory = memory
        self._callers: dict[str, list[tuple[Chain, int]]] | None = None

    def reasons(self) -> Iterable[tuple[frozenset[int], Reason]]:
        """Every rule that closes the fast path, with the families for which it does."""
        for name, reach in self._reached().items():
            chain = self._table.chains[name]
            for at, rule in enumerate(chain.rules):
                for number, part in enumerate(rule.parts):
                    if part.kind in CONCERNS:
                        families, words = self._closes(chain, at, number, reach)
                        if families:
                            yield families, Reason(self._table.name, name, rule.place, words)
                            break
                else:
                    families, words = self._compares(chain, at, reach)
                    if families:
                        yield families, Reason(self._table.name, name, rule.place, words)

    def _reached(self) -> dict[str, _Reach]:
        """The chains that forwarded packets reach."""
        found: dict[str, _Reach] = {}
        todo: list[tuple[str, _Reach]] = []
        for name, chain in self._table.chains.items():
            if chain.hook:
                families = self._table.families
                todo.append((name, _Reach(flows=families) if chain.nat else _Reach(packets=families)))
        while todo:
            name, reach = todo.pop()
            before = found.setdefault(name, _Reach())
            packets, flows = reach.packets | before.packets, reach.flows | before.flows
            if (packets, flows) == (before.packets, before.flows):
                continue
            found[name] = _Reach(packets, flows)
            for rule in self._table.chains[name].rules:
                part = _verdict(rule)
                if part is None or part.kind not in (Kind.JUMP, Kind.GOTO, Kind.MAP):
                    continue
                selected = _families(rule, self._slow)
                into = _Reach(packets & selected, flows & selected)
                todo += [(target, into) for target in self._targets(part) if target in self._table.chains]
        return found

    def _targets(self, part: Part) -> Iterable[str]:
        return self._table.maps.get(part.target, ()) if part.kind is Kind.MAP else (part.target,)

    def _closes(self, chain: Chain, at: int, number: int, reach: _Reach) -> tuple[frozenset[int], str]:
        """The families for which a part of a rule closes the fast path, and the words for it."""
        rule = chain.rules[at]
        part = rule.parts[number]
        families = reach.packets | reach.flows
        if part.kind in (Kind.MARK, Kind.RESTORE):
            part = _mark(rule.parts, number)
            if part.kind is Kind.RESTORE and self._memory.of_pairs:
                return _NOTHING, ""
            families = self._by_mark(part, families)
        elif part.kind is Kind.CONNMARK:
            return _NOTHING, ""  # It has no effect until it is restored.
        elif part.kind is Kind.NOTRACK:
            # An untracked flow is not translated, so the observer learns nothing; unless only some packets match.
            if any(each.field is Field.ADDRESS for each in rule.parts):
                return _NOTHING, ""
        elif part.words in _CHOOSES:
            families = reach.packets
        elif part.kind is Kind.COUNTS and part.words.startswith(ACCOUNTING) and _has_no_effect(rule, part):
            return _NOTHING, ""  # It only counts, whether there is a quota or not.
        if not (families := families & _families(rule, self._slow)):
            return _NOTHING, ""
        if part.kind in (Kind.COUNTS, Kind.LOGS) and self._is_dropped(chain, at):
            return _NOTHING, ""
        return families, part.words

    def _compares(self, chain: Chain, at: int, reach: _Reach) -> tuple[frozenset[int], str]:
        """The families for which the conditions of a rule close the fast path, and the words for it.

        Of two packets between the same hosts one may meet them, and the other not. Or only conntrack's entry of a flow
        that netfilter has seen from its first packet on meets them.
        """
        rule = chain.rules[at]
        if _has_no_effect(rule) or _accepts_in_vain(chain, at):
            return _NOTHING, ""
        selected = _families(rule, self._slow)
        states = list(_states(rule))
        for field, bits in _compared(rule):
            packets, words = reach.packets, ""
            if field is Field.CONNMARK and bits & self._memory.marks:
                words = "it compares flows' marks"
            elif field is Field.LABEL and self._memory.labels:
                words = "it compares flows' labels"
            elif field is Field.MARK and bits & self._memory.restored:
                words = "it compares marks that are restored from flows"
            elif self._is_source_port(field, bits) and all(each & _NEW for each in states):
                packets, words = reach.packets | reach.flows, "it compares source ports"
            if words and packets & selected:
                return packets & selected, words
        if families := (reach.packets | reach.flows) & selected & self._differs(rule):
            return families, "it compares header fields that differ among packets"
        return _NOTHING, ""

    def _differs(self, rule: Rule) -> frozenset[int]:
        """The families in which header fields that a rule compares differ among the packets of two hosts."""
        found: frozenset[int] = _NOTHING
        for part in rule.parts:
            if part.kind is Kind.LOAD and part.field is Field.HEADER:
                loaded = set(range(part.number or 0, part.value or 0))
                found |= {family for family, same in _SAME.items() if not loaded <= same}
        return found & self._table.families

    def _is_source_port(self, field: Field, bits: int) -> bool:
        if field is Field.IPSET:
            return bool(bits >> 16 & self._ipset_ports.get(bits & 0xFFFF, 0))
        return field is Field.SOURCE_PORT

    def _by_mark(self, part: Part, families: frozenset[int]) -> frozenset[int]:
        """The families in which an ip rule or tc filter uses the mark that a rule sets."""
        if part.kind is Kind.RESTORE and not self._memory.marks:
            return _NOTHING
        changed = _changed(part)
        return frozenset(
            family for family in families if any(_matters(part, changed, mark) for mark in self._marks.get(family, ()))
        )

    # ---- marks of flows ----------------------------------------------------------------------------------------

    def marks_pairs(self, bits: int) -> bool:
        """Whether the rules give these bits of a mark to all flows of a pair or to none. Only flows get them."""
        marks_flows = False
        for chain in self._table.chains.values():
            for at, rule in enumerate(chain.rules):
                for number in range(len(rule.parts)):
                    part = _mark(rule.parts, number)
                    if not _changed(part) & bits:
                        continue
                    if part.kind is Kind.MARK:
                        return False
                    if part.kind is Kind.CONNMARK and part.field is not Field.LABEL:
                        marks_flows = True
                        if not self._is_of_pair(chain, at):
                            return False
        # Verdicts decide which flows reach these rules.
        rules = (rule for chain in self._table.chains.values() for rule in chain.rules)
        return not marks_flows or not any(_verdict(rule) and _varies(rule) for rule in rules)

    def _is_of_pair(self, chain: Chain, at: int, below: frozenset[str] = frozenset()) -> bool:
        """Whether all flows of a pair meet a rule, or none, from the first packet on."""
        rule = chain.rules[at]
        if _varies(rule) or self._differs(rule):
            return False
        if not all(states & _NEW for states in _states(rule)):
            return False
        if any(field is Field.LABEL or self._is_source_port(field, bits) for field, bits in _compared(rule)):
            return False
        below |= {chain.name}
        callers = self._called().get(chain.name, ())
        return all(caller.name in below or self._is_of_pair(caller, place, below) for caller, place in callers)

    # ---- packets that are dropped afterwards -------------------------------------------------------------------

    def _is_dropped(self, chain: Chain, at: int) -> bool:
        """Whether the packets that a rule matches are dropped, by the rule itself or later, whatever it counts."""
        rule = chain.rules[at]
        verdict = _verdict(rule)
        if verdict is not None and verdict.kind is not Kind.DROP:
            return False
        limited = any(part.kind is Kind.COUNTS for part in rule.parts)
        if verdict is not None and not limited:
            return True
        return self._dropped_from(chain, at + 1, _conditions(rule)[0], 0)

    def _dropped_from(self, chain: Chain, at: int, known: Conditions, depth: int) -> bool:
        end = self._walk(chain, at, known, depth)
        if end is not _THROUGH:
            return end is _DROPS
        if chain.hook is not None:
            return chain.policy_drops
        callers = self._called().get(chain.name, [])
        return (
            bool(callers)
            and depth < _DEPTH
            and all(
                self._dropped_from(caller, place + 1, known | _conditions(caller.rules[place])[0], depth + 1)
                if _is_jump(caller.rules[place])
                else False
                for caller, place in callers
            )
        )

    def _walk(self, chain: Chain, at: int, known: Conditions, depth: int) -> str:
        """The fate of packets that meet these conditions, in a chain from the given rule on."""
        for rule in chain.rules[at:]:
            part = _verdict(rule)
            if part is None:
                continue
            conditions, sure = _conditions(rule)
            sure = sure and conditions <= known
            if part.kind is Kind.DROP:
                if sure:
                    return _DROPS
            elif part.kind in (Kind.ACCEPT, Kind.RETURN, Kind.MAP) or depth >= _DEPTH:
                return _THROUGH if sure and part.kind is Kind.RETURN else _MAYBE
            else:
                inner = self._table.chains.get(part.target)
                end = self._walk(inner, 0, known | conditions, depth + 1) if inner else _MAYBE
                if end is _MAYBE or (end is _THROUGH and part.kind is Kind.GOTO):
                    return _MAYBE
                if sure and end is _DROPS:
                    return _DROPS
        return _THROUGH

    def _called(self) -> dict[str, list[tuple[Chain, int]]]:
        if self._callers is None:
            self._callers = {}
            for chain in self._table.chains.values():
                for at, rule in enumerate(chain.rules):
                    part = _verdict(rule)
                    if part is not None and part.kind in (Kind.JUMP, Kind.GOTO, Kind.MAP):
                        for target in self._targets(part):
                            self._callers.setdefault(target, []).append((chain, at))
        return self._callers


def _has_no_effect(rule: Rule, beside: Part | None = None) -> bool:
    """Whether the parts of a rule do nothing to a packet, but for one of them. They may change what conntrack keeps."""
    passive = (Kind.LOAD, Kind.CONDITION, Kind.CONNMARK)
    return all(part is beside or part.kind in passive or part.words in _NO_EFFECT for part in rule.parts)


def _accepts_in_vain(chain: Chain, at: int) -> bool:
    """Whether a rule accepts packets that the rest of the chain would accept as well, and do nothing else to."""
    if chain.hook is None or chain.policy_drops:
        return False
    verdicts = ((rule, _verdict(rule)) for rule in chain.rules[at:])
    return all(_has_no_effect(rule, part if part and part.kind is Kind.ACCEPT else None) for rule, part in verdicts)


def _varies(rule: Rule) -> bool:
    """Whether a rule may match one flow of a pair and not the next, by other than ports, states and marks."""
    lasting = (Kind.MARK, Kind.CONNMARK, Kind.RESTORE)
    return any(part.varies or (part.kind in CONCERNS and part.kind not in lasting) for part in rule.parts)


def _verdict(rule: Rule) -> Part | None:
    """The last part, except for ignored parts such as comments; nothing follows a verdict."""
    for part in reversed(rule.parts):
        if part.kind in VERDICTS:
            return part
        if part.kind is not Kind.IGNORED:
            return None
    return None


def _is_jump(rule: Rule) -> bool:
    part = _verdict(rule)
    return part is not None and part.kind is Kind.JUMP


def _families(rule: Rule, slow: frozenset[str]) -> frozenset[int]:
    """The families in which the rule may match packets that the fast path carries."""
    families = BOTH
    field = Field.OTHER
    for part in rule.parts:
        if part.kind is Kind.LOAD:
            field = part.field
        elif part.kind is Kind.CONDITION and part.number is not None:
            field = part.field if part.field is not Field.OTHER else field
            if field is Field.PROTOCOL and part.number not in _CARRIED:
                return _NOTHING
            if field is Field.DEVICE and _name(part.number) in slow:
                return _NOTHING
            if field is Field.FAMILY:
                families &= _FAMILY.get(part.number, _NOTHING)
            elif field is Field.ETHERTYPE:
                families &= _ETHERTYPE.get(part.number, _NOTHING)
        elif part.kind is not Kind.CONDITION:
            field = Field.OTHER  # It may have loaded something else, which the next condition compares.
    return families


def _name(number: int) -> str:
    """The whole device name that is compared; empty if only a prefix is."""
    return "" if number & 0xFF else number.to_bytes(16, "big").strip(b"\0").decode(errors="replace")


def _compared(rule: Rule) -> Iterable[tuple[Field, int]]:
    """The fields that a rule compares, and which of their bits."""
    loads: list[Part] = []
    for part in rule.parts:
        looks_up = part.kind is Kind.LOAD and part.words == "map"
        if part.kind is Kind.LOAD and not looks_up:
            loads.append(part)
            continue
        if part.kind in (Kind.CONDITION, Kind.MAP) or looks_up:
            for at, load in enumerate(loads):
                after = loads[at + 1] if at + 1 < len(loads) and loads[at + 1].words == "bitwise" else None
                yield load.field, _ALL if after is None or after.number is None else after.number
            yield part.field, _ALL if part.number is None else part.number
        if part.kind is not Kind.CONDITION:
            loads = []


def _states(rule: Rule) -> Iterable[int]:
    """For each condition about the state of the flow: the states that meet it."""
    group: list[Part] = []
    last: list[Part] = []
    for part in rule.parts:
        if part.kind is Kind.LOAD:
            group.append(part)
        elif part.kind is Kind.CONDITION:
            last, group = group or last, []
            if part.field is Field.STATE:
                yield _ALL if part.number is None else part.number
            elif any(load.field is Field.STATE for load in last):
                yield _states_of(last, part)


def _states_of(loads: Sequence[Part], condition: Part) -> int:
    """The states that meet a comparison of nftables: some of the loaded bits are set, or none of them."""
    if len(loads) == 2 and loads[1].words == "bitwise" and not loads[1].value and (bits := loads[1].number):
        if condition.value == 0:
            return bits
        if condition.number == 0:
            return ~bits & _ALL
    return _ALL


def _conditions(rule: Rule) -> tuple[Conditions, bool]:
    """The conditions of a rule, and whether they are all: nothing is counted or inspected, or looked up in vain."""
    found = set()
    group: list[bytes] = []
    last: list[bytes] = []
    sure = True
    for part in rule.parts:
        if part.kind is Kind.LOAD:
            group.append(part.key)
            sure &= part.words != "map"
        elif part.kind is Kind.CONDITION:
            last = group or last
            found.add((*last, part.key))
            group = []
        elif part.kind in (Kind.COUNTS, Kind.INSPECTS, Kind.UNKNOWN) or (part.kind is Kind.IGNORED and part.target):
            sure = False
    return frozenset(found), sure


def _changed(part: Part) -> int:
    """The bits of a mark that a part may change."""
    return _ALL if part.number is None else part.number


def _mark(parts: Sequence[Part], number: int) -> Part:
    """The part that sets a mark, completed by the nftables expressions before it that compute the value."""
    part = parts[number]
    if part.kind is not Kind.MARK or part.number != _ALL or part.value is not None:
        return part
    loads = []
    for before in reversed(parts[:number]):
        if before.kind is not Kind.LOAD:
            break
        loads.append(before)
    if not loads:
        return part
    if any(load.field is Field.CONNMARK for load in loads):
        return replace(part, kind=Kind.RESTORE)
    first = loads[0]
    if first.field is Field.VALUE:
        return replace(part, value=first.number)
    if first.number is not None and len(loads) > 1 and loads[1].field is Field.MARK:
        # The cleared bits become the changed ones.
        changed = ~first.number & _ALL
        turned = first.value or 0
        return replace(part, number=changed | turned, value=turned if not turned & ~changed else None)
    return part


def _matters(part: Part, changed: int, mark: Mark) -> bool:
    """Whether a mark changed in this way can match ``mark``."""
    if not changed & mark.mask:
        return False
    if mark.inverted or part.value is None:
        return True
    # The unchanged bits may have any value.
    return part.value & mark.mask & changed == mark.value & mark.mask & changed
