# SPDX-License-Identifier: Apache-2.0
"""How applications use sockets. Each function runs in a namespace and asks a lab server at an address of a service. It
checks that its socket looks as if there were no proxy, and returns the answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from pyebpf_proxy.lab.client import Answer, family_of, read_answer

# include/uapi/linux: socket.h, in.h, in6.h, tcp.h, udp.h
SO_ZEROCOPY, MSG_ZEROCOPY, MSG_FASTOPEN = 60, 0x4000000, 0x20000000
IP_TRANSPARENT, IPV6_TRANSPARENT, TCP_FASTOPEN_CONNECT, UDP_SEGMENT = 19, 75, 30, 103
MARK = 0x55
DEADLINE = 30.0

Place = tuple[str, int]
REQUEST = b"GET / HTTP/1.1\r\nHost: lab\r\n\r\n"
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def opened(place: Place, kind: socket.SocketKind, family: int | None = None) -> Iterator[socket.socket]:
    with socket.socket(family or family_of(place[0]), kind) as sock:
        sock.settimeout(DEADLINE)
        yield sock


def read_http(sock: socket.socket) -> Answer:
    received = b""
    while data := sock.recv(65536):
        received += data
    return read_answer(received.partition(b"\r\n\r\n")[2])


def looks_connected(sock: socket.socket, place: Place) -> None:
    peer = sock.getpeername()[:2]
    assert peer == place, f"getpeername returns {peer}"


def asked(sock: socket.socket, place: Place) -> Answer:
    """The answer to a request over a connection that looks as if it went to ``place``."""
    looks_connected(sock, place)
    sock.sendall(REQUEST)
    return read_http(sock)


def _text(sender: Any) -> Place:
    return sender[0], sender[1]


def sockaddr(place: Place) -> bytes:
    address, port = place
    if ":" in address:
        return struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, 0) + _packed(address) + bytes(4)
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + _packed(address) + bytes(8)


def _packed(address: str) -> bytes:
    return socket.inet_pton(family_of(address), address)


def _disconnect(sock: socket.socket) -> None:
    """connect() with AF_UNSPEC."""
    nowhere = bytes(16)
    if _libc.connect(sock.fileno(), nowhere, len(nowhere)) != 0:
        raise OSError(ctypes.get_errno(), "connect with AF_UNSPEC")


def _error_of(call: Callable[..., Any], *args: Any) -> int | None:
    try:
        call(*args)
    except OSError as error:
        return error.errno
    return 0


# ---- TCP ------------------------------------------------------------------------------------------------------


def tcp_connected(place: Place, own: str) -> list[Answer]:
    with opened(place, socket.SOCK_STREAM) as sock:
        sock.connect(place)
        return [asked(sock, place)]


def tcp_bound(place: Place, own: str) -> list[Answer]:
    """Bound to an address and port of the node, which the endpoint must see."""
    with opened(place, socket.SOCK_STREAM) as sock:
        sock.bind((own, 0))
        name = _text(sock.getsockname())
        sock.connect(place)
        assert _text(sock.getsockname()) == name
        return [asked(sock, place)]


def tcp_options_kept(place: Place, own: str) -> list[Answer]:
    """SO_MARK, SO_PRIORITY and IP_TRANSPARENT keep the values that the application has set."""
    level, transparent = (socket.IPPROTO_IPV6, IPV6_TRANSPARENT) if ":" in own else (socket.IPPROTO_IP, IP_TRANSPARENT)
    wanted = {(socket.SOL_SOCKET, socket.SO_MARK): MARK, (socket.SOL_SOCKET, socket.SO_PRIORITY): 3}
    wanted[level, transparent] = 1
    with opened(place, socket.SOCK_STREAM) as sock:
        for (at, option), value in wanted.items():
            sock.setsockopt(at, option, value)
        sock.connect(place)
        found = {(at, option): sock.getsockopt(at, option) for at, option in wanted}
        assert found == wanted
        return [asked(sock, place)]


def tcp_mapped(place: Place, own: str) -> list[Answer]:
    """An IPv6 socket that uses IPv4."""
    mapped = f"::ffff:{place[0]}", place[1]
    with opened(place, socket.SOCK_STREAM, socket.AF_INET6) as sock:
        sock.connect(mapped)
        return [asked(sock, mapped)]


def tcp_fast_open(place: Place, own: str) -> list[Answer]:
    """The request is passed to sendto(), which connects."""
    with opened(place, socket.SOCK_STREAM) as sock:
        # With a timeout the socket would be non-blocking for the kernel, and would have to write again.
        sock.settimeout(None)
        assert sock.sendto(REQUEST, MSG_FASTOPEN, place) == len(REQUEST)
        sock.settimeout(DEADLINE)
        looks_connected(sock, place)
        return [read_http(sock)]


def tcp_fast_open_connect(place: Place, own: str) -> list[Answer]:
    """connect() waits for the first write."""
    with opened(place, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN_CONNECT, 1)
        sock.connect(place)
        sock.sendall(REQUEST)
        looks_connected(sock, place)
        return [read_http(sock)]


def tcp_non_blocking(place: Place, own: str) -> list[Answer]:
    with opened(place, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        assert sock.connect_ex(place) in (0, errno.EINPROGRESS)
        assert select.select([], [sock], [], DEADLINE)[1]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        sock.settimeout(DEADLINE)
        return [asked(sock, place)]


def tcp_reused(place: Place, own: str) -> list[Answer]:
    """One socket: connected, disconnected, connected again."""
    answers = []
    with opened(place, socket.SOCK_STREAM) as sock:
        for _ in range(3):
            sock.connect(place)
            answers.append(asked(sock, place))
            _disconnect(sock)
            assert _error_of(sock.getpeername) == errno.ENOTCONN
    return answers


def tcp_zero_copy(place: Place, own: str) -> list[Answer]:
    with opened(place, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
        sock.connect(place)
        request = REQUEST[:-2] + b"X-Fill: " + b"x" * 20000 + b"\r\n\r\n"
        sent = 0
        while sent < len(request):
            sent += sock.send(request[sent:], MSG_ZEROCOPY)
        answer = read_http(sock)
        assert answer.received == len(request)
        # The kernel reports that it does not need the pages any more.
        _, ancillary, _, _ = sock.recvmsg(1, 512, socket.MSG_ERRQUEUE)
        assert ancillary
        return [answer]


# ---- UDP ------------------------------------------------------------------------------------------------------


def udp_connected(place: Place, own: str) -> list[Answer]:
    with opened(place, socket.SOCK_DGRAM) as sock:
        sock.connect(place)
        looks_connected(sock, place)
        sock.send(b"who")
        text, sender = sock.recvfrom(65536)
        assert _text(sender) == place
        return [read_answer(text)]


def _receive(sock: socket.socket, place: Place, count: int) -> list[Answer]:
    answers = []
    for _ in range(count):
        text, _, _, sender = sock.recvmsg(65536)
        assert _text(sender) == place, f"the answer came from {sender}"
        answers.append(read_answer(text))
    return answers


def udp_sendto(place: Place, own: str) -> list[Answer]:
    with opened(place, socket.SOCK_DGRAM) as sock:
        for _ in range(3):
            sock.sendto(b"who", place)
        return _receive(sock, place, 3)


def udp_bound(place: Place, own: str) -> list[Answer]:
    with opened(place, socket.SOCK_DGRAM) as sock:
        sock.bind((own, 0))
        name = _text(sock.getsockname())
        sock.sendto(b"who", place)
        answers = _receive(sock, place, 1)
        assert _text(sock.getsockname()) == name
        return answers


def source_info(own: str) -> list[tuple[int, int, bytes]]:
    """Ancillary data of a message to be sent from ``own`` (IP_PKTINFO)."""
    if ":" in own:
        return [(socket.IPPROTO_IPV6, 50, _packed(own) + bytes(4))]
    return [(socket.IPPROTO_IP, 8, bytes(4) + _packed(own) + bytes(4))]


def udp_sendmsg_with_source(place: Place, own: str) -> list[Answer]:
    """A message that sets its source itself (IP_PKTINFO)."""
    with opened(place, socket.SOCK_DGRAM) as sock:
        sock.sendmsg([b"who"], source_info(own), 0, place)
        return _receive(sock, place, 1)


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class _Message(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vectors", ctypes.POINTER(_Vector)),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("length", ctypes.c_uint),
    ]


def udp_sendmmsg(place: Place, own: str) -> list[Answer]:
    """Several messages in one call."""
    count = 4
    text = ctypes.create_string_buffer(b"who", 3)
    vector = _Vector(ctypes.addressof(text), 3)
    names = [ctypes.create_string_buffer(sockaddr(place)) for _ in range(count)]
    size = len(sockaddr(place))
    messages = (_Message * count)(
        *(_Message(ctypes.addressof(name), size, ctypes.pointer(vector), 1) for name in names)
    )
    with opened(place, socket.SOCK_DGRAM) as sock:
        assert _libc.sendmmsg(sock.fileno(), messages, count, 0) == count, os.strerror(ctypes.get_errno())
        # The kernel did not write to the application's memory.
        assert all(name.raw[:size] == sockaddr(place) for name in names)
        return _receive(sock, place, count)


def udp_mapped(place: Place, own: str) -> list[Answer]:
    """An IPv6 socket that uses IPv4: connected and unconnected."""
    mapped = f"::ffff:{place[0]}", place[1]
    with opened(place, socket.SOCK_DGRAM, socket.AF_INET6) as sock:
        sock.sendto(b"who", mapped)
        answers = _receive(sock, mapped, 1)
        sock.connect(mapped)
        looks_connected(sock, mapped)
        sock.send(b"who")
        return answers + _receive(sock, mapped, 1)


def udp_reused(place: Place, own: str) -> list[Answer]:
    """Connected, disconnected, used unconnected, connected again."""
    answers = []
    with opened(place, socket.SOCK_DGRAM) as sock:
        for _ in range(2):
            sock.connect(place)
            looks_connected(sock, place)
            sock.send(b"who")
            answers += _receive(sock, place, 1)
            _disconnect(sock)
            assert _error_of(sock.send, b"who") == errno.EDESTADDRREQ
            sock.sendto(b"who", place)
            answers += _receive(sock, place, 1)
    return answers


def udp_connected_and_named(place: Place, own: str) -> list[Answer]:
    """Connected, and each message names the peer all the same."""
    with opened(place, socket.SOCK_DGRAM) as sock:
        sock.connect(place)
        looks_connected(sock, place)
        sock.send(b"who")
        answers = _receive(sock, place, 1)
        for _ in range(3):
            sock.sendto(b"who", place)
            answers += _receive(sock, place, 1)
        return answers


def many_connected_and_named(place: Place, own: str, count: int) -> list[list[str]]:
    """For each of these sockets, which endpoints have answered."""
    return [[answer.pod for answer in udp_connected_and_named(place, own)] for _ in range(count)]


def service_then_endpoint(place: Place, endpoint: Place) -> None:
    """One socket talks to a service and to its only endpoint itself: each answer is from where it has asked."""
    for connected in (False, True):
        with opened(place, socket.SOCK_DGRAM) as sock:
            for asked in (place, endpoint, place, endpoint, endpoint):
                if connected:
                    sock.connect(asked)
                    looks_connected(sock, asked)
                    sock.send(b"who")
                else:
                    sock.sendto(b"who", asked)
                _receive(sock, asked, 1)
                if connected:
                    _disconnect(sock)


def two_services(first: Place, second: Place) -> None:
    """One socket uses two services with the same endpoint, connected and unconnected."""
    with opened(first, socket.SOCK_DGRAM) as sock:
        for connected, other in ((first, second), (second, first)):
            sock.connect(connected)
            looks_connected(sock, connected)
            sock.send(b"who")
            _receive(sock, connected, 1)
            _disconnect(sock)
            for asked in (other, connected, other):
                sock.sendto(b"who", asked)
                _receive(sock, asked, 1)


def udp_segments(place: Place, own: str) -> list[Answer]:
    """One write that the kernel splits into datagrams (UDP_SEGMENT), connected and unconnected."""
    size = struct.pack("=H", 100)
    with opened(place, socket.SOCK_DGRAM) as sock:
        sock.sendmsg([b"who".ljust(300, b".")], [(socket.IPPROTO_UDP, UDP_SEGMENT, size)], 0, place)
        answers = _receive(sock, place, 3)
        sock.connect(place)
        sock.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, 100)
        sock.send(b"who".ljust(300, b"."))
        answers += _receive(sock, place, 3)
    assert {answer.received for answer in answers} == {100}
    return answers


def udp_resolver(place: Place, own: str) -> list[Answer]:
    """Like musl's resolver: an unconnected socket that accepts only answers from the address that it asked."""
    with opened(place, socket.SOCK_DGRAM) as sock:
        sock.bind(("::" if ":" in own else "0.0.0.0", 0))
        sock.sendto(b"who", place)
        while True:
            text, sender = sock.recvfrom(65536)
            if _text(sender) == place:
                return [read_answer(text)]


def ask_on_command(place: Place, connected: bool, rounds: Connection) -> str:
    """One socket that asks once for each word from the pipe. Reports the server that answered, and its address."""
    with socket.socket(family_of(place[0]), socket.SOCK_DGRAM) as sock:
        sock.settimeout(2)
        if connected:
            sock.connect(place)
        rounds.send(("up", place))
        while rounds.recv():
            try:
                if connected:
                    sock.send(b"question")
                else:
                    sock.sendto(b"question", place)
                text, sender = sock.recvfrom(65536)
                rounds.send((read_answer(text).pod, (sender[0], sender[1])))
            except OSError as error:
                rounds.send((str(error), place))
    return "done"


Call = Callable[[Place, str], list[Answer]]
TCP: tuple[Call, ...] = (
    *(tcp_connected, tcp_bound, tcp_options_kept, tcp_mapped, tcp_fast_open, tcp_fast_open_connect),
    *(tcp_non_blocking, tcp_reused, tcp_zero_copy),
)
UDP: tuple[Call, ...] = (
    *(udp_connected, udp_sendto, udp_bound, udp_sendmsg_with_source, udp_sendmmsg, udp_mapped),
    *(udp_reused, udp_connected_and_named, udp_segments, udp_resolver),
)
