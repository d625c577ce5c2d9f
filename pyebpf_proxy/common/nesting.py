# SPDX-License-Identifier: Apache-2.0
"""JSON that is nested too deeply for Python's parsers. A tenant can write it: the API server keeps what a client sends
as ``metadata.managedFields``, to a depth of ten thousand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

#: No field that is used is nested so deeply.
DEEPEST = 50

_T = TypeVar("_T")

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[][{}]', re.DOTALL)


def decode_nested(decode: Callable[[Any], _T], data: Any) -> _T:
    """``decode(data)``; of JSON that is nested too deeply for it, ``decode`` of its :func:`shallow` form.

    ``data``: what ``bytes`` accepts. Errors as of ``decode``.
    """
    try:
        return decode(data)
    except RecursionError:
        return decode(shallow(bytes(data)))


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
