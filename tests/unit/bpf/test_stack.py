# SPDX-License-Identifier: Apache-2.0
"""The stack of every chain of calls fits on older kernels, which round each function's frame up to 32 bytes."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.loader.programs import OBJECTS

MOST = 512
FRAME = 32
_FUNCTION = re.compile(r"^[0-9a-f]+ <(\w+)>:")
_CALL = re.compile(r"\scall (-?0x[0-9a-f]+|-?\d+)")
_TARGET = re.compile(r"R_BPF_64_32\s+(\S+)")
_STORED = re.compile(r"\(r10 - (0x[0-9a-f]+|\d+)\)|r\d+ \+= -(0x[0-9a-f]+|\d+)")
_SYMBOL = re.compile(r"^([0-9a-f]{16}) .{7} \.text\s+[0-9a-f]+ (?:\.\w+ )?(\w+)$", re.M)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def frames_and_calls(path: Path) -> tuple[dict[str, int], dict[str, set[str]]]:
    """The bytes of stack that each function uses, and which others it calls, by its name."""
    places = {int(place, 16): name for place, name in _SYMBOL.findall(_output("llvm-objdump", "-t", str(path)))}
    frames: dict[str, int] = defaultdict(int)
    calls: dict[str, set[str]] = defaultdict(set)
    name, operand = "", 0
    for line in _output("llvm-objdump", "-d", "-r", "--no-show-raw-insn", str(path)).splitlines():
        if (found := _FUNCTION.match(line)) and not found[1].startswith("LBB"):
            name = found[1]
        for numbers in _STORED.findall(line):
            frames[name] = max(frames[name], *(int(number, 0) for number in numbers if number))
        if called := _CALL.search(line):
            operand = int(called[1], 0)
        if target := _TARGET.search(line):
            # A static function is named by its place in the section.
            calls[name].add(places[(operand + 1) * 8] if target[1] == ".text" else target[1])
    return frames, calls


def deepest(name: str, frames: dict[str, int], calls: dict[str, set[str]]) -> tuple[int, str]:
    """The stack of the deepest chain of calls from this function, and the chain."""
    below = max((deepest(called, frames, calls) for called in calls[name] - {name}), default=(0, ""))
    own = max(FRAME, -(-frames[name] // FRAME) * FRAME)
    return own + below[0], f"{name}({frames[name]}) {below[1]}".strip()


@pytest.mark.parametrize("name", ["tc", "tc_without_lookup", "xdp", "sock"])
def test_no_chain_of_calls_needs_more_than_the_stack(name: str) -> None:
    """Linux 6.1 refuses a program whose chain needs more; the newest kernels round less, and accept it."""
    frames, calls = frames_and_calls(OBJECTS / f"{name}.bpf.o")
    assert any("search_list" in called for called in calls.values()), "no calls were found"
    chains = [deepest(each, frames, calls) for each in list(frames)]
    assert max(chains) <= (MOST, "~"), max(chains)
    assert max(chains)[0] > MOST // 2
