# SPDX-License-Identifier: Apache-2.0
"""The HTTP core on real sockets, with correct and with hostile clients."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyebpf_proxy.servers import connection as connections
from pyebpf_proxy.servers import server as server_module
from pyebpf_proxy.servers.http import Pool, Request, Response
from pyebpf_proxy.servers.server import BindError, Server, listening_socket
from tests.support.logs import Log, Message
from tests.support.ports import free_port
from tests.unit.servers.http_client import answers, get, raw, serving, until

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def echo(request: Request) -> Response:
    text = f"{request.method} {request.path} {request.query} {len(request.body)} {request.headers.get('x-a', '')}"
    return Response(200, (("Content-Type", "text/plain"),), text.encode())


@pytest.fixture
def echoing() -> Iterator[tuple[int, Pool]]:
    with serving(echo) as found:
        yield found


def test_the_contents_of_a_request_reach_the_handler(echoing: tuple[int, Pool]) -> None:
    port, _ = echoing
    answer = get(port, "/a/b?c=d", "PUT", body=b"12345", headers={"X-A": "v"})
    assert answer.body == b"PUT /a/b c=d 5 v"
    assert list(answer.headers) == ["Content-Type", "Date", "Content-Length"]


def test_one_connection_carries_many_requests_and_head_has_no_body(echoing: tuple[int, Pool]) -> None:
    port, pool = echoing
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    for method in ("HEAD", "GET", "POST", "HEAD", "GET"):  # a body after HEAD would be read as the next answer
        connection.request(method, "/x")
        answer = connection.getresponse()
        assert answer.getheader("Content-Length") == str(len(f"{method} /x  0 "))
        assert answer.read() == (b"" if method == "HEAD" else f"{method} /x  0 ".encode())
    assert len(pool) == 1
    connection.close()
    until(lambda: len(pool) == 0)


def test_pipelined_requests_are_answered_in_order(echoing: tuple[int, Pool]) -> None:
    port, _ = echoing
    many = b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(100))
    found = raw(port, many + b"GET /end HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    bodies = [part.partition(b"\r\n\r\n")[2] for part in found.split(b"HTTP/1.1 200 OK\r\n")[1:]]
    assert bodies == [b"GET /%d  0 " % number for number in range(100)] + [b"GET /end  0 "]


def test_a_pipelined_body_does_not_swallow_the_next_request(echoing: tuple[int, Pool]) -> None:
    port, _ = echoing
    put = b"PUT /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    chunked = b"PUT /q HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    found = raw(port, put + chunked + GET, half_close=True)
    assert [text in found for text in (b"PUT /p  3 ", b"PUT /q  2 ", b"GET /  0 ")] == [True] * 3


def test_a_client_that_waits_before_it_sends_its_body_gets_100_continue(echoing: tuple[int, Pool]) -> None:
    port, _ = echoing
    head = b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(head)
        assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n")
        connection.sendall(b"abc")
        assert connection.recv(1000).endswith(b"PUT /  3 ")


def test_a_half_closed_peer_gets_its_answer(echoing: tuple[int, Pool]) -> None:
    port, _ = echoing
    assert raw(port, GET, half_close=True).endswith(b"GET /  0 ")


def test_only_the_path_of_a_full_url_is_used(echoing: tuple[int, Pool]) -> None:
    port, _ = echoing
    found = raw(port, b"GET http://node:10256/healthz?a=b HTTP/1.1\r\nHost: x\r\n\r\n", half_close=True)
    assert found.endswith(b"GET /healthz a=b 0 ")


def test_http_1_0_is_answered_and_closed(echoing: tuple[int, Pool]) -> None:
    port, _ = echoing
    assert raw(port, b"GET / HTTP/1.0\r\n\r\n").endswith(b"GET /  0 ")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n", 400),  # TLS
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET /\r\n\r\n", 400),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 501),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 600 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * (1 << 20) + b"x" * 8192, 431),
        (b"GET /" + b"x" * (2 << 20), 431),
        (b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 70000\r\n\r\n" + b"x" * 70000, 413),
    ],
)
def test_refusals_are_answered(echoing: tuple[int, Pool], request_: bytes, status: int) -> None:
    port, pool = echoing
    found = raw(port, request_, half_close=True)
    assert found.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"Connection: close" in found
    until(lambda: len(pool) == 0)
    assert pool.kept == 0


def test_any_input_is_answered_or_rejected_and_others_are_served(caplog: pytest.LogCaptureFixture) -> None:
    """Pieces of requests, whole and broken, in any order and with any cut."""
    lines = (
        "GET / HTTP/1.1 | PUT /a?b HTTP/1.0 | HEAD * HTTP/1.1 | CONNECT x:1 HTTP/1.1 | PRI * HTTP/2.0 | Host: x |"
        "Content-Length: 3 | Content-Length: -1 | Transfer-Encoding: chunked | Connection: close | Connection: keep |"
        "Upgrade: h2c | Expect: 100-continue | folded | : | 0 | 3"
    )
    pieces = [
        *(line.strip().encode() + b"\r\n" for line in lines.split("|")),
        *(b"\r\n", b"\n", b"\r", b"abc", b"\0", b" folded\r\n", b"\xff\xfe: \x00\r\n"),
        *(b"GET / HTTP/1.1\r\nHost: x\r\n", b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"),
    ]
    with serving(echo) as (port, pool):

        @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(st.sampled_from(pieces) | st.binary(max_size=20), max_size=12), st.integers(1, 40))
        def send(chosen: list[bytes], step: int) -> None:
            data = b"".join(chosen)
            found = raw(port, *(data[start : start + step] for start in range(0, len(data), step)), half_close=True)
            assert found == b"" or found.startswith(b"HTTP/1.1 ")

        send()
        assert get(port).status == 200
        until(lambda: len(pool) == 0)
        assert pool.kept == 0
    Log(caplog).none(Message.INTERNAL_ERROR)


def test_a_header_below_the_limit_is_accepted(echoing: tuple[int, Pool]) -> None:
    port, _ = echoing
    request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nA: " + b"x" * ((1 << 20) - 100) + b"\r\n\r\n"
    assert raw(port, request[:5], request[5:900000], request[900000:]).endswith(b"GET /  0 ")


def test_a_failing_handler_gives_one_answer_with_500(caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: Request) -> Response:
        raise RuntimeError("no")

    with serving(fail) as (port, _):
        assert get(port).status == 500
        assert get(port).status == 500
    Log(caplog).some(Message.INTERNAL_ERROR, level="error")


def test_requests_that_never_end_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(server_module, "SWEEP_SECONDS", 0.05)
    with serving(echo) as (port, pool):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nA: ")
            until(lambda: len(pool) == 1)
            cut = False
            while not cut:
                time.sleep(0.01)
                try:
                    slow.sendall(b"b")  # a byte now and then does not keep the connection
                except OSError:
                    cut = True
        until(lambda: len(pool) == 0)


def test_clients_that_do_not_read_are_cut_off_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.3)
    monkeypatch.setattr(server_module, "SWEEP_SECONDS", 0.05)
    calls = 0

    def large(request: Request) -> Response:
        nonlocal calls
        calls += 1
        return Response(200, (), b"x" * 100_000)

    with serving(large) as (port, pool), socket.create_connection(("127.0.0.1", port), timeout=20) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(GET * 1000)
        until(lambda: calls > 0 and len(pool) == 0)
    assert calls < 300  # the size of the kernel's buffers


@pytest.mark.alone
def test_hostile_clients_do_not_delay_the_programming_thread() -> None:
    """Work that takes 1 ms alone is done often enough, and never much too late, while hostile clients run.

    The clients are other processes: their CPU time is not the server's.
    """
    import subprocess
    import sys

    program = (
        "import socket, sys, time\n"
        "port = int(sys.argv[1])\n"
        "get = b'GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'\n"
        "idle = [socket.create_connection(('127.0.0.1', port)) for _ in range(300)]\n"
        "pipelined, lines = get * 2000, b'GET / HTTP/1.1\\r\\n' + b'a: b\\r\\n' * 100000\n"
        "while True:\n"
        "    try:\n"
        "        with socket.create_connection(('127.0.0.1', port), timeout=1) as s:\n"
        "            s.sendall(pipelined)\n"
        "            s.sendall(lines)\n"
        "            s.recv(100)\n"
        "    except OSError:\n"
        "        pass\n"
    )
    with serving(echo, limit=64) as (port, _):
        clients = [subprocess.Popen([sys.executable, "-c", program, str(port)]) for _ in range(2)]
        try:
            until(lambda: get(port).status == 200)
            spent = time.process_time()
            began = time.monotonic()
            late = []
            while time.monotonic() - began < 3:
                before = time.monotonic()
                time.sleep(0.001)  # yields the interpreter, as a system call does
                late.append(time.monotonic() - before - 0.001)
            spent, elapsed = time.process_time() - spent, time.monotonic() - began
            assert 0.02 * elapsed < spent < 0.4 * elapsed  # they request all of it
            late.sort()
            assert late[len(late) // 2] < 0.05
            assert late[-1] < 1
        finally:
            for client in clients:
                client.kill()
                client.wait()
        assert get(port).status == 200


def test_an_address_in_use_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "BIND_RETRY_SECONDS", 0.01)
    errors: list[str] = []
    server = Server()
    server.start()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server.serve(("127.0.0.1", port), echo, server.pool(4), lambda error: bool(errors.append(error)) or True)
        until(lambda: len(errors) > 2)
    assert errors[0] == f"listen tcp 127.0.0.1:{port}: bind: address already in use"
    until(lambda: answers(port))
    assert get(port).status == 200
    server.stop()
    assert not answers(port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_unspecified_addresses_are_those_of_both_families(host: str) -> None:
    server = Server()
    server.start()
    port = free_port()
    server.serve((host, port), echo, server.pool(4), lambda error: False)
    until(lambda: answers(port))
    assert get(port, host="127.0.0.1").status == get(port, host="::1").status == 200
    server.stop()


def test_one_family_only() -> None:
    port = free_port()
    with listening_socket("0.0.0.0", port, "tcp4"), listening_socket("::", port, "tcp6"):
        assert answers(port) and answers(port, "::1")  # noqa: PT018
    with pytest.raises(BindError, match="bind: cannot assign requested address"):
        listening_socket("203.0.113.1", port)
