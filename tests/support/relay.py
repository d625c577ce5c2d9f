# SPDX-License-Identifier: Apache-2.0
"""A port on loopback that is reachable at the same address inside a network namespace."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Self

from pyebpf_proxy.lab.namespace import set_network_namespace


class Relay:
    """``with Relay(path, port)``: connections to 127.0.0.1:port in the namespace at ``path`` reach the same port here.

    ``target``: another port here for new connections.
    """

    def __init__(self, namespace: str, port: int) -> None:
        self._namespace = namespace
        self._port = self.target = port
        self._connections: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._flowing = threading.Event()
        self._flowing.set()
        self.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.flow()
        self.refuse()

    def listen(self) -> None:
        """Accept connections, if they are refused now."""
        if self._listener is not None:
            return
        made: list[socket.socket] = []

        def listen() -> None:
            # Only this thread changes its namespace, and it ends; its socket stays in that namespace.
            set_network_namespace(self._namespace)
            made.append(socket.create_server(("127.0.0.1", self._port), backlog=64))

        maker = threading.Thread(target=listen)
        maker.start()
        maker.join()
        (self._listener,) = made
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def refuse(self) -> None:
        """End every connection, and let the kernel refuse new ones, as if no server ran."""
        if self._listener is not None:
            # Closing alone would not wake the thread that accepts, and the socket would continue listening.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self.cut()

    def hold(self) -> None:
        """Until ``flow``, no data arrives: sent data is lost, and its connection ends at ``flow``; new ones wait."""
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """End every connection; new ones are accepted."""
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended by itself

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                inside, _ = listener.accept()
            except OSError:
                return  # closed
            # From here on ``cut`` ends it.
            self._connections.add(inside)
            if self._listener is not listener:
                self._connections.discard(inside)
                inside.close()
                return
            self._flowing.wait()
            try:
                outside = socket.create_connection(("127.0.0.1", self.target), timeout=10)
            except OSError:
                self._connections.discard(inside)
                inside.close()
                continue
            outside.settimeout(None)
            for one, other in ((inside, outside), (outside, inside)):
                threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        self._connections.add(source)
        try:
            while (data := source.recv(65536)) and self._flowing.is_set():
                target.sendall(data)
        except OSError:
            pass  # the other direction has ended both
        finally:
            self._flowing.wait()
            self._connections.discard(source)
            for each in (source, target):
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the other direction was first
            source.close()
