# SPDX-License-Identifier: Apache-2.0
"""The filter of a tracing session, and the order in which programs see it."""

from __future__ import annotations

import os
import sys
from typing import Any, cast

import pytest

from pyebpf_proxy.common.bpf_constants import TRACED_SERVICES
from pyebpf_proxy.datapath.loader import ordering
from pyebpf_proxy.trace.session import TraceControl

_SIZES = {
    "lost": 8,
    "reasons": 8,
    "process": 4,
    "device": 4,
    "service_count": 4,
    "services": 4 * TRACED_SERVICES,
    "address": 16,
    "family": 1,
    "protocol": 1,
    "port": 2,
}


class _Field:
    def __init__(self, offset: int, size: int) -> None:
        self.offset, self.size = offset, size


class _Tracing:
    """The map, and the layout of its value."""

    def __init__(self) -> None:
        self.raw = bytearray(sum(_SIZES.values()))
        self.fields, end = {}, 0
        for name, size in _SIZES.items():
            self.fields[name] = _Field(end, size)
            end += size

    def mmap(self) -> bytearray:
        return self.raw

    def number(self, name: str) -> int:
        field = self.fields[name]
        return int.from_bytes(self.raw[field.offset : field.offset + field.size], sys.byteorder)


def test_a_program_that_sees_the_process_also_sees_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """On arm64 another processor could see the process before the filter, and report by the one of a former session."""
    tracing = _Tracing()
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        ordering, "publish", lambda: seen.append(tuple(map(tracing.number, ("process", "port", "service_count"))))
    )
    control = TraceControl(cast(Any, tracing), cast(Any, tracing))
    control.start({"port": 80, "services": (7, 9)})
    control.start({"port": 443, "services": (7,)})
    assert tracing.number("process") == os.getpid()
    assert (0, 80, 2) in seen
    assert (0, 443, 1) in seen
