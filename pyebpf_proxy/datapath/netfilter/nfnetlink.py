# SPDX-License-Identifier: Apache-2.0
"""nftables by netlink: elements of sets and maps in both directions, and what a table has.

libnftables reads and writes text, and reads every element of every set before it lists anything: with 100 000
elements that takes a second each time. Here an element is a few bytes after a fixed header, and any number of them is
one transaction. Layouts: include/uapi/linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

NETLINK_NETFILTER = 12
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP, NLM_F_CREATE, NLM_F_DUMP_INTR = 1, 4, 0x300, 0x400, 0x10
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_SUBSYSTEM = 10
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_GET_TABLE, _GET_CHAIN, _GET_SET = (_SUBSYSTEM << 8 | number for number in (1, 4, 10))
_NEW_ELEMENT, _GET_ELEMENT, _DELETE_ELEMENT = (_SUBSYSTEM << 8 | number for number in (12, 13, 14))
_NEW_GENERATION, _GET_GENERATION = _SUBSYSTEM << 8 | 15, _SUBSYSTEM << 8 | 16
_INET = 1
_HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
# Attributes, by their message.
_GENERATION_ID = 1
_TABLE_NAME = 1
_CHAIN_TABLE, _CHAIN_NAME, _CHAIN_HOOK, _CHAIN_TYPE = 1, 3, 4, 7
_HOOK_NUMBER, _HOOK_PRIORITY = 1, 2
_SET_TABLE, _SET_NAME, _SET_COUNT = 1, 2, 20
_LIST_TABLE, _LIST_SET, _LIST_ELEMENTS = 1, 2, 3
_ELEMENT, _KEY, _DATA, _VALUE = 1, 1, 2, 1
_NESTED = 0x8000
#: An attribute has 16 bits for its length; this many elements of the largest size stay below that.
_IN_A_MESSAGE = 1000
_HEAD = struct.Struct("=IHHIIBBH")
_ATTRIBUTE = struct.Struct("=HH")
_RECEIVE = 1 << 18
_TRIES, _REHASH = 5, 0.05
_SO_SNDBUFFORCE = 32


class Shape(NamedTuple):
    """Bytes of an element's key and, in a map, of its data; each part of a concatenation is padded to four."""

    key: int
    data: int = 0

    @property
    def size(self) -> int:
        """Bytes of an element in a message."""
        return 12 + self.key + (8 + self.data if self.data else 0)


class Step(NamedTuple):
    """Elements to add to a set (keys, followed by their data) or to delete from it (keys only)."""

    delete: bool
    set: str
    shape: Shape
    elements: Sequence[bytes]


class Chain(NamedTuple):
    """A chain's type, hook and priority; a chain without a hook has ("", "", 0)."""

    type: str
    hook: str
    priority: int


