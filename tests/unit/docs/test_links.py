# SPDX-License-Identifier: Apache-2.0
"""Links and anchors of all pages resolve, and the site's navigation has every page. Part of ``make lint``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests import ROOT
from tests.unit.repository.files import own_files, relative

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names of a page's headings in links."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def lost(page: Path, text: str) -> list[str]:
    """The links of this text, on this page, that do not resolve."""
    found = []
    for place, heading in LINK.findall(BLOCK.sub("", text)):
        target = page.parent / place if place else page
        if not target.exists() or (heading and heading not in anchors(target)):
            found.append(f"{place}#{heading}" if heading else place)
    return found


def test_links_of_the_pages_resolve() -> None:
    pages = own_files(".md")
    assert len(pages) > 50
    assert {relative(page): links for page in pages if (links := lost(page, page.read_text()))} == {}


def test_a_broken_link_is_found() -> None:
    page = ROOT / "docs" / "README.md"
    text = "[a](lab.md) [b](no.md) [c](lab.md#no-such-heading) [d](https://example.org/no)\n```\n[e](no.md)\n```\n"
    assert lost(page, text) == ["no.md", "lab.md#no-such-heading"]


def places(nav: Any) -> Iterator[str]:
    """The pages of a part of mkdocs.yml's navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from places(each)


def test_the_navigation_has_every_page_once() -> None:
    named = list(places(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(named) == len(set(named))
    pages = {relative(page) for page in own_files(".md") if relative(page).startswith("docs/")}
    assert pages - set(named) == set()
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_list_of_pages_has_every_page() -> None:
    listed = {place for place, _ in LINK.findall((ROOT / "docs" / "README.md").read_text())}
    pages = {str(page.relative_to(ROOT / "docs")) for page in own_files(".md") if page.is_relative_to(ROOT / "docs")}
    assert pages - listed == {"README.md"}
