# SPDX-License-Identifier: Apache-2.0
"""Both ends of one TCP connection in a lab, step by step: each call of a test is the next packet."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
import time
from dataclasses import dataclass

from scapy.layers.inet import IP, TCP
from scapy.layers.inet6 import IPv6

from pyebpf_proxy.lab.namespace import Namespace

# include/uapi/linux/tcp.h
_REPAIR, _REPAIR_QUEUE, _QUEUE_SEQ, _REPAIR_OPTIONS = 19, 20, 21, 22
_OPTION_WINDOW, _SCALES = 3, 6  # offset of both scales in struct tcp_info: sent, received
_QUEUES = (1, 2)  # received data, data to be sent
_PATIENCE = 20.0

# Of the namespace's own process, where every call runs.
_listeners: dict[int, socket.socket] = {}
connections: dict[str, socket.socket] = {}


@dataclass(frozen=True)
class End:
    """The connection called ``name`` of this namespace."""

    namespace: Namespace
    name: str = "it"

    def listen(self, port: int) -> None:
        """Connections wait until they are accepted."""
        self.namespace.call(_listen, port)

    def accept(self, port: int) -> None:
        """The next connection becomes this one. TimeoutError if there is none."""
        self.namespace.call(_accept, self.name, port)

    def connect(self, address: str, port: int, own_port: int) -> None:
        """OSError; TimeoutError without an answer."""
        self.namespace.call(_connect, self.name, address, port, own_port)

    def resume(self, address: str, port: int, own_port: int) -> None:
        """Resume a connection that existed before; sends no packet."""
        self.namespace.call(_resume, self.name, address, port, own_port)

    def send(self, data: bytes) -> None:
        """Give the data to the kernel, without waiting until it arrives."""
        self.namespace.call(_send_data, self.name, data)

    def receive(self, size: int) -> bytes:
        """Receive so many bytes; fewer if the connection ends. OSError if it was reset."""
        return self.namespace.call(_receive_data, self.name, size)

    def reset(self) -> None:
        """End the connection with RST."""
        self.namespace.call(_reset, self.name)

    def reset_overtaking(self) -> None:
        """The same, and the RST overtakes an acknowledgment, as it may if two CPUs send the two."""
        self.namespace.call(_reset_overtaking, self.name)

    def finish(self) -> None:
        """End the connection with FIN."""
        self.namespace.call(_finish, self.name)

    def option(self, level: int, name: int, value: int | bytes) -> None:
        """Set an option of the socket, for packets that are sent from now on."""
        self.namespace.call(_option, self.name, level, name, value)

    def skip_bytes(self, sent: int, received: int) -> None:
        """Skip so many bytes, as if they had been sent and received. Nothing is sent until both ends have done so and
        `resume_sending`.
        """
        self.namespace.call(_skip_bytes, self.name, sent, received)

    def resume_sending(self) -> None:
        """Call it after ``skip_bytes``."""
        self.namespace.call(_resume_sending, self.name)


def exchange_data(client: End, server: End, rounds: int, size: int = 100) -> None:
    """Requests and answers; what arrives must be what was sent."""
    for number in range(rounds):
        for one, other in ((client, server), (server, client)):
            data = b"%d " % number * size
            one.send(data)
            heard = other.receive(len(data))
            assert heard == data, f"{len(heard)} bytes of {len(data)}"


def _listen(port: int) -> None:
    if port not in _listeners:
        _listeners[port] = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        _listeners[port].settimeout(_PATIENCE)


def _accept(name: str, port: int) -> None:
    made, _ = _listeners[port].accept()
    _keep(name, made)


def _connect(name: str, address: str, port: int, own_port: int) -> None:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("", own_port))
    made.settimeout(_PATIENCE)
    made.connect((address, port))
    _keep(name, made)


def _resume(name: str, address: str, port: int, own_port: int) -> None:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.IPPROTO_TCP, _REPAIR, 1)
    made.bind(("", own_port))
    made.connect((address, port))
    made.setsockopt(socket.IPPROTO_TCP, _REPAIR, 0)
    _keep(name, made)


def _keep(name: str, made: socket.socket) -> None:
    made.settimeout(_PATIENCE)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connections[name] = made


def _send_data(name: str, data: bytes) -> None:
    connections[name].sendall(data)


def _receive_data(name: str, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := connections[name].recv(size - len(data))):
        data += more
    return data


def _reset(name: str) -> None:
    it = connections.pop(name)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    it.close()


def _stop(made: socket.socket) -> list[int]:
    """Stop sending; the sequence numbers after what was received and sent."""
    made.setsockopt(socket.IPPROTO_TCP, _REPAIR, 1)
    numbers = []
    for queue in _QUEUES:
        made.setsockopt(socket.IPPROTO_TCP, _REPAIR_QUEUE, queue)
        numbers.append(made.getsockopt(socket.IPPROTO_TCP, _QUEUE_SEQ) & 0xFFFFFFFF)
    return numbers


def _reset_overtaking(name: str) -> None:
    it = connections[name]
    received, sent = _stop(it)
    it.setsockopt(socket.IPPROTO_TCP, _REPAIR, 0)
    own, peer = it.getsockname(), it.getpeername()
    _reset(name)
    layer = IPv6 if it.family == socket.AF_INET6 else IP
    late = layer(src=own[0], dst=peer[0]) / TCP(sport=own[1], dport=peer[1], flags="A", seq=sent, ack=received)
    with socket.socket(it.family, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        raw.sendto(bytes(late), (peer[0], 0))


def _finish(name: str) -> None:
    with contextlib.closing(connections.pop(name)) as it:
        it.shutdown(socket.SHUT_WR)


def _option(name: str, level: int, option: int, value: int | bytes) -> None:
    connections[name].setsockopt(level, option, value)


def _skip_bytes(name: str, sent: int, received: int) -> None:
    old = connections[name]
    tcp = socket.IPPROTO_TCP
    # While there is no socket, the kernel would answer an acknowledgement with RST.
    while fcntl.ioctl(old, termios.TIOCOUTQ, bytes(4)) != bytes(4):
        time.sleep(0.001)
    numbers = [number + further & 0xFFFFFFFF for number, further in zip(_stop(old), (received, sent), strict=True)]
    scales = old.getsockopt(tcp, socket.TCP_INFO, _SCALES + 1)[_SCALES]
    own, peer = old.getsockname(), old.getpeername()
    old.close()
    new = socket.socket(old.family)
    new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    new.setsockopt(tcp, _REPAIR, 1)
    for queue, number in zip(_QUEUES, numbers, strict=True):
        new.setsockopt(tcp, _REPAIR_QUEUE, queue)
        new.setsockopt(tcp, _QUEUE_SEQ, struct.pack("I", number))
    new.bind(own)
    new.connect(peer)
    # Without the scales a window is some 60 bytes.
    new.setsockopt(tcp, _REPAIR_OPTIONS, struct.pack("II", _OPTION_WINDOW, scales & 15 | scales >> 4 << 16))
    _keep(name, new)


def _resume_sending(name: str) -> None:
    connections[name].setsockopt(socket.IPPROTO_TCP, _REPAIR, 0)
