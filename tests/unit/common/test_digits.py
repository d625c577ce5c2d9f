# SPDX-License-Identifier: Apache-2.0
"""Numbers of any length (Python's int takes 4300 digits)."""

from __future__ import annotations

import pytest

from pyebpf_proxy.common.digits import bounded_int, port_number


@pytest.mark.parametrize(
    ("digits", "number"),
    [
        ("", 0),
        ("0", 0),
        ("0099", 99),
        ("100", 100),
        ("101", 100),
        ("1000", 100),
        ("9" * 5000, 100),
        ("0" * 5000 + "7", 7),
    ],
)
def test_a_number_is_at_most_its_bound(digits: str, number: int) -> None:
    assert bounded_int(digits, 100) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("00080", 80),
        ("65535", 65535),
        ("", None),
        ("0", None),
        ("65536", None),
        ("-1", None),
        ("+1", None),
        ("1_0", None),
        (" 80", None),
        ("²", None),
        ("٣", None),
        ("9" * 5000, None),
    ],
)
def test_a_port_is_a_number_in_ascii_digits(text: str, number: int | None) -> None:
    assert port_number(text) == number
