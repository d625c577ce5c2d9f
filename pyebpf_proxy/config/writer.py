# SPDX-License-Identifier: Apache-2.0
"""Writes the effective configuration as kube-proxy does: every field, sorted, canonical (spec/configuration §6, §7)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from pyebpf_proxy.config import durations, gotext
from pyebpf_proxy.config.model import API_VERSION, KIND, FlushFrequency, KubeProxyConfiguration, Reader, written_fields
from pyebpf_proxy.config.yaml_text import implicit_kind

_BASE_SIXTY = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
_STRING = "tag:yaml.org,2002:str"


def document(config: KubeProxyConfiguration) -> str:
    """The YAML text; ValueError if a value cannot be written as JSON, as in kube-proxy."""
    fields = _fields(config)
    fields.update({"apiVersion": _text(API_VERSION), "kind": _text(KIND)})
    return str(yaml.serialize(_mapping(fields), Dumper=_Dumper, allow_unicode=True))


def yaml_text(value: Mapping[str, Any]) -> str:
    """Plain values as YAML in the form that Kubernetes components write."""
    return str(yaml.serialize(_node(value, None), Dumper=_Dumper, allow_unicode=True))


class _Dumper(yaml.CSafeDumper):
    """A dumper without PyYAML's own quoting rules: Go's rules decide which strings need quotes."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return _STRING
        return str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]


def _fields(section: BaseModel) -> dict[str, yaml.Node]:
    return {key: _node(value, reader) for key, value, reader in written_fields(section)}


def _node(value: Any, reader: Reader | None) -> yaml.Node:
    if value is None:
        return _plain("null")
    if isinstance(value, FlushFrequency):
        return _text(durations.format(value.nanoseconds)) if value.as_text else _plain(str(value.nanoseconds))
    if reader in (Reader.DURATION, Reader.POINTER_DURATION):
        return _text(durations.format(value))
    if isinstance(value, bool):
        return _plain("true" if value else "false")
    if isinstance(value, int):
        return _plain(str(value))
    if isinstance(value, float):
        return _plain(_float(value))
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, BaseModel):
        return _mapping(_fields(value))
    if isinstance(value, dict):
        return _mapping({key: _node(item, None) for key, item in value.items()})
    items = [_node(item, None) for item in value]
    return yaml.SequenceNode("tag:yaml.org,2002:seq", items, flow_style=not items)


def _mapping(fields: dict[str, yaml.Node]) -> yaml.Node:
    entries = [(_text(key), node) for key, node in sorted(fields.items())]
    return yaml.MappingNode("tag:yaml.org,2002:map", entries, flow_style=not entries)


def _plain(text: str) -> yaml.Node:
    return yaml.ScalarNode(_STRING, text)


def _text(text: str) -> yaml.Node:
    if "\n" in text:
        style: str | None = "|"
    elif implicit_kind(text) != "str" or _BASE_SIXTY.fullmatch(text):
        style = '"'
    else:
        style = None
    return yaml.ScalarNode(_STRING, text, style=style)


def _float(value: float) -> str:
    if value != value or abs(value) == float("inf"):
        shown = "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
        raise ValueError(f"json: unsupported value: {shown}")
    text = gotext.float_text(value, 32)
    # 64-bit integers are written as in JSON, other numbers by YAML's rules.
    if re.fullmatch(r"-?[0-9]+", text) and -(1 << 63) <= int(text) < 1 << 64:
        return text
    return gotext.general_text(float(text))
