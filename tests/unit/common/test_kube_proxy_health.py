# SPDX-License-Identifier: Apache-2.0
"""Waiting for kube-proxy's health server: until kube-proxy starts, any program of the node may answer at its port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from pyebpf_proxy.common import kube_proxy_health
from pyebpf_proxy.common.kube_proxy_health import wait


def page(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


GOOD = page(b'{"currentTime": "", "healthy": true, "status": {"IPv4": {}, "IPv6": {}}}')


TIME = "kubeproxy_sync_proxy_rules_last_timestamp_seconds"
QUEUED = "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds"
#: kube-proxy's loops run; they have written rules for no family, for one, and for both.
STARTED = f'{QUEUED}{{ip_family="IPv4"}} 1.7958424560756457e+09\n{QUEUED}{{ip_family="IPv6"}} 1.7958424560756602e+09\n'
ONE = f'{STARTED}{TIME}{{ip_family="IPv4"}} 1.7958424570756457e+09\n'
BOTH = f'{ONE}{TIME}{{ip_family="IPv6"}} 1.7958424570756457e+09\n'


@contextmanager
def serving(answers: Sequence[bytes], host: str = "127.0.0.1") -> Iterator[str]:
    """A server that gives these answers, then the last one again and again. The result: its address on 127.0.0.1."""

    def serve(listener: socket.socket) -> None:
        number = 0
        while True:
            try:
                asking, _ = listener.accept()
            except OSError:
                return
            with asking:
                asking.recv(65536)
                asking.sendall(answers[min(number, len(answers) - 1)])
            number += 1

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


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
    with serving([answer, GOOD]) as address, serving([page(BOTH.encode())]) as metrics:
        assert wait(address, lambda seconds: None, metrics) == 0
    output = capsys.readouterr().out
    assert "kube-proxy has programmed this node: " in output
    assert all(line.isprintable() for line in output.splitlines()), output


@pytest.mark.parametrize(
    "pages",
    [
        # The health page has both families from the beginning.
        (STARTED, ONE, BOTH),
        # An old kube-proxy does not name the families here.
        (f"{QUEUED} 1.7e+09\n{TIME} 0\n", f"{QUEUED} 1.7e+09\n{TIME} 0\n", f"{QUEUED} 1.7e+09\n{TIME} 1.8e+09\n"),
    ],
)
def test_a_healthy_kube_proxy_that_has_written_no_rules_is_not_the_end(
    pages: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_proxy_health, "SETTLED_SECONDS", 0.0)
    looks: list[float] = []
    with serving([GOOD]) as address, serving([page(text.encode()) for text in pages]) as metrics:
        assert wait(address, looks.append, metrics) == 0
    assert len(looks) == 2
    output = capsys.readouterr().out
    assert "it has not programmed the node yet" in output
    assert output.endswith("kube-proxy has programmed this node: IPv4, IPv6\n")


@pytest.mark.parametrize(("health", "metrics"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_a_kube_proxy_that_listens_on_the_ipv6_loopback_is_asked_there(
    health: str, metrics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metrics with bindAddress ::, as kubeadm sets it on IPv6 nodes; the health page of k3s on such nodes."""
    monkeypatch.setattr(kube_proxy_health, "SETTLED_SECONDS", 0.0)
    looks: list[float] = []

    def look_again(seconds: float) -> None:
        looks.append(seconds)
        assert len(looks) < 10, "it waits"

    with (
        serving([GOOD], health) as address,
        serving([page(text.encode()) for text in (STARTED, BOTH)], metrics) as metrics_address,
    ):
        assert wait(address, look_again, metrics_address) == 0
    assert len(looks) == 1, "not before the rules are written"


@pytest.mark.parametrize("other", [b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", page(b"up 1\n"), b"\x00"])
def test_without_metrics_the_health_page_must_be_good_for_a_while(
    other: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_proxy_health, "SETTLED_SECONDS", 0.3)
    looks: list[float] = []

    def look_again(seconds: float) -> None:
        looks.append(seconds)
        time.sleep(0.1)

    with serving([GOOD]) as address, serving([other]) as metrics:
        assert wait(address, look_again, metrics) == 0
    assert looks
    assert "its metrics do not answer at 127.0.0.1:" in capsys.readouterr().out


@pytest.mark.parametrize("text", [BOTH, ""], ids=["metrics", "no metrics"])
def test_rules_that_are_gone_again_are_waited_for(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that starts beside kube-proxy removes them; the health page and the metrics do not change."""
    monkeypatch.setattr(kube_proxy_health, "SETTLED_SECONDS", 0.0)
    found = iter([set[str](), {"IPv4"}, {"IPv4", "IPv6"}])
    looks: list[float] = []
    with serving([GOOD]) as address, serving([page(text.encode())]) as metrics:
        assert wait(address, looks.append, metrics, lambda: next(found)) == 0
    assert len(looks) == 2
    output = capsys.readouterr().out
    assert "its rules are gone (IPv4, IPv6): an agent that starts removes them; restart kube-proxy" in output
    assert "its rules are gone (IPv6)" in output


def test_rules_that_cannot_be_read_are_not_waited_for() -> None:
    def refuse() -> set[str]:
        raise PermissionError

    with serving([GOOD]) as address, serving([page(BOTH.encode())]) as metrics:
        assert wait(address, lambda seconds: pytest.fail("it waits"), metrics, refuse) == 0


def test_an_address_without_a_port_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert wait("127.0.0.1", metrics="") == 2
    assert wait("127.0.0.1:10256", metrics="10249") == 2
    assert capsys.readouterr().err == (
        "Error: KUBE_PROXY_HEALTH: 127.0.0.1 is not HOST:PORT\nError: KUBE_PROXY_METRICS: 10249 is not HOST:PORT\n"
    )


@pytest.mark.parametrize("port", ["²", "0", "99999"])
def test_a_port_that_does_not_exist_is_an_error(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Python would ask port 34463 in place of 99999."""
    assert wait(f"127.0.0.1:{port}", metrics="", sleep=lambda seconds: pytest.fail("it waits")) == 2
    assert capsys.readouterr().err == f"Error: KUBE_PROXY_HEALTH: 127.0.0.1:{port} is not HOST:PORT\n"
