# SPDX-License-Identifier: Apache-2.0
"""Values as Go prints and parses them: quoted strings, numbers, booleans. kube-proxy's messages contain them."""

from __future__ import annotations

import math
import re
import struct
from decimal import Decimal

from pyebpf_proxy.common.digits import bounded_int

_TRUE = frozenset(("1", "t", "T", "true", "TRUE", "True"))
_FALSE = frozenset(("0", "f", "F", "false", "FALSE", "False"))
_ESCAPES = {
    "\a": "\\a",
    "\b": "\\b",
    "\f": "\\f",
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
    "\v": "\\v",
    '"': '\\"',
    "\\": "\\\\",
}
_INTEGER = re.compile(r"(?P<sign>[-+]?)(?P<base>0[xX]|0[oO]|0[bB]|)(?P<digits>[0-9a-zA-Z_]+)")
_DIGITS = r"[0-9](?:_?[0-9])*"
_FLOAT = re.compile(rf"[-+]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][-+]?{_DIGITS})?")
_HEX_FLOAT = re.compile(r"[-+]?0[xX](?:[0-9a-fA-F_]+(?:\.[0-9a-fA-F_]*)?|\.[0-9a-fA-F_]+)[pP][-+]?[0-9]+")
_NO_NUMBER = re.compile(r"[-+]?(?:inf|infinity)|nan", re.IGNORECASE)
#: Out of range of every type.
_TOO_LARGE = 1 << 128
_BASES = {"0x": 16, "0o": 8, "0b": 2}
_MAX_FLOAT32 = 3.4028235677973366e38  # from this value on, a number rounds to infinity


def quote(text: str) -> str:
    """Go's %q."""
    return '"' + "".join(_quoted(character) for character in text) + '"'


def _quoted(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character == " " or character.isprintable():
        return character
    code = ord(character)
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def parse_bool(text: str) -> bool:
    """strconv.ParseBool."""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"strconv.ParseBool: parsing {quote(text)}: invalid syntax")


def parse_int(text: str, bits: int) -> int:
    """strconv.ParseInt with base 0: it accepts ``0x``, ``0o``, ``0b``, a leading zero, underscores between digits."""
    value = _integer(text)
    if value is None:
        raise ValueError(f"strconv.ParseInt: parsing {quote(text)}: invalid syntax")
    if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise ValueError(f"strconv.ParseInt: parsing {quote(text)}: value out of range")
    return value


def parse_uint(text: str, bits: int) -> int:
    """strconv.ParseUint with base 10: no sign."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"strconv.ParseUint: parsing {quote(text)}: invalid syntax")
    value = bounded_int(text, 1 << bits)
    if value == 1 << bits:
        raise ValueError(f"strconv.ParseUint: parsing {quote(text)}: value out of range")
    return value


def _integer(text: str) -> int | None:
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    digits = match["digits"]
    base = _BASES.get(match["base"].lower(), 10)
    if base == 10 and len(digits) > 1 and digits[0] == "0":
        base, digits = 8, digits[1:]
        if digits[0] == "_":
            digits = digits[1:]
    elif match["base"] and digits[0] == "_":
        digits = digits[1:]
    if digits[:1] in ("", "_") or digits[-1] == "_" or "__" in digits:
        return None
    digits = digits.replace("_", "")
    if base == 10 and digits.isdigit():
        value = bounded_int(digits, _TOO_LARGE)
    else:
        try:
            value = int(digits, base)
        except ValueError:
            return None
    return -value if match["sign"] == "-" else value


def is_float(text: str) -> bool:
    """Whether strconv.ParseFloat accepts ``text`` as a decimal number."""
    return _FLOAT.fullmatch(text) is not None


def parse_float32(text: str) -> float:
    """strconv.ParseFloat with 32 bits: the nearest value of that size."""
    if is_float(text):
        value = float(text.replace("_", ""))
    elif _HEX_FLOAT.fullmatch(text):
        value = float.fromhex(text.replace("_", ""))
    elif _NO_NUMBER.fullmatch(text):
        return float(text)
    else:
        raise ValueError(f"strconv.ParseFloat: parsing {quote(text)}: invalid syntax")
    if abs(value) >= _MAX_FLOAT32:
        raise ValueError(f"strconv.ParseFloat: parsing {quote(text)}: value out of range")
    return float(struct.unpack("f", struct.pack("f", value))[0])


def float_text(value: float, bits: int = 64) -> str:
    """The number as Go's JSON writes it: the shortest digits, an exponent only below 1e-6 and from 1e21 on."""
    if value == 0:
        return "-0" if math.copysign(1, value) < 0 else "0"
    shortest = Decimal(repr(value) if bits == 64 else _shortest32(value))
    exponent = shortest.adjusted()
    if -7 < exponent < 21:
        text = f"{shortest:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    sign, digits, _ = shortest.as_tuple()
    mantissa = "".join(map(str, digits)).rstrip("0")
    point = "." + mantissa[1:] if len(mantissa) > 1 else ""
    # Go's JSON encoder removes the leading zero of negative exponents; positive ones always have two digits.
    return f"{'-' if sign else ''}{mantissa[0]}{point}e{'-' if exponent < 0 else '+'}{abs(exponent)}"


def _shortest32(value: float) -> str:
    for digits in range(1, 10):
        text = f"{value:.{digits}g}"
        if struct.pack("f", float(text)) == struct.pack("f", value):
            return text
    return repr(value)


def general_text(value: float) -> str:
    """strconv.FormatFloat with format g and the fewest digits: an exponent below 1e-4 and from 1e6 on."""
    shortest = Decimal(repr(value))
    sign, digits, _ = shortest.as_tuple()
    mantissa = "".join(map(str, digits)).rstrip("0") or "0"
    exponent = shortest.adjusted()
    if -5 < exponent < 6:
        text = f"{shortest:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    point = "." + mantissa[1:] if len(mantissa) > 1 else ""
    return f"{'-' if sign else ''}{mantissa[0]}{point}e{'-' if exponent < 0 else '+'}{abs(exponent):02}"
