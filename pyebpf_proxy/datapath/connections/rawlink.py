# SPDX-License-Identifier: Apache-2.0
"""Netlink as bytes, for tables that are too large to create an object for every entry.

pyroute2 can do this too, at some 100 µs per entry; a busy node has 100 000 flows. It is used for rare or small
requests (links, addresses, tc).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
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
_SOL_NETLINK, _CAP_ACK = 270, 10
#: Messages per send. Each acknowledgement takes about 768 bytes of the socket's receive buffer, 208 KiB by default.
_AT_ONCE = 128
#: Requests per send whose answers are whole messages, each of which takes 2 to 4 KiB of that buffer.
_ANSWERS_AT_ONCE = 32


class RawLink:
    """One netlink socket of the network namespace in which it is created; a context manager."""

    def __init__(self, protocol: int) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def dump(self, kind: int, body: bytes) -> Iterator[bytes]:
        """Every message of the answer, without its netlink header. OSError with the kernel's errno, also at the end.

        Must be read to the end before the same socket is used again.
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
        """Make a request: 0, or the errno of the refusal."""
        self._send(kind, _REQUEST | _ACK, body)
        (code,) = _CODE.unpack_from(self._socket.recv(_RECEIVE_BYTES), _HEADER.size)
        return -int(code)

    def request_many(self, kind: int, flags: int, bodies: Sequence[bytes]) -> list[int]:
        """Make many requests of one kind: for each, in order, 0 or the errno of the refusal.

        ``flags``: in addition to NLM_F_REQUEST and NLM_F_ACK. The kernel handles them in order, also after a failure.
        OSError if it does not answer at all.
        """
        # Without this option every refusal returns the whole message.
        self._socket.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
        numbers: list[int] = []
        for at in range(0, len(bodies), _AT_ONCE):
            numbers += self._request_some(kind, flags | _REQUEST | _ACK, bodies[at : at + _AT_ONCE])
        return numbers

    def _request_some(self, kind: int, flags: int, bodies: Sequence[bytes]) -> list[int]:
        self._socket.send(_batch(kind, flags, bodies))
        numbers, answered = [0] * len(bodies), 0
        while answered < len(bodies):
            data = self._socket.recv(_RECEIVE_BYTES)
            at = 0
            while at + _HEADER.size + _CODE.size <= len(data):
                length, answer, _, number, _ = _HEADER.unpack_from(data, at)
                if answer == _ERROR and number < len(bodies):
                    (code,) = _CODE.unpack_from(data, at + _HEADER.size)
                    numbers[number] = -int(code)
                    answered += 1
                at += max((length + 3) & ~3, _HEADER.size)
        return numbers

    def get_many(self, kind: int, bodies: Sequence[bytes]) -> list[bytes | int]:
        """Get many objects of one kind: for each, in order, the answer without its netlink header, or an errno.

        Each answer is one message, of 16 KiB at most. EAGAIN: the kernel gave no answer. OSError of the socket.
        """
        buffer = bytearray(1 << 14)
        found: list[bytes | int] = []
        for at in range(0, len(bodies), _ANSWERS_AT_ONCE):
            some: list[bytes | int] = [errno.EAGAIN] * len(bodies[at : at + _ANSWERS_AT_ONCE])
            self._socket.send(_batch(kind, _REQUEST, bodies[at : at + _ANSWERS_AT_ONCE]))
            # The kernel has answered all of them before send() returns.
            for _ in some:
                try:
                    size = self._socket.recv_into(buffer, 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    break
                length, answer, _, number, _ = _HEADER.unpack_from(buffer)
                if length > size or number >= len(some):
                    continue
                if answer == _ERROR:
                    (code,) = _CODE.unpack_from(buffer, _HEADER.size)
                    some[number] = -int(code)
                else:
                    some[number] = bytes(buffer[_HEADER.size : length])
            found += some
        return found

    def get(self, kind: int, body: bytes) -> bytes:
        """Get one object: the answer without its netlink header. OSError with the kernel's errno."""
        self._send(kind, _REQUEST, body)
        data = self._socket.recv(_RECEIVE_BYTES)
        length, answer, _, _, _ = _HEADER.unpack_from(data)
        if answer == _ERROR:
            (code,) = _CODE.unpack_from(data, _HEADER.size)
            raise OSError(-code, os.strerror(-code))
        return data[_HEADER.size : length]

    def _send(self, kind: int, flags: int, body: bytes) -> None:
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body)


def _batch(kind: int, flags: int, bodies: Sequence[bytes]) -> bytes:
    return b"".join(
        _HEADER.pack(_HEADER.size + len(body), kind, flags, number, 0) + body + bytes(-len(body) % 4)
        for number, body in enumerate(bodies)
    )


def attribute(kind: int, value: bytes, *, nested: bool = False) -> bytes:
    """One attribute, padded."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind | nested * _NESTED) + value + bytes(-len(value) % 4)


def attribute_header(kind: int, size: int, *, nested: bool = False) -> bytes:
    """The header of an attribute whose value has ``size`` bytes."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + size, kind | nested * _NESTED)


def attributes(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Type, begin and end of the value of each attribute between ``at`` and ``end``; stops at a broken one."""
    while at + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind & _TYPE, at + _ATTRIBUTE.size, min(at + length, end)
        at += (length + 3) & ~3
