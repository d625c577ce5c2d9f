# SPDX-License-Identifier: Apache-2.0
"""Steady traffic: from each place, again and again, a new connection to each address, and a round of each long one."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pyebpf_proxy.lab.client import ANSWERED, ask
from pyebpf_proxy.lab.namespace import Namespace

#: Between two rounds; other things need CPU time too.
PAUSE_SECONDS = 0.05
#: A busy machine may need so long for an answer.
PATIENCE_SECONDS = 15.0
CHUNK = 64 * 1024


class Way(NamedTuple):
    """A client that sends requests to this address and holds a transfer open: HTTP at one port, echo at the other."""

    address: str
    http: int
    echo: int


class Traffic:
    """``with Traffic(folder, {…}) as traffic``: the target of each client's namespace."""

    def __init__(self, folder: Path, places: Sequence[tuple[Namespace, Sequence[Way]]]) -> None:
        context = multiprocessing.get_context("fork")
        self._stop = context.Event()
        self._rounds = context.RawArray("L", len(places))
        self._file = folder / "failures"
        self._file.touch()
        self._tasks = [
            namespace.start(_run, self._stop, self._rounds, index, self._file, ways)
            for index, (namespace, ways) in enumerate(places)
        ]

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for task in self._tasks:
            with contextlib.suppress(Exception):
                task.result(PATIENCE_SECONDS + 5)

    @property
    def rounds(self) -> int:
        """How many rounds the slowest of them has done."""
        return min(self._rounds)

    def failures(self) -> list[str]:
        """What has failed since the last call, one line each."""
        lines = self._file.read_text().splitlines()
        for task in self._tasks:
            if task.done():
                lines.append(f"it ended: {task.result()}")
        with open(self._file, "r+", encoding="utf-8") as file:
            file.truncate()
        return lines


def _run(stop: Any, rounds: Any, index: int, file: Path, ways: Sequence[Way]) -> None:
    chunk = bytes(range(256)) * (CHUNK // 256)
    with contextlib.ExitStack() as stack, open(file, "a", encoding="utf-8", buffering=1) as log:

        def failed(what: str) -> None:
            log.write(f"{time.strftime('%H:%M:%S')} {what}\n")

        def connected(way: Way) -> socket.socket:
            return stack.enter_context(socket.create_connection((way.address, way.echo), PATIENCE_SECONDS))

        transfers = {way: connected(way) for way in ways}
        while not stop.is_set():
            for way in ways:
                outcome = ask(way.address, way.http, timeout=PATIENCE_SECONDS)
                if outcome.kind != ANSWERED:
                    failed(f"[{way.address}]:{way.http}: {outcome}")
                try:
                    transfers[way].sendall(chunk)
                    came = bytearray()
                    while len(came) < CHUNK and (data := transfers[way].recv(CHUNK)):
                        came += data
                    if came != chunk:
                        raise ConnectionError(f"{len(came)} bytes came back of {CHUNK}, or others")
                except OSError as error:
                    failed(f"transfer with [{way.address}]:{way.echo}: {error}")
                    transfers[way] = connected(way)
            rounds[index] += 1
            stop.wait(PAUSE_SECONDS)
