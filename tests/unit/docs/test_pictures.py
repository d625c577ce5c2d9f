# SPDX-License-Identifier: Apache-2.0
"""Pictures with a source are up to date, readable in both colour schemes, and used."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import ROOT
from tests.support.tool_module import tool

DOCS = ROOT / "docs"
SOURCES = sorted((DOCS / "pictures").glob("*.dot"))
PICTURES = tool("pictures")
COLOUR = re.compile(r'"(#[0-9a-fA-F]+)"')


def test_there_are_pictures() -> None:
    assert {"node", "takeover", "restart"} <= {source.stem for source in SOURCES}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_the_picture_is_made_from_its_source(source: Path) -> None:
    picture = (DOCS / f"{source.stem}.svg").read_text()
    assert PICTURES.stamp(source) in picture, "run make pictures"
    assert PICTURES.style() in picture, "run make pictures"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_every_colour_has_a_dark_variant(source: Path) -> None:
    assert set(COLOUR.findall(source.read_text())) <= PICTURES.DARK.keys()
    root = ElementTree.parse(DOCS / f"{source.stem}.svg").getroot()
    painted = {each.get(what) for each in root.iter() for what in ("fill", "stroke")} - {None, "none", "transparent"}
    assert painted <= PICTURES.DARK.keys()
    # Graphviz writes no colour for black: such text cannot be read on a dark page.
    assert [each.text for each in root.iter("{http://www.w3.org/2000/svg}text") if each.get("fill") is None] == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_what_the_picture_names_of_deploy_is_there(source: Path) -> None:
    """Paths are shown from a folder of deploy/, or of its overlays."""
    folders = (ROOT / "deploy", ROOT / "deploy" / "overlays")
    known = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()}
    words = re.sub(r"<[^>]*>", " ", source.read_text()).split()
    named = [word.rstrip(":,;.") for word in words if word.partition("/")[0] in known and "/" in word]
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []
    if source.stem == "takeover":
        assert {"kube-proxy/unpark.yaml", "kubeadm-back/cleanup"} <= {*named}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_the_picture_is_on_a_page(source: Path) -> None:
    assert [page.name for page in DOCS.glob("*.md") if f"]({source.stem}.svg)" in page.read_text()] != []
