# SPDX-License-Identifier: Apache-2.0
"""Unwanted packets: built once, sent repeatedly at a rate, from a namespace of the lab."""

from __future__ import annotations

import ipaddress
import multiprocessing
import random
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pyebpf_proxy.lab.namespace import Namespace

#: Packets a second: a multiple of the loads, and few enough for a machine with two CPUs.
RATE = 10_000
#: Different packets of one flood.
PACKETS = 8192
_BATCH_SECONDS = 0.005


def syns(sources: str, targets: Sequence[str], ports: Sequence[int], seed: int = 1) -> list[tuple[bytes, str]]:
    """SYNs from random addresses of a network: each packet with its IPv4 header, and its destination."""
    return [
        (_packet(source, target, 6, _syn(source, target, source_port, port)), target)
        for source, source_port, target, port in _flows(sources, targets, ports, seed)
    ]


def datagrams(sources: str, targets: Sequence[str], ports: Sequence[int], seed: int = 1) -> list[tuple[bytes, str]]:
    """The same with UDP datagrams of 18 bytes."""
    return [
        (_packet(source, target, 17, struct.pack("!HHHH18x", source_port, port, 26, 0)), target)
        for source, source_port, target, port in _flows(sources, targets, ports, seed)
    ]


@contextmanager
def flooding(namespace: Namespace, packets: Sequence[tuple[bytes, str]]) -> Iterator[None]:
    """Send RATE packets a second, in turn, until the end; returns when they flow."""
    context = multiprocessing.get_context("fork")
    stop, sent = context.Event(), context.RawValue("L", 0)
    task = namespace.start(_send, stop, sent, packets)
    try:
        while not sent.value:
            if task.done():
                task.result()
            time.sleep(0.001)
        yield
    finally:
        stop.set()
        task.result()


def _send(stop: Any, sent: Any, packets: Sequence[tuple[bytes, str]]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        begun = time.monotonic()
        while not stop.wait(_BATCH_SECONDS):
            due = int((time.monotonic() - begun) * RATE)
            # Packets that were not sent in time are skipped.
            for number in range(max(sent.value, due - 1000), due):
                packet, target = packets[number % len(packets)]
                try:
                    sock.sendto(packet, (target, 0))
                except OSError:
                    pass  # an ICMP error about an earlier one, or a full queue
            sent.value = due


def _flows(
    sources: str, targets: Sequence[str], ports: Sequence[int], seed: int
) -> Iterator[tuple[str, int, str, int]]:
    network, chance = ipaddress.IPv4Network(sources), random.Random(seed)
    for _ in range(PACKETS):
        source = network[chance.randrange(network.num_addresses)]
        yield str(source), chance.randrange(1024, 65536), chance.choice(targets), chance.choice(ports)


def _packet(source: str, target: str, protocol: int, payload: bytes) -> bytes:
    # The kernel fills in the checksum of this header.
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 0, 0, 64, protocol, 0)
    return header + socket.inet_aton(source) + socket.inet_aton(target) + payload


def _syn(source: str, target: str, source_port: int, port: int) -> bytes:
    segment = struct.pack("!HHIIBBHHH", source_port, port, source_port * 65537, 0, 5 << 4, 2, 64240, 0, 0)
    pseudo = socket.inet_aton(source) + socket.inet_aton(target) + struct.pack("!BBH", 0, 6, len(segment))
    total = sum(struct.unpack(f"!{(len(pseudo) + len(segment)) // 2}H", pseudo + segment))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return segment[:16] + struct.pack("!H", ~total & 0xFFFF) + segment[18:]
