# SPDX-License-Identifier: Apache-2.0
"""Numbers of any length (Python's int takes 4300 digits)."""

from __future__ import annotations

import pytest

from pyebpf_proxy.common.digits import bounded_int


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
