# SPDX-License-Identifier: Apache-2.0
"""Compiles BPF programs that tests write."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import ROOT

#: As in the Makefile, without its warnings.
FLAGS = ("-O2", "-g", "-target", "bpf", "-mcpu=v3")


def build(folder: Path, name: str, source: str) -> Path:
    """Compile as the Makefile does."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.bpf.c").write_text(f'#include "common.h"\n{source}\nchar LICENSE[] SEC("license") = "GPL";\n')
    command = [
        "clang",
        *FLAGS,
        f"-I{ROOT / 'bpf'}",
        "-c",
        f"{name}.bpf.c",
        "-o",
        f"{name}.bpf.o",
    ]
    subprocess.run(command, check=True, cwd=folder)
    return folder / f"{name}.bpf.o"
