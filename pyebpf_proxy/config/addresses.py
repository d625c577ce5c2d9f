# SPDX-License-Identifier: Apache-2.0
"""IP addresses, CIDRs and address:port texts, read as Go's "sloppy" parsers read them: leading zeros are decimal."""

from __future__ import annotations

import ipaddress

from pyebpf_proxy.services.addresses import parse_address

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
    if ip is None or not slash or not (length.isascii() and length.isdigit()) or int(length) > ip.max_prefixlen:
        return None
    return ipaddress.ip_network((ip, int(length)), strict=False)


def split_host_port(text: str) -> tuple[str, str] | None:
    """``host:port`` or ``[host]:port`` in two parts, as Go's net.SplitHostPort; None if it is neither."""
    if text.startswith("["):
        host, closing, port = text[1:].partition("]")
        if not closing or not port.startswith(":") or ":" in port[1:] or "[" in host:
            return None
        return host, port[1:]
    host, colon, port = text.rpartition(":")
    if not colon or ":" in host or "[" in text or "]" in text:
        return None
    return host, port


def join_host_port(host: str, port: int) -> str:
    """``host:port``, with brackets round an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def append_port(address: str, port: int) -> str:
    """``address`` with ``port`` where it has none; what is no address at all stays (spec/configuration §2.1, §4.5)."""
    if port == 0:
        return ""
    if split_host_port(address) is not None or parse_ip(address) is None:
        return address
    return join_host_port(address, port)
