# SPDX-License-Identifier: Apache-2.0
"""Escapes untrusted text for terminals and line-based readers.

Names of pods, processes and devices are untrusted. Control characters (C0, DEL, C1), line separators, bidirectional
marks, and halves of surrogate pairs are shown as escapes.
"""

from __future__ import annotations

import re

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str) -> str:
    """The text on one line, with Python's escapes: ``\\n``, ``\\x1b``, ``\\u202e``."""
    return _UNSAFE.sub(_escape, text)


def printable_json(text: str) -> str:
    """The same JSON, with escapes for unsafe characters that JSON permits. Lines and indentation are unchanged."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in "\n\r\t" else f"\\u{ord(found[0]):04x}", text)


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    return _SHORT.get(found[0]) or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")
