# SPDX-License-Identifier: Apache-2.0
"""Rules of packet filters in one form, from nftables, iptables-nft or iptables-legacy. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum

#: IP families as the fast path distinguishes them.
BOTH = frozenset({4, 6})


class Kind(IntEnum):
    """What a part of a rule does."""

    IGNORED = 1  # comments, counters, NAT, other marks: nothing that the fast path would change
    LOAD = 2  # loads something into a register for the following condition
    CONDITION = 3
    COUNTS = 4  # whether the packet matches depends on how many came before
    INSPECTS = 5  # inspects the contents of packets, or learns from each packet
    LOGS = 6
    TAKES = 7  # to user space, to another socket or device, or a copy of it
    REWRITES = 8
    TRACKS = 9  # configures how conntrack treats the flow
    NOTRACK = 10
    MARK = 11  # sets the packet's mark to a value
    CONNMARK = 12  # sets the flow's mark, or (field LABEL) a label
    RESTORE = 13  # copies the flow's mark to the packet
    UNKNOWN = 14  # an extension that this version does not know
    ACCEPT = 15
    DROP = 16
    RETURN = 17
    JUMP = 18
    GOTO = 19
    MAP = 20  # a verdict looked up in a map: may jump to any of its chains


#: How the words for ``-m nfacct`` begin.
ACCOUNTING = "nfacct "


class Field(Enum):
    """The field that a LOAD loads or a CONDITION compares, if it matters."""

    OTHER = 0
    FAMILY = 1  # AF_INET or AF_INET6
    ETHERTYPE = 2
    PROTOCOL = 3  # of the transport layer
    ADDRESS = 4
    VALUE = 5  # a constant
    MARK = 6
    CONNMARK = 7
    DEVICE = 8  # its name; the compared number ends with a zero byte if it is the whole name
    LABEL = 9  # of the flow
    HEADER = 10  # bytes of the IP header: ``number`` is the first one, ``value`` the one after the last
    SOURCE_PORT = 11
    STATE = 12  # of the flow: new, established
    IPSET = 13  # lookup of the packet's source: ``number`` is its index, and above 16 bits the flags of xt_set_info


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
    #: For people: its name in the tool that made it.
    words: str = ""
    #: Two conditions with the same key are the same condition.
    key: bytes = b""
    #: JUMP, GOTO: the chain. MAP, and COUNTS by a set or object map: its name.
    target: str = ""
    field: Field = Field.OTHER
    #: MARK, CONNMARK, RESTORE: the bits that may change. A condition for equality: the compared number. A LOAD or
    #: condition of the packet's or the flow's mark, or of the flow's state: the bits that count.
    number: int | None = None
    #: MARK: the new value of those bits; None: unknown. A condition for inequality: the compared number.
    value: int | None = None
    #: What it compares changes without a commit of rules: the time, a socket, elements of an ipset or that expire.
    varies: bool = False


@dataclass(slots=True)
class Rule:
    """``place``: its name in the tool that made it, such as "rule handle 7" or "rule 3"."""

    place: str
    parts: tuple[Part, ...]


@dataclass(slots=True)
class Chain:
    """``hook``: None for a chain without a hook; else whether forwarded packets cross it."""

    name: str
    hook: bool | None = None
    #: Run only for the first packet of a flow.
    nat: bool = False
    policy_drops: bool = False
    rules: list[Rule] = field(default_factory=list)


@dataclass(slots=True)
class Table:
    """``name`` as people know it: "nftables table inet filter", "iptables-legacy table mangle"."""

    name: str
    families: frozenset[int]
    chains: dict[str, Chain] = field(default_factory=dict)
    #: Target chains of this table's verdict maps, by map.
    maps: dict[str, frozenset[str]] = field(default_factory=dict)
    #: Sets whose elements have a state that matters: "limit rate" by the set's name.
    stateful: dict[str, str] = field(default_factory=dict)
    #: Sets and maps whose elements expire, or are added by packets.
    varying: set[str] = field(default_factory=set)
    #: Sets that a program or a person fills, and that may be empty.
    named: set[str] = field(default_factory=set)
    has_sets: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """The condition of an ip rule or a tc filter: packets whose mark is ``value`` in the bits ``mask``."""

    value: int
    mask: int
    #: It matches packets with any other mark.
    inverted: bool = False
    #: For people: "ip rule 1024".
    words: str = ""


@dataclass(slots=True)
class Rulesets:
    """Everything that was read."""

    tables: list[Table] = field(default_factory=list)
    #: By family.
    marks: dict[int, list[Mark]] = field(default_factory=dict)
    #: Names of devices that the fast path never uses: loopback, tunnels, PPP.
    slow_devices: frozenset[str] = frozenset()
    #: By an ipset's index: which parts of its elements are ports, as in the flags of xt_set_info.
    ipset_ports: dict[int, int] = field(default_factory=dict)
    #: Parts that could not be read, by family.
    unread: dict[int, list[str]] = field(default_factory=dict)
