# SPDX-License-Identifier: Apache-2.0
"""What was delivered of one resource, as hashes: enough to tell what differs, and no second copy of any object."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from .. import decode
from ..decode import ObjectKey
from ..source import Change, Kind, Object

_encoder = msgspec.msgpack.Encoder()


class Read(NamedTuple):
    """One object, read: its identity, and the object unless it breaks a rule."""

    key: ObjectKey | None
    object: Object | None


class Inventory:
    """``report`` is given one line for each object that breaks a rule, once until it changes."""

    def __init__(self, kind: Kind, report: Callable[[str], None]) -> None:
        self._kind = kind
        self._report = report
        #: By (namespace, name). Python's hash of bytes is keyed by chance: nobody can make two objects look the same.
        self._hashes: dict[tuple[str, str], int] = {}
        #: What was said of objects, and which of them are not used.
        self._told: dict[tuple[str, str], tuple[str, ...]] = {}
        self._refused: set[tuple[str, str]] = set()
        self._nameless: set[tuple[str, ...]] = set()

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def refused(self) -> int:
        """How many objects are not used as they are."""
        return len(self._refused)

    @property
    def in_part(self) -> int:
        """How many objects are used without something that is wrong in them."""
        return len(self._told) - len(self._refused)

    def read(self, data: bytes | msgspec.Raw) -> Read:
        """Decode and check an object; tell what is wrong with it. Raises UnreadableError for what is no JSON."""
        key, value, messages, _ = decode.decode_object(self._kind, data)
        if key is None:
            if messages not in self._nameless and len(self._nameless) < 1000:
                self._nameless.add(messages)
                self._tell(messages, kept=False)
            return Read(None, None)
        short = (key.namespace, key.name)
        if messages != self._told.get(short, ()):
            self._tell(messages, kept=value is None and short in self._hashes)
        if messages:
            self._told[short] = messages
        else:
            self._told.pop(short, None)
        if value is None:
            self._refused.add(short)
        else:
            self._refused.discard(short)
        return Read(key, value)

    def change(self, read: Read) -> list[Change]:
        """What an object that was added or modified changes: itself, or nothing."""
        if read.key is None or read.object is None:
            return []  # its last good state stays
        short = (read.key.namespace, read.key.name)
        now = _hash(read.object)
        if self._hashes.get(short) == now:
            return []
        self._hashes[short] = now
        return [Change(read.key.kind, *short, read.object)]

    def remove(self, namespace: str, name: str) -> list[Change]:
        """What an object that is deleted changes."""
        short = (namespace, name)
        self._told.pop(short, None)
        self._refused.discard(short)
        if self._hashes.pop(short, None) is None:
            return []
        return [Change(self._kind, namespace, name, None)]

    def keep_only(self, keys: Iterable[ObjectKey]) -> list[Change]:
        """Everything was listed: what is not among ``keys`` is gone."""
        there = {(key.namespace, key.name) for key in keys}
        changes = []
        for namespace, name in sorted((self._hashes.keys() | self._refused) - there):
            changes += self.remove(namespace, name)
        return changes

    def _tell(self, messages: tuple[str, ...], *, kept: bool) -> None:
        for message in messages:
            self._report(message + ("; its last good state stays" if kept else ""))


def _hash(value: Object) -> int:
    """Of everything that matters. Annotations only say things about what stands elsewhere in the object."""
    metadata = value.metadata
    annotations, metadata.annotations = metadata.annotations, None
    try:
        return hash(_encoder.encode(value))
    finally:
        metadata.annotations = annotations
