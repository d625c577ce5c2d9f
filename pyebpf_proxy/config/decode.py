# SPDX-License-Identifier: Apache-2.0
"""Decodes plain values into a typed configuration, with the rules and messages of Go's strict decoder.

See spec/configuration §1.1. Every value is checked against the models. Unknown and duplicate fields are collected as
strict errors, wrong types as errors. The first error is the one that kube-proxy reports: kube-proxy stops at once at a
bad value of a type with its own parser (duration, quantity); other wrong types are only collected.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel

from pyebpf_proxy.common.digits import bounded_int
from pyebpf_proxy.config import durations, gotext, quantities
from pyebpf_proxy.config.json_text import Pairs
from pyebpf_proxy.config.model import FlushFrequency, GoType, KubeProxyConfiguration, Reader
from pyebpf_proxy.config.yaml_text import Number

_RANGES = {"int32": (-(1 << 31), 1 << 31), "uint32": (0, 1 << 32), "v1.VerbosityLevel": (0, 1 << 32)}
_MAX_STRICT_ERRORS = 100


class Decoded(NamedTuple):
    """The result: the fields of the file, fatal errors, and errors that only strict decoding reports."""

    config: KubeProxyConfiguration
    errors: list[str]
    strict_errors: list[str]


def decode(fields: object) -> Decoded:
    """Decode ``fields``, an object of the file without defaults."""
    walk = _Walk()
    given: dict[str, Any] = {}
    walk.section(KubeProxyConfiguration, fields, "", (), given)
    errors = walk.fatal + walk.errors
    config = KubeProxyConfiguration() if errors else walk.built(KubeProxyConfiguration, given)
    return Decoded(config, errors, walk.strict[:_MAX_STRICT_ERRORS])


class _Field(NamedTuple):
    """One field of a section: its name in the model, its type and Go's name of the type."""

    name: str
    kind: Any
    go_type: str
    embedded: str


class _Walk:
    def __init__(self) -> None:
        self.fatal: list[str] = []
        self.errors: list[str] = []
        self.strict: list[str] = []

    def section(
        self, model: type[BaseModel], value: object, strict_path: str, path: tuple[str, ...], given: dict[str, Any]
    ) -> None:
        """Read an object into ``given``: model field → value; a section is a dict again."""
        fields = fields_of(model)
        seen: set[str] = set()
        struct = go_name(model)
        for key, item in pairs(value):
            shown = f"{strict_path}.{key}" if strict_path else key
            field = fields.get(key)
            if field is None:
                self._object(f"unknown field {gotext.quote(shown)}")
                continue
            if key in seen:
                self._object(f"duplicate field {gotext.quote(shown)}")
            seen.add(key)
            inner = (*path, field.embedded, key) if field.embedded else (*path, key)
            self._field(field, item, shown, inner, struct, given)

    def _object(self, text: str) -> None:
        if text not in self.strict:
            self.strict.append(text)

    def _field(
        self, field: _Field, value: object, shown: str, path: tuple[str, ...], struct: str, given: dict[str, Any]
    ) -> None:
        kind = field.kind
        context = f"Go struct field {struct}.{'.'.join(path)}"
        if isinstance(kind, Reader):
            try:
                read = _READERS[kind](value, context)
            except ValueError as error:
                # kube-proxy's message does not name the field.
                named = context in str(error)
                self.fatal.append(str(error) if named else f"{error} ({shown})")
            else:
                if read is not None:
                    given[field.name] = read
        elif is_section(kind):
            if value is None:
                return
            if not is_object(value):
                self._wrong(value, context, field.go_type)
                return
            nested = given.setdefault(field.name, {})
            self.section(kind, value, shown, path, nested)
        elif typing.get_origin(kind) is list:
            self._list(field, typing.get_args(kind)[0], value, shown, path, struct, given)
        elif typing.get_origin(kind) is dict:
            self._gates(field, value, shown, context, given)
        elif value is not None:
            read = self._scalar(kind, value, context, field.go_type)
            if read is not None:
                given[field.name] = read

    def _list(
        self,
        field: _Field,
        item_kind: Any,
        value: object,
        shown: str,
        path: tuple[str, ...],
        struct: str,
        given: dict[str, Any],
    ) -> None:
        context = f"Go struct field {struct}.{'.'.join(path)}"
        if value is None:
            given[field.name] = None
            return
        if is_object(value) or not isinstance(value, list):
            self._wrong(value, context, field.go_type)
            return
        entries: list[Any] = []
        for index, entry in enumerate(value):
            if is_section(item_kind):
                nested: dict[str, Any] = {}
                if is_object(entry):
                    self.section(item_kind, entry, f"{shown}[{index}]", path, nested)
                elif entry is not None:
                    self._wrong(entry, context, f"v1.{go_name(item_kind)}")
                entries.append(self.built(item_kind, nested))
            else:
                entries.append("" if entry is None else self._scalar(item_kind, entry, context, "string"))
        given[field.name] = entries

    def _gates(self, field: _Field, value: object, shown: str, context: str, given: dict[str, Any]) -> None:
        if value is None:
            return
        if not is_object(value):
            self._wrong(value, context, field.go_type)
            return
        gates: dict[str, bool] = {}
        for key, item in pairs(value):
            if key in gates:
                self._object(f"duplicate field {gotext.quote(f'{shown}.{key}')}")
            read = False if item is None else self._scalar(bool, item, context, "bool")
            gates[key] = bool(read)
        given[field.name] = gates

    def _scalar(self, kind: Any, value: object, context: str, go_type: str) -> Any:
        if kind is str and isinstance(value, str) and not isinstance(value, Number):
            return _whole_characters(value)
        if kind is bool and isinstance(value, bool):
            return value
        if isinstance(value, Number):
            if kind is int:
                low, high = _RANGES[go_type]
                number = _whole(value)
                if number is not None and low <= number < high:
                    return number
                return self._wrong(value, context, go_type, with_text=True)
            if kind is float:
                try:
                    return gotext.parse_float32(value)
                except ValueError:
                    return self._wrong(value, context, go_type, with_text=True)
        return self._wrong(value, context, go_type)

    def _wrong(self, value: object, context: str, go_type: str, *, with_text: bool = False) -> None:
        what = f"number {value}" if with_text else kind_of(value)
        self.errors.append(f"json: cannot unmarshal {what} into {context} of type {go_type}")

    def built(self, model: type[BaseModel], given: dict[str, Any]) -> Any:
        """An instance of the model with the fields in ``given``."""
        values: dict[str, Any] = {}
        for name, value in given.items():
            kind = bare(model.model_fields[name].annotation)
            values[name] = self.built(kind, value) if isinstance(value, dict) and is_section(kind) else value
        return model.model_construct(**values) if self.errors else model(**values)


