# SPDX-License-Identifier: Apache-2.0
"""Feature gates: which ones exist, which may be set, and which are enabled (spec/configuration §5.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pyebpf_proxy.config.gate_table import GATES, NEEDS

_ALL = {"AllAlpha": "ALPHA", "AllBeta": "BETA"}


class Gate(NamedTuple):
    """A feature gate of the reference release of kube-proxy."""

    stage: str
    default: bool
    locked: bool


KNOWN: dict[str, Gate] = {name: Gate(*key) for key, names in GATES.items() for name in names.split()}


class Gates(NamedTuple):
    """The gates that the user has set, with the errors and warnings about them."""

    enabled: dict[str, bool]
    errors: list[str]
    warnings: list[str]

    def on(self, name: str) -> bool:
        """Whether the feature is enabled."""
        return self.enabled.get(name, KNOWN[name].default)


def apply(wanted: Mapping[str, bool]) -> Gates:
    """Apply ``wanted`` to the defaults. As in kube-proxy, the checks end at an unknown gate."""
    enabled: dict[str, bool] = {}
    errors: list[str] = []
    warnings: list[str] = []
    for name, value in wanted.items():
        if name not in KNOWN:
            return Gates({}, [*errors, f"unrecognized feature gate: {name}"], warnings)
        gate = KNOWN[name]
        if gate.locked and gate.default != value:
            errors.append(
                f"cannot set feature gate {name} to {_text(value)}, feature is locked to {_text(gate.default)}"
            )
            continue
        if name in _ALL:
            for other, its in KNOWN.items():
                if its.stage == _ALL[name] and other not in _ALL and other not in wanted:
                    enabled[other] = value
        enabled[name] = value
        if gate.stage in ("GA", "DEPRECATED"):
            stage = gate.stage if gate.stage == "GA" else "deprecated"
            warnings.append(
                f"Warning: setting {stage} feature gate. It will be removed in a future release.:"
                f" featureGate={name} value={_text(value)}"
            )
    gates = Gates(enabled, errors, warnings)
    if not errors:
        errors += _missing(gates)
    return gates


def _missing(gates: Gates) -> list[str]:
    found = []
    for name, needs in NEEDS.items():
        off = [need for need in needs if not gates.on(need)]
        if off and gates.on(name):
            found.append(f"{name} is enabled, but depends on features that are disabled: [{' '.join(off)}]")
    return found


def _text(value: bool) -> str:
    return "true" if value else "false"
