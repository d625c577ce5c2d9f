# SPDX-License-Identifier: Apache-2.0
"""Long conversations in a lab: a server that answers with the client's address, and a client that asks until it is
stopped.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import selectors
import socket
import time
from typing import Any

from pyebpf_proxy.lab.cluster import Pod
from pyebpf_proxy.lab.namespace import Namespace, Task

PORT = 7007
_SIZE = 8
#: So many requests follow each other at once: twice what makes a stream of a UDP flow (bpf/complete.h).
_AT_ONCE = 8
#: Environment variable: seconds between an answer and the next request. Many clients at full speed would leave an
#: emulated CPU no time for the test itself.
PACE = "PEP_TALK_PACE"
#: The same while no test waits for an answer: a dozen clients at full speed would take all CPU time from the agent that
#: starts meanwhile.
_UNAWAITED = 0.002


def serve(pod: Pod) -> Task[None]:
    """Start a server in this pod. It answers with ``peer address, padded to the same length``. It ends with the lab."""
    wait, ready = multiprocessing.Pipe(duplex=False)
    task = pod.namespace.start(_serve, ready)
    ready.close()
    wait.recv()
    wait.close()
    return task


def _serve(ready: Any) -> None:
    selector = selectors.DefaultSelector()
    listener = socket.create_server(("::", PORT), family=socket.AF_INET6, dualstack_ipv6=True)
    datagrams = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    # Answers come from the address that was asked.
    datagrams.bind(("::", PORT))
    for sock in (listener, datagrams):
        selector.register(sock, selectors.EVENT_READ)
    ready.send("ready")
    while True:
        for key, _ in selector.select():
            sock: Any = key.fileobj
            with contextlib.suppress(OSError):
                if sock is listener:
                    made, _ = listener.accept()
                    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    selector.register(made, selectors.EVENT_READ)
                elif sock is datagrams:
                    data, peer = datagrams.recvfrom(65536)
                    datagrams.sendto(_answer(data, peer[0]), peer)
                else:
                    data = sock.recv(65536)
                    if data:
                        sock.sendall(_answer(data, sock.getpeername()[0]))
                        continue
                    selector.unregister(sock)
                    sock.close()


def _answer(data: bytes, peer: str) -> bytes:
    text = data[:_SIZE] + peer.removeprefix("::ffff:").encode()
    return text.ljust(len(data), b" ")[: len(data)]


class Conversation:
    """A client in ``namespace``: one connection or UDP socket, one request at a time, until :meth:`end`.

    ``gate``, a multiprocessing.Event: its process waits for it before it connects.
    """

    def __init__(
        self, namespace: Namespace, address: str, protocol: str, port: int = PORT, size: int = 100, gate: Any = None
    ) -> None:
        context = multiprocessing.get_context("fork")
        # Answers, when the last one came, the longest pause, and whether a test waits for more.
        self._state = context.RawArray("d", [0.0, 0.0, 0.0, 0.0])
        self._peer = context.RawArray("c", 64)
        self._protocol = protocol
        self._own_address = context.RawArray("c", 64)
        self._own_port = context.RawValue("i", 0)
        shared = self._state, self._peer, self._own_address, self._own_port, gate
        self._task = namespace.start(_converse, address, port, protocol, size, *shared)

    @property
    def answers(self) -> int:
        return int(self._state[0])

    @property
    def pause(self) -> float:
        """The longest time without an answer in seconds, since `forget_pause`."""
        return max(self._state[2], time.monotonic() - self._state[1])

    def forget_pause(self) -> None:
        """Measure ``pause`` from now on."""
        self._state[2] = 0.0

    @property
    def peer(self) -> str:
        """The client's address, as the server sees it."""
        return bytes(self._peer.value).decode()

    @property
    def own_port(self) -> int:
        """The client's port; 0 before it is connected."""
        return int(self._own_port.value)

    @property
    def client(self) -> tuple[str, str, int]:
        """The client's address, the protocol and the client's port, as soon as it is connected."""
        return bytes(self._own_address.value).decode(), self._protocol, self.own_port

    @property
    def over(self) -> bool:
        """Whether its connection was reset or its process has failed."""
        return self._task.done()

    def wait(self, more: int = 20, deadline: float = 60.0) -> float:
        """Wait for so many more answers; the seconds that the first one took. AssertionError if none comes."""
        before, begun = self.answers, time.monotonic()
        first = 0.0
        self._state[3] = 1.0
        try:
            while self.answers < before + more:
                assert time.monotonic() - begun < deadline, f"no further answers after {before}"
                if not first and self.answers > before:
                    first = time.monotonic() - begun
                time.sleep(0.002)
        finally:
            self._state[3] = 0.0
        return first

    def stops(self, seconds: float = 1.5, deadline: float = 60.0) -> bool:
        """Whether, within the deadline, no answer comes for so many seconds."""
        begun = time.monotonic()
        while time.monotonic() - begun < deadline:
            before = self.answers
            time.sleep(seconds)
            if self.answers == before:
                return True
        return False

    def end(self) -> None:
        self._task.stop()


def _converse(
    address: str,
    port: int,
    protocol: str,
    size: int,
    state: Any,
    peer: Any,
    own_address: Any,
    own_port: Any,
    gate: Any,
) -> None:
    awaited = float(os.environ.get(PACE, "0.001"))
    unawaited = max(awaited, _UNAWAITED)
    if gate is not None:
        gate.wait()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    with socket.socket(family, kind) as sock:
        if protocol == "tcp":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            sock.settimeout(0.1)
        sock.connect((address, port))
        own_address.value = sock.getsockname()[0].encode()
        own_port.value = sock.getsockname()[1]
        number = 0
        while True:
            number += 1
            sent = b"%07d " % (number % 10_000_000)
            answer = _ask(sock, sent.ljust(size, b"."), protocol)
            if answer is None:
                continue
            if answer[:_SIZE] != sent:
                raise AssertionError(f"another answer: {answer!r} instead of {sent!r}")
            peer.value = answer[_SIZE:].strip()[:63]
            state[0] += 1
            now = time.monotonic()
            state[2] = max(state[2], now - (state[1] or now))
            state[1] = now
            # With a pause after each answer a UDP flow never becomes a stream. Each request is then a new flow, which a
            # new policy denies (docs/fast-path.md).
            time.sleep(0 if number <= _AT_ONCE else awaited if state[3] else unawaited)


def _ask(sock: socket.socket, data: bytes, protocol: str) -> bytes | None:
    try:
        sock.sendall(data)
        if protocol == "udp":
            # Late answers to earlier requests come first; skip them, or each answer would be taken for the next
            # request's.
            while (answer := sock.recv(65536))[:_SIZE] != data[:_SIZE]:
                pass
            return answer
        answer = b""
        while len(answer) < len(data):
            more = sock.recv(65536)
            if not more:
                raise ConnectionResetError("the server has ended the connection")
            answer += more
        return answer
    except (TimeoutError, ConnectionRefusedError):
        if protocol == "tcp":
            raise
        return None
    except OSError:
        if protocol == "tcp":
            raise
        time.sleep(0.05)
        return None
