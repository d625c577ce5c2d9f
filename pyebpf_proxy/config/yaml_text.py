# SPDX-License-Identifier: Apache-2.0
"""Parses YAML into plain values, as kube-proxy's Go library converts it to JSON (spec/configuration §1).

PyYAML's C parser delivers events. They are interpreted here because Go has other rules for scalars (``010``, ``1:20``,
``y``), duplicate keys and merge keys, and limits the expansion of aliases. Nothing is recursive, so deep nesting cannot
overflow the stack. Numbers are returned as their JSON texts.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any, NamedTuple, cast

import yaml

from pyebpf_proxy.config import gotext

# More than any configuration needs, but still parsed within a second.
MAX_EVENTS = 200_000
# The C parser's time grows with the square of the depth.
MAX_DEPTH = 1_000

_LONG_TAG = "tag:yaml.org,2002:"
_WORDS: dict[str, bool | None] = {
    word: value
    for value, words in ((True, "y yes on true"), (False, "n no off false"), (None, "null"))
    for lower in words.split()
    for word in (lower, lower.capitalize(), lower.upper())
} | {"~": None, "": None}
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_TIMESTAMP = re.compile(
    r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt][0-9]{1,2}:[0-9]{1,2}:[0-9]{1,2}(?:\.[0-9]+)?(?:Z|[-+][0-9]{2}:[0-9]{2})"
    r"| [0-9]{1,2}:[0-9]{1,2}:[0-9]{1,2}(?:\.[0-9]+)?)?"
)
_NON_FINITE = {".inf": "+Inf", "+.inf": "+Inf", "-.inf": "-Inf", ".nan": "NaN"}


class Number(str):
    """A number, as its JSON text."""

    __slots__ = ()


class NonFinite(Number):
    """Infinity or not-a-number, which JSON cannot represent."""

    __slots__ = ()


class Document(NamedTuple):
    """The first document of a text, and kube-proxy's messages about its duplicate keys."""

    value: object
    duplicates: list[str]


class _Open:
    """A list or mapping that is being read."""

    __slots__ = ("anchor", "count", "duplicates", "key", "line", "lines", "value")

    def __init__(self, value: list[Any] | dict[Any, Any], anchor: str | None, line: int) -> None:
        self.value = value
        self.anchor = anchor
        self.count = 1
        self.key: Any = _NO_KEY
        self.line = line
        self.lines: dict[Any, int] = {}
        self.duplicates: list[str] = []


class _Anchor(NamedTuple):
    value: object
    decoded: int
    duplicates: list[str]
    lines: dict[Any, int]


_NO_KEY = object()
_MERGE = object()


def load(text: bytes) -> Document:
    """Parse the first document of ``text``; ValueError with kube-proxy's message if it is not YAML."""
    reader = _Reader()
    try:
        loader = yaml.CLoader(text)
        try:
            reader.read(loader)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(f"yaml: {_problem(error)}") from None
    return Document(_plain_keys(reader.value), reader.duplicates)


