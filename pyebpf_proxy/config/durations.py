# SPDX-License-Identifier: Apache-2.0
"""Durations as Go writes them (``1h30m``, ``250ms``): nanoseconds in, nanoseconds out (spec/configuration §1.2)."""

from __future__ import annotations

import re

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
    """Nanoseconds of ``text``; ValueError with Go's own words when it is not a duration."""
    rest = text
    negative = False
    if rest[:1] in ("+", "-"):
        negative = rest[0] == "-"
        rest = rest[1:]
    if rest == "0":
        return 0
    if not rest:
        raise ValueError(f"time: invalid duration {_quoted(text)}")
    total = 0
    while rest:
        term = _TERM.match(rest)
        if term is None or not (term[1] or term[2]):
            raise ValueError(f"time: invalid duration {_quoted(text)}")
        whole, fraction, unit = term[1], term[2] or "", term[3]
        if not unit:
            raise ValueError(f"time: missing unit in duration {_quoted(text)}")
        if unit not in _UNITS:
            raise ValueError(f"time: unknown unit {_quoted(unit)} in duration {_quoted(text)}")
        scale = _UNITS[unit]
        total += int(whole or "0") * scale
        if fraction:
            # Go scales in floating point, but truncates: whole nanoseconds, never rounded up.
            total += int(fraction) * scale // 10 ** len(fraction)
        if total > _LIMIT:
            raise ValueError(f"time: invalid duration {_quoted(text)}")
        rest = rest[term.end() :]
    if negative:
        return -total
    if total >= _LIMIT:
        raise ValueError(f"time: invalid duration {_quoted(text)}")
    return total


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


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
