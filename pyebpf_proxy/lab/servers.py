# SPDX-License-Identifier: Apache-2.0
"""The servers of a pod: HTTP, TCP echo and UDP, in one process, on any number of ports, for both families.

A reply names the pod, and the destination and source of the request as the pod saw them. Replies are JSON, which is
readable with ``curl``.

* HTTP: ``GET /`` returns the reply; ``GET /bytes/N`` pads it with spaces to N bytes. One request per connection.
* echo: sends the received data back.
* UDP: every datagram gets a reply; ``size N`` requests a reply padded to N bytes.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from pyebpf_proxy.lab.namespace import Namespace, Task

IPV6_RECVPKTINFO = 49
IPV6_PKTINFO = 50
IP_PKTINFO = 8
FAMILIES = (socket.AF_INET, socket.AF_INET6)


class Ports(NamedTuple):
    """The ports on which a pod listens."""

    http: tuple[int, ...] = (8080,)
    echo: tuple[int, ...] = (7007,)
    udp: tuple[int, ...] = (5353,)


class _Server:
    def __init__(self, identity: dict[str, str], ports: Ports, address: dict[int, str]) -> None:
        self.identity = identity
        self.selector = selectors.DefaultSelector()
        for family in FAMILIES:
            for port in ports.http:
                self._listen(family, address.get(family, ""), port, self._accept_http)
            for port in ports.echo:
                self._listen(family, address.get(family, ""), port, self._accept_echo)
            for port in ports.udp:
                self._bind_udp(family, address.get(family, ""), port)

    def run(self) -> None:
        while True:
            for key, _ in self.selector.select():
                # A reset affects only its own connection.
                with contextlib.suppress(ConnectionError, BlockingIOError):
                    key.data()

    def _listen(self, family: int, address: str, port: int, accept: Callable[[socket.socket], None]) -> None:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
        listener.listen(1024)
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, lambda: accept(listener))

    def _bind_udp(self, family: int, address: str, port: int) -> None:
        endpoint = socket.socket(family, socket.SOCK_DGRAM)
        if family == socket.AF_INET6:
            endpoint.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            endpoint.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVPKTINFO, 1)
        else:
            endpoint.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        endpoint.bind((address, port))
        endpoint.setblocking(False)
        self.selector.register(endpoint, selectors.EVENT_READ, lambda: self._answer_datagram(endpoint, port))

    def _answer(self, protocol: str, local: tuple[Any, ...], peer: tuple[Any, ...], received: int) -> bytes:
        return json.dumps(
            self.identity
            | {"protocol": protocol, "local": list(local[:2]), "peer": list(peer[:2]), "received": received}
        ).encode()

    def _answer_datagram(self, endpoint: socket.socket, port: int) -> None:
        payload, ancillary, _, peer = endpoint.recvmsg(65536, 256)
        local = ""
        reply_from: list[tuple[int, int, bytes]] = []
        for level, kind, data in ancillary:
            if level == socket.IPPROTO_IP and kind == IP_PKTINFO:
                local = socket.inet_ntop(socket.AF_INET, data[8:12])
                reply_from = [(level, kind, struct.pack("=I4s4s", 0, data[8:12], b"\0" * 4))]
            elif level == socket.IPPROTO_IPV6 and kind == IPV6_PKTINFO:
                local = socket.inet_ntop(socket.AF_INET6, data[:16])
                reply_from = [(level, kind, data[:16] + struct.pack("=I", 0))]
        answer = self._answer("udp", (local, port), peer, len(payload))
        if payload.startswith(b"size "):
            answer = answer.ljust(int(payload.split()[1]))
        endpoint.sendmsg([answer], reply_from, 0, peer)

    def _accept_http(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        received = bytearray()

        def read() -> None:
            try:
                data = connection.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            received.extend(data)
            if not data:
                self._close(connection)
            elif b"\r\n\r\n" in received:
                self._reply_http(connection, bytes(received))

        self.selector.register(connection, selectors.EVENT_READ, read)
        read()

    def _reply_http(self, connection: socket.socket, request: bytes) -> None:
        target = request.split(b" ", 2)[1].decode(errors="replace")
        try:
            body = self._answer("tcp", connection.getsockname(), connection.getpeername(), len(request)) + b"\n"
        except OSError:  # the peer has reset the connection
            self._close(connection)
            return
        if target.startswith("/bytes/"):
            body = body.rstrip(b"\n").ljust(int(target.removeprefix("/bytes/")))
        kind = "Content-Type: application/json"
        head = ["HTTP/1.1 200 OK", kind, f"Content-Length: {len(body)}", "Connection: close"]
        rest = memoryview("\r\n".join([*head, "", ""]).encode() + body)

        def write() -> None:
            nonlocal rest
            try:
                rest = rest[connection.send(rest) :]
            except BlockingIOError:
                return
            except OSError:
                rest = rest[:0]
            if not rest:
                self._close(connection)

        self.selector.modify(connection, selectors.EVENT_WRITE, write)
        write()

    def _accept_echo(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        waiting = bytearray()

        def turn() -> None:
            # To limit memory, reading pauses while the peer does not read its replies.
            try:
                if len(waiting) < 1 << 18:
                    data = connection.recv(65536)
                    if not data and not waiting:
                        self._close(connection)
                        return
                    waiting.extend(data)
            except BlockingIOError:
                pass
            except OSError:
                self._close(connection)
                return
            try:
                if waiting:
                    del waiting[: connection.send(waiting)]
            except BlockingIOError:
                pass
            except OSError:
                self._close(connection)
                return
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0)
            self.selector.modify(connection, events, turn)

        self.selector.register(connection, selectors.EVENT_READ, turn)

    def _close(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self.selector.unregister(connection)
        connection.close()


def _serve(identity: dict[str, str], ports: Ports, address: dict[int, str], ready: Any) -> None:
    server = _Server(identity, ports, address)
    ready.send("ready")
    ready.close()
    server.run()


def start_servers(
    namespace: Namespace, identity: dict[str, str], ports: Ports, address: dict[int, str] | None = None
) -> Task[None]:
    """Start a pod's servers in its namespace and return when all of them listen.

    ``identity`` is part of every reply (pod and node). ``address``: the listening address by socket family; empty means
    every address of the namespace. Raises the error of bind().
    """
    import multiprocessing

    wait, ready = multiprocessing.Pipe(duplex=False)
    task = namespace.start(_serve, identity, ports, address or {}, ready)
    ready.close()
    try:
        wait.recv()
    except EOFError:
        task.result(5)  # raises the child's own exception
        raise
    finally:
        wait.close()
    return task
