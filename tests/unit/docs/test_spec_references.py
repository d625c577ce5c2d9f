# SPDX-License-Identifier: Apache-2.0
"""Every reference to a section of docs/spec names a heading that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.unit.repository.files import own_files, relative

SPEC = ROOT / "docs" / "spec"
PAGES = sorted(page.stem for page in SPEC.glob("*.md"))
HEADING = re.compile(r"^#+ (\d+(?:\.\d+)*)\.? ", re.MULTILINE)
# Headers of bpf/ are ASCII: there service-semantics may be without the sign.
SIGN = r"(?:§{1,2} ?|(?<=service-semantics )(?=\d))"
NUMBER = r"\d+(?:\.\d+)*"
NEXT = r"(?:(?:,| and| to|–)\s*§{0,2}" + NUMBER + r"(?!\s*(?:ms|s|%)\b))*"
REFERENCE = re.compile(
    rf"(?P<rfc>RFC \d+,? )?(?:(?P<page>{'|'.join(PAGES)})(?:\.md)?\s+)?(?P<numbers>{SIGN}{NUMBER}{NEXT})"
)
# A page's name without a number also determines the page of the following bare numbers.
NAMED = re.compile(rf"\b(?:spec/({'|'.join(PAGES)})|(service-semantics))\b")
# If a reference continues on the next line, that line begins with the sign of a comment.
COMMENT = re.compile(r"\n[ \t]*(?:#:?|\*|//)?[ \t]*")
#: This file's own examples do not resolve.
EXCEPT = {"tests/unit/docs/test_spec_references.py"}


def headings(page: str) -> set[str]:
    """The numbers of a page's headings."""
    return set(HEADING.findall((SPEC / f"{page}.md").read_text()))


def references(text: str, page: str = "") -> list[tuple[str, str]]:
    """(page, number) of every reference in ``text``; a bare § belongs to the page named last, first to ``page``."""
    flat = COMMENT.sub(" ", text)
    named = [(found.start(), found.group(1) or found.group(2)) for found in NAMED.finditer(flat)]
    found = []
    for reference in REFERENCE.finditer(flat):
        if reference["rfc"]:
            continue
        before = [name for start, name in named if start <= reference.start()]
        of = reference["page"] or (before[-1] if before else page)
        found += [(of, number) for number in re.findall(NUMBER, reference["numbers"])]
    return found


def unresolved(text: str, page: str = "") -> list[str]:
    """The references of ``text`` without a heading."""
    return [
        f"{of or 'no page named'} §{number}"
        for of, number in references(text, page)
        if not of or number not in headings(of)
    ]


def sources() -> list[Path]:
    return [path for path in own_files(".py", ".c", ".h", ".md", ".sh") if relative(path) not in EXCEPT]


def test_every_reference_leads_to_a_heading() -> None:
    lost = {}
    for path in sources():
        own = path.stem if path.parent == SPEC else ""
        if found := unresolved(path.read_text(), own):
            lost[relative(path)] = found
    assert lost == {}


def test_references_are_found_all_over_the_tree() -> None:
    by_folder: dict[str, int] = {}
    for path in sources():
        folder = relative(path).split("/")[0]
        by_folder[folder] = by_folder.get(folder, 0) + len(references(path.read_text()))
    assert by_folder["pyebpf_proxy"] > 80
    assert by_folder["tests"] > 50
    assert by_folder["bpf"] > 8
    assert by_folder["docs"] > 60


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(spec/configuration §2.10)", []),
        ("(spec/configuration §2.99)", ["configuration §2.99"]),
        ("(spec/metrics §3 and §33)", ["metrics §33"]),
        ("(spec/service-semantics §§5, 88)", ["service-semantics §88"]),
        ("(spec/service-semantics §5–§99)", ["service-semantics §99"]),
        (" * (service-semantics 77).", ["service-semantics §77"]),
        (" * as in service-semantics\n * 77.", ["service-semantics §77"]),
        ("# spec/service-semantics\n# §77", ["service-semantics §77"]),
        ("spec/metrics has it, see §44", ["metrics §44"]),
        ("spec/nothing §1", ["no page named §1"]),
        ("RFC 5961 §5.2", []),
    ],
)
def test_a_broken_reference_is_found(text: str, expected: list[str]) -> None:
    assert unresolved(text) == expected
