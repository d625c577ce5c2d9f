# SPDX-License-Identifier: Apache-2.0
"""Another flow may take an entry of the flow table while a program reads it: readers compare (finding D13)."""

from __future__ import annotations

import re

import pytest

from tests import ROOT
from tests.unit.bpf.sources import functions

LOOKUP = "bpf_map_lookup_elem(&flows, "
COMPARED = "was_reused("
#: Rows of bpf/README.md: functions, and when they compare.
ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| (before|after|not) \| .* \|$", re.M)


#: The body of every function of the programs, by its name.
BODIES = {each.name: each.body for each in functions()}


def rows() -> dict[str, str]:
    """When each function compares, according to bpf/README.md."""
    section = (
        (ROOT / "bpf" / "README.md").read_text().partition("## Reads of the flow table\n")[2].partition("\n## ")[0]
    )
    return {name: when for names, when in ROW.findall(section) for name in re.findall(r"\w+", names)}


def test_every_reader_is_listed() -> None:
    """Finding D13. Functions that send by an entry get it from a reader that has compared."""
    readers = {name for name, body in BODIES.items() if LOOKUP in body}
    assert {"send_by_table", "other_direction", "sweep_flow"} <= readers
    senders = {name for name, body in BODIES.items() if re.search(r"\b(send|rewrite|redirect)\(", body)}
    # These send what their callers give them.
    senders -= {"send"}
    # flow_fragments contains copies.
    senders -= {"send_later_fragment"}
    assert set(rows()) == readers | senders


@pytest.mark.parametrize("name", [name for name, when in rows().items() if when == "before"])
def test_it_compares_before_it_reads(name: str) -> None:
    """Finding D13: they compare before any other read, except of flags."""
    body = BODIES[name]
    looked_up = body.index(LOOKUP)
    compared = body.index(COMPARED, looked_up)
    between = body[looked_up:compared]
    found = re.search(r"(\w+) = $", body[:looked_up])
    assert found is not None
    used = re.findall(rf"\b{found[1]}->(\w+)", between)
    assert set(used) <= {"young", "reply", "rewrite"}, "it reads only flags before"
    # The condition ends the function.
    assert ";" not in between.partition(";")[2].rstrip(), between


@pytest.mark.parametrize("name", [name for name, when in rows().items() if when == "after"])
def test_it_compares_after_it_has_read(name: str) -> None:
    """Finding D13: between the comparison and the sending or writing, no field of the rewrite is read."""
    body = BODIES[name]
    compared = body.rindex(COMPARED)
    rest = body[compared:].partition("\n")[2]
    assert "rewrite(" not in rest
    assert "a->" not in rest.replace("&a", "")
    if sent := re.search(r"\b(send|redirect)\(", body):
        assert sent.start() < compared, "the verdict is discarded if the entry was another flow's"
        assert "return DROPPED;" in rest


def test_loads_are_ordered() -> None:
    """Finding D13: also on arm64, where a compiler barrier does not order the CPU's loads."""
    lines = [line.strip() for line in BODIES["was_reused"].splitlines() if line.strip()]
    before, *_, after = (number for number, line in enumerate(lines) if line == "read_barrier();")
    (comparison,) = (
        number for number, line in enumerate(lines) if "tag_again != tag" in line and "->tag != tag" in line
    )
    assert before < comparison < after
    assert "__sync_lock_test_and_set" in BODIES["read_barrier"]
    # During a change of the link the entry counts as another flow's until it is complete.
    words = re.findall(r"tag(?:_again)? = (?:0|tag);|read_barrier\(\);|a->out = ", BODIES["change_link"])
    words = [word for word in words if word != "tag = a->tag;"]
    assert words == [
        "tag_again = 0;",
        "tag = 0;",
        "read_barrier();",
        "a->out = ",
        "read_barrier();",
        "tag = tag;",
        "tag_again = tag;",
    ]
