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
_SECTION = re.compile(r"^Disassembly of section (\S+):")
#: A call of another BPF function, not of a helper: its place in the section, counted in instructions, and its operand.
_CALL = re.compile(r"^\s*(\d+):\s+85 10 00 00 (?:[0-9a-f]{2}\s){4}call (-?0x[0-9a-f]+|-?\d+)")
_TARGET = re.compile(r"R_BPF_64_32\s+(\S+)")
_STORED = re.compile(r"\(r10 - (0x[0-9a-f]+|\d+)\)|r\d+ \+= -(0x[0-9a-f]+|\d+)")
_SYMBOL = re.compile(r"^([0-9a-f]{16}) .{6}F (\S+)\s+[0-9a-f]+ (?:\.\w+ )?(\w+)$", re.M)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def frames_and_calls(path: Path) -> tuple[dict[str, int], dict[str, set[str]]]:
    """The bytes of stack that each function uses, and which others it calls, by its name."""
    symbols = _SYMBOL.findall(_output("llvm-objdump", "-t", str(path)))
    places = {(section, int(place, 16) // 8): name for place, section, name in symbols}
    frames: dict[str, int] = defaultdict(int)
    calls: dict[str, set[str]] = defaultdict(set)
    section, name = "", ""
    pending: tuple[int, int] | None = None

    def add_call(target: str = "") -> None:
        """Functions of the same section are called without a relocation, static ones by their place in theirs."""
        nonlocal pending
        if pending is not None:
            place, operand = pending
            if not target:
                target = places[section, place + 1 + operand]
            elif target == ".text":
                target = places[target, operand + 1]
            calls[name].add(target)
            pending = None

    for line in _output("llvm-objdump", "-d", "-r", str(path)).splitlines():
        if target := _TARGET.search(line):
            add_call(target[1])
            continue
        if not line:
            continue
        add_call()
        if found := _SECTION.match(line):
            section = found[1]
        elif (found := _FUNCTION.match(line)) and not found[1].startswith("LBB"):
            name = found[1]
        elif found := _CALL.match(line):
            pending = int(found[1]), int(found[2], 0)
        for numbers in _STORED.findall(line):
            frames[name] = max(frames[name], *(int(number, 0) for number in numbers if number))
    add_call()
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
    assert "search_list" in calls["choose_at_random"], "calls of another section are not found"
    assert "scheduler_affinity" in calls["choose_by_scheduler"], "calls within a section are not found"
    chains = [deepest(each, frames, calls) for each in list(frames)]
    assert max(chains) <= (MOST, "~"), max(chains)
    assert max(chains)[0] > MOST // 2
