# SPDX-License-Identifier: Apache-2.0
"""``--datapath-config``: the DatapathConfiguration, decoded strictly. Every error is reported with its path.

The parsers and size limits are those of kube-proxy's file. Unlike there, unknown and duplicate fields are errors: only
pyebpf-proxy uses this file, so an unknown field is a mistake.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from pyebpf_proxy.config import gotext, loader
from pyebpf_proxy.config.datapath_model import API_VERSION, KIND, DatapathConfiguration
from pyebpf_proxy.config.decode import bare, is_object, is_section, pairs
from pyebpf_proxy.config.loader import ConfigError
from pyebpf_proxy.config.validation import in_one_line
from pyebpf_proxy.config.yaml_text import Number

#: Old names of renamed fields, which are still accepted.
RENAMED = {
    "maps.tables": "serviceConfigs",
    "maps.liftedFragments": "bridgedFragments",
    "maps.socketPeers4": "socketRevnat4",
    "maps.socketPeers6": "socketRevnat6",
    "maps.leftSockets": "deferredSockets",
}

_SHOWN = 60
_MAX_ERRORS = 100
#: More digits than any valid value has; longer numbers are not parsed.
_MAX_DIGITS = 30


def read(path: Path) -> DatapathConfiguration:
    """The document in this file; ConfigError names the file and every error with its path."""
    try:
        return decode_text(loader.content(path))
    except ValueError as error:
        raise ConfigError(f"datapath configuration: {error}", file=str(path)) from None


def decode_text(text: bytes) -> DatapathConfiguration:
    """The document; ValueError in one line with every error."""
    fields, duplicates = loader.parsed(text)
    if fields is not None and not is_object(fields):
        raise ValueError("the file holds no fields")
    errors = list(duplicates)
    values = _plain(DatapathConfiguration, [] if fields is None else pairs(fields), "", errors)
    if wrong := _identity(values):
        # If the document is of another kind, do not report each of its fields.
        raise ValueError(in_one_line(wrong))
    try:
        config = DatapathConfiguration.model_validate(values, by_alias=True, by_name=False)
    except ValidationError as error:
        errors += [f"{_shown_path(entry['loc'])}: {_message(entry)}" for entry in error.errors()]
    if errors:
        more = [f"and {len(errors) - _MAX_ERRORS} more"] if len(errors) > _MAX_ERRORS else []
        raise ValueError(in_one_line(errors[:_MAX_ERRORS] + more))
    return config


def _identity(values: dict[str, Any]) -> list[str]:
    errors = []
    for name, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if name not in values:
            errors.append(f"{name}: is missing, must be {wanted}")
        elif values[name] != wanted:
            errors.append(f"{name}: must be {wanted}, not {_described(values[name])}")
    return errors


class _Fraction(float):
    """A number that is not an integer, as it was written."""

    text: str

    def __new__(cls, text: str) -> _Fraction:
        made = super().__new__(cls, "nan")
        made.text = _cut(text)
        return made


def _plain(model: type[BaseModel], fields: list[tuple[str, Any]], path: str, errors: list[str]) -> dict[str, Any]:
    """Fields as Python values, without those that are null. Unknown and duplicate fields are added to ``errors``."""
    known = {info.alias or name: info for name, info in model.model_fields.items()}
    values: dict[str, Any] = {}
    seen = set()
    for key, value in fields:
        shown = f"{path}.{key}" if path else key
        key = RENAMED.get(shown, key)
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.7)
            errors.append(f"{_cut(shown)}: unknown field{f', did you mean {near[0]}?' if near else ''}")
            continue
        if key in seen:
            errors.append(f"{shown}: duplicate field")
        seen.add(key)
        if value is None:
            continue
        kind = bare(known[key].annotation)
        if is_section(kind) and is_object(value):
            values[key] = _plain(kind, pairs(value), shown, errors)
        else:
            values[key] = [_scalar(item) for item in value] if type(value) is list else _scalar(value)
    return values


def _scalar(value: object) -> object:
    if not isinstance(value, Number):
        return value
    text = value.removeprefix("-")
    if not text.isdigit():
        return _Fraction(value)
    return int(value) if len(text) <= _MAX_DIGITS else 10**_MAX_DIGITS


def _shown_path(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


_WANTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "bool_type": "true or false",
    "fast_path": "auto, true or false",
    "list_type": "a list",
    "model_type": "a mapping of fields",
    "model_attributes_type": "a mapping of fields",
}


def _message(error: Any) -> str:
    kind, given = error["type"], error["input"]
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind == "literal_error":
        return f"must be {error['ctx']['expected'].replace(chr(39), '')}, not {_described(given)}"
    return f"must be {_WANTED.get(kind, 'something else')}, not {_described(given)}"


def _described(value: object) -> str:
    if isinstance(value, str):
        return gotext.quote(_cut(value))
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, _Fraction):
        return value.text
    if is_object(value):
        return "a mapping"
    return "a list" if isinstance(value, list) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
