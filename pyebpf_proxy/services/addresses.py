# SPDX-License-Identifier: Apache-2.0
"""Addresses and prefixes as packed bytes, parsed as kube-proxy does (spec/service-semantics §1.2).

A hundred thousand endpoint addresses may be parsed at the start, so the common case is one ``inet_pton``. Texts that it
rejects are parsed again without leading zeros, which count for nothing: numbers of IPv4 are decimal.
"""

from __future__ import annotations

import re
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton

from pyebpf_proxy.common.digits import bounded_int
from pyebpf_proxy.services.model import IPFamily, SourceRange

#: A packed address and a port.
Place = tuple[bytes, int]

UNSPECIFIED = {IPFamily.IPV4: bytes(4), IPFamily.IPV6: bytes(16)}

_LEADING_ZEROS = re.compile(r"(?<![0-9A-Fa-f])0+(?=[0-9A-Fa-f])")
#: As the length of a prefix: more bits than any address has.
_TOO_LONG = 999
_MAPPED = bytes(10) + b"\xff\xff"
_LOOPBACK6 = bytes(15) + b"\x01"


def parse_address(text: str) -> bytes | None:
    """The packed address (4 or 16 bytes), or None. IPv4-mapped IPv6 addresses are IPv4, as in Go."""
    family = AF_INET6 if ":" in text else AF_INET
    try:
        packed = inet_pton(family, text)
    except (OSError, ValueError):
        try:
            packed = inet_pton(family, _LEADING_ZEROS.sub("", text))
        except (OSError, ValueError):
            return None
    return packed[12:] if packed.startswith(_MAPPED) else packed


def family_of(packed: bytes) -> IPFamily:
    """The family of a packed address."""
    return IPFamily.IPV4 if len(packed) == 4 else IPFamily.IPV6


def format_address(packed: bytes) -> str:
    """The canonical text of a packed address."""
    return inet_ntop(AF_INET if len(packed) == 4 else AF_INET6, packed)


def format_address_port(packed: bytes, port: int) -> str:
    """``address:port``, an IPv6 address in brackets."""
    text = format_address(packed)
    return f"{text}:{port}" if len(packed) == 4 else f"[{text}]:{port}"


def parse_prefix(text: str) -> SourceRange | None:
    """Parse ``address/length``; None if malformed. Removes white space and host bits; leading zeros are decimal."""
    address, slash, length = text.strip().partition("/")
    packed = parse_address(address)
    prefix_length = parse_length(length)
    if packed is None or not slash or prefix_length is None:
        return None
    if ":" in address and len(packed) == 4:
        # IPv4-mapped: the length counts IPv6 bits. As in Go, a network of mapped addresses only is an IPv4 network.
        if prefix_length < 96:
            packed = _MAPPED + packed
        else:
            prefix_length -= 96
    bits = len(packed) * 8
    if prefix_length > bits:
        return None
    host_bits = bits - prefix_length
    network = int.from_bytes(packed, "big") >> host_bits << host_bits
    return SourceRange(network.to_bytes(len(packed), "big"), prefix_length)


def parse_length(text: str) -> int | None:
    """The number after the slash of a prefix, or None. Leading zeros count for nothing. It may be too large."""
    return bounded_int(text, _TOO_LONG) if text.isascii() and text.isdigit() else None


def format_prefix(prefix: SourceRange) -> str:
    """``address/length``."""
    return f"{format_address(prefix.address)}/{prefix.prefix_length}"


def contains(prefix: SourceRange, packed: bytes) -> bool:
    """Whether the address is inside the prefix; False across families."""
    if len(prefix.address) != len(packed):
        return False
    host_bits = len(packed) * 8 - prefix.prefix_length
    return int.from_bytes(packed, "big") >> host_bits == int.from_bytes(prefix.address, "big") >> host_bits


def unusable_reason(packed: bytes, *, link_local: bool = False) -> str | None:
    """Why an address cannot be a frontend or an endpoint, as a noun phrase; None if it is usable.

    The API server also rejects these addresses (spec/service-semantics §1.4). In the maps, a zero address means a
    NodePort. With loopback or link-local endpoints, the author of an EndpointSlice could reach services that are only
    for the node: its daemons, or a cloud's metadata server.

    :param link_local: whether link-local addresses are usable (as frontends, not as endpoints).
    """
    first = packed[0]
    if len(packed) == 4:
        if first == 0:
            return "an unspecified address"
        if first == 127:
            return "a loopback address"
        if first == 169 and packed[1] == 254 and not link_local:
            return "a link-local address"
        if 224 <= first <= 239:
            return "a multicast address"
        if packed == b"\xff\xff\xff\xff":
            return "the broadcast address"
        return None
    if first == 0:
        if packed == UNSPECIFIED[IPFamily.IPV6]:
            return "an unspecified address"
        if packed == _LOOPBACK6:
            return "a loopback address"
        return None
    if first == 0xFF:
        return "a multicast address"
    if first == 0xFE and packed[1] & 0xC0 == 0x80 and not link_local:
        return "a link-local address"
    return None