def _whole(number: Number) -> int | None:
    """The value of an integer, or one beyond 64 bits as well; None if it has a point or an exponent."""
    digits = number.removeprefix("-")
    if not digits.isdigit():
        return None
    value = bounded_int(digits, 1 << 64)
    return -value if number.startswith("-") else value


def _whole_characters(text: str) -> str:
    # JSON escapes can denote half a surrogate pair, which is not a character.
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def pairs(value: object) -> list[tuple[str, Any]]:
    """Keys and values of an object, in the order in which Go reads them."""
    return list(value.items()) if isinstance(value, dict) else typing.cast("list[tuple[str, Any]]", value)


def is_object(value: object) -> bool:
    """Whether the value is a JSON object."""
    return isinstance(value, (dict, Pairs))


def kind_of(value: object) -> str:
    """Go's name for the kind of a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, Number):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if is_object(value) else "array"


def bare(annotation: Any) -> Any:
    """The type without ``| None``."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not type(None))
    return annotation


def go_name(model: type[BaseModel]) -> str:
    """The name of Go's struct."""
    return str(getattr(model, "go_name", model.__name__))


@cache
def fields_of(model: type[BaseModel]) -> dict[str, _Field]:
    """The fields of a section by the names that the file uses."""
    found = {}
    for name, info in model.model_fields.items():
        go = next((entry for entry in info.metadata if isinstance(entry, GoType)), None)
        kind: Any = bare(info.annotation)
        reader = next((entry for entry in info.metadata if isinstance(entry, Reader)), None)
        if go is None:
            package = getattr(kind, "go_package", "v1alpha1")
            go = GoType(f"{package}.{go_name(kind)}" if is_section(kind) else _GO.get(kind, ""))
        found[info.alias or name] = _Field(name, reader or kind, go.name, go.embedded)
    return found


def is_section(kind: Any) -> typing.TypeGuard[type[BaseModel]]:
    """Whether the type of a field is a section of the configuration."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


_GO: dict[Any, str] = {
    str: "string",
    bool: "bool",
    int: "int32",
    float: "float32",
    list[str]: "[]string",
    dict[str, bool]: "map[string]bool",
}


def _duration(value: object, context: str) -> int:
    if value is None:
        raise ValueError('time: invalid duration ""')
    if isinstance(value, Number) or not isinstance(value, str):
        raise ValueError(f"json: cannot unmarshal {kind_of(value)} into {context} of type string")
    return durations.parse(value)


def _pointer_duration(value: object, context: str) -> int | None:
    return None if value is None else _duration(value, context)


def _flush_frequency(value: object, context: str) -> FlushFrequency:
    if isinstance(value, str) and not isinstance(value, Number):
        return FlushFrequency(durations.parse(value), as_text=True)
    if value is None:
        return FlushFrequency(0, as_text=False)
    if isinstance(value, Number):
        number = _whole(value)
        if number is not None and -(1 << 63) <= number < 1 << 63:
            return FlushFrequency(number, as_text=False)
        what, text = f"number {value}", str(value)
    else:
        what, text = kind_of(value), _compact(value)
    raise ValueError(
        f"invalid duration {gotext.quote(text)}: json: cannot unmarshal {what} into Go value of type time.Duration"
    )


def _quantity(value: object, context: str) -> str:
    if value is None:
        return quantities.ZERO.text
    return quantities.parse((value if isinstance(value, str) else _compact(value)).strip()).text


def _compact(value: object) -> str:
    """A value as JSON, as in kube-proxy's messages: keys sorted, numbers unchanged."""

    def text(value: object) -> str:
        if isinstance(value, Number):
            return str(value)
        if is_object(value):
            entries = sorted(pairs(value)) if isinstance(value, dict) else pairs(value)
            return "{" + ",".join(f"{text(key)}:{text(item)}" for key, item in entries) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(text, value)) + "]"
        return json.dumps(value, ensure_ascii=False).translate(_ESCAPED)

    return text(value)[:200]


#: Go escapes these characters in JSON so that it can be embedded in HTML.
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


_READERS: dict[Reader, Callable[[Any, str], Any]] = {
    Reader.DURATION: _duration,
    Reader.POINTER_DURATION: _pointer_duration,
    Reader.FLUSH_FREQUENCY: _flush_frequency,
    Reader.QUANTITY: _quantity,
}
