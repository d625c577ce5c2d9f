# SPDX-License-Identifier: Apache-2.0
"""Go's durations (spec/configuration §1.2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyebpf_proxy.config import durations


@pytest.mark.parametrize(
    ("text", "nanoseconds", "canonical"),
    [
        ("0", 0, "0s"),
        ("+0", 0, "0s"),
        ("30s", 30_000_000_000, "30s"),
        ("1h", 3_600_000_000_000, "1h0m0s"),
        ("15m", 900_000_000_000, "15m0s"),
        ("1.5s", 1_500_000_000, "1.5s"),
        ("1500ms", 1_500_000_000, "1.5s"),
        (".5s", 500_000_000, "500ms"),
        ("5.s", 5_000_000_000, "5s"),
        ("250ms", 250_000_000, "250ms"),
        ("1us", 1_000, "1µs"),
        ("1µs", 1_000, "1µs"),
        ("1μs", 1_000, "1µs"),
        ("7ns", 7, "7ns"),
        ("1h2m3.004s", 3_723_004_000_000, "1h2m3.004s"),
        ("-1m", -60_000_000_000, "-1m0s"),
        ("9223372036854775807ns", (1 << 63) - 1, "2562047h47m16.854775807s"),
        ("-9223372036854775808ns", -(1 << 63), "-2562047h47m16.854775808s"),
    ],
)
def test_a_duration_is_read_and_written_as_go_does(text: str, nanoseconds: int, canonical: str) -> None:
    assert durations.parse(text) == nanoseconds
    assert durations.format(nanoseconds) == canonical


def test_numbers_of_thousands_of_digits_are_read_as_go_reads_them() -> None:
    """Python's int() takes 4300 digits."""
    text = "9" * 5000 + "s"
    with pytest.raises(ValueError, match=r"^time: ") as caught:
        durations.parse(text)
    assert str(caught.value) == f'time: invalid duration "{text}"'
    assert durations.parse("0" * 5000 + "1s") == durations.SECOND


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'time: invalid duration ""'),
        ("-", 'time: invalid duration "-"'),
        ("5", 'time: missing unit in duration "5"'),
        ("s", 'time: invalid duration "s"'),
        (".s", 'time: invalid duration ".s"'),
        ("1 s", 'time: unknown unit " s" in duration "1 s"'),
        ("1d", 'time: unknown unit "d" in duration "1d"'),
        ("1s-2s", 'time: unknown unit "s-" in duration "1s-2s"'),
        ("9223372036854775808ns", 'time: invalid duration "9223372036854775808ns"'),
        ("-9223372036854775809ns", 'time: invalid duration "-9223372036854775809ns"'),
        ("٣s", 'time: invalid duration "\\xd9\\xa3s"'),
    ],
)
def test_what_go_rejects_is_rejected_with_its_message(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^time: ") as caught:
        durations.parse(text)
    assert str(caught.value) == message


@given(st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1))
def test_what_is_written_is_read_back(nanoseconds: int) -> None:
    assert durations.parse(durations.format(nanoseconds)) == nanoseconds
