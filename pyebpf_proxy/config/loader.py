# SPDX-License-Identifier: Apache-2.0
"""A configuration file to a completed, checked KubeProxyConfiguration (spec/configuration §1, §5).

Strict first, then lenient: unknown and duplicate fields are warnings, every other error is fatal.
"""

from __future__ import annotations

import os
import stat
import types
import typing
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from pyebpf_proxy.config import document, durations
from pyebpf_proxy.config.defaults import with_defaults, with_platform_defaults
from pyebpf_proxy.config.model import API_VERSION, KIND, KubeProxyConfiguration, field_type
from pyebpf_proxy.config.validation import in_one_line, validate

MAX_FILE_SIZE = 10 * 1024 * 1024


class ConfigError(Exception):
    """The configuration cannot be used; the text is one line that names the file and the field."""


class Loaded(NamedTuple):
    """A configuration that may be run, and what its reader should be told."""

    config: KubeProxyConfiguration
    warnings: list[str]


def load(path: Path | None) -> Loaded:
    """Read, complete and check the file; without a file, the defaults. ConfigError names what is wrong."""
    if path is None:
        return Loaded(complete(KubeProxyConfiguration(), "defaults"), [])
    try:
        text = _read(path)
        config, warnings = decode(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return Loaded(complete(config, str(path)), [f"{path}: {warning}" for warning in warnings])


def complete(config: KubeProxyConfiguration, origin: str) -> KubeProxyConfiguration:
    """Fill the defaults in and validate; ConfigError lists every error."""
    config = with_platform_defaults(with_defaults(config))
    errors = validate(config)
    if errors:
        raise ConfigError(f"{origin}: failed validate: {in_one_line(errors)}")
    return config


def decode(text: str) -> tuple[KubeProxyConfiguration, list[str]]:
    """The document without its defaults, and the warnings of the lenient second pass."""
    try:
        read = document.load(text)
    except ValueError as error:
        raise ConfigError(f"failed to decode: {error}") from None
    if not isinstance(read.value, dict):
        raise ConfigError("failed to decode: Object 'Kind' is missing: the file holds no mapping of fields")
    fields = {_key(key): value for key, value in read.value.items()}
    for name in ("apiVersion", "kind"):
        if not isinstance(fields.get(name, ""), str):
            raise ConfigError(f"failed to decode: couldn't get version/kind: {name}: expected a text")
    version, kind = fields.pop("apiVersion", ""), fields.pop("kind", "")
    if not kind:
        raise ConfigError("failed to decode: Object 'Kind' is missing")
    if not version:
        raise ConfigError("failed to decode: Object 'apiVersion' is missing")
    if (version, kind) != (API_VERSION, KIND):
        raise ConfigError(
            f'failed to decode: no kind "{kind}" is registered for version "{version}":'
            f" expected {KIND} of {API_VERSION}"
        )
    strict_errors = list(read.duplicates)
    known = _known_fields(KubeProxyConfiguration, fields, "", strict_errors)
    try:
        config = KubeProxyConfiguration.model_validate(known)
    except ValidationError as error:
        raise ConfigError(f"failed to decode: {in_one_line(_type_errors(error))}") from None
    if not strict_errors:
        return config, []
    return config, [
        f"Using lenient decoding as strict decoding failed: strict decoding error: {', '.join(strict_errors)}"
    ]


def _read(path: Path) -> str:
    try:
        # Not blocking: a FIFO must not hang the start.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"cannot open the configuration file: {error.strerror}") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise ConfigError("the configuration file is a directory; --config needs a file")
        if not stat.S_ISREG(mode):
            raise ConfigError("the configuration file is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_FILE_SIZE + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if len(content) > MAX_FILE_SIZE:
        raise ConfigError("the configuration file is larger than 10 MB")
    if b"\0" in content:
        raise ConfigError("failed to decode: the configuration file contains NUL bytes: it is no text")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"failed to decode: invalid UTF-8 at byte {error.start}") from None


def _known_fields(section: type[BaseModel], values: dict[Any, Any], path: str, errors: list[str]) -> dict[str, Any]:
    """``values`` without unknown fields (reported in ``errors``) and without nulls that mean "absent"."""
    known: dict[str, Any] = {}
    for raw, value in values.items():
        name = _key(raw)
        annotation = field_type(section, name)
        if annotation is None:
            errors.append(f'unknown field "{path}{name}"')
        elif value is not None:
            known[name] = _known(annotation, value, f"{path}{name}", errors)
        elif _is_duration(section, name):
            known[name] = None  # the one kind of field for which null is an error
    return known


def _known(annotation: Any, value: Any, path: str, errors: list[str]) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = typing.get_args(annotation)[0]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _known_fields(annotation, value, f"{path}.", errors) if isinstance(value, dict) else value
    if typing.get_origin(annotation) is list and isinstance(value, list):
        (item,) = typing.get_args(annotation)
        return [_known(item, entry, f"{path}[{index}]", errors) for index, entry in enumerate(value)]
    if typing.get_origin(annotation) is dict and isinstance(value, dict):
        return {_key(key): entry for key, entry in value.items()}
    return value


def _is_duration(section: type[BaseModel], name: str) -> bool:
    for key, info in section.model_fields.items():
        if name == (info.alias or key):
            # An Annotated type keeps its serializer in the metadata; a pointer field has it inside the union.
            return any(getattr(item, "func", None) is durations.format for item in info.metadata)
    return False


def _key(key: object) -> str:
    # JSON has only text keys: Go's reader turns the others into text as well.
    return str(key).lower() if isinstance(key, bool) else str(key)


def _type_errors(error: ValidationError) -> list[str]:
    found: list[str] = []
    for item in error.errors(include_url=False):
        path = ""
        for part in item["loc"]:
            path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
        message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
        shown = repr(item["input"])
        found.append(f"{path}: {message}, got {shown if len(shown) <= 60 else shown[:57] + '...'}")
    return found
