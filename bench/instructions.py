# SPDX-License-Identifier: Apache-2.0
"""Which instructions of the BPF programs a load spends its time at: ``python -m bench.instructions dns pod ours``.

``perf`` samples the CPU that does all the work, by its clock. A sample names the instruction that waits: after a load,
the line of cache that is missing. Programs have no symbols for their lines, so the machine code comes from the kernel,
and ``objdump`` shows it. Printed are the shares of the programs' functions, and the busiest instructions of each with
those before them. ``--keep FOLDER``: the whole code of each function, with its samples.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from pyebpf_proxy.datapath.loader import _libbpf

from .contenders import CONTENDERS, WAYS, field
from .shares import LOADS, record

FREQUENCY = 9999
FUNCTIONS_MAX, CODE_MAX = 512, 1 << 20
#: A function is printed if it has this share of the samples, an instruction if it has this share of the function's.
LEAST, LEAST_OF_FUNCTION = 0.001, 0.04
BEFORE = 4
# struct bpf_prog_info (include/uapi/linux/bpf.h): its size, and where the fields of the machine code are.
_SIZE, _CODE_SIZE, _CODE, _COUNTS, _POINTERS = 228, 16, 24, 104, 112


class Function(NamedTuple):
    """A function of a program in the kernel's memory."""

    address: int
    code: bytes


def functions(number: int) -> Iterator[Function]:
    """The functions of the program with this id. BpfError."""
    ffi = _libbpf.ffi
    fd = _libbpf.checked(_libbpf.lib().bpf_prog_get_fd_by_id(number), f"program {number}")
    try:
        code, addresses = ffi.new("char[]", CODE_MAX), ffi.new("uint64_t[]", FUNCTIONS_MAX)
        sizes, info = ffi.new("uint32_t[]", FUNCTIONS_MAX), ffi.new("char[]", _SIZE)
        at = [int(ffi.cast("uintptr_t", pointer)) for pointer in (code, addresses, sizes)]
        raw = ffi.buffer(info)
        struct.pack_into("=I", raw, _CODE_SIZE, CODE_MAX)
        struct.pack_into("=Q", raw, _CODE, at[0])
        struct.pack_into("=II", raw, _COUNTS, FUNCTIONS_MAX, FUNCTIONS_MAX)
        struct.pack_into("=QQ", raw, _POINTERS, at[1], at[2])
        size = ffi.new("uint32_t *", _SIZE)
        _libbpf.checked(_libbpf.lib().bpf_obj_get_info_by_fd(fd, info, size), f"code of program {number}")
        (count,) = struct.unpack_from("=I", raw, _COUNTS)
        start = 0
        for i in range(count):
            yield Function(addresses[i], bytes(ffi.buffer(code + start, sizes[i])))
            start += sizes[i]
    finally:
        os.close(fd)


def samples(script: Iterable[str]) -> tuple[Counter[tuple[int, str]], int]:
    """From ``perf script -F ip,sym``: how often each address of a program, with its function's name; all samples."""
    found: Counter[tuple[int, str]] = Counter()
    total = 0
    for line in script:
        words = line.split()
        if len(words) < 2:
            continue
        total += 1
        if named := re.fullmatch(r"bpf_prog_[0-9a-f]{16}_(\w+)", words[1]):
            found[int(words[0], 16), named[1]] += 1
    return found, total


def listing(code: bytes, taken: dict[int, int], folder: Path) -> list[tuple[int, str]]:
    """The instructions of a function, each with its samples. ``taken``: samples by offset."""
    path = folder / "code"
    path.write_bytes(code)
    command = ["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", "-M", "intel", "--no-show-raw-insn", str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    matched = (re.match(r"\s*([0-9a-f]+):\s+(.*)", line) for line in lines)
    return [(taken.get(int(each[1], 16), 0), f"{each[1]:>6}  {each[2]}") for each in matched if each]


def busiest(instructions: list[tuple[int, str]]) -> Iterator[str]:
    """The instructions with the most samples, each with those before it."""
    total = sum(count for count, _ in instructions)
    for number, (count, _) in enumerate(instructions):
        if count >= LEAST_OF_FUNCTION * total:
            yield from (f"{of or '':>8} {text}" for of, text in instructions[max(0, number - BEFORE) : number + 1])
            yield ""


def report(found: Counter[tuple[int, str]], total: int, keep: Path | None, folder: Path) -> Iterator[str]:
    """The busiest instructions of each function of the loaded programs. ``keep``: a folder for their whole code."""
    shown = subprocess.run(["bpftool", "-j", "prog", "show"], capture_output=True, check=True).stdout
    for program in json.loads(shown):
        for function in functions(program["id"]):
            end = function.address + len(function.code)
            own = {key: count for key, count in found.items() if function.address <= key[0] < end}
            taken = sum(own.values())
            if not taken or taken < LEAST * total:
                continue
            (_, name), caller = next(iter(own)), program.get("name", program["id"])
            offsets = {address - function.address: count for (address, _), count in own.items()}
            code = listing(function.code, offsets, folder)
            yield f"{name} of {caller}: {100 * taken / total:.2f} % of {total} samples\n"
            yield from busiest(code)
            if keep:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{caller}.{name}.txt").write_text(
                    "".join(f"{count or '':>8} {text}\n" for count, text in code)
                )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description=__doc__)
    parser.add_argument("load", choices=LOADS)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--family", type=int, choices=(4, 6), default=4)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    asked = parser.parse_args()
    take = LOADS[asked.load][0]
    try:
        (ground,) = field().grounds([asked.contender])
        _, lines = record(lambda: take(ground, asked.way, asked.family, asked.seconds), FREQUENCY, "ip,sym")
        with TemporaryDirectory() as folder:
            for line in report(*samples(lines), asked.keep, Path(folder)):
                print(line)
    finally:
        field().close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
