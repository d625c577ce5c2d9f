# SPDX-License-Identifier: Apache-2.0
"""JSON that Go's parser reads, but not those of Python: nested too deeply, or with halves of surrogate pairs.

A tenant can write it: the API server keeps what a client sends as ``metadata.managedFields``, to a depth of ten
thousand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

#: No field that is used is nested so deeply.
DEEPEST = 50

_T = TypeVar("_T")

_HIGH, _LOW = (rb"u[dD][%b][0-9a-fA-F]{2}" % digits for digits in (b"89abAB", b"c-fC-F"))
#: An escape, or two for the halves of a pair. Those of single halves have the group ``half``.
_ESCAPE = re.compile(rb"\\(?:%b\\%b|(?P<half>%b|%b)|.)" % (_HIGH, _LOW, _HIGH, _LOW), re.DOTALL)

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[][{}]', re.DOTALL)


def decode_nested(decode: Callable[[Any], _T], data: Any) -> _T:
    """``decode(data)``; of JSON that it cannot read, ``decode`` of its :func:`shallow` form with
    :func:`whole` characters.

    ``data``: what ``bytes`` accepts. Errors as of ``decode``.
    """
    try:
        return decode(data)
    except RecursionError:
        mended = whole(bytes(data))
    except msgspec.DecodeError:
        mended = whole(bytes(data))
        if mended == bytes(data):
            raise
    return decode(shallow(mended))


def whole(data: bytes) -> bytes:
    """The same JSON with U+FFFD instead of every half of a surrogate pair, as Go reads it."""
    # In place, since both are of the same length. With ``sub``, a text of escapes would take thirty times its size.
    mended = bytearray(data)
    for found in _ESCAPE.finditer(data):
        if found["half"] is not None:
            mended[found.start() : found.end()] = b"\\ufffd"
    return bytes(mended)


def shallow(data: bytes) -> bytes:
    """The same JSON with ``null`` instead of every list and object below :data:`DEEPEST` others."""
    kept: list[bytes] = []
    depth = begin = 0
    for token in _TOKEN.finditer(data):
        char = token[0]
        if char in (b"{", b"["):
            depth += 1
            if depth == DEEPEST + 1:
                kept += data[begin : token.start()], b"null"
        elif char in (b"}", b"]"):
            if depth == DEEPEST + 1:
                begin = token.end()
            depth -= 1
    # If the deep part does not end, the text is no JSON, with it or without.
    return b"".join((*kept, data[begin:] if depth <= DEEPEST else b""))
