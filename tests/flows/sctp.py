# SPDX-License-Identifier: Apache-2.0
"""SCTP over raw sockets, for kernels without SCTP sockets: a client's INIT, a server's INIT ACK or ABORT.

The INIT ACK's cookie is the answer of the lab's servers: the server, where the INIT arrived, its source. Both sides
accept only packets with a right CRC32c, so a translation that does not update it appears as a loss.
"""

from __future__ import annotations

import json
import random
import selectors
import socket
import struct
from collections.abc import Collection
from functools import cache
from typing import Any

from pyebpf_proxy.lab.namespace import Namespace, Task
from tests.flows.flow import Flow

PROTOCOL = 132
INIT, INIT_ACK, ABORT = 1, 2, 6
_COOKIE = 7
_IP_PKTINFO, _IPV6_RECVPKTINFO, _IPV6_PKTINFO = 8, 49, 50
_HEADER = struct.Struct("!HHI")
_CHUNK = struct.Struct("!BBH")
_INIT = struct.Struct("!IIHHI")
#: More ports than any source needs.
_PORTS = (10000, 60000)


def crc32c(data: bytes) -> int:
    """The checksum of RFC 9260, appendix A."""
    table, value = _table(), 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        found.append(value)
    return tuple(found)


def packet(source: int, destination: int, tag: int, kind: int, body: bytes = b"") -> bytes:
    """One chunk with its headers and checksum."""
    chunk = _CHUNK.pack(kind, 0, _CHUNK.size + len(body)) + body + b"\0" * (-len(body) % 4)
    header = _HEADER.pack(source, destination, tag)
    return header + struct.pack("<I", crc32c(header + b"\0\0\0\0" + chunk)) + chunk


def is_whole(text: bytes) -> bool:
    """Whether the checksum is right."""
    return len(text) >= 16 and text[8:12] == struct.pack("<I", crc32c(text[:8] + b"\0\0\0\0" + text[12:]))


def init(port: int) -> tuple[int, bytes]:
    """A source port, and an INIT from it to ``port``."""
    source = random.randint(*_PORTS)
    return source, packet(source, port, 0, INIT, _INIT.pack(source + 1, 65536, 1, 1, 1))


def has_ports(text: bytes, source: int, destination: int) -> bool:
    """Whether this side sent a packet between these ports. An ICMP error may quote only its first bytes."""
    return len(text) >= 4 and _HEADER.unpack_from(text.ljust(8, b"\0"))[:2] == (source, destination)


def answer(text: bytes, flow: Flow, port: int) -> bytes | None:
    """The answer in a packet from a raw socket; empty for an ABORT; None if it does not belong to that request."""
    text = _without_header(text, flow.family)
    if not is_whole(text):
        return None
    source, destination, tag = _HEADER.unpack_from(text)
    kind, _, length = _CHUNK.unpack_from(text, 12)
    if (source, destination, tag) != (flow.port, port, port + 1) or kind not in (INIT_ACK, ABORT):
        return None
    return text[16 + _INIT.size + 4 : 12 + length] if kind == INIT_ACK else b""


def _without_header(text: bytes, family: int) -> bytes:
    """An IPv4 raw socket reads the IP header too."""
    return text[(text[0] & 15) * 4 :] if family == 4 and text else text


class _Server:
    def __init__(self, identity: dict[str, str], ports: Collection[int]) -> None:
        self._identity = identity
        self._ports = ports
        self._selector = selectors.DefaultSelector()
        for family, level, option in (
            (socket.AF_INET, socket.IPPROTO_IP, 0),
            (socket.AF_INET6, socket.IPPROTO_IPV6, _IPV6_RECVPKTINFO),
        ):
            sock = socket.socket(family, socket.SOCK_RAW, PROTOCOL)
            if option:
                sock.setsockopt(level, option, 1)
            self._selector.register(sock, selectors.EVENT_READ, sock)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                self._serve(key.data)

    def _serve(self, sock: socket.socket) -> None:
        text, ancillary, _, peer = sock.recvmsg(65536, 256)
        if sock.family == socket.AF_INET:
            own: bytes = text[16:20]
            text = _without_header(text, 4)
            info = (socket.IPPROTO_IP, _IP_PKTINFO, struct.pack("=I4s4s", 0, own, b"\0" * 4))
        else:
            own = next(data[:16] for _, kind, data in ancillary if kind == _IPV6_PKTINFO)
            info = (socket.IPPROTO_IPV6, _IPV6_PKTINFO, own + struct.pack("=I", 0))
        if not is_whole(text) or text[12] != INIT:
            return
        source, port, _ = _HEADER.unpack_from(text)
        tag = _INIT.unpack_from(text, 16)[0]
        reply = packet(port, source, tag, ABORT)
        if port in self._ports:
            local = socket.inet_ntop(sock.family, own)
            output = self._identity | {"protocol": "sctp", "local": [local, port], "peer": [peer[0], source]}
            cookie = json.dumps(output | {"received": len(text)}).encode()
            body = _INIT.pack(1, 65536, 1, 1, 1) + struct.pack("!HH", _COOKIE, 4 + len(cookie)) + cookie
            reply = packet(port, source, tag, INIT_ACK, body)
        sock.sendmsg([reply], [info], 0, peer)


def _serve(identity: dict[str, str], ports: Collection[int], ready: Any) -> None:
    server = _Server(identity, ports)
    ready.send("ready")
    ready.close()
    server.run()


def start_server(namespace: Namespace, identity: dict[str, str], ports: Collection[int]) -> Task[None]:
    """Answer INITs in a namespace: to ``ports`` with an INIT ACK, to others with an ABORT. Returns when it listens."""
    import multiprocessing

    wait, ready = multiprocessing.Pipe(duplex=False)
    task = namespace.start(_serve, identity, ports, ready)
    ready.close()
    try:
        wait.recv()
    except EOFError:
        task.result(5)
        raise
    finally:
        wait.close()
    return task
