# SPDX-License-Identifier: Apache-2.0
"""docs/data-plane.md says which function decides what: each of them exists, and each row says one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADING = "## The decision table as it is implemented"
NAMED = re.compile(r"`(\w+)\(\)`")
DEFINED_IN_C = re.compile(r"^(?:[a-z_]\w*[ \t*]+)+(\w+)\([^;{}]*\)\s*\{", re.MULTILINE)
DEFINED_IN_PYTHON = re.compile(r"^ *(?:async )?def (\w+)\(", re.MULTILINE)


def section() -> str:
    text = (ROOT / "docs" / "data-plane.md").read_text()
    assert text.count(HEADING) == 1
    return text.partition(HEADING)[2].partition("\n## ")[0]


def defined() -> set[str]:
    sources = (*(ROOT / "bpf").glob("*.[ch]"), *(ROOT / "pyebpf_proxy").rglob("*.py"))
    found: set[str] = set()
    for path in sources:
        how = DEFINED_IN_PYTHON if path.suffix == ".py" else DEFINED_IN_C
        found.update(how.findall(path.read_text()))
    return found


def test_every_function_that_the_page_names_exists() -> None:
    named = set(NAMED.findall((ROOT / "docs" / "data-plane.md").read_text()))
    assert len(named) > 40
    there = defined()
    assert {"decide", "choose_lists", "tc_ethernet"} <= there
    assert named - there == set()


def test_every_row_names_who_decides() -> None:
    rows = [line for line in section().splitlines() if line.startswith("| ")]
    deciders = [line.rstrip(" |").rpartition(" | ")[2] for line in rows]
    headings = {"decided by", "where it is so"}
    assert len(rows) > 30
    assert [row for row, who in zip(rows, deciders, strict=True) if not NAMED.search(who) and who not in headings] == [
        "| InterfaceNamePrefix | the same with the beginning of the name | the same |"
    ]
