# SPDX-License-Identifier: Apache-2.0
"""A port of this machine's loopback, reachable at the same address inside a network namespace."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Self

from pyebpf_proxy.lab.namespace import set_network_namespace


class Relay:
    """``with Relay(path, port)``: what connects to 127.0.0.1:port in the namespace at ``path`` reaches it here."""

    def __init__(self, namespace: str, port: int) -> None:
        self._port = port
        made: list[socket.socket] = []

        def listen() -> None:
            # A thread alone changes its namespace, and ends with it; its socket stays where it was made.
            set_network_namespace(namespace)
            made.append(socket.create_server(("127.0.0.1", port), backlog=64))

        maker = threading.Thread(target=listen)
        maker.start()
        maker.join()
        (self._listener,) = made
        self._connections: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cut()
        self._listener.close()

    def cut(self) -> None:
        """End every connection; new ones are taken."""
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended by itself

    def _accept(self) -> None:
        while True:
            try:
                inside, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                outside = socket.create_connection(("127.0.0.1", self._port), timeout=10)
            except OSError:
                inside.close()
                continue
            outside.settimeout(None)
            for one, other in ((inside, outside), (outside, inside)):
                threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        self._connections.add(source)
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass  # the other direction has ended both
        finally:
            self._connections.discard(source)
            for each in (source, target):
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the other direction was first
            source.close()
