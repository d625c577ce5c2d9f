# SPDX-License-Identifier: Apache-2.0
"""Commands on the pages for operators exist, with the options that the pages name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from pyebpf_proxy.cluster.cli import parser as cluster_parser
from pyebpf_proxy.commands import COMMANDS, command_parser
from pyebpf_proxy.config.flags import parse
from tests import ROOT

PAGES = (
    *("quick-start.md", "runbook.md", "troubleshooting.md", "migrating-from-kube-proxy.md", "deploy.md", "cluster.md"),
    *("upgrade.md", "limits.md"),
)
#: A line of a block, after its prompt, or inline code.
WRITTEN = re.compile(r"^(?:# )?(pyebpf-proxy .*)$|`(pyebpf-proxy [^`]*)`|-- (pyebpf-proxy .*)$", re.MULTILINE)
END = re.compile(r"[|;&>…]")


def written(text: str) -> Iterator[list[str]]:
    """The words of each command."""
    for match in WRITTEN.finditer(text):
        line = next(group for group in match.groups() if group)
        for part in re.findall(r"pyebpf-proxy [^;|&>`]*", line):
            _, *words = shlex.split(END.split(part)[0], comments=True)
            if words:
                yield words


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_the_page_can_be_run(page: str) -> None:
    commands = list(written((ROOT / "docs" / page).read_text()))
    assert commands
    for name, *rest in commands:
        if name.startswith("--"):
            parse([name, *rest])
        elif name == "cluster":
            cluster_parser().parse_args(rest or ["status"])
        else:
            assert name in COMMANDS, name
            command_parser(name).parse_args(rest or ["live"] * (name == "probe"))


def test_a_command_that_does_not_exist_is_found() -> None:
    assert list(written("# pyebpf-proxy flows --no-such; echo $?\n`pyebpf-proxy nothing`")) == [
        ["flows", "--no-such"],
        ["nothing"],
    ]
    with pytest.raises(SystemExit):
        command_parser("flows").parse_args(["--no-such"])


def test_every_symptom_of_the_table_leads_to_its_section() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = re.findall(r"^\| .* \| \[([^]]+)\]\(#\S+\) \|$", text.partition("\n## ")[0], re.MULTILINE)
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert len(table) >= 15
    assert sorted(table) == sorted(set(sections) - {"Where to begin"})
