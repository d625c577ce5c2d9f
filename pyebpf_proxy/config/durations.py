# SPDX-License-Identifier: Apache-2.0
"""Durations as Go writes them (``1h30m``, ``250ms``): nanoseconds in, nanoseconds out (spec/configuration §1.2)."""

from __future__ import annotations

import re

from pyebpf_proxy.common.digits import bounded_int

NANOSECOND = 1
MICROSECOND = 1_000
MILLISECOND = 1_000_000
SECOND = 1_000_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE

_UNITS = {
    "ns": NANOSECOND,
    "us": MICROSECOND,
    "µs": MICROSECOND,  # U+00B5 micro sign
    "μs": MICROSECOND,  # U+03BC Greek mu
    "ms": MILLISECOND,
    "s": SECOND,
    "m": MINUTE,
    "h": HOUR,
}
_TERM = re.compile(r"([0-9]*)(?:\.([0-9]*))?([^0-9.]*)")
_LIMIT = 1 << 63


def parse(text: str) -> int:
    """Nanoseconds of ``text``; ValueError with Go's message if it is not a duration."""
    rest = text
    negative = False
    if rest[:1] in ("+", "-"):
        negative = rest[0] == "-"
        rest = rest[1:]
    if rest == "0":
        return 0
    if not rest:
        raise _invalid(text)
    total = 0
    while rest:
        term = _TERM.match(rest)
        if term is None or not (term[1] or term[2]):
            raise _invalid(text)
        whole, unit = bounded_int(term[1], _LIMIT + 1), term[3]
        if whole > _LIMIT:
            raise _invalid(text)
        if not unit:
            raise ValueError(f"time: missing unit in duration {_quoted(text)}")
        if unit not in _UNITS:
            raise ValueError(f"time: unknown unit {_quoted(unit)} in duration {_quoted(text)}")
        total += whole * _UNITS[unit] + _fraction(term[2] or "", _UNITS[unit])
        if total > _LIMIT:
            raise _invalid(text)
        rest = rest[term.end() :]
    if negative:
        return -total
    if total >= _LIMIT:
        raise _invalid(text)
    return total


def _fraction(digits: str, unit: int) -> int:
    """Nanoseconds of the digits after the point, in floating point and truncated, as in Go."""
    value, scale = 0, 1.0
    for digit in digits:
        grown = value * 10 + int(digit)
        if value > (_LIMIT - 1) // 10 or grown > _LIMIT:
            break  # further digits have no effect
        value, scale = grown, scale * 10
    return int(float(value) * (float(unit) / scale))


def format(nanoseconds: int) -> str:  # noqa: A001 - durations.format reads as what it is
    """The canonical text: ``1h0m0s``, ``1.5s``, ``250ms``, ``0s``."""
    if nanoseconds == 0:
        return "0s"
    sign = "-" if nanoseconds < 0 else ""
    value = abs(nanoseconds)
    if value < SECOND:
        for unit, scale in (("ms", MILLISECOND), ("µs", MICROSECOND), ("ns", NANOSECOND)):
            if value >= scale:
                return f"{sign}{_decimal(value, scale)}{unit}"
    hours, value = divmod(value, HOUR)
    minutes, value = divmod(value, MINUTE)
    text = f"{_decimal(value, SECOND)}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    if hours:
        text = f"{hours}h{text}"
    return sign + text


def seconds(nanoseconds: int) -> float:
    """The duration in seconds, for clocks and timers."""
    return nanoseconds / SECOND


def _decimal(value: int, scale: int) -> str:
    whole, rest = divmod(value, scale)
    digits = len(str(scale)) - 1
    return f"{whole}.{rest:0{digits}}".rstrip("0").rstrip(".") if rest else str(whole)


def _invalid(text: str) -> ValueError:
    return ValueError(f"time: invalid duration {_quoted(text)}")


def _quoted(text: str) -> str:
    # Not Go's usual quoting: package time has its own, byte by byte.
    quoted = ""
    for character in text:
        if character in '"\\':
            quoted += "\\" + character
        elif " " <= character < "\x80":
            quoted += character
        else:
            quoted += "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))
    return f'"{quoted}"'
