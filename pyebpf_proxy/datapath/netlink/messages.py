# SPDX-License-Identifier: Apache-2.0
"""Netlink messages and their attributes as bytes: encode, decode. Pure.

A table of the kernel may have a million entries, so nothing here creates an object per entry.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from struct import Struct

from pyebpf_proxy.datapath.netlink.uapi import (
    NLA_F_NESTED,
    NLA_TYPE_MASK,
    NLATTR,
    NLM_F_ACK_TLVS,
    NLM_F_CAPPED,
    NLMSGERR_ATTR_MSG,
    NLMSGHDR,
)

_CODE = Struct("=i")
_WORD = Struct("=I")


def message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    """One message, padded."""
    size = NLMSGHDR.size + len(body)
    return NLMSGHDR.pack(size, kind, flags, sequence, 0) + body + bytes(-size % 4)


def messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Type, flags, sequence number and body of each message of a datagram."""
    at, end, header, unpack = 0, len(data), NLMSGHDR.size, NLMSGHDR.unpack_from
    while at + header <= end:
        length, kind, flags, sequence, _ = unpack(data, at)
        yield kind, flags, sequence, data[at + header : at + length]
        at += length + 3 & ~3 if length > header else header


def error_number(body: bytes) -> int:
    """The errno of NLMSG_ERROR or NLMSG_DONE; 0: an acknowledgement, or the end."""
    return -int(_CODE.unpack_from(body)[0]) if len(body) >= _CODE.size else 0


def error_text(body: bytes, flags: int) -> str:
    """The error's name, and the kernel's message if it sends one (extended acknowledgement)."""
    name = os.strerror(error_number(body))
    if not flags & NLM_F_ACK_TLVS:
        return name
    at = _CODE.size + NLMSGHDR.size
    if not flags & NLM_F_CAPPED:
        at += (_WORD.unpack_from(body, _CODE.size)[0] - NLMSGHDR.size + 3) & ~3
    message = values(body, at).get(NLMSGERR_ATTR_MSG)
    return name if message is None else f"{name} ({text(message)})"


def attribute(kind: int, value: bytes, *, nested: bool = False) -> bytes:
    """One attribute, padded."""
    return NLATTR.pack(NLATTR.size + len(value), kind | nested * NLA_F_NESTED) + value + bytes(-len(value) % 4)


def attribute_header(kind: int, size: int, *, nested: bool = False) -> bytes:
    """The header of an attribute whose value has ``size`` bytes."""
    return NLATTR.pack(NLATTR.size + size, kind | nested * NLA_F_NESTED)


def attributes(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Type, begin and end of the value of each attribute between ``at`` and ``end``; stops at a broken one."""
    while at + NLATTR.size <= end:
        length, kind = NLATTR.unpack_from(data, at)
        if length < NLATTR.size:
            return
        yield kind & NLA_TYPE_MASK, at + NLATTR.size, min(at + length, end)
        at += (length + 3) & ~3


def values(data: bytes, at: int = 0) -> dict[int, bytes]:
    """The attributes from ``at`` to the end, by type; the last one of each type."""
    return {kind: data[begin:end] for kind, begin, end in attributes(data, at, len(data))}


def word(value: int) -> bytes:
    """A number of 32 bits as the value of an attribute."""
    return _WORD.pack(value)


def number(value: bytes) -> int:
    """A number in the byte order of this machine; 0 if the value is empty."""
    return int.from_bytes(value, sys.byteorder)


def zero_terminated(value: str) -> bytes:
    """A string as the value of an attribute."""
    return value.encode() + b"\0"


def text(value: bytes) -> str:
    """A string as the kernel returns it."""
    return value.rstrip(b"\0").decode(errors="replace")
