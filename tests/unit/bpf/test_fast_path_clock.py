# SPDX-License-Identifier: Apache-2.0
"""The fast path uses clocks that cannot be set: a change of the system time has no effect."""

from __future__ import annotations

import re

import pytest

from tests import ROOT

#: CLOCK_MONOTONIC; CLOCK_BOOTTIME, which also runs while the machine sleeps; the number of ticks. None can be set.
NOT_TO_BE_SET = {"bpf_ktime_get_ns", "bpf_ktime_get_coarse_ns", "bpf_ktime_get_boot_ns", "bpf_jiffies64"}


def test_the_programs_use_no_other_clock() -> None:
    sources = {path.name: path.read_text() for path in (ROOT / "bpf").glob("*.[ch]")}
    found = {name: set(re.findall(r"\b(bpf_ktime\w+|bpf_jiffies\w*)\(", text)) for name, text in sources.items()}
    assert found["flow_table.h"] == {"bpf_ktime_get_coarse_ns", "bpf_jiffies64"}
    assert "flow_clock()" in sources["flow_send.h"]
    assert set().union(*found.values()) <= NOT_TO_BE_SET


@pytest.mark.parametrize(
    ("path", "calls"),
    [
        ("node/fast_path.py", {"clock_gettime_ns"}),
        ("rulesets/watch.py", {"clock_gettime", "thread_time"}),  # the latter is a thread's CPU time
        ("rulesets/kernel.py", set()),
    ],
)
def test_the_agent_uses_no_other_clock(path: str, calls: set[str]) -> None:
    text = (ROOT / "pyebpf_proxy" / "datapath" / path).read_text()
    assert set(re.findall(r"\btime\.(?!CLOCK)(\w+)\(", text)) == calls
    assert set(re.findall(r"CLOCK_\w+", text)) <= {"CLOCK_MONOTONIC"}
    assert set(re.findall(r"\.call_(\w+)\(", text)) <= {"later", "soon_threadsafe"}, "loops have a monotonic clock too"
