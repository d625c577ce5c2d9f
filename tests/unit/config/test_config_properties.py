# SPDX-License-Identifier: Apache-2.0
"""Properties of every duration, quantity, address, CIDR and port range: round trips, and one canonical form."""

from __future__ import annotations

import ipaddress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyebpf_proxy.config import addresses, durations, gotext, port_ranges, quantities

ADDRESSES = st.ip_addresses()
PORTS = st.integers(0, 65535)
TEXTS = st.text("0123456789.:-+/,[]abcfx nsumhkKMGTPEeiµ", max_size=12) | st.text(max_size=12)


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_a_duration_survives_its_text(nanoseconds: int) -> None:
    text = durations.format(nanoseconds)
    assert durations.parse(text) == nanoseconds
    assert durations.format(durations.parse(text)) == text


@given(
    st.lists(st.tuples(st.integers(0, 999), st.sampled_from(["h", "m", "s", "ms", "us", "ns"])), min_size=1, max_size=4)
)
def test_a_duration_is_the_sum_of_its_terms(terms: list[tuple[int, str]]) -> None:
    text = "".join(f"{number}{unit}" for number, unit in terms)
    assert durations.parse(text) == sum(durations.parse(f"{number}{unit}") for number, unit in terms)


@given(TEXTS)
def test_any_text_is_a_value_or_a_refusal_in_one_line(text: str) -> None:
    for read in (durations.parse, quantities.parse, port_ranges.parse, addresses.split):
        refusal = ""
        try:
            read(text)
        except ValueError as error:
            refusal = str(error)
        assert "\n" not in refusal or "\n" in text
    addresses.parse_ip(text)
    addresses.parse_cidr(text)
    addresses.append_port(text, 1)


@given(TEXTS)
def test_a_canonical_quantity_stays_as_it_is(text: str) -> None:
    try:
        quantity = quantities.parse(text)
    except ValueError:
        return
    again = quantities.parse(quantity.text)
    assert again.value == quantity.value
    assert again.text == quantity.text


ROUND = st.builds(lambda number, zeroes: number * 10**zeroes, st.integers(0, 2048), st.integers(0, 15))


@given(st.integers(0, (1 << 62)) | ROUND, st.sampled_from(["", "k", "M", "G", "Ki", "Mi", "m", "e3", "e-2"]))
def test_a_quantity_is_its_number_times_its_unit(number: int, unit: str) -> None:
    factor = {"k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "m": Fraction(1, 1000), "e3": 1000}.get(
        unit, 1
    )
    value = Fraction(number) * (Fraction(1, 100) if unit == "e-2" else factor)
    limit = (1 << 63) - 1
    quantity = quantities.parse(f"{number}{unit}")
    assert quantity.value == (min(value, limit) if unit.endswith("i") else value)
    # From here on kube-proxy has no unit, and writes none: 1000E becomes 1.
    if quantity.value < 10**21:
        assert quantities.parse(quantity.text).value == quantity.value


@given(ADDRESSES, PORTS)
def test_an_address_with_a_port_comes_apart_again(address: addresses.Address, port: int) -> None:
    joined = addresses.join_host_port(str(address), port)
    assert addresses.split_host_port(joined) == (str(address), str(port))
    # A text with a port keeps it; one without gets one, except port 0.
    assert addresses.append_port(joined, 9) == joined
    assert addresses.append_port(str(address), port) == (joined if port else "")


@given(ADDRESSES, st.integers(0, 128))
def test_a_cidr_is_its_network(address: addresses.Address, bits: int) -> None:
    network = addresses.parse_cidr(f"{address}/{bits}")
    if bits > address.max_prefixlen:
        assert network is None
    elif not (isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped):
        assert network == ipaddress.ip_network((address, bits), strict=False)
        assert addresses.parse_cidr(str(network)) == network


def test_an_ipv4_network_may_be_written_as_an_ipv6_one() -> None:
    assert addresses.parse_cidr("::ffff:10.1.2.3/104") == ipaddress.ip_network("10.0.0.0/8")
    assert addresses.parse_cidr("::ffff:10.1.2.3/128") == ipaddress.ip_network("10.1.2.3/32")
    assert addresses.parse_cidr("::ffff:10.1.2.3/64") == ipaddress.ip_network("::/64")
    assert addresses.parse_cidr("::ffff:10.1.2.3/129") is None


@given(st.integers(0, 255), st.integers(0, 3))
def test_leading_zeroes_are_decimal(number: int, zeroes: int) -> None:
    assert addresses.parse_ip(f"1.2.3.{'0' * zeroes}{number}") == ipaddress.ip_address(f"1.2.3.{number}")


@given(PORTS, PORTS)
def test_a_port_range_survives_its_text(one: int, other: int) -> None:
    ports = port_ranges.PortRange(min(one, other), max(one, other))
    assert port_ranges.parse(port_ranges.format(ports)) == ports
    assert port_ranges.parse(f"{ports.first}-{ports.last}") == ports
    assert port_ranges.parse(f"{ports.first}+{ports.last - ports.first}") == ports


def test_numbers_of_thousands_of_digits_are_out_of_range() -> None:
    """Python's int() takes 4300 digits."""
    # 66 bits: of YAML, to find out whether 64 suffice.
    for text in ("9" * 5000, "-" + "9" * 5000, "9" * 21, "100000000000000000000"):
        for bits in (64, 66):
            with pytest.raises(ValueError, match=r"^strconv\.ParseInt: .*: value out of range$"):
                gotext.parse_int(text, bits)
    assert gotext.parse_int("9223372036854775807", 64) == (1 << 63) - 1
    for text in ("9" * 5000, "1-" + "9" * 5000):
        with pytest.raises(ValueError, match="the port range cannot be greater than 65535"):
            port_ranges.parse(text)


@pytest.mark.parametrize("text", ["x", "1-", "-1", "5-3", "65536", "1-65536", "1+x", "1--2", "٣"])
def test_invalid_port_ranges(text: str) -> None:
    with pytest.raises(ValueError, match="port"):
        port_ranges.parse(text)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_survives_its_text(value: float) -> None:
    assert float(gotext.float_text(value)) == value
    assert float(gotext.general_text(value)) == value


@given(st.text(max_size=20))
def test_a_quoted_text_is_printable_and_in_one_line(text: str) -> None:
    quoted = gotext.quote(text)
    assert quoted[0] == quoted[-1] == '"'
    assert quoted.isprintable()
