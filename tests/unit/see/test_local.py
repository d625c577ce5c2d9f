# SPDX-License-Identifier: Apache-2.0
"""Answers of the agent's socket, whatever they are: a container of the agent may serve it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.see import local

Serve = Callable[[bytes], Path]
STATE = {"version": "", "refusals": {}, "datapath": {}, "source": {}, "overLimit": {}}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Serves this body once per request; the result is the run folder."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "agent.sock"))
    listener.listen()
    body = b""

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                try:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                except OSError:
                    pass

    def begin(content: bytes) -> Path:
        nonlocal body
        body = content
        return tmp_path

    thread = threading.Thread(target=answer)
    thread.start()
    yield begin
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    listener.close()


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"version": ', b"\xff", b"5", b"1" * 10_000], ids=["deep", "cut", "bytes", "5", "long"]
)
def test_a_state_that_cannot_be_read_is_empty(serve: Serve, body: bytes) -> None:
    assert local.state(serve(body)) == STATE
    assert local.pods(serve(body), [bytes(4)]) == {}


def test_a_state(serve: Serve) -> None:
    assert local.state(serve(b'{"version": "1"}')) == {**STATE, "version": "1"}


def test_metrics_that_are_no_numbers_are_left_out(serve: Serve) -> None:
    assert local.samples(serve(b'a 1\nb x\nb{c="d"} 2\n')) == {"a": [1.0], "b": [2.0]}


def test_an_endless_answer_is_none(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_MOST_BYTES", 1000)
    assert local.state(serve(b'{"version": "%s"}' % (b"1" * 1000))) is None
    assert local.state(serve(b'{"version": "1"}')) is not None
