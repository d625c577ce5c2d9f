# SPDX-License-Identifier: Apache-2.0
"""The manual pages name every command and every option, and are valid roff."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pyebpf_proxy.commands import COMMANDS, command_parser
from pyebpf_proxy.config.flag_table import GROUPS
from tests.support.tool_module import tool

OPTION = re.compile(r"\\fB(-[^ ]*?)\\fR")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    found: dict[str, str] = tool("man_pages").pages()
    return found


def options(page: str) -> set[str]:
    return set(OPTION.findall(page.replace(r"\-", "-")))


def test_every_command_has_a_page_that_the_first_page_lists(pages: dict[str, str]) -> None:
    assert pages.keys() == {"pyebpf-proxy.1", *(f"pyebpf-proxy-{name}.1" for name in (*COMMANDS, "cluster", "lab"))}
    first = pages["pyebpf-proxy.1"].replace(r"\-", "-")
    assert [name for name in (*COMMANDS, "cluster", "lab") if rf"\fBpyebpf-proxy-{name}(1)\fR" not in first] == []


def test_every_flag_of_the_agent_is_on_its_page(pages: dict[str, str]) -> None:
    flags = [flag for group in GROUPS.values() for flag in group]
    named = {f"--{flag.name}" for flag in flags} | {f"-{flag.short}" for flag in flags if flag.short}
    assert len(named) > 50
    assert options(pages["pyebpf-proxy.1"]) == named


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_on_its_page(pages: dict[str, str], name: str) -> None:
    # Every command has --help; the library leaves it out.
    known = {text for action in command_parser(name)._actions for text in action.option_strings} - {"-h", "--help"}
    page = pages[f"pyebpf-proxy-{name}.1"]
    assert options(page) == known
    words = [action.metavar for action in command_parser(name)._actions if not action.option_strings]
    assert [word for word in words if isinstance(word, str) and word not in page] == []


def test_no_page_breaks_words_or_stretches_lines(pages: dict[str, str]) -> None:
    assert [name for name, text in pages.items() if not text.partition("\n")[2].startswith(".nh\n.ad l\n")] == []


def test_the_usage_of_a_subcommand_is_one_paragraph(pages: dict[str, str]) -> None:
    usages = re.findall(r"^usage: .*\n(.*)$", pages["pyebpf-proxy-cluster.1"], re.MULTILINE)
    assert len(usages) == 9
    assert set(usages) == {""}


def test_the_page_of_cluster_has_examples_and_exit_statuses(pages: dict[str, str]) -> None:
    page = pages["pyebpf-proxy-cluster.1"].replace(r"\-", "-")
    assert "pyebpf-proxy cluster install --image" in page.partition(".SH EXAMPLES")[2].partition(".SH")[0]
    assert r"\fB130\fR" in page.partition(".SH EXIT STATUS")[2]


def test_the_pages_are_valid_roff(pages: dict[str, str], tmp_path: Path) -> None:
    if shutil.which("mandoc") is None:
        pytest.skip("mandoc is not installed: apt-get install mandoc")
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["mandoc", "-Tlint", "-Wwarning", *sorted(pages)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
