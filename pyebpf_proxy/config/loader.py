# SPDX-License-Identifier: Apache-2.0
"""Reads a configuration file into typed values, without defaults (spec/configuration §1).

Decoding is strict first, then lenient: unknown and duplicate fields cause a warning; every other error is fatal.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple, NoReturn

from pyebpf_proxy.config import gotext, json_text, yaml_text
from pyebpf_proxy.config.decode import decode, is_object, kind_of, pairs
from pyebpf_proxy.config.model import API_VERSION, KIND, KubeProxyConfiguration
from pyebpf_proxy.config.validation import in_one_line

#: A ConfigMap cannot contain a larger file.
MAX_FILE_SIZE = 1 << 20


class ConfigError(Exception):
    """The configuration cannot be used. The message is one line; if kube-proxy has a message for it, it is the same.

    ``file``: the file with the error, if it is not that of ``--config``.
    """

    def __init__(self, text: str, file: str = "") -> None:
        super().__init__(text)
        self.file = file


class Read(NamedTuple):
    """The content of a file, and warnings about it."""

    config: KubeProxyConfiguration
    warnings: list[str]


def read(path: Path) -> Read:
    """The configuration in the file, without defaults; ConfigError describes the error."""
    try:
        text = content(path)
    except ValueError as error:
        raise ConfigError(f"failed complete: {error}") from None
    return decode_text(text)


def decode_text(text: bytes) -> Read:
    """The document without defaults, and the warning if only lenient decoding accepts it."""
    try:
        fields, duplicates = parsed(text)
    except ValueError as error:
        _fail(str(error))
    decoded = decode(_without_kind(fields))
    if decoded.errors:
        _fail(in_one_line(decoded.errors))
    strict = list(decoded.strict_errors)
    if duplicates:
        strict.insert(0, "yaml: unmarshal errors:\n  " + "\n  ".join(duplicates))
    warning = "Using lenient decoding as strict decoding failed: strict decoding error: "
    return Read(decoded.config, [warning + ", ".join(strict)] if strict else [])


def _fail(text: str) -> NoReturn:
    raise ConfigError(f"failed complete: failed to decode: {text}")


def parsed(text: bytes) -> tuple[object, list[str]]:
    """YAML or JSON as plain values, and messages about duplicate keys (JSON keeps them in ``Pairs``).

    Raises ValueError.
    """
    if json_text.is_json(text):
        try:
            return json_text.load(text), []
        except ValueError as error:
            raise ValueError(f"couldn't get version/kind; json parse error: {error}") from None
    document = yaml_text.load(text)
    return document.value, document.duplicates


def _without_kind(fields: object) -> object:
    """Check the document's version and kind. The result: its other fields."""
    if fields is not None and not is_object(fields):
        what = "json: cannot unmarshal " + kind_of(fields)
        _fail(f"couldn't get version/kind; json parse error: {what}: the file holds no fields")
    found = {"apiversion": "", "kind": ""}
    entries = [] if fields is None else pairs(fields)
    for key, value in entries:
        # These two names are case-insensitive, as in Go's encoding/json; all others are not.
        if key.lower() in found and value is not None:
            if not isinstance(value, str) or isinstance(value, yaml_text.Number):
                name = "kind" if key.lower() == "kind" else "apiVersion"
                _fail(
                    f"couldn't get version/kind; json parse error: json: cannot unmarshal {kind_of(value)}"
                    f" into Go struct field .{name} of type string"
                )
            found[key.lower()] = value
    version, kind = found["apiversion"], found["kind"]
    if version.count("/") > 1:
        _fail(f"unexpected GroupVersion string: {version}")
    if not kind:
        _fail("Object 'Kind' is missing")
    if not version:
        _fail("Object 'apiVersion' is missing")
    if (version, kind) != (API_VERSION, KIND):
        _fail(f"no kind {gotext.quote(kind)} is registered for version {gotext.quote(version)}")
    rest = [(key, value) for key, value in entries if key not in ("apiVersion", "kind")]
    return dict(rest) if isinstance(fields, dict) else json_text.Pairs(rest)


def content(path: Path) -> bytes:
    """The content of a file, in bounded time and memory; ValueError with Go's message if it cannot be read."""
    try:
        # Non-blocking: a FIFO must not block the start.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"open {path}: {_reason(error)}") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise ValueError(f"read {path}: is a directory")
        if not stat.S_ISREG(mode):
            raise ValueError(f"read {path}: not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            text = file.read(MAX_FILE_SIZE + 1)
    except OSError as error:
        raise ValueError(f"read {path}: {_reason(error)}") from None
    finally:
        os.close(descriptor)
    if len(text) > MAX_FILE_SIZE:
        raise ValueError(f"read {path}: larger than 1 MiB, the size of a ConfigMap")
    return text


def _reason(error: OSError) -> str:
    """The reason in Go's words."""
    return (error.strerror or str(error)).lower()
