# SPDX-License-Identifier: Apache-2.0
"""Numbers of any length: Python's ``int`` raises ValueError for decimal texts of more than 4300 digits."""

from __future__ import annotations


def bounded_int(digits: str, most: int) -> int:
    """The number that these decimal digits stand for, or ``most`` if it is larger."""
    significant = digits.lstrip("0")
    return most if len(significant) > len(str(most)) else min(most, int(significant or "0"))
