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

from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import (
    attribute,
    attribute_header,
    attributes,
    error_number,
    message,
    messages,
    text,
    values,
    zero_terminated,
)
from pyebpf_proxy.datapath.netlink.request import RequestSocket

_HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
#: An attribute has 16 bits for its length; this many elements of the largest size stay below that.
_IN_A_MESSAGE = 1000
_TRIES, _REHASH = 5, 0.05
#: Attempts to list what changes meanwhile, and the seconds between them.
_ATTEMPTS, _PAUSE = 10, 0.005


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
        self._socket = RequestSocket(uapi.NETLINK_NETFILTER)
        try:
            # Otherwise every refusal returns the whole message: the answers to a large transaction overflow the buffer.
            self._socket.without_bodies()
        except BaseException:
            self._socket.close()
            raise
        self._sequence = 0

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def generation(self) -> int | None:
        """The current generation of the ruleset: the kernel counts every committed transaction of the namespace."""
        sequence = self._next()
        self._socket.send(_message(uapi.NFT_MSG_GETGEN, 0, sequence, b"", family=0))
        while True:
            for kind, _, number, body in messages(self._socket.receive()):
                if number != sequence:
                    continue  # the answer to an earlier request
                if kind == uapi.NFT_MSG_NEWGEN and uapi.NFTA_GEN_ID in (found := _values(body)):
                    return int(struct.unpack(">I", found[uapi.NFTA_GEN_ID])[0])
                return None

    def has_table(self, table: str) -> bool:
        """Whether the table of family inet with this name exists."""
        bodies = self._dump(uapi.NFT_MSG_GETTABLE, b"")
        return any(_text(_values(body), uapi.NFTA_TABLE_NAME) == table for body in bodies)

    def rules(self, table: str) -> int:
        """The number of rules in a table; 0 also if there is no such table."""
        return len(self._rules(table))

    def looks_up(self, table: str, name: str) -> bool:
        """Whether a rule of the table names this set or map."""
        lookup = attribute(uapi.NFTA_LOOKUP_SET, zero_terminated(name))
        return any(lookup in body for body in self._rules(table))

    def loaded(self, table: str, chain: str) -> list[bytes]:
        """The values that the rules of a chain load into registers, in order: ports for NAT, marks and priorities."""
        bodies = [_values(body) for body in self._rules(table)]
        return [
            value
            for body in bodies
            if _text(body, uapi.NFTA_RULE_CHAIN) == chain
            for value in _loaded(body.get(uapi.NFTA_RULE_EXPRESSIONS, b""))
        ]

    def _rules(self, table: str) -> list[bytes]:
        return self._dump(uapi.NFT_MSG_GETRULE, attribute(uapi.NFTA_RULE_TABLE, zero_terminated(table)))

    def chains(self, table: str) -> dict[str, Chain]:
        """The chains of a table by name."""
        found = {}
        for body in self._dump(uapi.NFT_MSG_GETCHAIN, b""):
            chain = _values(body)
            if _text(chain, uapi.NFTA_CHAIN_TABLE) != table:
                continue
            hook = values(chain.get(uapi.NFTA_CHAIN_HOOK, b""))
            shape = Chain("", "", 0)
            if uapi.NFTA_HOOK_HOOKNUM in hook:
                (number,) = struct.unpack(">I", hook[uapi.NFTA_HOOK_HOOKNUM])
                (priority,) = struct.unpack(">i", hook[uapi.NFTA_HOOK_PRIORITY])
                known = number < len(_HOOKS)
                shape = Chain(_text(chain, uapi.NFTA_CHAIN_TYPE), _HOOKS[number] if known else str(number), priority)
            found[_text(chain, uapi.NFTA_CHAIN_NAME)] = shape
        return found

    def sets(self, table: str) -> dict[str, int | None]:
        """A table's named sets and maps: how many elements each has.

        None: the kernel does not report it (before 6.17).
        """
        found = {}
        for body in self._dump(uapi.NFT_MSG_GETSET, b""):
            one = _values(body)
            name = _text(one, uapi.NFTA_SET_NAME)
            if _text(one, uapi.NFTA_SET_TABLE) == table and not name.startswith("__"):
                count = one.get(uapi.NFTA_SET_COUNT)
                found[name] = None if count is None else int.from_bytes(count, "big")
        return found

    def elements(self, table: str, name: str, shape: Shape) -> dict[bytes, bytes]:
        """The elements of a set or map, by key; none if the set does not exist."""
        found: dict[bytes, bytes] = {}
        for _ in range(_TRIES):
            bodies = self._dump(uapi.NFT_MSG_GETSETELEM, _names(table, name))
            raw = b"".join([_values(body).get(uapi.NFTA_SET_ELEM_LIST_ELEMENTS, b"") for body in bodies])
            found |= _unpacked(raw, shape)
            # While the kernel moves a set to a bigger hash table, some elements come twice and some not at all.
            if len(raw) == shape.size * len(found):
                break
            time.sleep(_REHASH)
        return found

    def contains(self, table: str, name: str, key: bytes) -> bool:
        """Whether a set has this key, also inside one of its intervals; False also if the set does not exist."""
        sequence = self._next()
        (body,) = _element_bodies(table, Step(False, name, Shape(len(key)), [key]))
        self._socket.send(_message(uapi.NFT_MSG_GETSETELEM, 0, sequence, body))
        while True:
            for kind, _, number, answer in messages(self._socket.receive()):
                if number != sequence:
                    continue  # the answer to an earlier request
                error = error_number(answer) if kind == uapi.NLMSG_ERROR else 0
                if error not in (0, errno.ENOENT):
                    raise OSError(error, os.strerror(error))
                return not error

    def change(self, table: str, steps: Iterable[Step]) -> bool:
        """Carry out all steps in order, in one transaction, or none; False if there was nothing to do."""
        changes = list(_bodies(table, steps))
        if not changes:
            return False
        sequence, subsystem = self._next(), uapi.NFNL_SUBSYS_NFTABLES
        parts = [_message(uapi.NFNL_MSG_BATCH_BEGIN, 0, sequence, b"", family=0, resource=subsystem)]
        # The kernel answers every refused message. Otherwise the answer to the last message confirms the commit.
        for number, (kind, flags, body) in enumerate(changes, 1):
            parts.append(_message(kind, flags | (uapi.NLM_F_ACK if number == len(changes) else 0), sequence, body))
        parts.append(_message(uapi.NFNL_MSG_BATCH_END, 0, sequence, b"", family=0, resource=subsystem))
        # The whole batch is one datagram.
        self._socket.send(b"".join(parts))
        self._await(sequence)
        return True

    def _next(self) -> int:
        self._sequence = self._sequence + 1 & 0xFFFFFFFF
        return self._sequence

    def _await(self, wanted: int) -> None:
        """The answer to a transaction; OSError with the first refusal. Only the last message asks for an answer."""
        while True:
            for kind, _, sequence, body in messages(self._socket.receive()):
                if kind != uapi.NLMSG_ERROR or sequence != wanted:
                    continue
                number = error_number(body)
                if number:
                    raise OSError(number, os.strerror(number))
                return

    def _dump(self, kind: int, attributes: bytes) -> list[bytes]:
        """Bodies of the answers; none if the requested object is missing."""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE)
            wanted = self._next()
            self._socket.send(_message(kind, uapi.NLM_F_DUMP, wanted, attributes))
            bodies: list[bytes] = []
            interrupted, number = False, None
            while number is None:
                for answer, flags, sequence, body in messages(self._socket.receive()):
                    if sequence != wanted:
                        continue  # the answer to an earlier request
                    interrupted |= bool(flags & uapi.NLM_F_DUMP_INTR)
                    if answer in (uapi.NLMSG_DONE, uapi.NLMSG_ERROR):
                        number = error_number(body)
                    else:
                        bodies.append(body)
            if number == errno.ENOENT:
                return []
            if number and number != errno.EINTR:
                raise OSError(number, os.strerror(number))
            if not number and not interrupted:
                return bodies
        raise OSError(errno.EAGAIN, "the rules changed while they were read, ten times in a row")


