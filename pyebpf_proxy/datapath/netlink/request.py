# SPDX-License-Identifier: Apache-2.0
"""A netlink socket for requests and their answers.

The kernel answers a request before ``send`` returns, so blocking costs no waiting.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from pyebpf_proxy.datapath.netlink.messages import error_number, message, messages
from pyebpf_proxy.datapath.netlink.uapi import (
    NETLINK_CAP_ACK,
    NLM_F_ACK,
    NLM_F_DUMP,
    NLM_F_DUMP_INTR,
    NLM_F_REQUEST,
    NLMSG_DONE,
    NLMSG_ERROR,
    NLMSGHDR,
    SO_SNDBUFFORCE,
    SOL_NETLINK,
)

_RECEIVE_BYTES = 1 << 18
#: Messages per send. Each acknowledgement takes about 768 bytes of the socket's receive buffer, 208 KiB by default.
_AT_ONCE = 128
#: Requests per send whose answers are whole messages, each of which takes 2 to 4 KiB of that buffer.
_ANSWERS_AT_ONCE = 32
#: Bytes of a datagram that the smallest possible send buffer takes.
_ALWAYS_FITS = 2048


class RequestSocket:
    """One netlink socket of the network namespace in which it is created; a context manager. OSError."""

    def __init__(self, protocol: int) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def dump(self, kind: int, body: bytes, whole: bool = False) -> Iterator[bytes]:
        """Every message of the answer, without its netlink header. OSError with the kernel's errno, also at the end.

        Must be read to the end before the same socket is used again. ``whole``: EINTR at the end if the objects have
        changed meanwhile, so that some may be missing (NLM_F_DUMP_INTR).
        """
        self.send(message(kind, NLM_F_REQUEST | NLM_F_DUMP, 1, body))
        interrupted = False
        while True:
            for answer, flags, _, found in messages(self.receive()):
                interrupted |= bool(flags & NLM_F_DUMP_INTR)
                if answer in (NLMSG_ERROR, NLMSG_DONE):
                    number = error_number(found) or (errno.EINTR if whole and interrupted else 0)
                    if number:
                        raise OSError(number, os.strerror(number))
                    return
                yield found

    def request(self, kind: int, body: bytes) -> int:
        """Make a request: 0, or the errno of the refusal."""
        self.send(message(kind, NLM_F_REQUEST | NLM_F_ACK, 1, body))
        return error_number(self.receive()[NLMSGHDR.size :])

    def request_many(self, kind: int, flags: int, bodies: Sequence[bytes]) -> list[int]:
        """Make many requests of one kind: for each, in order, 0 or the errno of the refusal.

        ``flags``: in addition to NLM_F_REQUEST and NLM_F_ACK. The kernel handles them in order, also after a failure.
        OSError if it does not answer at all.
        """
        self.without_bodies()
        numbers: list[int] = []
        for at in range(0, len(bodies), _AT_ONCE):
            numbers += self._request_some(kind, flags | NLM_F_REQUEST | NLM_F_ACK, bodies[at : at + _AT_ONCE])
        return numbers

    def _request_some(self, kind: int, flags: int, bodies: Sequence[bytes]) -> list[int]:
        self.send(_batch(kind, flags, bodies))
        numbers, answered = [0] * len(bodies), 0
        while answered < len(bodies):
            for answer, _, number, body in messages(self.receive()):
                if answer == NLMSG_ERROR and number < len(bodies):
                    numbers[number] = error_number(body)
                    answered += 1
        return numbers

    def without_bodies(self) -> None:
        """Refusals must not return the whole message. OSError."""
        self._socket.setsockopt(SOL_NETLINK, NETLINK_CAP_ACK, 1)

    def get_many(self, kind: int, bodies: Sequence[bytes]) -> list[bytes | int]:
        """Get many objects of one kind: for each, in order, the answer without its netlink header, or an errno.

        Each answer is one message, of 16 KiB at most. EAGAIN: the kernel gave no answer. OSError of the socket.
        """
        buffer = bytearray(1 << 14)
        found: list[bytes | int] = []
        for at in range(0, len(bodies), _ANSWERS_AT_ONCE):
            some: list[bytes | int] = [errno.EAGAIN] * len(bodies[at : at + _ANSWERS_AT_ONCE])
            self.send(_batch(kind, NLM_F_REQUEST, bodies[at : at + _ANSWERS_AT_ONCE]))
            # The kernel has answered all of them before send() returns.
            for _ in some:
                try:
                    size = self._socket.recv_into(buffer, 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    break
                length, answer, _, number, _ = NLMSGHDR.unpack_from(buffer)
                if length > size or number >= len(some):
                    continue
                body = bytes(buffer[NLMSGHDR.size : length])
                some[number] = error_number(body) if answer == NLMSG_ERROR else body
            found += some
        return found

    def get(self, kind: int, body: bytes) -> bytes:
        """Get one object: the answer without its netlink header. OSError with the kernel's errno."""
        self.send(message(kind, NLM_F_REQUEST, 1, body))
        answer, _, _, found = next(messages(self.receive()))
        if answer == NLMSG_ERROR:
            number = error_number(found)
            raise OSError(number, os.strerror(number))
        return found

    def send(self, data: bytes) -> None:
        """Send messages in one datagram, whatever its size. OSError."""
        # A datagram must fit into the send buffer, whose size the kernel reports doubled.
        if len(data) > _ALWAYS_FITS and len(data) > self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2:
            self._socket.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 2 * len(data))
        self._socket.send(data)

    def receive(self) -> bytes:
        """The next datagram; waits for it. OSError."""
        return self._socket.recv(_RECEIVE_BYTES)


def _batch(kind: int, flags: int, bodies: Sequence[bytes]) -> bytes:
    return b"".join(message(kind, flags, number, body) for number, body in enumerate(bodies))
