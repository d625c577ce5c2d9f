# SPDX-License-Identifier: Apache-2.0
"""Findings of reviews: tests name each fixed one that they would detect again."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests import ROOT

#: Findings about the data plane (D), tests (T) and security (S). A docstring names one as ``finding D7``.
LAST = {"D": 18, "T": 13, "S": 12}
FINDINGS = {f"{letter}{number}" for letter, last in LAST.items() for number in range(1, last + 1)}
NAME = re.compile(r"\bfinding ([DTS]\d+)\b", re.IGNORECASE)


def named(path: Path) -> dict[str, set[str]]:
    """The findings in docstrings of the tests of this file, by test."""
    tree = ast.parse(path.read_text())
    tests = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")]
    return {test.name: set(NAME.findall(ast.get_docstring(test) or "")) for test in tests}


def test_every_finding_is_named_by_a_test() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for test, findings in named(path).items():
            for finding in findings:
                found.setdefault(finding, []).append(test)
    assert FINDINGS - set(found) == set(), "no test shows that they are fixed"
    assert set(found) - FINDINGS == set(), "unknown findings"


def test_a_finding_is_read_from_docstrings_alone(tmp_path: Path) -> None:
    source = tmp_path / "test_it.py"
    source.write_text(
        "# finding D1\ndef test_a():\n    '''As Finding D2, (finding S1).'''\n"
        "def helper():\n    '''finding T3'''\ndef test_b():\n    assert 'finding D4'\n"
    )
    assert named(source) == {"test_a": {"D2", "S1"}, "test_b": set()}
