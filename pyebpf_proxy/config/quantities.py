# SPDX-License-Identifier: Apache-2.0
"""Parses and formats Kubernetes quantities: ``1500m``, ``1.5Gi``, ``3e6`` (spec/configuration §2.9)."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

_FORM = re.compile(r"([-+]?)0*([0-9]*)(?:(\.)([0-9]*))?((?:[eEinumkKMGTP]*[-+]?[0-9]*)?)")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_DECIMAL_SUFFIX = {exponent: suffix for suffix, exponent in _DECIMAL.items()}
_BINARY_SUFFIX = {exponent: suffix for suffix, exponent in _BINARY.items()}
_MAX = (1 << 63) - 1
_MAX_DIGITS = 18
_LONGEST = 64


class Quantity(NamedTuple):
    """A quantity: its exact value, and the text that kube-proxy writes for it."""

    value: Fraction
    text: str


ZERO = Quantity(Fraction(0), "0")


def parse(text: str) -> Quantity:
    """Parse ``text``; ValueError with kube-proxy's message if it is not a quantity."""
    match = _FORM.fullmatch(text)
    if not text or match is None or len(text) > _LONGEST:
        raise ValueError("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")
    sign, whole, point, fraction, suffix = match[1], match[2], match[3], match[4] or "", match[5]
    base, exponent, kind = _suffix(suffix)
    if not whole and not point and not suffix:
        return ZERO
    digits = whole or "0"
    cached = _if_unchanged(text, digits, fraction, exponent, kind)
    value = Fraction(int(digits + fraction)) / 10 ** len(fraction) * Fraction(base) ** exponent
    if cached is None:
        scaled = value * 10**9
        value = Fraction(-(-scaled.numerator // scaled.denominator), 10**9)  # rounded up: never to zero
        if kind == "binary":
            value = min(value, Fraction(_MAX))
    if sign == "-":
        value = -value
    return Quantity(value, cached or _canonical(value, kind))


def _suffix(suffix: str) -> tuple[int, int, str]:
    if suffix in _DECIMAL:
        return 10, _DECIMAL[suffix], "decimal"
    if suffix in _BINARY:
        return 2, _BINARY[suffix], "binary"
    if re.fullmatch(r"[eE][-+]?[0-9]+", suffix) and abs(int(suffix[1:])) <= 1000:
        return 10, int(suffix[1:]), "exponent"
    raise ValueError("unable to parse quantity's suffix")


def _if_unchanged(text: str, digits: str, fraction: str, exponent: int, kind: str) -> str | None:
    """The text if kube-proxy keeps it unchanged; "" if kube-proxy writes it differently; None: use the full parser."""
    if kind == "binary":
        if fraction or 15 - len(digits) - int(exponent * 3 / 10) - 1 < 0 or int(digits) << exponent > _MAX:
            return None
        return text if exponent % 10 == 0 and int(digits) & 7 else ""
    scale = exponent - len(fraction)
    if len(digits) + len(fraction) > _MAX_DIGITS or scale < -9:
        return None
    shifted = digits + fraction
    return text if scale % 3 == 0 and not shifted.endswith("000") and shifted[0] != "0" else ""


def _canonical(value: Fraction, kind: str) -> str:
    if value == 0:
        return "0"
    if kind == "binary" and abs(value) >= 1024 and value.denominator == 1:
        number, exponent = value.numerator, 0
        while number % 1024 == 0 and exponent < 60:
            number, exponent = number // 1024, exponent + 10
        return f"{number}{_BINARY_SUFFIX.get(exponent, '')}"
    exponent = 0
    while value.denominator != 1:
        value, exponent = value * 1000, exponent - 3
    number = value.numerator
    while number % 1000 == 0:
        number, exponent = number // 1000, exponent + 3
    if kind == "exponent":
        return f"{number}e{exponent}" if exponent else str(number)
    # No suffix is larger than E: kube-proxy writes larger numbers without a suffix.
    return f"{number}{_DECIMAL_SUFFIX.get(exponent, '')}"