class Channel:
    """A netlink socket for nftables in the network namespace where it was created. Every method may raise OSError."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)

    def generation(self) -> int | None:
        """The current generation of the ruleset: the kernel counts every committed transaction of the namespace."""
        self._socket.send(_message(_GET_GENERATION, 0, 1, b"", family=0))
        for kind, _, _, body in _walk(self._socket.recv(_RECEIVE)):
            if kind == _NEW_GENERATION and _GENERATION_ID in (found := _attributes(body[4:])):
                return int(struct.unpack(">I", found[_GENERATION_ID])[0])
        return None

    def has_table(self, table: str) -> bool:
        """Whether the table of family inet with this name exists."""
        bodies, _ = self._dump(_GET_TABLE, b"")
        return any(_text(_attributes(body), _TABLE_NAME) == table for body in bodies)

    def chains(self, table: str) -> dict[str, Chain]:
        """The chains of a table by name."""
        found = {}
        for body in self._dump(_GET_CHAIN, b"")[0]:
            chain = _attributes(body)
            if _text(chain, _CHAIN_TABLE) != table:
                continue
            hook = _attributes(chain.get(_CHAIN_HOOK, b""))
            shape = Chain("", "", 0)
            if _HOOK_NUMBER in hook:
                (number,) = struct.unpack(">I", hook[_HOOK_NUMBER])
                (priority,) = struct.unpack(">i", hook[_HOOK_PRIORITY])
                known = number < len(_HOOKS)
                shape = Chain(_text(chain, _CHAIN_TYPE), _HOOKS[number] if known else str(number), priority)
            found[_text(chain, _CHAIN_NAME)] = shape
        return found

    def sets(self, table: str) -> dict[str, int | None]:
        """A table's named sets and maps: how many elements each has.

        None: the kernel does not report it (before 6.17).
        """
        found = {}
        for body in self._dump(_GET_SET, b"")[0]:
            one = _attributes(body)
            name = _text(one, _SET_NAME)
            if _text(one, _SET_TABLE) == table and not name.startswith("__"):
                found[name] = struct.unpack(">I", one[_SET_COUNT])[0] if _SET_COUNT in one else None
        return found

    def elements(self, table: str, name: str, shape: Shape) -> dict[bytes, bytes]:
        """The elements of a set or map, by key; none if the set does not exist."""
        found: dict[bytes, bytes] = {}
        for _ in range(_TRIES):
            bodies, _ = self._dump(_GET_ELEMENT, _names(table, name))
            raw = b"".join([_attributes(body).get(_LIST_ELEMENTS, b"") for body in bodies])
            found |= _unpacked(raw, shape)
            # While the kernel moves a set to a bigger hash table, some elements come twice and some not at all.
            if len(raw) == shape.size * len(found):
                break
            time.sleep(_REHASH)
        return found

    def change(self, table: str, steps: Iterable[Step]) -> bool:
        """Carry out all steps in order, in one transaction, or none; False if there was nothing to do."""
        messages = list(_bodies(table, steps))
        if not messages:
            return False
        parts = [_message(_BATCH_BEGIN, 0, 0, b"", family=0, resource=_SUBSYSTEM)]
        # The kernel answers every refused message. Otherwise the answer to the last message confirms the commit.
        for number, (kind, flags, body) in enumerate(messages, 1):
            parts.append(_message(kind, flags | (NLM_F_ACK if number == len(messages) else 0), number, body))
        parts.append(_message(_BATCH_END, 0, len(messages) + 1, b"", family=0, resource=_SUBSYSTEM))
        batch = b"".join(parts)
        # The whole batch is one message of the socket.
        if len(batch) > self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 2 * len(batch))
        self._socket.send(batch)
        self._await(len(messages))
        return True

    def _await(self, last: int) -> None:
        while True:
            for kind, sequence, _, body in _walk(self._socket.recv(_RECEIVE)):
                number = -struct.unpack_from("=i", body)[0] if kind == _NLMSG_ERROR else None
                if number:
                    self._drain()
                    raise OSError(number, os.strerror(number))
                if number == 0 and sequence == last:
                    return

    def _drain(self) -> None:
        """Read the remaining answers to a refused transaction."""
        try:
            while True:
                self._socket.recv(_RECEIVE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass

    def _dump(self, kind: int, attributes: bytes) -> tuple[list[bytes], bool]:
        """Bodies of the answers, without their nfgenmsg; and whether the requested object is missing."""
        while True:
            self._socket.send(_message(kind, NLM_F_DUMP, 1, attributes))
            bodies: list[bytes] = []
            interrupted, number = False, None
            while number is None:
                for answer, _, flags, body in _walk(self._socket.recv(_RECEIVE)):
                    interrupted |= bool(flags & NLM_F_DUMP_INTR)
                    if answer in (_NLMSG_DONE, _NLMSG_ERROR):
                        number = -struct.unpack_from("=i", body)[0] if len(body) >= 4 else 0
                    else:
                        bodies.append(body[4:])
            if number == errno.ENOENT:
                return [], True
            if number and number != errno.EINTR:
                raise OSError(number, os.strerror(number))
            if not number and not interrupted:
                return bodies, False


def _unpacked(raw: bytes, shape: Shape) -> Iterator[tuple[bytes, bytes]]:
    size, end = shape.size, 12 + shape.key
    for start in range(0, len(raw), size):
        element = raw[start : start + size]
        yield element[12:end], element[end + 8 :]


def _bodies(table: str, steps: Iterable[Step]) -> Iterator[tuple[int, int, bytes]]:
    """Type, flags and body of each message."""
    for step in steps:
        packed = _packed(step)
        kind, flags = (_DELETE_ELEMENT, 0) if step.delete else (_NEW_ELEMENT, NLM_F_CREATE)
        for start in range(0, len(packed), _IN_A_MESSAGE):
            part = b"".join(packed[start : start + _IN_A_MESSAGE])
            yield kind, flags, _names(table, step.set) + _ATTRIBUTE.pack(4 + len(part), _LIST_ELEMENTS | _NESTED) + part


def _packed(step: Step) -> list[bytes]:
    key = step.shape.key
    data = 0 if step.delete else step.shape.data
    length = 12 + key + (8 + data if data else 0)
    head = _ATTRIBUTE.pack(length, _ELEMENT | _NESTED) + _ATTRIBUTE.pack(8 + key, _KEY | _NESTED)
    head += _ATTRIBUTE.pack(4 + key, _VALUE)
    if not data:
        return [head + element for element in step.elements]
    middle = _ATTRIBUTE.pack(8 + data, _DATA | _NESTED) + _ATTRIBUTE.pack(4 + data, _VALUE)
    return [head + element[:key] + middle + element[key:] for element in step.elements]


def _message(kind: int, flags: int, sequence: int, body: bytes, family: int = _INET, resource: int = 0) -> bytes:
    flags |= NLM_F_REQUEST
    return _HEAD.pack(20 + len(body), kind, flags, sequence, 0, family, 0, socket.htons(resource)) + body


def _names(table: str, name: str) -> bytes:
    return _attribute(_LIST_TABLE, table.encode() + b"\0") + _attribute(_LIST_SET, name.encode() + b"\0")


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(4 + len(value), kind) + value + bytes(-len(value) % 4)


def _walk(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Type, sequence, flags and body of every message of a datagram."""
    start = 0
    while start + 16 <= len(data):
        length, kind, flags, sequence, _ = struct.unpack_from("=IHHII", data, start)
        yield kind, sequence, flags, data[start + 16 : start + length]
        start += (length + 3) & ~3


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    start = 0
    while start + 4 <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, start)
        found[kind & 0x3FFF] = data[start + 4 : start + length]
        start += max(4, (length + 3) & ~3)
    return found


def _text(attributes: dict[int, bytes], kind: int) -> str:
    return attributes.get(kind, b"").rstrip(b"\0").decode()
