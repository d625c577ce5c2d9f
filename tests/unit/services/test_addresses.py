# SPDX-License-Identifier: Apache-2.0
"""Addresses and prefixes as kube-proxy reads them, compared with Python's ipaddress."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyebpf_proxy.services.addresses import (
    contains,
    format_address,
    format_address_port,
    format_prefix,
    parse_address,
    parse_prefix,
    unusable_reason,
)


@given(st.ip_addresses())
def test_addresses_are_read_as_by_ipaddress(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return
    packed = parse_address(str(address))
    assert packed == address.packed
    assert parse_address(address.exploded) == packed
    assert ipaddress.ip_address(format_address(packed)) == address


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("172.30.0.041", "172.30.0.41"),
        ("010.000.001.00", "10.0.1.0"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::ffff:a00:1", "10.0.0.1"),
        ("64:ff9b::192.000.2.033", "64:ff9b::c000:221"),
        ("FD00::1", "fd00::1"),
        ("::00001", "::1"),
        ("02001:0db8::000000a", "2001:db8::a"),
        ("::ffff:010.0.00.1", "10.0.0.1"),
    ],
)
def test_other_notations(text: str, canonical: str) -> None:
    packed = parse_address(text)
    assert packed is not None
    assert format_address(packed) == canonical


@pytest.mark.parametrize(
    "text",
    ["", " ", "None", "10.0.0", "10.0.0.256", "10.0.0.1 ", "10.0.0.1/32", "fe80::1%eth0", "[::1]", ":::", "1::2::3",
     "10.0.0.1\0", "١٠.0.0.1", "0x0a.0.0.1", "example.org", "::10.0.0.256", "::12345", "0a.0.0.1", "::0g"],
)  # fmt: skip
def test_no_address(text: str) -> None:
    assert parse_address(text) is None


@given(st.ip_addresses(), st.integers(0, 128))
def test_prefixes_are_read_as_by_ipaddress(address: ipaddress.IPv4Address | ipaddress.IPv6Address, length: int) -> None:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return
    prefix = parse_prefix(f" {address}/{length}\n")
    if length > address.max_prefixlen:
        assert prefix is None
        return
    network = ipaddress.ip_network((address, length), strict=False)
    assert prefix is not None
    assert prefix == (network.network_address.packed, length)
    assert ipaddress.ip_network(format_prefix(prefix)) == network
    assert contains(prefix, address.packed)


@given(st.ip_addresses(), st.ip_addresses(), st.integers(0, 32))
def test_contains(
    inside: ipaddress.IPv4Address | ipaddress.IPv6Address,
    other: ipaddress.IPv4Address | ipaddress.IPv6Address,
    length: int,
) -> None:
    network = ipaddress.ip_network((inside, length), strict=False)
    assert contains(parse_prefix(str(network)), other.packed) == (other in network)  # type: ignore[arg-type]


def test_zeros_before_the_length_count_for_nothing() -> None:
    assert parse_prefix("10.0.0.0/" + "0" * 5000 + "8") == parse_prefix("10.0.0.0/8")
    assert parse_prefix("10.0.0.0/000") == parse_prefix("10.0.0.0/0")


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("::ffff:10.1.2.3/104", "10.0.0.0/8"), ("::ffff:a01:203/128", "10.1.2.3/32"),
        ("::ffff:10.1.2.3/96", "0.0.0.0/0"), ("::ffff:10.1.2.3/95", "::fffe:0:0/95"), ("::ffff:10.1.2.3/0", "::/0"),
    ],
)  # fmt: skip
def test_a_network_of_ipv4_mapped_addresses_is_gos(text: str, network: str) -> None:
    """net.ParseCIDR and IPNet.String, with which kube-proxy writes its rules."""
    prefix = parse_prefix(text)
    assert prefix is not None
    assert ipaddress.ip_network(format_prefix(prefix)) == ipaddress.ip_network(network)


@pytest.mark.parametrize("text", ["10.0.0.0", "10.0.0.0/", "10.0.0.0/-1", "10.0.0.0/33", "::/129", "10.0.0.0/8/8",
                                  "10.0.0.0/²", "10.0.0.0/" + "9" * 5000,
                                  "::ffff:10.0.0.0/129", "/8", "10.0.0/8"])  # fmt: skip
def test_no_prefix(text: str) -> None:
    assert parse_prefix(text) is None


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("0.0.0.0", False), ("0.1.2.3", False), ("127.255.0.1", False), ("169.254.1.1", False), ("224.0.0.1", False),
        ("239.255.255.255", False), ("255.255.255.255", False), ("::", False), ("::1", False), ("fe80::1", False),
        ("febf::1", False), ("ff02::1", False),
        ("1.0.0.0", True), ("126.0.0.1", True), ("169.253.1.1", True), ("240.0.0.1", True), ("fec0::1", True),
        ("64:ff9b::1", True), ("::2", True), ("fd00::1", True),
    ],
)  # fmt: skip
def test_usable(text: str, usable: bool) -> None:
    packed = parse_address(text)
    assert packed is not None
    assert (unusable_reason(packed) is None) == usable


def test_services_may_have_link_local_addresses() -> None:
    for text in ("169.254.20.10", "fe80::1"):
        packed = parse_address(text)
        assert packed is not None
        assert unusable_reason(packed, link_local=True) is None


def test_address_and_port() -> None:
    assert format_address_port(bytes([10, 0, 0, 1]), 80) == "10.0.0.1:80"
    assert format_address_port(bytes(15) + b"\x02", 80) == "[::2]:80"
