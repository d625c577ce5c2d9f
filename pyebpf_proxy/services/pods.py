# SPDX-License-Identifier: Apache-2.0
"""Names of the pods of a slice, kept small: those of one ReplicaSet differ in their last five letters only.

A hundred thousand of them take a megabyte or two. They are for people; no decision goes by them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .endpoints import SliceView

# No name has either of them: the first stands between names, the second for an endpoint that is no pod.
_BETWEEN, _NOBODY = "\0", "/"


def packed(names: Sequence[str]) -> bytes:
    """What the names begin with, and the rest of each; "" is an endpoint that is no pod. b"": none is one."""
    known = [name for name in names if name]
    if not known:
        return b""
    common = os.path.commonprefix([min(known), max(known)])  # noqa: RUF071 (letters are meant)
    rests = (name[len(common) :] if name else _NOBODY for name in names)
    return _BETWEEN.join((common, *rests)).encode()


def unpacked(data: bytes) -> Iterator[str]:
    """The names again, "" for an endpoint that is no pod; nothing at all where no endpoint is one."""
    if data:
        common, *rests = data.decode().split(_BETWEEN)
        yield from ("" if rest == _NOBODY else common + rest for rest in rests)


def named(slices: Iterable[tuple[str, Iterable[SliceView]]], addresses: Collection[bytes]) -> Mapping[bytes, str]:
    """The pods that have these addresses, ``namespace/name``. ``slices``: by the namespace that they are in."""
    wanted = frozenset(addresses)
    found: dict[bytes, str] = {}
    for namespace, views in slices:
        for view in views:
            if not view.pods:
                continue
            here = [(i, address) for i, (address, _, _) in enumerate(view.members()) if address in wanted]
            if here:
                names = list(unpacked(view.pods))
                found.update((address, f"{namespace}/{names[i]}") for i, address in here if names[i])
    return found
