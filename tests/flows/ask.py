# SPDX-License-Identifier: Apache-2.0
"""Sends flows from inside a namespace, many at once from one thread, and returns the outcome of each."""

from __future__ import annotations

import errno
import itertools
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pyebpf_proxy.lab.client import read_answer
from tests.flows import sctp
from tests.flows.flow import DROPPED, Flow

#: No answer for so many seconds counts as dropped.
PATIENCE = 2.4
#: How many requests may wait for an answer. One that has waited long makes room for others: it is probably dropped.
AT_ONCE = 32
#: Seconds, and multiples of the usual time, after which a request has waited long.
LONG = 0.2
SLOWER = 5
#: Sockets.
MOST = 600
#: How many requests of a flow may be lost before it counts as dropped; one more for so many answers.
LOST = 1
SELDOM = 6
#: How many refusals end a flow.
REFUSED = 2

#: The client ports of TCP and UDP, in turns. A request with the port and the destination of an earlier one may get that
#: one's outcome: conntrack keeps the entry of a closed connection for two minutes, and a datagram continues its flow
#: for half a minute at least, in conntrack or in the programs. The kernel chooses from these, too: masqueraded young
#: flows have the ports below (docs/fast-path.md, "Source ports").
CLIENT_PORTS = range(33000, 61000)

_IP_RECVERR, _IPV6_RECVERR = 11, 25
_MSG_ERRQUEUE = 0x2000
_ORIGINS = {2: "ICMP", 3: "ICMPv6"}
_REQUEST = {"tcp": b"GET / HTTP/1.1\r\nHost: flow\r\n\r\n", "udp": b"who "}


class Raw(NamedTuple):
    """One request: the server that answered, its address and port, the source that it saw; or the failure.

    The first outcome of a flow also has the number of requests, how many of them were lost and repeated, and how many
    of CLIENT_PORTS they used.
    """

    pod: str
    port: int
    peer: str
    own: str
    failed: str = ""
    asked: int = 0
    lost: int = 0
    ports: int = 0


def ask_flows(flows: Sequence[Flow], patience: float = PATIENCE, first: int | None = None) -> list[list[Raw]]:
    """Send every flow until it has no new outcome; in the order of ``flows``. Runs in the client's namespace.

    ``first``: the place in CLIENT_PORTS of the first port; None: a random one.
    """
    asker = _Asker(flows, patience, secrets.randbelow(len(CLIENT_PORTS)) if first is None else first)
    try:
        return asker.run()
    finally:
        asker.close()


def ask(flow: Flow) -> Raw:
    """One request from a new socket."""
    return ask_flows([flow._replace(count=0)])[0][0]


class _Found:
    """The outcome of a flow so far. Failures take long and are seldom chance: a few of them end the flow."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.outcomes: dict[tuple[str, int, str, str], Raw] = {}
        self.in_vain = self.lost = self.refused = self.answered = self.asked = self.ports = 0

    def add(self, raw: Raw) -> bool:
        """Add an outcome; returns whether another request must be sent."""
        self.asked += 1
        # A busy machine sometimes loses an answer; a rule drops all of them, or every second one.
        if raw.failed == DROPPED:
            self.lost += 1
            if self.lost <= max(LOST, self.answered // SELDOM) and self.flow.count:
                return True
        self.answered += not raw.failed
        self.refused += bool(raw.failed)
        key = raw.pod, raw.port, raw.peer, raw.failed
        self.in_vain = self.in_vain + 1 if key in self.outcomes else 0
        self.outcomes.setdefault(key, raw)
        if raw.failed == DROPPED:
            return False
        # The more answers there are, the longer another endpoint may be missing by chance.
        return self.in_vain < self.flow.count * len(self.outcomes) and self.refused < REFUSED

    def all(self) -> list[Raw]:
        """Every different outcome, with its requests."""
        first, *others = self.outcomes.values()
        return [first._replace(asked=self.asked, lost=self.lost, ports=self.ports), *others]


class _Request:
    """One request with its socket. ``ports``: those to try."""

    def __init__(self, found: _Found, ports: Iterator[int]) -> None:
        self.found = found
        self.flow = flow = found.flow
        self.begun = time.monotonic()
        self.own = ""
        self.text = b""
        self.port = 0
        self._ports = ports
        self.connected = False
        family = socket.AF_INET6 if flow.family == 6 else socket.AF_INET
        kind, number = socket.SOCK_STREAM, 0
        if flow.protocol == "udp":
            kind = socket.SOCK_DGRAM
        elif flow.protocol == "sctp":
            kind, number = socket.SOCK_RAW, sctp.PROTOCOL
        self.sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, number)
        level, option = (socket.IPPROTO_IPV6, _IPV6_RECVERR) if flow.family == 6 else (socket.IPPROTO_IP, _IP_RECVERR)
        self.sock.setsockopt(level, option, 1)

    def start(self) -> Raw | None:
        """Connect and send; returns the outcome if it is known at once."""
        flow, sock = self.flow, self.sock
        raw = flow.protocol == "sctp"
        if not raw:
            self._bind()
        elif flow.bound:
            sock.bind((flow.bound, 0))
        error = sock.connect_ex((flow.address, 0 if raw else flow.port))
        if error not in (0, errno.EINPROGRESS):
            return self.failed(error)
        if flow.protocol == "tcp":
            return None
        self.connected = True
        self.own = sock.getsockname()[0]
        try:
            if raw:
                self.port, packet = sctp.init(flow.port)
                sock.send(packet)
            else:
                sock.send(_REQUEST["udp"])
        except OSError as error_:
            return self.failed(error_.errno or 0)
        return None

    def _bind(self) -> None:
        """Bind to the next port that no other socket has."""
        while True:
            self.found.ports += 1
            try:
                self.sock.bind((self.flow.bound, next(self._ports)))
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise

    def step(self, events: int) -> Raw | None:
        """The socket has an event; returns the outcome of the request as soon as it is known."""
        if events & select.EPOLLERR:
            reason = self._queued()
            error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if reason or (error and not self.port):
                return Raw("", 0, "", self.own, f"refused ({reason})") if reason else self.failed(error)
            return None
        try:
            if not self.connected:
                error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    return self.failed(error)
                self.connected = True
                self.own = self.sock.getsockname()[0]
                self.sock.send(_REQUEST["tcp"])
                return None
            return self._read(self.sock.recv(65536))
        except BlockingIOError:
            return None
        except OSError as error_:
            return self.failed(error_.errno or 0)

    def _read(self, text: bytes) -> Raw | None:
        if self.port:
            found = sctp.answer(text, self.flow, self.port)
            if found is None:
                return None
            if not found:
                return Raw("", 0, "", self.own, "refused (ABORT)")
            text = found
        elif self.flow.protocol == "tcp":
            self.text += text
            text = self.text.partition(b"\r\n\r\n")[2] if text else b"{}"
            if not text:
                return None
        answer = read_answer(text)
        return Raw(answer.pod, answer.local[1], answer.peer[0], self.own)

    def failed(self, error: int) -> Raw:
        """A reset, a loss that the kernel reports, or the kernel's error."""
        if error == errno.ETIMEDOUT:
            return Raw("", 0, "", self.own, DROPPED)
        reset = error in (errno.ECONNREFUSED, errno.ECONNRESET)
        return Raw("", 0, "", self.own, f"refused ({'RST' if reset else errno.errorcode.get(error, str(error))})")

    def _queued(self) -> str:
        """Which host refused: the ICMP error in the socket's error queue."""
        while True:
            try:
                payload, ancillary, _, _ = self.sock.recvmsg(512, 512, _MSG_ERRQUEUE | socket.MSG_DONTWAIT)
            except OSError:
                return ""
            # A raw socket gets errors about every packet to that address. Source ports are random, so two requests to
            # different ports of it may have the same one.
            if self.port and not sctp.has_ports(payload, self.port, self.flow.port):
                continue
            for _, _, data in ancillary:
                if len(data) >= 16:
                    # struct sock_extended_err
                    _, origin, icmp_type, icmp_code = struct.unpack_from("=IBBB", data)
                    if origin in _ORIGINS:
                        return f"{_ORIGINS[origin]} {icmp_type}/{icmp_code}"


