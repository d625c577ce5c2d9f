# SPDX-License-Identifier: Apache-2.0
"""Connections that carry data all the time."""

from __future__ import annotations

import multiprocessing
import selectors
import socket
import struct
import time
from typing import Any

from pyebpf_proxy.lab.manifests import Port
from pyebpf_proxy.lab.namespace import Namespace, Task
from tests.support.lab_services import Kind

ECHO = Kind("echo", 11)
ECHO.ports = [Port("echo", 7, 7007, "TCP", 30011)]


class Transfers:
    """Connections that carry numbered data back and forth all the time; every byte is compared."""

    def __init__(self, namespace: Namespace, address: str, port: int, count: int) -> None:
        context = multiprocessing.get_context("fork")
        self._stop = context.Event()
        self._rounds = context.RawArray("L", count)
        self._task: Task[str] = namespace.start(_transfer, self._stop, self._rounds, address, port, count)

    def least(self) -> int:
        """The rounds of the slowest connection."""
        return min(self._rounds)

    def done(self) -> bool:
        return self._task.done()

    def stop(self) -> str:
        """End them; returns what went wrong, empty if nothing did."""
        self._stop.set()
        return self._task.result(120)


PACE = 0.05  # seconds between two rounds of a transfer, to leave CPU time for new connections


def _transfer(stop: Any, rounds: Any, address: str, port: int, count: int) -> str:
    selector = selectors.DefaultSelector()
    sockets, sent, got = [], [b""] * count, [bytearray() for _ in range(count)]
    due = [0.0] * count
    for index in range(count):
        sockets.append(socket.create_connection((address, port), timeout=10))
        sockets[index].settimeout(5)
        selector.register(sockets[index], selectors.EVENT_READ, index)
    while not stop.is_set():
        now = time.monotonic()
        for index, sock in enumerate(sockets):
            if due[index] <= now and not sent[index]:
                sent[index] = struct.pack("!Q", rounds[index] * 1000 + index) * 1024
                try:
                    sock.sendall(sent[index])
                except OSError as error:
                    return f"transfer {index}: {error}"
                due[index] = now + 10
            elif due[index] <= now:
                return f"transfer {index}: nothing came back for 10 s"
        for key, _ in selector.select(PACE):
            index = key.data
            try:
                data = sockets[index].recv(65536)
            except OSError as error:
                return f"transfer {index}: {error}"
            if not data:
                return f"transfer {index}: ended by the other side"
            got[index] += data
            if len(got[index]) >= len(sent[index]):
                if bytes(got[index]) != sent[index]:
                    return f"transfer {index}: other bytes came back"
                sent[index], got[index] = b"", bytearray()
                rounds[index] += 1
                due[index] = time.monotonic() + PACE
    return ""
