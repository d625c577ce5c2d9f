# SPDX-License-Identifier: Apache-2.0
"""A table of iptables-legacy, as the kernel returns it, read into the model. Pure.

include/uapi/linux/netfilter_ipv4/ip_tables.h, netfilter_ipv6/ip6_tables.h: entries follow one another, each with its
matches and one target. A user-defined chain begins with a target ERROR that has its name.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from dataclasses import dataclass

from pyebpf_proxy.datapath.rulesets import xtables
from pyebpf_proxy.datapath.rulesets.model import Chain, Field, Kind, Part, Rule, Table

#: struct ipt_getinfo: name, valid_hooks, hook_entry, underflow, num_entries, size.
INFO = struct.Struct("=32sI5I5III")
#: The header before the entries in struct ipt_get_entries: name, size.
ENTRIES = struct.Struct("=32sI4x")
_OFFSETS = struct.Struct("=HH")
_EXTENSION = struct.Struct("=H29sB")  # match_size or target_size, name, revision
_VERDICT = struct.Struct("=i")
_HOOKS = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
_CROSSED = {"PREROUTING", "FORWARD", "POSTROUTING"}
_ACCEPT, _QUEUE, _RETURN, _DROP = -2, -4, -5, -1
_VERDICTS = {
    _ACCEPT: Part(Kind.ACCEPT, "ACCEPT"),
    _DROP: Part(Kind.DROP, "DROP"),
    _QUEUE: Part(Kind.TAKES, "QUEUE"),
    _RETURN: Part(Kind.RETURN, "RETURN"),
}
_NAME_BYTES = 16  # IFNAMSIZ
_COUNTERS = 16  # struct xt_counters, last before the matches
_INVERTED_PROTOCOL = 0x40  # XT_INV_PROTO
_FRAGMENT = 0x01  # IPT_F_FRAG; IPv6 has another flag there


@dataclass(frozen=True, slots=True)
class _Shape:
    """Offsets in an entry of one family."""

    conditions: int  # bytes of struct ipt_ip
    protocol: int
    flags: int
    inverted: int
    goto: int  # IPT_F_GOTO, IP6T_F_GOTO
    entry: int  # bytes before the first match
    addresses: int  # bytes of addresses and masks at the beginning


_SHAPES = {4: _Shape(84, 80, 82, 83, 2, 112, 16), 6: _Shape(136, 128, 131, 132, 4, 168, 64)}


@dataclass(frozen=True, slots=True)
class Info:
    """The kernel's information about a table, without entries: changes with nearly every change of the rules."""

    name: str
    valid_hooks: int
    hook_entry: tuple[int, ...]
    underflow: tuple[int, ...]
    entries: int
    size: int


def info(data: bytes | bytearray) -> Info:
    """Parses the answer to IPT_SO_GET_INFO."""
    name, hooks, *rest = INFO.unpack_from(data)
    return Info(name.rstrip(b"\0").decode(), hooks, tuple(rest[:5]), tuple(rest[5:10]), rest[10], rest[11])


def table(family: int, about: Info, blob: bytes, known: dict[bytes, Part]) -> Table:
    """A table from its entries. ``known``: cache of decoded extensions, by their bytes. ValueError."""
    word = "iptables-legacy" if family == 4 else "ip6tables-legacy"
    result = Table(f"{word} table {about.name}", frozenset({family}))
    shape = _SHAPES[family]
    hooks = [number for number in range(5) if about.valid_hooks >> number & 1]
    begins = {about.hook_entry[number]: _HOOKS[number] for number in hooks}
    ends = {about.underflow[number] for number in hooks}
    starts = _chains(blob, shape, begins)
    chain = Chain("")
    for at, rules_end, following in _entries(blob, shape):
        name, _, extension = _extension(blob, rules_end)
        if at in begins:
            hook = begins[at]
            chain = result.chains.setdefault(hook, Chain(hook, hook=hook in _CROSSED, nat=about.name == "nat"))
        if name == "ERROR":
            label = _text(extension)
            if following < len(blob):
                chain = result.chains.setdefault(label, Chain(label))
            continue
        if at in ends:
            chain.policy_drops = _VERDICT.unpack_from(extension)[0] == _DROP
            continue
        parts = [*_conditions(blob, at, shape), *_matches(blob, at + shape.entry, rules_end, known)]
        if name:
            parts.append(_known(known, blob, rules_end, xtables.target))
        else:
            goto = bool(blob[at + shape.flags] & shape.goto)
            parts.append(_verdict(_VERDICT.unpack_from(extension)[0], following, goto, starts))
        chain.rules.append(Rule(f"{len(chain.rules) + 1}", tuple(parts)))
    for each in result.chains.values():
        # Every user-defined chain ends with an implicit RETURN.
        if each.hook is None and each.rules:
            each.rules.pop()
    return result


