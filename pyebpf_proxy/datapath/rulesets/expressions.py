# SPDX-License-Identifier: Apache-2.0
"""Expressions of nftables as the kernel dumps them (include/uapi/linux/netfilter/nf_tables.h), read into parts. Pure.

A large ruleset mostly repeats a few different expressions, so each is decoded once and cached by its bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from pyebpf_proxy.datapath.netlink.messages import text, values
from pyebpf_proxy.datapath.netlink.uapi import NLATTR
from pyebpf_proxy.datapath.rulesets import xtables
from pyebpf_proxy.datapath.rulesets.model import Field, Kind, Part

_NAME, _DATA = 1, 2
#: The beginning of every counter; its numbers differ in each rule.
_COUNTER = NLATTR.pack(12, _NAME) + b"counter\0"
_VERDICT_REGISTER = 0
#: The words of a lookup in a set that the packet must be in.
LOOKUP = "lookup"
_LOOKUP_INVERTED = 1  # NFT_LOOKUP_F_INV
_DROP, _ACCEPT, _QUEUE, _STOLEN, _JUMP, _GOTO, _RETURN = 0, 1, 3, 2, -3, -4, -5
_VERDICTS = {
    _DROP: Kind.DROP,
    _STOLEN: Kind.DROP,
    _ACCEPT: Kind.ACCEPT,
    _QUEUE: Kind.TAKES,
    _JUMP: Kind.JUMP,
    _GOTO: Kind.GOTO,
    _RETURN: Kind.RETURN,
}
_EQUAL, _NOT_EQUAL = 0, 1
_ALL = 0xFFFFFFFF
_META_FIELDS = {
    1: Field.ETHERTYPE,
    3: Field.MARK,
    6: Field.DEVICE,
    7: Field.DEVICE,
    15: Field.FAMILY,
    16: Field.PROTOCOL,
}
_META_LENGTH, _META_PRIORITY, _META_MARK, _META_NFTRACE, _META_SECMARK, _META_PKTTYPE, _META_RANDOM = (
    *(0, 2, 3, 12, 14, 19, 24),
)
_META_SET = {
    _META_PRIORITY: (Kind.REWRITES, "meta priority set"),
    _META_NFTRACE: (Kind.LOGS, "meta nftrace set"),
    _META_SECMARK: (Kind.REWRITES, "meta secmark set"),
    _META_PKTTYPE: (Kind.REWRITES, "meta pkttype set"),
}
_CT_STATE, _CT_MARK, _CT_SECMARK, _CT_LABEL, _CT_PACKETS, _CT_BYTES, _CT_AVERAGE, _CT_ZONE = 0, 3, 4, 13, 14, 15, 16, 17
_CT_FIELDS = {_CT_STATE: Field.STATE, _CT_MARK: Field.CONNMARK, _CT_LABEL: Field.LABEL}
_CT_ADDRESSES = {8, 9, 19, 20, 21, 22}
#: Key and direction of the client's port: proto-src of original packets, proto-dst of replies.
_CT_SOURCE_PORTS = {(11, 0), (12, 1)}
_LINK, _NETWORK, _TRANSPORT = 0, 1, 2
#: What follows the ports differs among the packets of two hosts. The flags of TCP do not count: SYN, FIN and RST of
#: flows that conntrack knows take the slow path.
_PORT_BYTES, _TCP_FLAGS = 4, range(12, 14)
_TCP_OPTION = 1  # NFT_EXTHDR_OP_TCPOPT
_SYMMETRIC = 1  # NFT_HASH_SYM
_OBJECTS = {
    2: (Kind.COUNTS, "quota"),
    3: (Kind.TRACKS, "ct helper set"),
    4: (Kind.COUNTS, "limit"),
    5: (Kind.COUNTS, "ct count"),
    7: (Kind.TRACKS, "ct timeout set"),
    8: (Kind.TRACKS, "ct expectation set"),
    9: (Kind.REWRITES, "secmark"),
    10: (Kind.TAKES, "synproxy"),
}
_OBJECT_COUNTER = 1
_PLAIN: dict[str, tuple[Kind, str]] = {
    "counter": (Kind.IGNORED, "counter"),
    "last": (Kind.IGNORED, "last"),
    "nat": (Kind.IGNORED, "nat"),
    "masq": (Kind.IGNORED, "masquerade"),
    "redir": (Kind.IGNORED, "redirect"),
    "reject": (Kind.DROP, "reject"),
    "limit": (Kind.COUNTS, "limit"),
    "connlimit": (Kind.COUNTS, "ct count"),
    "quota": (Kind.COUNTS, "quota"),
    "numgen": (Kind.COUNTS, "numgen"),
    "log": (Kind.LOGS, "log"),
    "queue": (Kind.TAKES, "queue"),
    "tproxy": (Kind.TAKES, "tproxy"),
    "dup": (Kind.TAKES, "dup"),
    "fwd": (Kind.TAKES, "fwd"),
    "synproxy": (Kind.TAKES, "synproxy"),
    "flow_offload": (Kind.TAKES, "flow add"),
    "notrack": (Kind.NOTRACK, "notrack"),
    "osf": (Kind.INSPECTS, "osf"),
}
#: They load something into a register. What the second ones load may change from one packet to the next of a pair.
_LOADS = frozenset({"byteorder", "fib", "rt", "socket", "tunnel", "xfrm", "inner"})
_VARYING_LOADS = frozenset({"socket", "tunnel", "xfrm", "inner"})
#: Keys of enum nft_meta_keys that are the same for all packets of a pair, as long as devices and routes are the same:
#: protocols, devices and their types and groups, the kind of frame.
_LASTING_META = frozenset({1, *range(3, 10), *range(15, 20), 21, 22, *range(26, 30), 33, 34})

Found = dict[int, bytes]


def expressions(data: bytes, at: int, end: int, known: dict[bytes, Part]) -> tuple[Part, ...]:
    """The expressions of a rule: a list of attributes between ``at`` and ``end``. ``known``: cache of decoded ones."""
    parts = []
    while at + 4 <= end:
        length, _ = NLATTR.unpack_from(data, at)
        if length < 4:
            break
        raw = data[at + 4 : at + length]
        at += (length + 3) & ~3
        part = known.get(raw)
        if part is None:
            if raw.startswith(_COUNTER):
                continue
            part = known[raw] = _expression(raw)
        parts.append(part)
    return tuple(parts)


def verdict(data: bytes) -> Part:
    """The verdict in an attribute of the type of NFTA_DATA_VERDICT."""
    found = values(data)
    code = _signed(found.get(1, b""))
    kind = _VERDICTS.get(code & 0xFF if code > 0 else code, Kind.IGNORED)  # continue and break have no effect
    return Part(kind, "queue" if kind is Kind.TAKES else kind.name.lower(), target=text(found.get(2, b"")))


def number(data: bytes | None) -> int | None:
    """A number in network byte order; None if it is missing."""
    return int.from_bytes(data, "big") if data else None


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


def _expression(raw: bytes) -> Part:
    parts = values(raw)
    name = text(parts.get(_NAME, b""))
    if name in _PLAIN:
        kind, words = _PLAIN[name]
        return Part(kind, words)
    if name in _LOADS:
        return Part(Kind.LOAD, name, raw, varies=name in _VARYING_LOADS)
    special = _SPECIAL.get(name)
    if special is None:
        return Part(Kind.UNKNOWN, f"unknown expression {name}")
    return special(values(parts.get(_DATA, b"")), raw)


def _immediate(found: Found, raw: bytes) -> Part:
    data = values(found.get(2, b""))
    if 2 in data:
        return verdict(data[2])
    # In host byte order where it becomes a mark.
    value = data.get(1, b"")
    return Part(Kind.LOAD, "value", raw, field=Field.VALUE, number=int.from_bytes(value, sys.byteorder))


def _bitwise(found: Found, raw: bytes) -> Part:
    """``number``: the bits that are kept, ``value``: the bits that are then inverted."""
    mask, turned = (values(found.get(kind, b"")).get(1, b"") for kind in (4, 5))
    if number(found.get(6)) or len(mask) != 4:
        return Part(Kind.LOAD, "bitwise", raw)
    kept = int.from_bytes(mask, sys.byteorder)
    return Part(Kind.LOAD, "bitwise", raw, number=kept, value=int.from_bytes(turned, sys.byteorder))


def _compare(found: Found, raw: bytes) -> Part:
    value = number(values(found.get(3, b"")).get(1, b""))
    operator = number(found.get(2))
    return Part(
        Kind.CONDITION,
        "compare",
        raw,
        number=value if operator == _EQUAL else None,
        value=value if operator == _NOT_EQUAL else None,
    )


def _condition(_: Found, raw: bytes) -> Part:
    return Part(Kind.CONDITION, "range", raw)


def _lookup(found: Found, raw: bytes) -> Part:
    target = text(found.get(1, b""))
    if 3 not in found:
        inverted = (number(found.get(5)) or 0) & _LOOKUP_INVERTED
        return Part(Kind.CONDITION, "not in" if inverted else LOOKUP, raw, target=target)
    if number(found[3]) == _VERDICT_REGISTER:
        return Part(Kind.MAP, "vmap", raw, target=target)
    return Part(Kind.LOAD, "map", raw, target=target)


def _meta(found: Found, raw: bytes) -> Part:
    key = number(found.get(2))
    if 3 not in found:
        if key == _META_RANDOM:
            return Part(Kind.COUNTS, "meta random")
        if key == _META_LENGTH:
            return Part(Kind.INSPECTS, "meta length")
        field = _META_FIELDS.get(key or 0, Field.OTHER)
        return Part(Kind.LOAD, "meta", raw, field=field, varies=key not in _LASTING_META)
    if key == _META_MARK:
        return Part(Kind.MARK, "meta mark set", number=_ALL)
    kind, words = _META_SET.get(key or 0, (Kind.REWRITES, f"meta {key} set"))
    return Part(kind, words)


def _ct(found: Found, raw: bytes) -> Part:
    key = number(found.get(2)) or 0
    if 4 not in found:
        if key in (_CT_PACKETS, _CT_BYTES, _CT_AVERAGE):
            return Part(Kind.COUNTS, "ct bytes" if key == _CT_BYTES else "ct packets")
        field = Field.ADDRESS if key in _CT_ADDRESSES else _CT_FIELDS.get(key, Field.OTHER)
        if (key, number(found.get(3))) in _CT_SOURCE_PORTS:
            field = Field.SOURCE_PORT
        return Part(Kind.LOAD, "ct", raw, field=field)
    if key == _CT_MARK:
        return Part(Kind.CONNMARK, "ct mark set", number=_ALL)
    if key == _CT_ZONE:
        return Part(Kind.TRACKS, "ct zone set")
    if key == _CT_SECMARK:
        return Part(Kind.REWRITES, "ct secmark set")
    if key == _CT_LABEL:
        return Part(Kind.CONNMARK, "ct label set", field=Field.LABEL)
    return Part(Kind.IGNORED, "ct set")  # which events are reported


def _payload(found: Found, raw: bytes) -> Part:
    base, offset, length = (number(found.get(kind)) or 0 for kind in (2, 3, 4))
    if 5 in found:
        return Part(Kind.REWRITES, "header field set")
    bytes_ = range(offset, offset + length)
    if base > _TRANSPORT or (base == _TRANSPORT and bytes_ and bytes_[-1] >= _PORT_BYTES and not _are_flags(bytes_)):
        return Part(Kind.INSPECTS, "inspection of packet contents")
    if base == _TRANSPORT and offset < 2:
        return Part(Kind.LOAD, "payload", raw, field=Field.SOURCE_PORT)
    if base == _NETWORK:
        if length == 1 and offset in (6, 9):  # ip6 nexthdr, ip protocol
            return Part(Kind.LOAD, "payload", raw, field=Field.PROTOCOL)
        if (length == 4 and offset in (12, 16)) or (length == 16 and offset in (8, 24)):
            return Part(Kind.LOAD, "payload", raw, field=Field.ADDRESS)
        return Part(Kind.LOAD, "payload", raw, field=Field.HEADER, number=offset, value=offset + length)
    if base == _LINK and offset == 12 and length == 2:
        return Part(Kind.LOAD, "payload", raw, field=Field.ETHERTYPE)
    return Part(Kind.LOAD, "payload", raw)


def _are_flags(found: range) -> bool:
    return found[0] in _TCP_FLAGS and found[-1] in _TCP_FLAGS


def _header(found: Found, raw: bytes) -> Part:
    if 7 in found:
        return Part(Kind.REWRITES, "tcp option set")
    if 1 not in found:
        return Part(Kind.REWRITES, "reset tcp option")
    if number(found.get(6)) == _TCP_OPTION:
        return Part(Kind.INSPECTS, "tcp option")
    return Part(Kind.LOAD, "exthdr", raw)


def _hash(found: Found, raw: bytes) -> Part:
    if number(found.get(7)) == _SYMMETRIC:
        return Part(Kind.COUNTS, "symhash")  # of addresses and ports: another number for each flow
    return Part(Kind.LOAD, "hash", raw)


def _object(found: Found, raw: bytes) -> Part:
    if 4 in found:
        return Part(Kind.COUNTS, "an object from a map", target=text(found[4]))
    kind = number(found.get(1)) or 0
    if kind == _OBJECT_COUNTER:
        return Part(Kind.IGNORED, "counter")
    found_kind, words = _OBJECTS.get(kind, (Kind.UNKNOWN, f"unknown object type {kind}"))
    return Part(found_kind, f"{words} {text(found.get(2, b''))}")


def _dynamic(found: Found, raw: bytes) -> Part:
    name = text(found.get(1, b""))
    inner = values(found.get(7, b""))
    what = text(inner.get(_NAME, b""))
    return Part(
        Kind.COUNTS if what else Kind.INSPECTS, f"set {name} updated by packets" + (f", {what}" if what else "")
    )


def _match(found: Found, raw: bytes) -> Part:
    return xtables.match(text(found.get(1, b"")), number(found.get(2)) or 0, found.get(3, b""))


def _target(found: Found, raw: bytes) -> Part:
    return xtables.target(text(found.get(1, b"")), number(found.get(2)) or 0, found.get(3, b""))


_SPECIAL: dict[str, Callable[[Found, bytes], Part]] = {
    "immediate": _immediate,
    "bitwise": _bitwise,
    "cmp": _compare,
    "range": _condition,
    "lookup": _lookup,
    "meta": _meta,
    "ct": _ct,
    "payload": _payload,
    "exthdr": _header,
    "hash": _hash,
    "objref": _object,
    "dynset": _dynamic,
    "match": _match,
    "target": _target,
}
