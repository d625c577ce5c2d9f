# SPDX-License-Identifier: Apache-2.0
"""The effective configuration, flags and gates, as texts for the metrics server."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from pyebpf_proxy.config import durations, gates, gotext
from pyebpf_proxy.config.flag_table import DEPRECATED, FLAGS, Flag
from pyebpf_proxy.config.flags import Flags
from pyebpf_proxy.config.model import API_VERSION, KIND, FlushFrequency, KubeProxyConfiguration, Reader, written_fields

#: Fields whose empty value is replaced by a platform default; without a file, kube-proxy's /flagz shows the default.
_COMPLETED = frozenset(("mode", "detect_local_mode"))


@dataclass(frozen=True, slots=True)
class Shown:
    """``configz`` is JSON text. ``flags``: value by flag. ``gates``: stage, and whether it is enabled, by gate."""

    mode: str = "iptables"
    configz: str = "{}"
    flags: dict[str, str] = field(default_factory=dict)
    gates: dict[str, tuple[str, bool]] = field(default_factory=dict)

    def on(self, gate: str) -> bool:
        """Whether a feature is enabled."""
        return self.gates.get(gate, ("", False))[1]


def shown(config: KubeProxyConfiguration, flags: Flags) -> Shown:
    """The texts for a completed and validated configuration."""
    enabled = gates.apply(config.feature_gates)
    document: dict[str, Any] = {"kind": KIND, "apiVersion": API_VERSION, **_object(config)}
    return Shown(
        mode=config.mode or "iptables",
        configz=json.dumps({API_VERSION.partition("/")[0]: document}, separators=(",", ":"), ensure_ascii=False),
        flags={flag.name: _flag(flag, flags, config) for flag in (*FLAGS, *(old for old, _ in DEPRECATED.values()))},
        gates={name: (gate.stage, enabled.on(name)) for name, gate in gates.KNOWN.items()},
    )


def _object(section: BaseModel) -> dict[str, Any]:
    return {key: _value(value, reader) for key, value, reader in written_fields(section)}


def _value(value: Any, reader: Reader | None) -> Any:
    if isinstance(value, FlushFrequency):
        return durations.format(value.nanoseconds) if value.as_text else value.nanoseconds
    if value is not None and reader in (Reader.DURATION, Reader.POINTER_DURATION):
        return durations.format(value)
    if isinstance(value, BaseModel):
        return _object(value)
    if isinstance(value, dict):
        return {key: value[key] for key in sorted(value)}
    if isinstance(value, list):
        return [_value(item, None) for item in value]
    if isinstance(value, float):
        text = gotext.float_text(value, 32)
        return int(text) if text.lstrip("-").isdigit() else float(text)
    return value


def _flag(flag: Flag, flags: Flags, config: KubeProxyConfiguration) -> str:
    """The value as Go's pflag prints it."""
    value = flags.values.get(flag.name)
    if flag.field in _COMPLETED and not flags.config:
        value = getattr(config, flag.field)
    if value is None:
        if flag.default:
            return flag.default
        return "false" if flag.alone == "true" else "[]" if flag.type == "strings" else ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return ",".join(f"{key}={_text(value[key])}" for key in sorted(value))
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, FlushFrequency):
        return durations.format(value.nanoseconds)
    if flag.type == "duration":
        return durations.format(value)
    return _text(value)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return gotext.float_text(value, 32) if isinstance(value, float) else str(value)
