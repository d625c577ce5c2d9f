# SPDX-License-Identifier: Apache-2.0
"""Objects of other versions of clang: they compile without a warning, and the verifier takes them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.datapath.loader.programs import OBJECTS
from tests import ROOT
from tests.packet.compiled import FLAGS
from tests.packet.program_node import SIZES

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_bpf]

OTHERS = [name for version in range(15, 40) if shutil.which(name := f"clang-{version}")]
MISSING = pytest.mark.skip("no other clang is installed: apt-get install clang-19")


@pytest.mark.parametrize("compiler", OTHERS or [pytest.param("", marks=MISSING)])
def test_objects_of_another_clang_load(compiler: str, tmp_path: Path) -> None:
    for name in sorted(path.name for path in OBJECTS.glob("*.bpf.o")):
        made = tmp_path / name
        source = ROOT / "bpf" / name.replace(".bpf.o", ".bpf.c")
        flags = (*FLAGS, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Ibpf")
        subprocess.run([compiler, *flags, "-c", source, "-o", made], check=True, cwd=ROOT)
        subprocess.run(["llvm-strip", "-g", made], check=True)
        Object.open(made, max_entries=SIZES).load().close()
