# SPDX-License-Identifier: Apache-2.0
"""Records which file contains which object, and decides between duplicates. It receives texts and does no I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from pyebpf_proxy.kube import decode
from pyebpf_proxy.kube.decode import Decoded, ObjectKey
from pyebpf_proxy.kube.limits import UnreadableError
from pyebpf_proxy.kube.source import Change, Object

#: Used as the kind of objects that have no name or cannot be read.
UNREADABLE = "unreadable"
#: How many lines about the objects of one file are logged at a time.
MOST_LINES = 1000


class _File(NamedTuple):
    digest: bytes
    objects: dict[ObjectKey, Object]


class DecodedFile(NamedTuple):
    """The text of a file, decoded. ``complete``: every object could be identified. ``bad``: see ``Catalogue``."""

    digest: bytes
    objects: dict[ObjectKey, Object]
    complete: bool
    bad: dict[str, list[int]]


class Catalogue:
    """The objects of a directory of files, by file.

    An object that becomes invalid keeps its last valid state. Of duplicates, the one in the last file by name is used.

    :param report: called with one line for each problem that the user should fix.
    :param note: called with one line for everything that is ignored on purpose.
    """

    def __init__(self, report: Callable[[str], None], note: Callable[[str], None]) -> None:
        self._report = report
        self._note = note
        self._files: dict[str, _File] = {}
        self._holders: dict[ObjectKey, list[str]] = {}
        self._delivered: dict[ObjectKey, Object] = {}
        self._duplicates: dict[ObjectKey, tuple[str, ...]] = {}
        self._ignored: set[tuple[str, str]] = set()
        self._touched: set[ObjectKey] = set()
        #: By file, then by kind: the numbers of objects that are refused, and that are used in part.
        self._bad: dict[str, dict[str, list[int]]] = {}

    def __len__(self) -> int:
        return len(self._delivered)

    @property
    def files(self) -> Iterable[str]:
        """Names of the files that have been read, whatever their content."""
        return self._files.keys()

    @property
    def bad(self) -> dict[str, tuple[int, int]]:
        """By kind, how many objects are refused, and how many are used in part. UNREADABLE: the kind is not known."""
        found = dict.fromkeys((*decode.KINDS, UNREADABLE), (0, 0))
        for of in self._bad.values():
            for kind, (refused, in_part) in of.items():
                found[kind] = (found[kind][0] + refused, found[kind][1] + in_part)
        return found

    def read(self, name: str, data: bytes) -> None:
        """Update a file's text. An unchanged text is only hashed."""
        if (decoded := self.decode(name, data)) is not None:
            self.take(name, decoded)

    def decode(self, name: str, data: bytes) -> DecodedFile | None:
        """Decode a file's text for :meth:`take`; None if it is unchanged.

        In any thread. Meanwhile, other methods may be called for other files.
        """
        digest = hashlib.blake2b(data, digest_size=16).digest()
        before = self._files.get(name)
        if before is not None and before.digest == digest:
            return None
        return self._decode(name, data, digest, before.objects if before is not None else {})

    def take(self, name: str, decoded: DecodedFile) -> None:
        """Update a file. It must not have been updated or removed since its text was decoded."""
        before = self._files.get(name)
        old = before.objects if before is not None else {}
        objects = decoded.objects
        self._bad.pop(name, None)
        if decoded.bad:
            self._bad[name] = decoded.bad
        if not decoded.complete:
            # Keep all old objects: the part that could not be identified may be any of them.
            objects = {**old, **objects}
        for key in old.keys() - objects.keys():
            self._release(key, name)
        for key in objects.keys() - old.keys():
            self._holders.setdefault(key, []).append(name)
        self._touched |= {key for key in old.keys() | objects.keys() if old.get(key) != objects.get(key)}
        self._files[name] = _File(decoded.digest, objects)

    def remove(self, name: str) -> None:
        """Remove a file and its objects."""
        file = self._files.pop(name, None)
        self._bad.pop(name, None)
        if file is None:
            return
        for key in file.objects:
            self._release(key, name)
        self._touched |= file.objects.keys()

    def changes(self, leaving: Iterable[str] = (), removals: bool = True) -> list[Change]:
        """The difference from the previous call.

        :param leaving: files that are missing, perhaps only for a moment. All other files have precedence over them.
        :param removals: whether objects that are in no file any more are removed now, and not by a later call.
        """
        touched, self._touched = self._touched, set()
        changes = []
        for key in sorted(touched):
            holders = self._holders.get(key, ())
            winner = max(holders, key=lambda name: (name not in leaving, name), default=None)
            self._report_duplicate(key, tuple(sorted(name for name in holders if name not in leaving)))
            now = self._files[winner].objects[key] if winner is not None else None
            if now == self._delivered.get(key):
                continue
            if now is None:
                if not removals:
                    self._touched.add(key)
                    continue
                del self._delivered[key]
            else:
                self._delivered[key] = now
            changes.append(Change(key.kind, key.namespace, key.name, now))
        return changes

    def _decode(self, name: str, data: bytes, digest: bytes, old: dict[ObjectKey, Object]) -> DecodedFile:
        """The file's objects, invalid ones in their old state."""
        objects: dict[ObjectKey, Object] = {}
        complete = True
        bad: dict[str, list[int]] = {}
        lines = 0

        def report(text: str) -> None:
            nonlocal lines
            lines += 1
            if lines <= MOST_LINES:
                self._report(f"{name}: {text}")

        for decoded in self._documents(name, data):
            if decoded is None:
                complete = False
                bad.setdefault(UNREADABLE, [0, 0])[0] += 1
                continue
            key, value, messages, ignored = decoded[:4]
            if messages:
                bad.setdefault(key.kind if key is not None else UNREADABLE, [0, 0])[value is not None] += 1
            for message in messages:
                kept = key is not None and value is None and key in old
                report(message + ("; its last good state stays" if kept else ""))
            if ignored is not None:
                if (name, ignored) not in self._ignored and len(self._ignored) < MOST_LINES:
                    self._ignored.add((name, ignored))
                    self._note(f"{name}: objects of kind {ignored} are not used")
            elif key is None:
                complete = False
            elif value is not None or key in old:
                if key in objects:
                    report(f"{key}: is in this file more than once, the last one counts")
                objects[key] = value if value is not None else old[key]
        if lines > MOST_LINES:
            self._report(f"{name}: {lines - MOST_LINES} more errors")
        return DecodedFile(digest, objects, complete, bad)

    def _documents(self, name: str, data: bytes) -> Iterator[Decoded | None]:
        """Every object of the text; None for the rest if it cannot be parsed."""
        try:
            yield from decode.decode_json(data) if name.endswith(".json") else decode.decode_yaml(data)
        except UnreadableError as error:
            self._report(f"{name}: {error}; the objects that were in the file stay")
            yield None

    def _release(self, key: ObjectKey, name: str) -> None:
        holders = self._holders[key]
        holders.remove(name)
        if not holders:
            del self._holders[key]

    def _report_duplicate(self, key: ObjectKey, holders: tuple[str, ...]) -> None:
        if len(holders) < 2:
            self._duplicates.pop(key, None)
        elif self._duplicates.get(key) != holders:
            self._duplicates[key] = holders
            self._report(f"{key}: is in {', '.join(holders)}; {holders[-1]} counts")
