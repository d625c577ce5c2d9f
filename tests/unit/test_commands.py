# SPDX-License-Identifier: Apache-2.0
"""The entry point of the commands: help, usage, and that kube-proxy's command line is unchanged."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyebpf_proxy import commands as see
from pyebpf_proxy.cli import main
from pyebpf_proxy.cluster.cli import parser as cluster_parser
from pyebpf_proxy.config.flags import usage
from pyebpf_proxy.datapath import preflight
from pyebpf_proxy.lab.cli import _parser as lab_parser
from pyebpf_proxy.see import COMMANDS
from pyebpf_proxy.see.doctor import checks
from pyebpf_proxy.see.reasons import MEANINGS, SLOW
from tests import ROOT
from tests.support.tool_module import tool


def test_every_command_is_known_to_the_front_door() -> None:
    assert set(see.COMMANDS) == COMMANDS


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_help_has_an_example_that_can_be_read(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"example:\n  {see.COMMANDS[name].example}" in text
    assert "exit status:" in text
    for line in see.COMMANDS[name].example.splitlines():
        words = line.split("#")[0].split("|")[0].strip().removeprefix("source <(").rstrip(")").split()
        parsed = see.command_parser(words[1]).parse_args(words[2:])
        assert parsed is not None


def test_every_command_is_in_its_page() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in sorted(COMMANDS) if f"`pyebpf-proxy {name}" not in page] == []


def test_the_schema_matches_the_code() -> None:
    wanted = (ROOT / "docs" / "commands.schema.json").read_text()
    assert wanted == tool("commands_schema").text(), (
        "run .venv/bin/python tools/commands_schema.py >docs/commands.schema.json"
    )


def test_answers_of_earlier_agents_can_be_read() -> None:
    """``cluster upgrade`` asks agents of the earlier version. A field that is added needs a default."""
    earlier = json.loads((ROOT / "tests" / "unit" / "see" / "required_fields.json").read_text())
    types = json.loads((ROOT / "docs" / "commands.schema.json").read_text())["$defs"]
    added = {name: set(types[name].get("required", [])) - set(fields) for name, fields in earlier.items()}
    assert {name: fields for name, fields in added.items() if fields} == {}


def enumerators(enum: str) -> set[str]:
    text = (ROOT / "bpf" / "reason.h").read_text()
    body = text[text.index(f"enum {enum} {{") :].partition("};")[0]
    return {name.lower() for name in re.findall(r"^\t(\w+)", body, re.MULTILINE)}


def test_every_refusal_has_a_meaning() -> None:
    refusals = enumerators("drop_reason") - {"not_dropped", "drop_reasons_end"}
    assert len(refusals) >= 10
    assert refusals == MEANINGS.keys()


def test_every_reason_for_the_slow_path_is_explained() -> None:
    explained = {name for name in enumerators("slow_path_reason") if name.startswith(("slow_", "stack_"))}
    assert explained - {"slow_path_reasons_end"} == SLOW.keys()


def test_usage_errors_are_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["services", "--no-such-flag"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error == "Error: unrecognized arguments: --no-such-flag; see pyebpf-proxy services --help\n"


def test_an_unknown_command_is_rejected_as_by_kube_proxy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 1
    assert capsys.readouterr().err == 'Error: "pyebpf-proxy" does not take any arguments, got ["nonsense"]\n'
    assert main(["sevrices"]) == 1
    assert capsys.readouterr().err.endswith('got ["sevrices"]; did you mean services?\n')


def test_the_general_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [name for name in COMMANDS if not any(line.startswith(f"  {name} ") for line in lines)] == []
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("columns", ["60", "80", "100"])
def test_no_help_breaks_a_path_or_an_option_at_a_hyphen(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    parsers = [see.command_parser(name) for name in COMMANDS]
    parsers += [each for parser in (cluster_parser(), lab_parser()) for each in commands_of(parser)]
    helps = [parser.format_help() for parser in parsers] + [
        usage({name: each.text for name, each in see.COMMANDS.items()})
    ]
    assert len(helps) > 25
    lines = [line for text in helps for line in text.splitlines()]
    assert [line for line in lines if re.search(r"\w-$", line)] == []


def commands_of(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parsers of its sub-commands, and itself."""
    (action,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return [parser, *action.choices.values()]


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
@pytest.mark.parametrize(
    ("asked", "lacks"), [(["--help"], True), (["flows", "--help"], False), (["trace", "--help"], False)]
)
def test_characters_that_the_terminal_lacks_are_escaped(asked: list[str], lacks: bool, encoding: str) -> None:
    """As with LC_ALL=de_DE.ISO-8859-1."""
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    ran = subprocess.run(
        [sys.executable, "-m", "pyebpf_proxy", *asked], env=environment, capture_output=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert (b"\\u2026" in ran.stdout) == lacks


@pytest.mark.parametrize("asked", [["--help"], ["status", "--help"], ["completion", "zsh"], ["--version"]])
def test_a_closed_pipe_ends_a_command_quietly(asked: list[str]) -> None:
    """There is no reader from the beginning, so there is no race."""
    # Without a buffer, argparse of Python 3.12 and later ignores the error, and the status is 0.
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "pyebpf_proxy", *asked],
            env=buffered,
            stdout=writing,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_old_kernels_and_kernels_without_types_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = SimpleNamespace(release="5.10.0-30-amd64")
    monkeypatch.setattr(preflight.os, "uname", lambda: release)
    monkeypatch.setattr(preflight, "_BTF", Path("/none"))
    assert main(["doctor"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "this kernel, 5.10.0-30-amd64, is older than 5.14 boot a kernel of 5.14 or newer" in text
    assert "the kernel has no BTF (/none does not exist)" in text


@pytest.mark.parametrize(
    ("release", "state"),
    [("5.13.19", "bad"), ("5.14.0-70", "warning"), ("6.0.1", "warning"), ("6.1.0", "good"), ("custom", "good")],
)
def test_a_kernel_that_should_work_but_is_not_tested_is_a_warning(
    release: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `cluster check`."""
    monkeypatch.setattr(preflight.os, "uname", lambda: SimpleNamespace(release=release))
    found = next(checks._needs())
    assert (found.what, found.state) == ("kernel", state)
    assert release in found.text


@pytest.mark.parametrize(
    ("words", "problem", "of"),
    [
        ([], "the following arguments are required: COMMAND", "lab"),
        (["fly"], "argument COMMAND: invalid choice: 'fly'", "lab"),
        (["demo", "--pod-network", "fog"], "argument --pod-network: invalid choice: 'fog'", "lab demo"),
        (["exec"], "the following arguments are required: name", "lab exec"),
    ],
)
def test_wrong_usage_of_the_lab_is_one_line(
    words: list[str], problem: str, of: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lab", *words])
    assert ended.value.code == 2
    assert re.fullmatch(rf"Error: {re.escape(problem)}[^\n]*; see pyebpf-proxy {of} --help\n", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["services", "explain", "flows"])
@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--config", "failed complete: open {path}: no such file or directory"),
        ("--manifests", "the manifests folder {path} does not exist"),
    ],
)
def test_a_missing_source_is_the_error_also_where_nothing_runs(
    name: str, flag: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["192.0.2.1", "192.0.2.2:80"] if name == "explain" else []
    path = str(tmp_path / "none")
    assert main([name, *words, flag, path, "--directory", str(tmp_path)]) == 3
    assert capsys.readouterr().err == f"Error: {problem.format(path=path)}\n"
