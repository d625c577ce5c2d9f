# SPDX-License-Identifier: Apache-2.0
"""The client side: one request and its outcome.

These functions run inside a namespace (``namespace.call(ask, …)``). The result is always an ``Outcome``, never an
exception: *answered*, *refused* (RST, or ICMP port unreachable), *timed out*, *unreachable* (any other ICMP error),
*reset* (after it had been accepted; or a UDP socket that was destroyed).
"""

from __future__ import annotations

import errno
import json
import socket
import time
from typing import Any, NamedTuple

ANSWERED = "answered"
REFUSED = "refused"
TIMED_OUT = "timed out"
UNREACHABLE = "unreachable"
RESET = "reset"


class Answer(NamedTuple):
    """The reply of the server (``servers``)."""

    pod: str
    node: str
    local: tuple[str, int]  # the destination of the request, as the pod saw it
    peer: tuple[str, int]  # the source of the request, as the pod saw it
    received: int  # bytes of the request


class Outcome(NamedTuple):
    """The outcome of one request. Times in seconds (monotonic clock for ``begun``)."""

    kind: str
    answer: Answer | None
    local: tuple[str, int] | None  # the client socket's address
    peer: tuple[str, int] | None  # TCP, connected UDP: getpeername; unconnected UDP: the source of the reply
    begun: float
    took: float
    error: str = ""
    size: int = 0  # bytes of the reply

    def __str__(self) -> str:
        if self.answer:
            return f"answered by {self.answer.pod}, which saw {self.answer.peer[0]}"
        return f"{self.kind} ({self.error})" if self.error else self.kind


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def read_answer(text: bytes) -> Answer:
    """Parse the reply of a lab server. Raises ValueError for anything else."""
    fields = json.loads(text)
    local, peer = fields["local"], fields["peer"]
    return Answer(fields["pod"], fields["node"], (local[0], local[1]), (peer[0], peer[1]), fields["received"])


def classify(error: OSError) -> str:
    """The kind of outcome for an error of a socket call."""
    if isinstance(error, TimeoutError):
        return TIMED_OUT
    if error.errno == errno.ECONNREFUSED:
        return REFUSED
    if error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED):
        return RESET
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EPERM, errno.EACCES):
        return UNREACHABLE
    raise error


def ask(
    address: str,
    port: int,
    protocol: str = "tcp",
    *,
    source: str | None = None,
    source_port: int = 0,
    timeout: float = 4.0,
    size: int = 0,
    reply_size: int = 0,
    connected: bool = True,
    fragment: bool = False,
) -> Outcome:
    """Send one request to a lab server and return the outcome.

    ``size``: minimum bytes of the request; ``reply_size``: requested bytes of the reply. ``connected``: UDP uses
    connect(), so an ICMP error is reported as refused. Otherwise it uses sendto and recvfrom, and ``peer`` is the
    source of the reply. ``fragment``: UDP may be fragmented instead of respecting a path MTU.
    """
    family = family_of(address)
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    begun = time.monotonic()
    local = peer = None
    with socket.socket(family, kind) as sock:
        sock.settimeout(timeout)
        try:
            if source_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if source or source_port:
                sock.bind((source or ("::" if family == socket.AF_INET6 else ""), source_port))
            if protocol == "tcp":
                sock.connect((address, port))
                local, peer = _pair(sock.getsockname()), _pair(sock.getpeername())
                text = _ask_http(sock, size, reply_size)
            else:
                if fragment:
                    _allow_fragments(sock, family)
                text, local, peer = _ask_datagram(sock, (address, port), size, reply_size, connected)
            took = time.monotonic() - begun
            return Outcome(ANSWERED, read_answer(text), local, peer, begun, took, size=len(text))
        except OSError as error:
            return Outcome(classify(error), None, local, peer, begun, time.monotonic() - begun, str(error))


def _pair(name: Any) -> tuple[str, int]:
    return (name[0], name[1])


def _ask_http(sock: socket.socket, size: int, reply_size: int) -> bytes:
    target = f"/bytes/{reply_size}" if reply_size else "/"
    request = f"GET {target} HTTP/1.1\r\nHost: lab\r\n".encode()
    if size > len(request):
        request += b"X-Fill: " + b"x" * (size - len(request)) + b"\r\n"
    sock.sendall(request + b"\r\n")
    received = bytearray()
    while data := sock.recv(262144):
        received += data
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise ConnectionResetError(errno.ECONNRESET, f"incomplete reply: {bytes(received[:80])!r}")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
    if len(body) != length:
        raise ConnectionResetError(errno.ECONNRESET, f"{len(body)} of {length} bytes")
    return body


def _ask_datagram(
    sock: socket.socket, target: tuple[str, int], size: int, reply_size: int, connected: bool
) -> tuple[bytes, tuple[str, int], tuple[str, int]]:
    payload = (b"size %d " % reply_size if reply_size else b"who ").ljust(size, b".")
    if connected:
        sock.connect(target)
        sock.send(payload)
        text = sock.recv(65536)
        return text, _pair(sock.getsockname()), _pair(sock.getpeername())
    sock.setsockopt(*((socket.IPPROTO_IPV6, 25) if sock.family == socket.AF_INET6 else (socket.IPPROTO_IP, 11)), 1)
    sock.sendto(payload, target)
    text, sender = sock.recvfrom(65536)
    return text, _pair(sock.getsockname()), _pair(sender)


def _allow_fragments(sock: socket.socket, family: int) -> None:
    # IP_MTU_DISCOVER / IPV6_MTU_DISCOVER = DONT: send fragments instead of failing with EMSGSIZE.
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, 23, 0)
    else:
        sock.setsockopt(socket.IPPROTO_IP, 10, 0)


def ask_many(
    count: int, address: str, port: int, protocol: str = "tcp", *, first_port: int = 0, **options: Any
) -> list[Outcome]:
    """Send ``count`` requests, one after the other; from consecutive source ports if ``first_port`` is given."""
    ports = range(first_port, first_port + count) if first_port else [0] * count
    return [ask(address, port, protocol, source_port=each, **options) for each in ports]
