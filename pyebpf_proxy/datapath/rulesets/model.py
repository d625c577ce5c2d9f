# SPDX-License-Identifier: Apache-2.0
"""Rules of packet filters in one form, whether nftables, iptables-nft or iptables-legacy made them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum

#: IP families as the fast path tells them apart.
BOTH = frozenset({4, 6})


class Kind(IntEnum):
    """What a part of a rule does."""

    IGNORED = 1  # comments, counters, NAT, marks of others: nothing that the fast path would change
    LOAD = 2  # puts something into a register for the condition that follows
    CONDITION = 3
    COUNTS = 4  # whether the packet matches depends on how many came before
    INSPECTS = 5  # looks into what the packet carries, or learns from each packet
    LOGS = 6
    TAKES = 7  # to user space, to another socket or device, or a copy of it
    REWRITES = 8
    TRACKS = 9  # says how conntrack treats the flow
    NOTRACK = 10
    MARK = 11  # the packet's mark is set to a value
    CONNMARK = 12  # the flow's mark is set
    RESTORE = 13  # the packet's mark becomes the flow's
    UNKNOWN = 14  # an extension that this version does not know
    ACCEPT = 15
    DROP = 16
    RETURN = 17
    JUMP = 18
    GOTO = 19
    MAP = 20  # a verdict looked up in a map: jumps to any of its chains


class Field(Enum):
    """What a LOAD loads or a CONDITION compares, as far as it matters."""

    OTHER = 0
    FAMILY = 1  # AF_INET or AF_INET6
    ETHERTYPE = 2
    PROTOCOL = 3  # of the transport layer
    ADDRESS = 4
    VALUE = 5  # a constant
    MARK = 6
    CONNMARK = 7
    DEVICE = 8  # its name; the number compared with ends with a zero byte if it is the whole name


#: Kinds that end the walk through a chain, or leave it.
VERDICTS = frozenset({Kind.ACCEPT, Kind.DROP, Kind.RETURN, Kind.JUMP, Kind.GOTO, Kind.MAP})
#: Kinds for which the fast path may have to close.
CONCERNS = frozenset(
    {
        Kind.COUNTS,
        Kind.INSPECTS,
        Kind.LOGS,
        Kind.TAKES,
        Kind.REWRITES,
        Kind.TRACKS,
        Kind.NOTRACK,
        Kind.MARK,
        Kind.CONNMARK,
        Kind.RESTORE,
        Kind.UNKNOWN,
    }
)


@dataclass(frozen=True, slots=True)
class Part:
    """One match, target or expression of a rule."""

    kind: Kind
    #: For people: what it is called in the tool that made it.
    words: str = ""
    #: Two conditions with the same key are the same condition.
    key: bytes = b""
    #: JUMP, GOTO: the chain. MAP, and COUNTS by a set or object map: its name.
    target: str = ""
    field: Field = Field.OTHER
    #: MARK, CONNMARK, RESTORE: the bits that it may change. A condition for equality: the number compared with.
    number: int | None = None
    #: MARK: what those bits become, None: not known.
    value: int | None = None


@dataclass(slots=True)
class Rule:
    """``place``: how the tool that made it names it, as "rule handle 7" or "rule 3"."""

    place: str
    parts: tuple[Part, ...]


@dataclass(slots=True)
class Chain:
    """``hook``: None for one that is only jumped to; else whether packets that are forwarded cross it."""

    name: str
    hook: bool | None = None
    #: Asked for the first packet of a flow only.
    nat: bool = False
    policy_drops: bool = False
    rules: list[Rule] = field(default_factory=list)


@dataclass(slots=True)
class Table:
    """``name`` as people know it: "nftables table inet filter", "iptables-legacy table mangle"."""

    name: str
    families: frozenset[int]
    chains: dict[str, Chain] = field(default_factory=dict)
    #: Chains that the verdict maps of this table lead to, by map.
    maps: dict[str, frozenset[str]] = field(default_factory=dict)
    #: What the elements of sets carry, where that counts: "limit rate" by the set's name.
    stateful: dict[str, str] = field(default_factory=dict)
    has_sets: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """What an ip rule or a tc filter goes by: packets whose mark is ``value`` in the bits ``mask``."""

    value: int
    mask: int
    #: It is for the packets with any other mark.
    inverted: bool = False
    #: For people: "ip rule 1024".
    words: str = ""


@dataclass(slots=True)
class Rulesets:
    """All that was read."""

    tables: list[Table] = field(default_factory=list)
    #: By family.
    marks: dict[int, list[Mark]] = field(default_factory=dict)
    #: Names of devices that the fast path never uses: loopback, tunnels, PPP.
    slow_devices: frozenset[str] = frozenset()
    #: What could not be read, by family; nothing is known of it.
    unread: dict[int, list[str]] = field(default_factory=dict)
