# SPDX-License-Identifier: Apache-2.0
"""The functions of the BPF programs, from their sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tests import ROOT

_FUNCTION = re.compile(
    r"^((?:static |__noinline |__always_inline )[^;{}=]*?)\b(\w+)\([^;{}]*\)\n\{\n(.*?)^\}", re.M | re.S
)


class Function(NamedTuple):
    """``body`` has no comments. The entry points of the programs are not included."""

    file: str
    name: str
    static: bool
    body: str


def functions() -> Iterator[Function]:
    """Every function of every file, in the order of the files' names."""
    for path in sorted((ROOT / "bpf").glob("*.[ch]")):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
        for head, name, body in _FUNCTION.findall(text):
            yield Function(path.name, name, head.startswith("static "), body)
