# SPDX-License-Identifier: Apache-2.0
"""bpf/vmlinux.h, with which one build serves every kernel and architecture, against the types of this kernel."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import ROOT

HEADER = ROOT / "bpf/vmlinux.h"
STRUCTS = re.findall(r"^struct (\w+) \{$", HEADER.read_text(), re.MULTILINE)
#: The kernel changes these as it likes: libbpf takes the offsets from the running kernel.
INTERNAL = {"nf_hook_entry", "nf_hook_entries", "nf_hook_ops", "netns_nf", "net", "net_device", "nsproxy",
            "task_struct"}  # fmt: skip
#: All other types come from libbpf, and are the same on every architecture.
INCLUDED = {"bpf/bpf_core_read.h", "bpf/bpf_endian.h", "bpf/bpf_helpers.h"}


class Place(NamedTuple):
    offset: int  # in bits
    size: int  # in bytes


class Types:
    """The types of a file, by bpftool."""

    def __init__(self, file: Path) -> None:
        shown = subprocess.run(["bpftool", "-j", "btf", "dump", "file", file], check=True, capture_output=True)
        types = json.loads(shown.stdout)["types"]
        self._by_number: dict[int, dict[str, Any]] = {each["id"]: each for each in types}
        self._structs = {each["name"]: each for each in types if each["kind"] == "STRUCT"}
        # Compilers before LLVM 15 write only 32 bits of a constant.
        self.constants = {each["name"]: each["val"] % 2**32 for kind in types for each in kind.get("values", ())}

    def places(self, name: str) -> dict[str, Place]:
        """Every member of a struct, also of unnamed structs in it, and of the structs that it contains."""
        return dict(self._members(self._structs[name], "", 0, name not in INTERNAL))

    def size(self, name: str) -> int:
        return int(self._structs[name]["size"])

    def _members(self, kind: dict[str, Any], prefix: str, at: int, deep: bool) -> Iterator[tuple[str, Place]]:
        for member in kind["members"]:
            inner, offset = self._plain(member["type_id"]), at + member["bits_offset"]
            unnamed = member["name"] == "(anon)"
            name = prefix if unnamed else f"{prefix}.{member['name']}"
            if not unnamed:
                yield name, Place(offset, self._bytes(inner))
            if inner["kind"] in ("STRUCT", "UNION") and (deep or unnamed):
                yield from self._members(inner, name, offset, deep)

    def _plain(self, number: int) -> dict[str, Any]:
        kind = self._by_number.get(number, {"kind": "VOID"})
        while kind["kind"] in ("TYPEDEF", "CONST", "VOLATILE", "RESTRICT", "TYPE_TAG"):
            kind = self._by_number.get(kind["type_id"], {"kind": "VOID"})
        return kind

    def _bytes(self, kind: dict[str, Any]) -> int:
        if kind["kind"] == "PTR":
            return 8
        if kind["kind"] == "ARRAY":
            return int(kind["nr_elems"]) * self._bytes(self._plain(kind["type_id"]))
        return int(kind.get("size", 0))


@cache
def kernel() -> Types:
    return Types(Path("/sys/kernel/btf/vmlinux"))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Types:
    """One variable of each type in the header."""
    folder = tmp_path_factory.mktemp("vmlinux")
    enums = re.findall(r"^enum (\w+) \{$", HEADER.read_text(), re.MULTILINE)
    unnamed = re.sub(r"^enum \{$(.*?)^\};$", r"enum e__COUNTER__ {\1};", HEADER.read_text(), flags=re.M | re.S)
    while "__COUNTER__" in unnamed:  # BTF has only types that are used, so each needs a name
        enums.append(f"e{len(enums)}")
        unnamed = unnamed.replace("e__COUNTER__", enums[-1], 1)
    uses = [f"struct {name} v_{name};" for name in STRUCTS] + [f"enum {name} v_{name};" for name in enums]
    (folder / "all.c").write_text("\n".join([unnamed, *uses, ""]))
    command = ["clang", "-g", "-target", "bpf", "-Wno-gnu-variable-sized-type-not-at-end", "-c", "all.c"]
    subprocess.run(command, cwd=folder, check=True)
    return Types(folder / "all.o")


@pytest.mark.needs_bpf
@pytest.mark.parametrize("name", STRUCTS)
def test_the_kernel_has_the_same_type(own: Types, name: str) -> None:
    """Fields at the end may be missing in an older kernel, or be new in a newer one."""
    wanted, found = own.places(name), kernel().places(name)
    assert wanted
    if name in INTERNAL:
        assert wanted.keys() <= found.keys()
    else:
        assert {field: found.get(field) for field in wanted} == wanted
        assert own.size(name) <= kernel().size(name)


@pytest.mark.needs_bpf
def test_the_kernel_has_the_same_constants(own: Types) -> None:
    assert len(own.constants) > 20
    assert {name: kernel().constants.get(name) for name in own.constants} == own.constants


def test_no_program_includes_what_depends_on_the_architecture() -> None:
    """Such as bpf_tracing.h, whose macros read registers, or the C library's headers."""
    files = [*ROOT.glob("bpf/*.[ch]"), *ROOT.glob("bench/*.bpf.c"), *ROOT.glob("tests/packet/*.bpf.c")]
    assert {name for path in files for name in re.findall(r"#\s*include\s*<(.*?)>", path.read_text())} <= INCLUDED


def test_every_record_is_relocated() -> None:
    """The attribute covers the whole header: without it, a field would have the offset that the header gives it."""
    text = HEADER.read_text()
    before, _, rest = text.partition("#pragma clang attribute push(__attribute__((preserve_access_index))")
    assert rest
    records, _, after = rest.partition("#pragma clang attribute pop")
    assert "struct task_struct {" in records
    assert "struct" not in re.sub(r"/\*.*?\*/", "", before + after, flags=re.S)
