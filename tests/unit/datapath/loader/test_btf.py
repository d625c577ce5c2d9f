# SPDX-License-Identifier: Apache-2.0
"""Layouts from the built objects' BTF, compared with bpftool and the C headers."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.common import bpf_constants
from pyebpf_proxy.datapath.loader import _libbpf_abi
from pyebpf_proxy.datapath.loader.btf import Btf, StaleObjectError
from pyebpf_proxy.datapath.loader.libbpf import Object, SkBuff
from pyebpf_proxy.datapath.loader.programs import SCHEDULERS
from pyebpf_proxy.datapath.maps.layouts import Layouts
from pyebpf_proxy.datapath.node import plan
from pyebpf_proxy.services.model import FrontendKind, IPFamily, Protocol, ServicePortName
from tests.support.tool_module import tool


@pytest.fixture(scope="module")
def btf(bpf_objects: Path) -> Btf:
    with Object.open(bpf_objects / "tc.bpf.o") as opened:
        return opened.btf


def test_a_struct(btf: Btf) -> None:
    layout = btf.struct("backend6")
    assert [(f.name, f.offset, f.size, f.code) for f in layout.fields.values()] == [
        ("address", 0, 16, "16s"),
        ("port", 16, 2, "H"),
        ("protocol", 18, 1, "B"),
        ("zero", 19, 1, "B"),
        ("service", 20, 4, "I"),
        ("local", 24, 4, "I"),
    ]
    raw = layout.pack(port=0x1234, local=1, address=bytes(range(16)))
    assert raw == bytes(range(16)) + struct.pack("=HBBII", 0x1234, 0, 0, 0, 1)
    assert layout.unpack(raw)["port"] == 0x1234


def test_a_packer_sets_unnamed_fields_to_zero(btf: Btf) -> None:
    packer = btf.struct("backend4").packer("port", "service")
    assert packer.pack(80, 7) == bytes(4) + struct.pack("=HBBI", 80, 0, 0, 7) + bytes(4)
    assert packer.unpack(packer.pack(80, 7)) == (80, 7)
    with pytest.raises(ValueError, match="port stands before the field named before it"):
        btf.struct("backend4").packer("service", "port")


def test_unknown_names(btf: Btf) -> None:
    with pytest.raises(StaleObjectError, match="no struct nonsense"):
        btf.struct("nonsense")
    with pytest.raises(StaleObjectError, match="struct service_config has no field nonsense"):
        btf.struct("service_config").packer("nonsense")
    with pytest.raises(StaleObjectError, match="no enum nonsense"):
        btf.enum("nonsense")
    with pytest.raises(StaleObjectError, match="no variable nonsense"):
        btf.variable(".rodata", "nonsense")
    with pytest.raises(ValueError, match="has 4 bytes, not 3"):
        btf.struct("endpoint").unpack(bytes(3))


def test_enums_are_those_of_the_model(btf: Btf) -> None:
    assert btf.enum("protocol") == {p.name: p.value for p in Protocol}
    assert btf.enum("frontend_kind") == {k.name: k.value for k in FrontendKind}


def test_constants_are_those_of_the_headers(btf: Btf) -> None:
    assert Path(bpf_constants.__file__).read_text() == tool("bpf_constants").text(), (
        "run .venv/bin/python tools/bpf_constants.py >pyebpf_proxy/common/bpf_constants.py"
    )
    for enum in ("frontend_kind", "detector", "scheduler", "redirect_mode", "xdp_frames"):
        numbers = btf.enum(enum)
        assert {name: getattr(bpf_constants, name) for name in numbers} == numbers
    assert [f"REDIRECT_{name.upper()}" for name in plan.REDIRECTS] == list(btf.enum("redirect_mode"))
    assert {*SCHEDULERS.values(), bpf_constants.AT_RANDOM} == set(btf.enum("scheduler").values())


def test_the_declarations_of_libbpf_are_those_that_were_parsed() -> None:
    assert Path(_libbpf_abi.__file__).read_text() == tool("libbpf_abi").text(), (
        "run .venv/bin/python tools/libbpf_abi.py >pyebpf_proxy/datapath/loader/_libbpf_abi.py"
    )


def test_the_context_of_a_test_run_is_the_kernels(btf: Btf) -> None:
    numbers = {name: number for number, name in enumerate(SkBuff._fields, 1) if name != "cb"}
    raw = SkBuff(cb=(11, 12, 13, 14, 15), **numbers).pack()
    found = btf.struct("__sk_buff").unpack(raw)
    assert {name: found[name] for name in numbers} == numbers
    assert struct.unpack("=5I", found["cb"]) == (11, 12, 13, 14, 15)
    others = [value for name, value in found.items() if name not in SkBuff._fields]
    assert not any(value if isinstance(value, int) else any(value) for value in others)


def test_settings_fill_their_variable(btf: Btf) -> None:
    offset, size = btf.variable(".rodata", "settings")
    assert size == btf.struct("settings").size
    assert offset % 8 == 0


def test_invalid_btf() -> None:
    for raw in (b"", b"\x7fELF" + bytes(40)):
        with pytest.raises(ValueError, match="not BTF"):
            Btf(raw, "nothing.bpf.o")


def test_every_struct_is_as_bpftool_reads_it(btf: Btf, bpf_objects: Path) -> None:
    bpftool = shutil.which("bpftool", path="/usr/sbin:/usr/bin:/sbin")
    assert bpftool, "make setup installs it"
    dump = subprocess.run(
        [bpftool, "-j", "btf", "dump", "file", bpf_objects / "tc.bpf.o"], check=True, capture_output=True
    )
    types: list[dict[str, Any]] = json.loads(dump.stdout)["types"]
    compared = 0
    for entry in types:
        if entry["kind"] != "STRUCT" or entry["name"] in ("", "(anon)"):
            continue
        if any(member.get("bitfield_size") for member in entry["members"]):
            continue
        layout = btf.struct(entry["name"])
        if layout.size != entry["size"]:
            continue  # two types of one name
        assert [(f.name, f.offset * 8) for f in layout.fields.values() if f.name] == [
            (m["name"], m["bits_offset"]) for m in entry["members"] if m["name"] != "(anon)"
        ]
        compared += 1
    assert compared > 25


def test_names_of_service_ports_survive_packing_and_unpacking(btf: Btf) -> None:
    layouts = Layouts(btf)
    for name in (
        ServicePortName("default", "kubernetes", "", Protocol.TCP, IPFamily.IPV4),
        ServicePortName("n" * 63, "s" * 63, "p" * 63, Protocol.SCTP, IPFamily.IPV6),
    ):
        assert layouts.unpack_name(layouts.pack_name(name)) == name
    with pytest.raises(ValueError, match="longer than 63 bytes"):
        layouts.pack_name(ServicePortName("default", "s" * 64, "", Protocol.TCP, IPFamily.IPV4))