def _loaded(expressions: bytes) -> Iterator[bytes]:
    for _, begin, end in attributes(expressions, 0, len(expressions)):
        expression = values(expressions[begin:end])
        if _text(expression, uapi.NFTA_EXPR_NAME) == "immediate":
            immediate = values(expression.get(uapi.NFTA_EXPR_DATA, b""))
            yield values(immediate.get(uapi.NFTA_IMMEDIATE_DATA, b"")).get(uapi.NFTA_DATA_VALUE, b"")


def _unpacked(raw: bytes, shape: Shape) -> Iterator[tuple[bytes, bytes]]:
    size, end = shape.size, 12 + shape.key
    for start in range(0, len(raw), size):
        element = raw[start : start + size]
        yield element[12:end], element[end + 8 :]


def _bodies(table: str, steps: Iterable[Step]) -> Iterator[tuple[int, int, bytes]]:
    """Type, flags and body of each message."""
    for step in steps:
        kind, flags = (uapi.NFT_MSG_DELSETELEM, 0) if step.delete else (uapi.NFT_MSG_NEWSETELEM, uapi.NLM_F_CREATE)
        for body in _element_bodies(table, step):
            yield kind, flags, body


def _element_bodies(table: str, step: Step) -> Iterator[bytes]:
    packed = _packed(step)
    for start in range(0, len(packed), _IN_A_MESSAGE):
        part = b"".join(packed[start : start + _IN_A_MESSAGE])
        elements = attribute_header(uapi.NFTA_SET_ELEM_LIST_ELEMENTS, len(part), nested=True) + part
        yield _names(table, step.set) + elements


def _packed(step: Step) -> list[bytes]:
    key = step.shape.key
    data = 0 if step.delete else step.shape.data
    head = attribute_header(uapi.NFTA_LIST_ELEM, 8 + key + (8 + data if data else 0), nested=True)
    head += attribute_header(uapi.NFTA_SET_ELEM_KEY, 4 + key, nested=True)
    head += attribute_header(uapi.NFTA_DATA_VALUE, key)
    if not data:
        return [head + element for element in step.elements]
    middle = attribute_header(uapi.NFTA_SET_ELEM_DATA, 4 + data, nested=True)
    middle += attribute_header(uapi.NFTA_DATA_VALUE, data)
    return [head + element[:key] + middle + element[key:] for element in step.elements]


def _message(
    kind: int, flags: int, sequence: int, body: bytes, family: int = uapi.NFPROTO_INET, resource: int = 0
) -> bytes:
    header = uapi.NFGENMSG.pack(family, 0, socket.htons(resource))
    return message(kind, flags | uapi.NLM_F_REQUEST, sequence, header + body)


def _names(table: str, name: str) -> bytes:
    of_table = attribute(uapi.NFTA_SET_ELEM_LIST_TABLE, zero_terminated(table))
    return of_table + attribute(uapi.NFTA_SET_ELEM_LIST_SET, zero_terminated(name))


def _values(body: bytes) -> dict[int, bytes]:
    return values(body, uapi.NFGENMSG.size)


def _text(attributes: dict[int, bytes], kind: int) -> str:
    return text(attributes.get(kind, b""))
