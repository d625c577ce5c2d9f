# SPDX-License-Identifier: Apache-2.0
"""IP addresses, CIDRs and address:port texts, parsed like Go's "sloppy" parsers: leading zeros are decimal."""

from __future__ import annotations

import ipaddress

from pyebpf_proxy.services.addresses import parse_address, parse_length

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_ip(text: str) -> Address | None:
    """The address, or None. No brackets, no zone, no white space."""
    packed = parse_address(text)
    return None if packed is None else ipaddress.ip_address(packed)


def parse_cidr(text: str) -> Network | None:
    """The network of ``address/length``, host bits cut off, or None."""
    address, slash, length = text.partition("/")
    ip = parse_ip(address)
    bits = parse_length(length)
    if ip is None or not slash or bits is None:
        return None
    if ip.version == 4 and ":" in address:
        # An IPv4-mapped IPv6 address: the prefix length counts IPv6 bits.
        if bits < 96:
            return ipaddress.ip_network((f"::ffff:{ip}", bits), strict=False)
        bits -= 96
    return ipaddress.ip_network((ip, bits), strict=False) if bits <= ip.max_prefixlen else None


def split_host_port(text: str) -> tuple[str, str] | None:
    """Split ``host:port`` or ``[host]:port`` like Go's net.SplitHostPort; None if it is neither."""
    try:
        return split(text)
    except ValueError:
        return None


def split(text: str) -> tuple[str, str]:
    """Like ``split_host_port``, but ValueError with Go's message if it is neither."""
    last = text.rfind(":")
    if last < 0:
        raise ValueError(f"address {text}: missing port in address")
    start = 0
    if text.startswith("["):
        end = text.find("]")
        if end < 0:
            raise ValueError(f"address {text}: missing ']' in address")
        if end + 1 == len(text):
            raise ValueError(f"address {text}: missing port in address")
        if end + 1 != last:
            what = "too many colons in address" if text[end + 1] == ":" else "missing port in address"
            raise ValueError(f"address {text}: {what}")
        host, start, after = text[1:end], 1, end + 1
    else:
        host, after = text[:last], 0
        if ":" in host:
            raise ValueError(f"address {text}: too many colons in address")
    if "[" in text[start:]:
        raise ValueError(f"address {text}: unexpected '[' in address")
    if "]" in text[after:]:
        raise ValueError(f"address {text}: unexpected ']' in address")
    return host, text[last + 1 :]


def join_host_port(host: str, port: int) -> str:
    """``host:port``, with brackets round an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def append_port(address: str, port: int) -> str:
    """``address``, with ``port`` if it has none; other text is unchanged (spec/configuration §2.1, §4.5)."""
    if port == 0:
        return ""
    if split_host_port(address) is not None or parse_ip(address) is None:
        return address
    return join_host_port(address, port)
