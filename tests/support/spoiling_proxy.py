# SPDX-License-Identifier: Apache-2.0
"""A proxy between a client and the API server, with TLS on both sides, that corrupts the answers."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from pathlib import Path
from typing import Literal

Mode = Literal["through", "slow", "mute", "garbage", "truncated", "refuse"]

#: How many bytes of an answer pass before it is cut: the header and part of the body.
_WHOLE = 700


class Proxy:
    """``with Proxy(server.port, folder) as proxy``; ``folder`` holds the server's certificates."""

    def __init__(self, port: int, folder: Path) -> None:
        self.mode: Mode = "through"
        self._server_port = port
        self._inner = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        self._outer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._outer.load_cert_chain(folder / "server.crt", folder / "server.key")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._handles: list[list[socket.socket]] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.connections = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._listener.close()
        self.cut()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def set(self, mode: Mode) -> None:
        """Set how new connections are treated, and cut the existing ones."""
        self.mode = mode
        self.cut()

    def cut(self) -> None:
        """End every connection."""
        with self._lock:
            for handles in self._handles:
                _end(handles)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        mode = self.mode
        if mode == "refuse":
            raw.close()
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(OSError, ssl.SSLError))
            there = socket.create_connection(("127.0.0.1", self._server_port))
            # The sockets below TLS: only the thread of a connection may use its TLS object.
            handles = [stack.enter_context(each.dup()) for each in (raw, there)]
            client = stack.enter_context(self._outer.wrap_socket(raw, server_side=True))
            server = stack.enter_context(self._inner.wrap_socket(there, server_hostname="127.0.0.1"))
            with self._lock:
                self._handles.append(handles)
            with contextlib.suppress(OSError):
                self._pump(client, server, mode)
            _end(handles)
            with self._lock:
                self._handles.remove(handles)

    def _pump(self, client: ssl.SSLSocket, server: ssl.SSLSocket, mode: Mode) -> None:
        """Both directions in one thread: a TLS object must not be used by two. Returns when either side has ended."""
        while not self._stopping.is_set():
            ready = [each for each in (client, server) if each.pending()]
            for each in ready or select.select([client, server], [], [], 0.2)[0]:
                each.settimeout(0.02)
                try:
                    data = each.recv(65536)
                except TimeoutError:  # a TLS record without data
                    continue
                if not data:
                    return
                if each is client:
                    server.settimeout(30)
                    server.sendall(data)
                else:
                    client.settimeout(30)
                    self._answer(client, data, mode)

    def _answer(self, client: ssl.SSLSocket, data: bytes, mode: Mode) -> None:
        """The server's answer, corrupted."""
        if mode == "through":
            client.sendall(data)
        elif mode == "garbage":
            line = b'{"type": "ADDED", \x00\xff not JSON at all\n'
            client.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
            client.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(line), line))
            raise ConnectionAbortedError
        elif mode == "truncated":
            client.sendall(data[:_WHOLE])
            raise ConnectionAbortedError
        elif mode == "slow":
            head = data.find(b"\r\n\r\n") + 4 if data.startswith(b"HTTP/") else 0
            client.sendall(data[:head])
            for byte in data[head:]:
                client.sendall(bytes([byte]))
                if self._stopping.wait(1):
                    return


def _end(handles: list[socket.socket]) -> None:
    for handle in handles:
        with contextlib.suppress(OSError):
            handle.shutdown(socket.SHUT_RDWR)
