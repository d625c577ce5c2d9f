# SPDX-License-Identifier: Apache-2.0
"""README.md stays short, and there is one review checklist."""

from __future__ import annotations

from tests import ROOT
from tests.unit.repository.files import own_files, relative


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_only_one_page_is_a_review_checklist() -> None:
    lists = [
        relative(page)
        for page in own_files(".md")
        if any(line.startswith("#") and "review" in line.lower() for line in page.read_text().splitlines())
    ]
    assert lists == ["CONTRIBUTING.md", "docs/review-checklist.md"]