def _problem(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return str(getattr(error, "reason", "")) or " ".join(str(error).split())
    marks = (error.problem_mark, error.context_mark)
    line, context = [0 if mark is None else mark.line for mark in marks]
    # Go's library counts lines from 0 in parser errors, from 1 in scanner errors.
    if line and isinstance(error, yaml.scanner.ScannerError):
        line += 1
    line = line or context
    return (f"line {line}: " if line else "") + (error.problem or "unknown problem parsing YAML content")


class _Reader:
    def __init__(self) -> None:
        self.value: object = None
        self.duplicates: list[str] = []
        self._anchors: dict[str, _Anchor | _Open] = {}
        self._open: list[_Open] = []
        # The counters of Go's limit against alias bombs: values decoded, and how many of them through aliases.
        self._decoded = 1
        self._aliased = 0

    def read(self, loader: Any) -> None:
        depth = 0
        wrong: ValueError | None = None
        for _ in range(MAX_EVENTS):
            event = loader.get_event()
            if event is None or isinstance(event, (yaml.DocumentEndEvent, yaml.StreamEndEvent)):
                # Only the first document is used; the rest is not parsed.
                if wrong is not None:
                    raise wrong
                return
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH:
                    raise ValueError(f"yaml: exceeded max depth of {MAX_DEPTH}")
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if wrong is None:
                try:
                    self._event(event)
                except ValueError as error:
                    # Go parses the whole document before it decodes it: so a later syntax error is reported instead.
                    wrong = error
        raise ValueError("yaml: the configuration holds too many values")

    def _event(self, event: Any) -> None:
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event)
        elif isinstance(event, yaml.MappingStartEvent):
            self._start({}, event)
        elif isinstance(event, yaml.SequenceStartEvent):
            self._start([], event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._end()
        elif isinstance(event, yaml.DocumentStartEvent) and event.version not in (None, (1, 1)):
            line = cast(yaml.error.Mark, event.start_mark).line
            raise ValueError(f"yaml: {f'line {line}: ' if line else ''}found incompatible YAML document")

    def _start(self, value: list[Any] | dict[Any, Any], event: Any) -> None:
        self._decoded += 1
        self._open.append(_Open(value, event.anchor, event.start_mark.line + 1))
        if event.anchor is not None:
            self._anchors[event.anchor] = self._open[-1]

    def _end(self) -> None:
        done = self._open.pop()
        # A nested node may have reused the anchor's name.
        if done.anchor is not None and self._anchors[done.anchor] is done:
            self._anchors[done.anchor] = _Anchor(done.value, done.count, done.duplicates, done.lines)
        self._add(done.value, done.count, done.lines, done.duplicates, done.line)

    def _scalar(self, event: Any) -> None:
        top = self._open[-1] if self._open else None
        plain = event.implicit[0]
        is_key = top is not None and isinstance(top.value, dict) and top.key is _NO_KEY
        if top is not None and is_key and plain and event.value == "<<" and event.tag is None:
            top.key = _MERGE
            return
        self._decoded += 1
        value = _resolve(event.tag, event.value, plain)
        if event.anchor is not None:
            self._anchors[event.anchor] = _Anchor(value, 1, [], {})
        self._add(value, 1, {}, [], event.start_mark.line + 1)

    def _alias(self, event: Any) -> None:
        if event.anchor not in self._anchors:
            raise ValueError(f"yaml: unknown anchor '{event.anchor}' referenced")
        anchor = self._anchors[event.anchor]
        if isinstance(anchor, _Open):
            raise ValueError(f"yaml: anchor '{event.anchor}' value contains itself")
        self._decoded += 1 + anchor.decoded
        self._aliased += anchor.decoded
        if self._aliased > 100 and self._decoded > 1000 and self._aliased / self._decoded > _allowed(self._decoded):
            raise ValueError("yaml: document contains excessive aliasing")
        self._add(anchor.value, 1 + anchor.decoded, anchor.lines, anchor.duplicates, event.start_mark.line + 1)

    def _add(self, value: object, count: int, lines: dict[Any, int], duplicates: list[str], line: int) -> None:
        """Add a complete value to its parent."""
        if not self._open:
            self.value = value
            self.duplicates = duplicates
            return
        top = self._open[-1]
        top.count += count
        if isinstance(top.value, list):
            top.value.append(value)
            top.duplicates += duplicates
            return
        assert isinstance(top.value, dict)
        if top.key is _NO_KEY:
            top.key = _key(value)
            return
        key, top.key = top.key, _NO_KEY
        top.duplicates += duplicates
        if key is _MERGE:
            self._merge(top, value, lines)
        else:
            _set(top, key, value, line)

    def _merge(self, top: _Open, value: object, lines: dict[Any, int]) -> None:
        sources = list(reversed(value)) if isinstance(value, list) else [value]
        for source in sources:
            if not isinstance(source, dict):
                raise ValueError("yaml: map merge requires map or sequence of maps as the value")
            for key, item in source.items():
                _set(top, key, item, lines.get(key, 0))


def _set(top: _Open, key: Any, value: object, line: int) -> None:
    assert isinstance(top.value, dict)
    if key in top.value:
        top.duplicates.append(f"line {line}: key {_shown(key)} already set in map")
    else:
        top.lines[key] = line
    top.value[key] = value


def _allowed(decoded: int) -> float:
    low, high = 400_000, 4_000_000
    if decoded <= low:
        return 0.99
    if decoded >= high:
        return 0.10
    return 0.99 - 0.89 * (decoded - low) / (high - low)


def _resolve(tag: str | None, text: str, plain: bool) -> object:
    """The value of a scalar, by Go's rules."""
    tag = tag or ""
    if tag == "!" or (not tag and not plain):
        return text
    short = tag.removeprefix(_LONG_TAG) if tag.startswith(_LONG_TAG) else tag
    if short == "binary":
        try:
            return base64.b64decode(text, validate=True).decode("utf-8", "replace")
        except binascii.Error:
            raise ValueError("yaml: !!binary value contains invalid base64 data") from None
    if short == "str" or (tag and short not in ("bool", "int", "float", "null", "timestamp")):
        return text
    kind, value = _implicit(text)
    if short in ("", kind) or (short == "timestamp" and _TIMESTAMP.fullmatch(text)):
        return value
    if short == "float" and kind == "int":
        return Number(gotext.float_text(float(str(value))))
    raise ValueError(f"yaml: cannot decode !!{kind} `{text}` as a !!{short}")


def implicit_kind(text: str) -> str:
    """The type that a plain scalar resolves to: str, bool, int, float, null, timestamp."""
    if _TIMESTAMP.fullmatch(text):
        return "timestamp"
    return _implicit(text)[0]


def _implicit(text: str) -> tuple[str, object]:
    first = text[:1]
    if text in _WORDS:
        value = _WORDS[text]
        return ("null" if value is None else "bool"), value
    if first == "." or text[:2] in ("+.", "-."):
        lower = text.lower()
        if lower in _NON_FINITE and text[-3:] in ("inf", "Inf", "INF", "nan", "NaN", "NAN"):
            return "float", NonFinite(_NON_FINITE[lower])
    if first and first in "+-0123456789.":
        number = _number(text if first == "." else text.replace("_", ""))
        if number is not None:
            return ("int" if number.lstrip("-").isdigit() else "float"), number
    return "str", text


def _number(text: str) -> Number | None:
    value: int | float
    try:
        value = gotext.parse_int(text, 66)
        if -(1 << 63) <= value < 1 << 64:
            return Number(value)
    except ValueError:
        pass
    # Go passes a scalar that begins with a point directly to its number parser, which accepts underscores.
    if gotext.is_float(text) if text[0] == "." else _FLOAT.fullmatch(text):
        value = float(text.replace("_", ""))
        # A number that is too large for a float remains a string.
        return Number(gotext.float_text(value)) if abs(value) != float("inf") else None
    return None


def _key(value: object) -> Any:
    """A value by which keys are compared: like Go's maps, it distinguishes 1, "1" and true."""
    if isinstance(value, NonFinite):
        return "float", {"+Inf": ".inf", "-Inf": "-.inf", "NaN": ".nan"}[value]
    if isinstance(value, Number):
        return "number", str(value)
    if isinstance(value, bool):
        return "bool", "true" if value else "false"
    if isinstance(value, str):
        return "str", value
    if value is None:
        return "null", "<nil>"
    raise ValueError(f"yaml: invalid map key: {_go_value(value)}")


def _shown(key: Any) -> str:
    kind, text = key
    return gotext.quote(text) if kind == "str" else str(text)


def _go_value(value: object) -> str:
    if isinstance(value, list):
        return "[]interface {}{" + ", ".join(map(_go_value, value)) + "}"
    if isinstance(value, dict):
        return (
            "map[interface {}]interface {}{"
            + ", ".join(f"{_shown(key)}:{_go_value(item)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and not isinstance(value, Number):
        return gotext.quote(value)
    return "interface {}(nil)" if value is None else str(value)


def _plain_keys(root: object) -> object:
    """The same values with string keys, sorted, as in JSON; each shared value is converted once."""
    done: dict[int, object] = {}
    waiting: list[tuple[object, bool]] = [(root, False)]
    while waiting:
        value, children_done = waiting.pop()
        if not isinstance(value, (list, dict)) or id(value) in done:
            if isinstance(value, NonFinite):
                raise ValueError(f"json: unsupported value: {value}")
            continue
        children = list(value.values()) if isinstance(value, dict) else value
        if not children_done:
            waiting.append((value, True))
            waiting += [(child, False) for child in children]
            continue
        if isinstance(value, list):
            done[id(value)] = [done.get(id(child), child) for child in value]
            continue
        fields = {}
        for key, child in value.items():
            if key[0] == "null":
                raise ValueError(f"unsupported map key of type: %!s(<nil>), key: <nil>, value: {_go_value(child)}")
            fields[str(key[1])] = done.get(id(child), child)
        done[id(value)] = dict(sorted(fields.items()))
    return done.get(id(root), root)
