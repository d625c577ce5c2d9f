# SPDX-License-Identifier: Apache-2.0
"""A DNS server: every name has the configured addresses; names that begin with ``big`` resolve only over TCP."""

from __future__ import annotations

import selectors
import socket
import struct

_ANSWER, _TRUNCATED, _A, _AAAA = 0x8580, 0x0200, 1, 28


def serve(port: int, v4: str, v6: str) -> None:
    """Serve forever, in both families, over UDP and TCP."""
    selector = selectors.DefaultSelector()
    data = {_A: socket.inet_pton(socket.AF_INET, v4), _AAAA: socket.inet_pton(socket.AF_INET6, v6)}
    for family in (socket.AF_INET, socket.AF_INET6):
        for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
            sock = socket.socket(family, kind)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", port))
            if kind == socket.SOCK_STREAM:
                sock.listen(16)
            selector.register(sock, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            _serve_one(key.fileobj, data)  # type: ignore[arg-type]


def _serve_one(sock: socket.socket, data: dict[int, bytes]) -> None:
    if sock.type == socket.SOCK_DGRAM:
        query, client = sock.recvfrom(4096)
        sock.sendto(_answer(query, data, by_tcp=False), client)
        return
    connection, _ = sock.accept()
    with connection:
        connection.settimeout(5)
        try:
            # A resolver may ask for both address types over one connection.
            while head := connection.recv(2, socket.MSG_WAITALL):
                query = connection.recv(struct.unpack("!H", head)[0], socket.MSG_WAITALL)
                answer = _answer(query, data, by_tcp=True)
                connection.sendall(struct.pack("!H", len(answer)) + answer)
        except OSError:
            return


def _answer(query: bytes, data: dict[int, bytes], by_tcp: bool) -> bytes:
    end = 12
    while query[end]:
        end += query[end] + 1
    end += 5
    (kind,) = struct.unpack_from("!H", query, end - 4)
    if query[13:].startswith(b"big") and not by_tcp:
        return query[:2] + struct.pack("!HHHHH", _ANSWER | _TRUNCATED, 1, 0, 0, 0) + query[12:end]
    record = b""
    if kind in data:
        record = struct.pack("!HHHIH", 0xC00C, kind, 1, 1, len(data[kind])) + data[kind]
    return query[:2] + struct.pack("!HHHHH", _ANSWER, 1, bool(record), 0, 0) + query[12:end] + record
