# SPDX-License-Identifier: Apache-2.0
"""Netlink as bytes, for tables that are too large to make an object of every entry.

pyroute2 can do this too, at some 100 µs for each entry; a busy node has 100 000 flows. What is asked once or for few
things (links, addresses, tc) is asked by pyroute2.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import Self

# include/uapi/linux/netlink.h
NETLINK_SOCK_DIAG, NETLINK_NETFILTER = 4, 12
_REQUEST, _ACK, _DUMP = 1, 4, 0x300
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_CODE = struct.Struct("=i")
_ATTRIBUTE = struct.Struct("=HH")
_NESTED, _TYPE = 0x8000, 0x3FFF
_RECEIVE_BYTES = 1 << 18


class RawLink:
    """One netlink socket of the network namespace it is made in, to be used by ``with``."""

    def __init__(self, protocol: int) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def dump(self, kind: int, body: bytes) -> Iterator[bytes]:
        """Every message of the answer, without its netlink header. OSError with what the kernel says, also at its end.

        To be read to the end before anything else is asked by the same socket.
        """
        self._send(kind, _REQUEST | _DUMP, body)
        while True:
            data = self._socket.recv(_RECEIVE_BYTES)
            at = 0
            while at + _HEADER.size <= len(data):
                length, answer, _, _, _ = _HEADER.unpack_from(data, at)
                if answer in (_ERROR, _DONE):
                    (code,) = _CODE.unpack_from(data, at + _HEADER.size)
                    if code:
                        raise OSError(-code, os.strerror(-code))
                    return
                yield data[at + _HEADER.size : at + length]
                at += (length + 3) & ~3

    def request(self, kind: int, body: bytes) -> int:
        """Ask for something to be done: 0, or the errno that it was refused with."""
        self._send(kind, _REQUEST | _ACK, body)
        (code,) = _CODE.unpack_from(self._socket.recv(_RECEIVE_BYTES), _HEADER.size)
        return -int(code)

    def get(self, kind: int, body: bytes) -> bytes:
        """Ask for one thing: the answer without its netlink header. OSError with what the kernel says."""
        self._send(kind, _REQUEST, body)
        data = self._socket.recv(_RECEIVE_BYTES)
        length, answer, _, _, _ = _HEADER.unpack_from(data)
        if answer == _ERROR:
            (code,) = _CODE.unpack_from(data, _HEADER.size)
            raise OSError(-code, os.strerror(-code))
        return data[_HEADER.size : length]

    def _send(self, kind: int, flags: int, body: bytes) -> None:
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body)


def attribute(kind: int, value: bytes, *, nested: bool = False) -> bytes:
    """One attribute, padded."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind | nested * _NESTED) + value + bytes(-len(value) % 4)


def attribute_header(kind: int, size: int, *, nested: bool = False) -> bytes:
    """What stands before an attribute's value of ``size`` bytes."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + size, kind | nested * _NESTED)


def attributes(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Type, begin and end of the value of each attribute between ``at`` and ``end``; a broken one ends them."""
    while at + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind & _TYPE, at + _ATTRIBUTE.size, min(at + length, end)
        at += (length + 3) & ~3