class _Asker:
    def __init__(self, flows: Sequence[Flow], patience: float, first: int) -> None:
        self._ports = itertools.islice(itertools.cycle(CLIENT_PORTS), first, None)
        self._found = [_Found(flow) for flow in flows]
        self._waiting = deque(self._found)
        self._patience = patience
        self._epoll = select.epoll()
        self._live: dict[int, _Request] = {}
        #: Those that count for AT_ONCE, oldest first.
        self._young: dict[int, _Request] = {}
        self._usual = 0.0

    def close(self) -> None:
        for request in self._live.values():
            request.sock.close()
        self._epoll.close()

    def run(self) -> list[list[Raw]]:
        while self._waiting or self._live:
            self._start()
            for fd, events in self._epoll.poll(self._pause()):
                request = self._live.get(fd)
                if request is not None:
                    self._after(request, request.step(events))
            self._give_up()
        return [found.all() for found in self._found]

    def _start(self) -> None:
        while self._waiting and len(self._young) < AT_ONCE and len(self._live) < MOST:
            request = _Request(self._waiting.popleft(), self._ports)
            fd = request.sock.fileno()
            self._live[fd] = self._young[fd] = request
            self._epoll.register(fd, select.EPOLLOUT if request.flow.protocol == "tcp" else select.EPOLLIN)
            self._after(request, request.start())

    def _after(self, request: _Request, raw: Raw | None) -> None:
        fd = request.sock.fileno()
        if raw is None:
            if request.connected and request.flow.protocol == "tcp":
                self._epoll.modify(fd, select.EPOLLIN)
            return
        if not raw.failed:
            self._usual += (time.monotonic() - request.begun - self._usual) / 16
        del self._live[fd]
        self._young.pop(fd, None)
        request.sock.close()
        if request.found.add(raw):
            self._waiting.append(request.found)

    def _pause(self) -> float:
        """How long until the oldest request fails, or makes room."""
        if not self._live:
            return 0.0
        now = time.monotonic()
        oldest = next(iter(self._live.values())).begun + self._patience - now
        if self._young and self._waiting:
            oldest = min(oldest, next(iter(self._young.values())).begun + self._long() - now)
        return max(oldest, 0.0)

    def _long(self) -> float:
        return max(LONG, SLOWER * self._usual)

    def _give_up(self) -> None:
        now = time.monotonic()
        while self._young:
            fd, request = next(iter(self._young.items()))
            if request.begun + self._long() > now:
                break
            del self._young[fd]
        while self._live:
            request = next(iter(self._live.values()))
            if request.begun + self._patience > now:
                return
            self._after(request, Raw("", 0, "", request.own, DROPPED))
