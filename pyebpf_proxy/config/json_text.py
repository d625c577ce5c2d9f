# SPDX-License-Identifier: Apache-2.0
"""Parses JSON into plain values: kube-proxy reads a file that begins with ``{`` as JSON, never as YAML."""

from __future__ import annotations

import json

from pyebpf_proxy.config.yaml_text import Number


class Pairs(list[tuple[str, object]]):
    """An object with its keys in the order of the file, duplicates included."""


def is_json(content: bytes) -> bool:
    """Whether the file is to be read as JSON."""
    return content.lstrip().startswith(b"{")


def load(content: bytes) -> object:
    """Parse the file; ValueError in one line if it is not JSON."""
    try:
        # Go replaces invalid UTF-8, also halves of surrogate pairs; see ``decode``.
        text = content.decode("utf-8", "replace")
        return json.loads(
            text, object_pairs_hook=Pairs, parse_int=Number, parse_float=Number, parse_constant=_no_constant
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: {error.msg[:1].lower()}{error.msg[1:]}") from None
    except RecursionError:
        raise ValueError("exceeded max depth") from None


def _no_constant(name: str) -> object:
    raise ValueError(f"invalid character '{name[0]}' looking for beginning of value")
