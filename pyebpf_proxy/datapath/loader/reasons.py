# SPDX-License-Identifier: Apache-2.0
"""The numbers of the map ``counters`` (bpf/reason.h), by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

_ENUMS = ("counter", "drop_reason", "slow_path_reason")


def reasons(enum: Callable[[str], Mapping[str, int]]) -> dict[str, int]:
    """Numbers by name (lower case), in their order. ``enum``: the enumerators of an enum, as ``Btf.enum``."""
    found = {name: number for each in _ENUMS for name, number in enum(each).items()}
    # 0 is "none" in each enum, and the end of one is the first number of another.
    numbers = {name.lower(): number for name, number in found.items() if number and not name.endswith("S_END")}
    return dict(sorted(numbers.items(), key=lambda item: item[1]))
