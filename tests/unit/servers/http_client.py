# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the servers: a server on loopback, requests of well-behaved and of other clients."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pyebpf_proxy.servers.http import Handler, Pool
from pyebpf_proxy.servers.server import Server
from tests.support.ports import free_port

#: What one pass of the event loop reads at most, and what a connection takes besides its request.
READ_BYTES = 1 << 20
CONNECTION_BYTES = 12 << 10


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


@contextmanager
def serving(handler: Handler, limit: int = 64) -> Iterator[tuple[int, Pool]]:
    """A server on a free port of loopback; returns its port and its connections."""
    server = Server()
    pool = server.pool(limit)
    port = free_port()
    server.start()
    server.serve(("127.0.0.1", port), handler, pool, lambda error: False)
    try:
        until(lambda: answers(port))
        yield port, pool
    finally:
        server.stop()


def answers(port: int, host: str = "127.0.0.1") -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except (ConnectionRefusedError, ConnectionResetError):  # reset: its listener was closed at that moment
        return False
    return True


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def get(port: int, path: str = "/", method: str = "GET", host: str = "127.0.0.1", **more: object) -> Answer:
    connection = http.client.HTTPConnection(host, port, timeout=20)
    try:
        connection.request(method, path, **more)  # type: ignore[arg-type]
        answer = connection.getresponse()
        return Answer(answer.status, dict(answer.getheaders()), answer.read())
    finally:
        connection.close()


def raw(port: int, *pieces: bytes, half_close: bool = False) -> bytes:
    """Everything that arrives until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass
        found = b""
        try:
            while data := connection.recv(65536):
                found += data
        except ConnectionResetError:
            pass
        return found
