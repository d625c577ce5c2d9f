# SPDX-License-Identifier: Apache-2.0
"""Waiting for kube-proxy's health server: until kube-proxy starts, any program of the node may answer at its port."""

from __future__ import annotations

import socket
import threading

import pytest

from pyebpf_proxy.common.kube_proxy_health import wait


def page(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


GOOD = page(b'{"currentTime": "", "healthy": true, "status": {"IPv4": {}, "IPv6": {}}}')


@pytest.mark.parametrize(
    "answer",
    [
        b"\x1b[2J\x1b]0;mine\x07\r\n\r\n",
        page(b"[" * 60_000),
        page(b'{"currentTime": "", "healthy": true, "status": 5}'),
        page(b'{"currentTime": "", "healthy": true, "status": {"\\u001b[2J": {}, "IPv4": {}, "IPv6": {}}}'),
    ],
)
def test_a_strange_answer_is_printable_and_not_the_end(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    def serve(listener: socket.socket) -> None:
        for each in (answer, GOOD):
            try:
                asking, _ = listener.accept()
            except OSError:
                return  # the first answer was enough
            with asking:
                asking.recv(65536)
                asking.sendall(each)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        assert wait(f"127.0.0.1:{listener.getsockname()[1]}", lambda seconds: None) == 0
    output = capsys.readouterr().out
    assert "kube-proxy has programmed this node: " in output
    assert all(line.isprintable() for line in output.splitlines()), output
