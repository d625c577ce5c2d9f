# SPDX-License-Identifier: Apache-2.0
"""tests/e2e/load.c: its rate, and its report of failures."""

from __future__ import annotations

import contextlib
import re
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from tests.e2e import images
from tests.support.ports import free_port


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images.compiled("load", tmp_path_factory.mktemp("load"))


@pytest.fixture
def started(load: Path) -> Iterator[Callable[..., Popen[str]]]:
    """Starts the program with these arguments; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Popen[str]:
            made = stack.enter_context(Popen([load, *arguments], stdout=subprocess.PIPE, text=True))
            stack.callback(made.kill)
            return made

        yield start


def line_of(process: Popen[str]) -> str:
    assert process.stdout is not None
    text = process.stdout.readline().strip()
    assert text, "it has ended"
    return text


def last_lines(process: Popen[str]) -> list[str]:
    """End the program; what it still writes."""
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    text = process.stdout.read()
    assert process.wait(10) == 0
    return text.splitlines()


def test_connections_at_a_rate(started: Callable[..., Popen[str]]) -> None:
    port = str(free_port())
    started("serve", port)
    client = started("ask", "200", "127.0.0.1", port, "::1", port)
    said = [line_of(client) for _ in range(3)]
    said += last_lines(client)
    counts = [tuple(map(int, re.findall(r"\d+", line))) for line in said]
    assert [failed for _, failed in counts] == [0] * len(counts), said
    # A busy machine may make it slower, never faster.
    assert 100 <= counts[2][0] <= 3 * 200 + 200
    assert counts == sorted(counts)


def test_connections_begin_when_each_target_accepts_one(started: Callable[..., Popen[str]]) -> None:
    ports = [str(free_port()) for _ in range(2)]
    client = started("ask", "200", *(word for port in ports for word in ("127.0.0.1", port)))
    started("serve", ports[0])
    # It would report each second.
    assert not select.select([client.stdout], [], [], 1.5)[0]
    started("serve", ports[1])
    assert re.fullmatch(r"asked \d+ failed 0", line_of(client))


def test_failures_are_named_and_counted(started: Callable[..., Popen[str]]) -> None:
    port = str(free_port())
    server, client = started("serve", port), started("ask", "20", "127.0.0.1", port)
    said = [line_of(client)]
    assert said[0].startswith("asked")
    server.kill()
    refused = re.compile(rf"127\.0\.0\.1 port {port}, own port [1-9]\d*: Connection refused after ")
    while not refused.search(said[-1]):
        said.append(line_of(client))
    said += last_lines(client)
    failures = [line for line in said if not line.startswith("asked")]
    # Those that were open when the server ended have other reasons.
    named = re.compile(rf"\d\d:\d\d:\d\d\.\d{{3}} 127\.0\.0\.1 port {port}, own port \d+: .+ after \d+ ms")
    assert all(named.fullmatch(line) for line in failures), failures
    asked, failed = map(int, re.findall(r"\d+", said[-1]))
    assert 0 < failed == len(failures) < asked


def test_a_pause_of_the_load_is_no_failure_of_its_connections(started: Callable[..., Popen[str]]) -> None:
    """A machine with too little CPU time stops the load, not only what it measures."""
    with SlowServer() as server:
        client = started("ask", "200", "127.0.0.1", str(server.port))
        assert line_of(client).endswith("failed 0")
        # About 60 connections have no answer yet.
        client.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        client.send_signal(signal.SIGCONT)
        said = [line_of(client) for _ in range(4)]
    stalls = [line for line in said if re.fullmatch(r"stalled 3[5-9]\d\d ms|stalled \d{4,} ms", line)]
    assert len(stalls) == 1, said
    assert all(line.endswith("failed 0") for line in said if line not in stalls), said


def test_a_connection_without_an_answer_fails(started: Callable[..., Popen[str]]) -> None:
    with SlowServer(seconds=60) as server:
        client = started("ask", "20", "127.0.0.1", str(server.port))
        while "no answer" not in (line := line_of(client)):
            assert line.endswith("failed 0"), line


class SlowServer:
    """Answers each connection after this time. ``with SlowServer() as server``."""

    def __init__(self, seconds: float = 0.3) -> None:
        self._seconds, self._socket = seconds, socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept), threading.Thread(target=self._answer)]
        self._accepted: list[tuple[float, socket.socket]] = []

    def __enter__(self) -> SlowServer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._socket.close()
        for _when, connection in self._accepted:
            connection.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(OSError):
                self._accepted.append((time.monotonic() + self._seconds, self._socket.accept()[0]))

    def _answer(self) -> None:
        while not self._ended.wait(0.01):
            while self._accepted and self._accepted[0][0] < time.monotonic():
                with contextlib.suppress(OSError), self._accepted.pop(0)[1] as connection:
                    connection.sendall(b"x")
