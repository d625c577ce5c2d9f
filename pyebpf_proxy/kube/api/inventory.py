# SPDX-License-Identifier: Apache-2.0
"""Hashes of the delivered objects of one resource. They detect differences without a second copy of the objects."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from pyebpf_proxy.kube import decode
from pyebpf_proxy.kube.decode import ObjectKey
from pyebpf_proxy.kube.objects import EndpointSlice
from pyebpf_proxy.kube.source import Change, Kind, Object

#: How many lines about the objects of one namespace are logged in this time (seconds). An object has at most 101 lines,
#: and a tenant can change them all with every update.
MOST_LINES, LINES_SECONDS = 200, 10.0

_UID_BITS = 32
_UID = (1 << _UID_BITS) - 1

_encoder = msgspec.msgpack.Encoder()


class Read(NamedTuple):
    """A decoded object: its identity, the object unless it is invalid, and a hash of its UID (0: not known).

    ``keeps_former``: if it is invalid, its last valid state stays.
    """

    key: ObjectKey | None
    object: Object | None
    uid: int = 0
    keeps_former: bool = True


class Inventory:
    """The delivered objects. ``report`` is called with a line for each error in an object, once until this changes."""

    def __init__(self, kind: Kind, report: Callable[[str], None]) -> None:
        self._kind = kind
        self._report = report
        #: By (namespace, name): the hash of the content, and below it that of the UID, in one number to save memory.
        #: Python's hashes of bytes and texts are randomized: collisions cannot be crafted.
        self._hashes: dict[tuple[str, str], int] = {}
        #: Hashes of the messages reported for objects, and which objects are refused. The messages of an object may be
        #: several times as large as the object.
        self._logged: dict[tuple[str, str], int] = {}
        self._refused: set[tuple[str, str]] = set()
        self._nameless: set[tuple[str, ...]] = set()
        #: By namespace, the lines since ``_lines_since``.
        self._lines: Counter[str] = Counter()
        self._lines_since = 0.0

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def refused(self) -> int:
        """The number of refused objects."""
        return len(self._refused)

    @property
    def in_part(self) -> int:
        """The number of objects that are used without their invalid parts."""
        return len(self._logged) - len(self._refused)

    def read(self, data: bytes | msgspec.Raw) -> Read:
        """Decode and check an object; report its errors. Raises UnreadableError if it is not JSON."""
        key, value, messages, _, uid_text, too_large = decode.decode_object(self._kind, data)
        uid = hash(uid_text) & _UID if uid_text else 0
        if key is None:
            if messages not in self._nameless and len(self._nameless) < 1000:
                self._nameless.add(messages)
                self._report_all("", messages, "")
            return Read(None, None)
        short = (key.namespace, key.name)
        # The API server accepts such a Service. It may have freed addresses, and given them to others: with its last
        # state, it would take their connections.
        keeps_former = not (too_large and self._kind == "Service")
        if not messages:
            self._logged.pop(short, None)
        elif self._logged.get(short) != hash(messages):
            self._logged[short] = hash(messages)
            kept = value is None and short in self._hashes and not self._is_another(short, uid)
            after = "; its last good state stays" if kept else ""
            self._report_all(key.namespace, messages, after if keeps_former else "; it is not served")
        if value is None:
            self._refused.add(short)
        else:
            self._refused.discard(short)
        return Read(key, value, uid, keeps_former)

    def change(self, read: Read) -> list[Change]:
        """The change from an added or modified object; none if it is invalid or the same as before.

        The last valid state of an invalid object stays, but not that of a deleted object of the same name, nor that of
        a Service that has too many values by now.
        """
        if read.key is None:
            return []
        short = (read.key.namespace, read.key.name)
        if read.object is None:
            if read.keeps_former and not self._is_another(short, read.uid):
                return []
            if self._hashes.pop(short, None) is None:
                return []
            return [Change(self._kind, *short, None)]
        now = _hash(read.object)
        before = self._hashes.get(short)
        self._hashes[short] = now << _UID_BITS | read.uid
        if before is not None and before >> _UID_BITS == now:
            return []
        return [Change(read.key.kind, *short, read.object)]

    def _is_another(self, short: tuple[str, str], uid: int) -> bool:
        """Whether the delivered object of this name has another UID: its deletion was missed."""
        known = self._hashes.get(short, 0) & _UID
        return known != uid and known != 0 and uid != 0

    def remove(self, namespace: str, name: str) -> list[Change]:
        """The changes from a deleted object."""
        short = (namespace, name)
        self._logged.pop(short, None)
        self._refused.discard(short)
        if self._hashes.pop(short, None) is None:
            return []
        return [Change(self._kind, namespace, name, None)]

    def keep_only(self, keys: Iterable[ObjectKey]) -> list[Change]:
        """The deletions after a complete list: all objects that are not in ``keys``."""
        there = {(key.namespace, key.name) for key in keys}
        changes = []
        for namespace, name in sorted((self._hashes.keys() | self._refused) - there):
            changes += self.remove(namespace, name)
        return changes

    def _report_all(self, namespace: str, messages: tuple[str, ...], after: str) -> None:
        now = time.monotonic()
        if now - self._lines_since >= LINES_SECONDS:
            self._lines.clear()
            self._lines_since = now
        for message in messages:
            self._lines[namespace] += 1
            if self._lines[namespace] > MOST_LINES:
                break
            self._report(message + after)
        if self._lines[namespace] == MOST_LINES + 1:
            where = f" of namespace {namespace}" if namespace else ""
            what = f"for {LINES_SECONDS:g} s no more errors in objects of kind {self._kind}{where} are logged"
            self._report(what)


def _hash(value: Object) -> int:
    """The hash of an object without its annotations: a change of these alone has no effect.

    Except for the time in a slice's annotation, which is measured (spec/metrics §3), whatever else has changed.
    """
    metadata = value.metadata
    annotations, metadata.annotations = metadata.annotations, None
    try:
        encoded = _encoder.encode(value)
    finally:
        metadata.annotations = annotations
    if annotations is None or annotations.last_change_trigger_time is None or not isinstance(value, EndpointSlice):
        return hash(encoded)
    return hash((encoded, annotations.last_change_trigger_time))
