# SPDX-License-Identifier: Apache-2.0
"""Random packets with a structure: mostly well-formed and for a Service, often with one oddity, sometimes with many."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tests.packet.fuzz_reference import SCTP, TCP, UDP, Ends

NODE = bytes.fromhex("020000000002")
PEER = bytes.fromhex("020000000001")
FLAGS = (2, 2, 2, 16, 16, 24, 18, 17, 4, 20, 1, 0, 3, 6, 41, 255)
PAYLOAD = bytes(i * 7 & 255 for i in range(2048))


@dataclass
class Pools:
    """The values that packets are made of."""

    family: int
    sources: Sequence[bytes]
    destinations: Sequence[bytes]
    ports: Sequence[int]
    client_ports: Sequence[int]
    #: Flows whose first packets are likely.
    known: list[Ends]
    #: Directions of flows that exist.
    live: list[Ends]


def fold(total: int) -> int:
    return ~(total % 0xFFFF or 0xFFFF) & 0xFFFF


def checksum(data: bytes) -> int:
    return fold(int.from_bytes(data + b"\0" * (len(data) & 1), "big"))


def make(rng: random.Random, pools: Pools, layer3: bool = False) -> bytes:
    """One frame. With ``layer3`` an IP packet, with an EtherType where a test run looks for it."""
    draw = rng.random
    if pools.live and draw() < 0.45:
        ends = rng.choice(pools.live)
    elif pools.known and draw() < 0.5:
        ends = rng.choice(pools.known)
    else:
        source = rng.choice(pools.sources)
        destination = rng.choice(pools.destinations)
        protocol = rng.choice((TCP, TCP, UDP, UDP, SCTP))
        ends = Ends(source, destination, rng.choice(pools.client_ports), rng.choice(pools.ports), protocol)
        if draw() < 0.1:
            ends = ends.turned()
    if layer3:
        ends = ends._replace(source=_with_type(ends.source))
    size = rng.choice((0, 0, 1, 5, 20, 100, 700, 1460)) if draw() < 0.9 else rng.randrange(1600)
    transport, protocol = _transport(rng, ends, size, pools.family), ends.protocol
    if draw() < 0.03:
        protocol = rng.choice((0, 1, 2, 4, 41, 47, 58, 59, 255))
    packet = (_ip4 if pools.family == 4 else _ip6)(rng, ends, protocol, transport)
    if layer3:
        frame = packet
    else:
        # An EtherType: of the other family, VLAN, ARP, or an unknown one.
        kind = 0x0800 if pools.family == 4 else 0x86DD
        if draw() < 0.04:
            kind = rng.choice((0x86DD if kind == 0x0800 else 0x0800, 0x8100, 0x88A8, 0x0806, 0x0600, 64))
        mac = NODE if draw() < 0.95 else rng.choice((PEER, b"\xff" * 6, b"\1\0^\0\0\1", bytes(6)))
        frame = mac + PEER + kind.to_bytes(2, "big") + packet
        if draw() < 0.02:
            frame = frame[:12] + rng.choice((b"\x81\0\0\5", b"\x81\0\0\0", b"\x88\xa8\0\7")) + frame[12:]
    # Cut or flip bytes after the first sixteen: the test run itself reads those.
    if draw() < 0.04:
        frame = frame[: rng.randrange(34 if pools.family == 4 else 54, max(len(frame), 55) + 1)]
    if draw() < 0.06:
        changed = bytearray(frame)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(14, min(len(frame), 90))] = rng.randrange(256)
        frame = bytes(changed)
    if draw() < 0.03:
        frame += bytes(rng.randrange(1, 30))  # padding, as short frames have
    return frame


def _with_type(source: bytes) -> bytes:
    return b"\x08\0" + source[2:] if len(source) == 4 else source[:4] + b"\x86\xdd" + source[6:]


def _transport(rng: random.Random, ends: Ends, size: int, family: int) -> bytes:
    draw = rng.random()
    ports = struct.pack("!HH", ends.source_port, ends.destination_port)
    if ends.protocol == TCP:
        words = 5 if draw < 0.8 else rng.randrange(16)
        flags = rng.choice(FLAGS) if draw < 0.97 else rng.randrange(256)
        sequence = rng.choice((0, 1, 1000, 1001, 0xFFFFFFFF, rng.getrandbits(32)))
        head = ports + struct.pack("!IIBBHHH", sequence, rng.choice((0, 1, 1001)), words << 4, flags, 512, 0, 0)
        head += PAYLOAD[: max(words - 5, 0) * 4]
    elif ends.protocol == UDP:
        length = 8 + size if draw < 0.95 else rng.randrange(65536)
        head = ports + struct.pack("!HH", length, 0)
    else:
        head = ports + bytes(8) + bytes((1 if draw < 0.7 else rng.randrange(16), 0, 0, 20))
    whole = head + PAYLOAD[:size]
    if ends.protocol == SCTP:
        return whole
    at = 16 if ends.protocol == TCP else 6
    if ends.protocol == UDP and draw > 0.9:
        return whole  # unchanged
    if draw > 0.86:
        value = rng.getrandbits(16)
    elif draw > 0.83:  # only the pseudo header's sum: a local sender left the checksum to the device
        value = ~fold(_pseudo(ends, len(whole))) & 0xFFFF
    else:
        data = whole + b"\0" * (len(whole) & 1)
        value = fold(int.from_bytes(data, "big") + _pseudo(ends, len(whole)))
        if ends.protocol == UDP and not value:
            value = 0xFFFF
    return whole[:at] + value.to_bytes(2, "big") + whole[at + 2 :]


def _pseudo(ends: Ends, length: int) -> int:
    return int.from_bytes(ends.source + ends.destination, "big") + ends.protocol + length


def _hops(rng: random.Random) -> int:
    return 64 if rng.random() < 0.93 else rng.choice((0, 1, 2, 255))


def _ip4(rng: random.Random, ends: Ends, protocol: int, transport: bytes) -> bytes:
    draw = rng.random()
    options = b"" if draw < 0.93 else b"\1" * (4 * rng.randrange(1, 11))
    bits = 0x4000 if draw < 0.5 else 0
    odd = rng.random()
    if odd < 0.06:
        bits = rng.choice((0x2000, 0x2000, 0x2004, 0x0004, 0x1FFF, 0x8000, 0x6000))
    length = 20 + len(options) + len(transport)
    if odd > 0.97:
        length = rng.choice((0, 19, 20, 28, length - 1, length + 1, 65535)) & 0xFFFF
    head = struct.pack(
        "!BBHHHBBH",
        0x40 | (5 + len(options) // 4),
        0 if draw < 0.9 else rng.randrange(256),
        length,
        rng.getrandbits(1) if odd < 0.06 else rng.getrandbits(3),
        bits,
        _hops(rng),
        protocol,
        0,
    )
    head += ends.source + ends.destination + options
    value = checksum(head) if draw < 0.98 else rng.getrandbits(16)
    return head[:10] + value.to_bytes(2, "big") + head[12:] + transport


def _ip6(rng: random.Random, ends: Ends, protocol: int, transport: bytes) -> bytes:
    chain: list[tuple[int, bytes]] = []
    draw = rng.random()
    if draw < 0.06:
        chain.append((44, struct.pack("!BHI", 0, rng.choice((1, 1, 9, 17, 8)), rng.getrandbits(1))))
    elif draw < 0.16:
        for _ in range(rng.choice((1, 1, 1, 2, 3, 5, 6, 7, 9))):
            kind = rng.choice((0, 43, 60, 51, 44, 44, 135))
            words = rng.choice((0, 0, 0, 1, 3))
            if kind == 44:
                offset = rng.choice((0, 0, 1, 1, 8, 0xFFF9, 6))
                chain.append((44, struct.pack("!BHI", 0, offset, rng.getrandbits(2))))
            elif kind == 51:
                chain.append((51, bytes((words,)) + bytes(6 + words * 4)))
            else:
                chain.append((kind, bytes((words,)) + bytes(6 + words * 8)))
    following, body = protocol, transport
    for kind, rest in reversed(chain):
        body = bytes((following,)) + rest + body
        following = kind
    length = len(body) if rng.random() < 0.97 else rng.choice((0, 7, len(body) + 1, max(len(body) - 1, 0), 65535))
    first = 0x60000000 | rng.choice((0, 0, 0x0FF00000, 0x000ABCDE))
    return struct.pack("!IHBB", first, length, following, _hops(rng)) + ends.source + ends.destination + body
