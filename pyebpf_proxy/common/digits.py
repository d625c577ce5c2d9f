# SPDX-License-Identifier: Apache-2.0
"""Numbers of any length: Python's ``int`` raises ValueError for decimal texts of more than 4300 digits."""

from __future__ import annotations


def bounded_int(digits: str, most: int) -> int:
    """The number that these decimal digits stand for, or ``most`` if it is larger."""
    significant = digits.lstrip("0")
    return most if len(significant) > len(str(most)) else min(most, int(significant or "0"))


def port_number(text: str) -> int | None:
    """The port from 1 to 65535 that this text names in decimal ASCII digits, or None."""
    number = bounded_int(text, 65536) if text.isascii() and text.isdigit() else 0
    return number if 0 < number < 65536 else None