def digest(family: int, blob: bytes) -> bytes:
    """A digest of all rules without their counters. ValueError."""
    shape = _SHAPES[family]
    found = hashlib.blake2b(digest_size=16)
    before = 0
    for at, _, _ in _entries(blob, shape):
        found.update(blob[before : at + shape.entry - _COUNTERS])
        before = at + shape.entry
    found.update(blob[before:])
    return found.digest()


def _entries(blob: bytes, shape: _Shape) -> list[tuple[int, int, int]]:
    """For every entry: the offsets of its beginning, its target and the next entry."""
    found = []
    at = 0
    while at + shape.entry <= len(blob):
        target, size = _OFFSETS.unpack_from(blob, at + shape.conditions + 4)
        if not shape.entry <= target < size or at + size > len(blob):
            raise ValueError(f"an entry at {at} of {len(blob)} bytes claims a size of {size}")
        found.append((at, at + target, at + size))
        at += size
    return found


def _chains(blob: bytes, shape: _Shape, begins: dict[int, str]) -> dict[int, str]:
    """Names of chains by the offset of their first rule."""
    starts = dict(begins)
    for _, target, following in _entries(blob, shape):
        name, _, extension = _extension(blob, target)
        if name == "ERROR" and following < len(blob):
            starts[following] = _text(extension)
    return starts


def _conditions(blob: bytes, at: int, shape: _Shape) -> list[Part]:
    """The addresses, devices, protocol and ``--fragment`` in the entry itself."""
    found = []
    own = blob[at : at + shape.conditions]
    inverted = own[shape.inverted : shape.inverted + 1]
    first = shape.addresses
    addresses = own[:first]
    if any(addresses[shape.addresses // 2 :]):
        found.append(Part(Kind.CONDITION, "address", addresses + inverted, field=Field.ADDRESS))
    protocol = int.from_bytes(own[shape.protocol : shape.protocol + 2], sys.byteorder)
    rest = own[shape.addresses : shape.protocol + 2] + inverted
    if protocol and not own[shape.inverted] & _INVERTED_PROTOCOL:
        found.append(Part(Kind.CONDITION, "protocol", rest, field=Field.PROTOCOL, number=protocol))
    elif any(rest[:-1]):
        found.append(Part(Kind.CONDITION, "device", rest))
    if shape is _SHAPES[4] and own[shape.flags] & _FRAGMENT:
        found.append(Part(Kind.CONDITION, "fragment", b"fragment %d" % own[shape.inverted]))
    for number in range(2):
        name, mask = (
            own[at : at + _NAME_BYTES] for at in (first + number * _NAME_BYTES, first + (2 + number) * _NAME_BYTES)
        )
        whole = name[: name.find(0) + 1]
        # Not inverted, and compared with its zero byte.
        if name[0] and not own[shape.inverted] >> number & 1 and mask.startswith(b"\xff" * len(whole)):
            value = int.from_bytes(whole, "big")
            found.append(Part(Kind.CONDITION, "device", b"%d %s" % (number, whole), field=Field.DEVICE, number=value))
    return found


def _matches(blob: bytes, at: int, end: int, known: dict[bytes, Part]) -> list[Part]:
    found = []
    while at + _EXTENSION.size <= end:
        size, _, _ = _EXTENSION.unpack_from(blob, at)
        if size < _EXTENSION.size:
            raise ValueError(f"a match claims a size of {size} bytes")
        found.append(_known(known, blob, at, xtables.match))
        at += size
    return found


def _known(known: dict[bytes, Part], blob: bytes, at: int, decode: xtables.Decoder) -> Part:
    raw = blob[at : at + _EXTENSION.unpack_from(blob, at)[0]]
    part = known.get(raw)
    if part is None:
        part = known[raw] = decode(*_extension(raw, 0))
    return part


def _extension(blob: bytes, at: int) -> tuple[str, int, bytes]:
    """Name, revision and data of a match or a target."""
    size, name, revision = _EXTENSION.unpack_from(blob, at)
    return _text(name), revision, blob[at + _EXTENSION.size : at + size]


def _verdict(code: int, following: int, goto: bool, starts: dict[int, str]) -> Part:
    if code < 0:
        return _VERDICTS.get(code, Part(Kind.UNKNOWN, f"unknown verdict {code}"))
    if code == following:
        return Part(Kind.IGNORED, "no target")
    return Part(Kind.GOTO if goto else Kind.JUMP, "jump", target=starts.get(code, ""))


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode(errors="replace")
