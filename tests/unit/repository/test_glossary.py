# SPDX-License-Identifier: Apache-2.0
"""Replaced names and phrases do not return, and docs/glossary.md explains every map."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from tests import ROOT

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
IDENTIFIERS = (
    "table_in_force",
    "entitlement",
    "lift_bridged_reply",
    "say_masqueraded",
    "only_said",
    "fast_way",
    "find_ways",
    "is_turning_point",
    "flow_sightings",
    "left_sockets",
    "socket_peers4",
    "hide_source",
    "own_sctp",
    "wayOut",
)
PHRASES = (
    "enum talk",
    "nothing to warn of",
    "WAY OUT",
    "source spoke",
    "in the place of kube-proxy",
    "everything of ours",
    "What to run",
)
#: Banned in the code and pages of SCOPES: people without a role, "told" of programs, and names without a meaning.
WORDS = re.compile(
    r"\b[Nn]obody|\b[Ss]omebody|\b[Ww]hoever|\b(?:is|are|was|were)\s+told\b|\bway\s+back\b|\b[Oo]urs\b|"
    r"\b(?:class|struct|enum) (?:Beside|Former|Outside|Some|Board|Paper|Known|passage|table)\b"
)
SCOPES = ("bpf/", "pyebpf_proxy/", "docs/", "tests/", "deploy/")
#: Results keep the labels of their measurement; a passwd file and a DNS zone name a user; the licence is fixed.
LABELS = (
    *("tests/faults/", "docs/reliability.md", "tests/unit/suites/test_faults_page.py", "tests/unit/bench/"),
    *("tests/e2e/images.py", "tests/e2e/coredns.yaml", "bpf/LICENSE"),
)
#: Identifiers as whole words; phrases also across line ends.
BANNED = re.compile(r"(?<!\w)(?:" + "|".join(IDENTIFIERS) + r")(?!\w)|" + "|".join(PHRASES).replace(" ", r"\s+"))
#: Pages about names, this test, licences, and code that reads files of older versions.
EXEMPT = {
    "docs/glossary.md",
    "CHANGELOG.md",
    "tests/unit/repository/test_glossary.py",
    "bpf/LICENSE.BSD-2-Clause",
    "pyebpf_proxy/config/datapath_config.py",
    "tests/unit/config/test_datapath_config.py",
    "pyebpf_proxy/datapath/netfilter/host_rules.py",
}
MAP = re.compile(r'^\} (\w+) SEC\("\.maps"\)', re.MULTILINE)


def tracked() -> list[str]:
    """Every file of the repository; the test is skipped in a tree without git."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("this tree is no git checkout: which files are tracked is not known")
    return [name for name in listed.stdout.split("\0") if name and name not in EXEMPT]


def texts() -> Iterator[tuple[str, str]]:
    """Names and contents of the text files."""
    for name in tracked():
        path = ROOT / name
        if not path.is_file() or path.is_symlink():
            continue
        try:
            yield name, path.read_text()
        except UnicodeDecodeError:  # images, packet captures
            continue


def hits(pattern: re.Pattern[str], name: str, text: str) -> list[str]:
    """The places where the pattern matches."""
    return [f"{name}:{text.count(chr(10), 0, hit.start()) + 1}: {hit.group()}" for hit in pattern.finditer(text)]


def test_replaced_names_do_not_come_back() -> None:
    assert [hit for name, text in texts() for hit in hits(BANNED, name, text)] == []


def test_words_that_hide_the_actor_do_not_come_back() -> None:
    scope = [(name, text) for name, text in texts() if name.startswith(SCOPES) and not name.startswith(LABELS)]
    assert len(scope) > 700
    assert [hit for name, text in scope for hit in hits(WORDS, name, text)] == []


def test_replaced_names_are_recognised() -> None:
    assert BANNED.search("chain hide_source {")
    assert BANNED.search("is everything\n of ours") is not None
    assert not BANNED.search("test_no_table_in_force")
    assert WORDS.search("the client is\n    told") is not None
    assert WORDS.search("class Known(NamedTuple):") is not None
    assert not WORDS.search("hours, twofold, a class of Knowns, struct tables")


def test_every_map_is_in_the_glossary() -> None:
    maps = {name for path in (ROOT / "bpf").glob("*.[ch]") for name in MAP.findall(path.read_text())}
    assert len(maps) > 40
    assert {name for name in maps if f"`{name}`" not in GLOSSARY} == set()


def test_every_term_has_one_line() -> None:
    rows = [line.strip("|").split("|") for line in GLOSSARY.splitlines() if line.startswith("| ")]
    terms = [row[0].strip() for row in rows if row[0].strip() not in ("term", "map")]
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in rows)
    assert len(terms) == len(set(terms)) > 50
