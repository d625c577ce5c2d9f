# SPDX-License-Identifier: Apache-2.0
"""Stores the names of a slice's pods compactly: pods of one ReplicaSet differ only in their last five letters.

A hundred thousand names take one or two megabytes. They are only displayed; no decision depends on them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

# Characters that no name contains: the separator of names, and the mark of an endpoint that is not a pod.
_SEPARATOR, _NO_POD = "\0", "/"
#: Between several names of one address.
OR = " or "


def packed(names: Sequence[str]) -> bytes:
    """Pack names: the common prefix, then the rest of each. "" stands for an endpoint that is not a pod.

    The result is b"" if no endpoint is a pod.
    """
    known = [name for name in names if name]
    if not known:
        return b""
    common = os.path.commonprefix([min(known), max(known)])  # noqa: RUF071 (letters, not path components)
    rests = (name[len(common) :] if name else _NO_POD for name in names)
    return _SEPARATOR.join((common, *rests)).encode()


def unpacked(data: bytes) -> Iterator[str]:
    """Unpack the names, with "" for an endpoint that is not a pod; nothing if no endpoint is a pod."""
    if data:
        common, *rests = data.decode().split(_SEPARATOR)
        yield from ("" if rest == _NO_POD else common + rest for rest in rests)
