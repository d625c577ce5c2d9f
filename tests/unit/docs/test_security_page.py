# SPDX-License-Identifier: Apache-2.0
"""docs/security.md names a test for each possible attack: these tests exist."""

from __future__ import annotations

import re

from tests import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_test_on_the_page_exists() -> None:
    files = (ROOT / "tests").rglob("test_*.py")
    there = {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 40
    assert named - there == set()


def test_every_row_about_an_actor_names_a_test() -> None:
    before = ""
    rows = 0
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if len(cells) == 3 and cells[0] not in ("attack", "not possible") and not set(cells[0]) <= {"-"}:
            rows += 1
            assert "`test_" in cells[2] or (cells[2] == "the same" and "`test_" in before), line
            before = cells[2]
    assert rows > 25
