# SPDX-License-Identifier: Apache-2.0
"""Completion, tested in the shells themselves."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.see import COMMANDS
from tests import ROOT

PORTS = ("default/web:dns", "default/web:http")
#: The typed text and the offers. For bash a : ends a word, so names have no ports there.
CASES = [
    ("serv", {"services"}),
    ("services --di", {"--diff", "--directory"}),
    ("services -o j", {"json"}),
    ("services def", set(PORTS)),
    ("trace tcp default/w", set(PORTS)),
    ("backends -n d", {"default"}),
    ("top --sort f", {"flows"}),
    ("services --manifests exam", {"examples"}),
    ("completion z", {"zsh"}),
    ("probe re", {"ready"}),
    ("probe --dir", {"--directory"}),
    ("nonsense x", set()),
    ("explain 192.0.2.1 def", set()),
]
Ask = Callable[[str], set[str]]


def script(shell: str) -> str:
    """The script as a user gets it."""
    run = [sys.executable, "-m", "pyebpf_proxy", "completion", shell]
    return subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def _run(*command: str) -> list[str]:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert ran.stderr == ""
    return ran.stdout.splitlines()


def bash(folder: Path) -> Ask:
    """Bash without a terminal: its offers are in COMPREPLY."""
    (folder / "script").write_text(script("bash"))

    def ask(typed: str) -> set[str]:
        words = ["pyebpf-proxy", *typed.split()]
        return set(
            _run(
                "bash",
                "-c",
                f"""
                source {folder}/script
                pyebpf-proxy() {{ printf '%s\\n' {" ".join(PORTS)}; }}
                COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}
                _pyebpf_proxy; printf '%s\\n' "${{COMPREPLY[@]}}"
                """,
            )
        ) - {""}

    return ask


def fish(folder: Path) -> Ask:
    """Fish has a command that lists completions."""
    (folder / "script").write_text(script("fish"))

    def ask(typed: str) -> set[str]:
        text = f"""
        set -gx HOME {folder}
        function pyebpf-proxy; printf '%s\\n' {" ".join(PORTS)}; end
        source {folder}/script
        complete -C 'pyebpf-proxy {typed}'
        """
        return {line.split("\t")[0].rstrip("/") for line in _run("fish", "--no-config", "-c", text)}

    return ask


class Zsh:
    """A zsh on a terminal: it completes only typed text. It writes its offers to a file."""

    SETUP = """
    PS1='> ' LISTMAX=10000
    autoload -Uz compinit && compinit -u -D
    pyebpf-proxy() { printf '%s\\n' @PORTS@ }
    compadd() {
        local -a hits
        if [[ ${@[1,(i)(-|--)]} != *-(O|A|D)\\ * ]]; then
            builtin compadd -A hits "$@"
            print -rl -- $hits >>@SAID@
        fi
        builtin compadd "$@"
    }
    said() { print -r -- . >>@SAID@ }
    zle -N said
    ended() { comppostfuncs=(ended); print -r -- . >>@SAID@ }
    comppostfuncs=(ended)
    """

    def __init__(self, folder: Path, source: bool) -> None:
        self.output = folder / "output"
        setup = self.SETUP.replace("@SAID@", str(self.output)).replace("@PORTS@", " ".join(PORTS))
        (folder / "_pyebpf-proxy").write_text(script("zsh"))
        begin = f"fpath=({folder} $fpath)" if not source else ""
        end = f"source {folder}/_pyebpf-proxy" if source else ""
        (folder / ".zshrc").write_text(f"{begin}\n{setup}\n{end}\nprint READY\n")
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.environ |= {"ZDOTDIR": str(folder), "TERM": "dumb"}
            os.execvp("zsh", ["zsh", "-d", "-i"])
        self.shown = ""
        self._until(lambda: "READY" in self.shown)

    def _until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end, self.shown
            if select.select([self.terminal], [], [], 0.02)[0]:
                self.shown += os.read(self.terminal, 4096).decode(errors="replace")

    def ask(self, typed: str) -> set[str]:
        """The offers after a tab."""
        self.output.write_text("")
        os.write(self.terminal, f"\x15pyebpf-proxy {typed}\t".encode())
        self._until(lambda: self.output.read_text().endswith(".\n"))
        return {line.rstrip("/") for line in self.output.read_text().splitlines()} - {"", "."}

    def close(self) -> None:
        """The shell ends with its terminal."""
        os.close(self.terminal)
        os.waitpid(self.pid, 0)


@pytest.fixture(
    scope="module",
    params=[
        "bash",
        pytest.param("zsh", marks=pytest.mark.needs_zsh),
        pytest.param("zsh, as a file of fpath", marks=pytest.mark.needs_zsh),
        pytest.param("fish", marks=pytest.mark.needs_fish),
    ],
)
def shell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Ask]]:
    """A shell by name, and a function that asks it."""
    folder = tmp_path_factory.mktemp("shell")
    name: str = request.param
    if name.startswith("zsh"):
        zsh = Zsh(folder, source=name == "zsh")
        yield name, zsh.ask
        zsh.close()
    else:
        yield name, {"bash": bash, "fish": fish}[name](folder)


@pytest.mark.parametrize(("typed", "offered"), CASES)
def test_what_is_offered(shell: tuple[str, Ask], typed: str, offered: set[str]) -> None:
    name, ask = shell
    if name == "bash":
        offered = {each.partition(":")[0] for each in offered}
    assert ask(typed) == offered


def test_every_command_is_offered(shell: tuple[str, Ask]) -> None:
    name, ask = shell
    assert ask("") >= {*COMMANDS, "lab"} if name != "bash" else ask("s") == {"status", "services"}
