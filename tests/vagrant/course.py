# SPDX-License-Identifier: Apache-2.0
"""The steps on the two machines, and the table of the results."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.vagrant.nodes import BUILT, FOLDER, REPOSITORY, Node, Remote
from tests.vagrant.problem import VagrantError

LINE = "{:<14} {:<8} {:<26} {:<5} {:<4} {:<16} {:<36} {}"
HEAD = LINE.format("when", "from", "to", "IP", "", "answered by", "what the backend saw, or how long", "")
#: How many requests each part of the load must make before and after the event.
ENOUGH = 10
#: Seconds between two requests of one part of the load, by driver. With a fifth of a second, requests would take most
#: of an emulated CPU, and the start of the agent would take minutes.
PAUSE = {"kvm": 0.2, "qemu": 1.0}
NEXT = "next"


class Row(NamedTuple):
    """One line of the table; ``problem`` is empty if it is right."""

    when: str
    client: str
    what: str
    family: str
    protocol: str
    answered: str
    seen: str
    problem: str

    def text(self) -> str:
        return LINE.format(*self[:7], f"WRONG: {self.problem}" if self.problem else "ok").rstrip()


def asked(when: str, answer: Sequence[str]) -> Row:
    """A row of ``guest.ask_all``."""
    _, client, what, family, protocol, answered, seen, problem = answer
    return Row(when, client, what, family, protocol, answered, seen, problem)


def loaded(when: str, answer: Sequence[Any]) -> Row:
    """A row of ``guest.load``: no connection may be lost, and each must have made enough requests."""
    _, client, what, family, protocol, requests, lost, longest, error = answer
    problem = f"{lost} lost, the first: {error}" if lost else ""
    if not problem and requests < 2 * ENOUGH:
        problem = f"only {requests} requests: no result"
    return Row(when, client, what, family, protocol, f"{requests}, {lost} lost", f"at most {longest:.1f} s", problem)


def changed(when: str, name: str, before: dict[str, Any], after: dict[str, Any], version: str, seconds: float) -> Row:
    """The agent itself: another process, of the expected version."""
    problem = ""
    if after["process"] in ("0", before["process"]):
        problem = f"process {after['process']} as before"
    elif after["version"] != version:
        problem = f"version {after['version']}, not {version}"
    layouts = ", ".join(after["layouts"])
    return Row(when, name, f"agent {after['version']}", "", "", layouts, f"all written after {seconds:.1f} s", problem)


def next_tree(tree: Path) -> None:
    """This checkout as the next version: another version number, and another map layout."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(REPOSITORY / name, tree)
    for name in ("pyebpf_proxy", "bpf"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    edit(tree / "pyproject.toml", r'^version = "(.*)"$', rf'version = "\1+{NEXT}"')
    edit(tree / "pyebpf_proxy/__init__.py", r'^__version__ = "(.*)"$', rf'__version__ = "\1+{NEXT}"')
    edit(tree / "pyebpf_proxy/datapath/loader/layout.py", r"^LAYOUT_VERSION = (\d+)$", r"LAYOUT_VERSION = 1\1")


def next_site(folder: Path) -> Path:
    """The next version, installed into a folder below ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    tree = folder / "tree"
    tree.mkdir(parents=True)
    next_tree(tree)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "-w", str(folder), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise VagrantError(f"the next version's wheel: {(done.stderr.strip() or 'no word').splitlines()[-1]}")
    shutil.rmtree(tree)
    (wheel,) = folder.glob("*.whl")
    if subprocess.run([FOLDER / "prepare.sh", "site", wheel, folder / "site"], check=False).returncode:
        raise VagrantError("the next version cannot be installed: see above")
    return folder / "site"


def edit(path: Path, pattern: str, replacement: str) -> None:
    """Replace the only matching line. VagrantError if there is none, or more."""
    text, count = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
    if count != 1:
        raise VagrantError(f"{path.name} has {count} lines like {pattern}")
    path.write_text(text)


class Course:
    """The steps; rows are printed at once, and kept."""

    def __init__(self, nodes: Sequence[Node], driver: str) -> None:
        self.nodes = nodes
        self._pause = PAUSE[driver]
        self.rows: list[Row] = []

    def run(self) -> None:
        """Run all steps. VagrantError if a step could not be made at all."""
        print("\n" + HEAD, flush=True)
        for node in self.nodes:
            node.install()
        self._requests("at first")
        version = self._agents()[0]["version"]
        self._under_load("restart", version, self._restart)
        site = next_site(BUILT / NEXT)
        self._under_load("upgrade", f"{version}+{NEXT}", lambda: self._upgrade(site))
        self._requests("upgraded")

    def _keep(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows.append(row)
            print(row.text(), flush=True)

    def _each(self, step: Callable[[Node], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            return list(pool.map(step, self.nodes))

    def _agents(self) -> list[dict[str, Any]]:
        return [answer for (answer,) in self._each(lambda node: node.ask("agent"))]

    def _requests(self, when: str) -> None:
        for answers in self._each(lambda node: node.ask("ask")):
            self._keep(asked(when, answer) for answer in answers)

    def _under_load(self, when: str, version: str, step: Callable[[], Any]) -> None:
        before = self._agents()
        loads: list[Remote] = []
        try:
            loads += [node.start("load", str(self._pause)) for node in self.nodes]
            for load in loads:
                load.wait_for(ENOUGH)
            began = time.monotonic()
            step()
            took = time.monotonic() - began
            for load in loads:
                load.wait_for(ENOUGH)
            self._keep(loaded(when, answer) for load in loads for answer in load.stop())
        finally:
            for load in loads:
                load.kill()
        for node, old, new in zip(self.nodes, before, self._agents(), strict=True):
            self._keep([changed(when, node.name, old, new, version, took)])

    def _restart(self) -> None:
        self._each(lambda node: node.ask("restart"))

    def _upgrade(self, site: Path) -> None:
        def one(node: Node) -> None:
            node.send(site, "/srv/pyebpf-proxy/site")
            node.run("sudo /srv/pyebpf-proxy/provision.sh --lab", limit=1200)

        self._each(one)


def summary(rows: Sequence[Row], seconds: float) -> str:
    """The last line."""
    wrong = sum(bool(row.problem) for row in rows)
    return f"{len(rows)} rows, {wrong} not as they must be; {seconds:.0f} s, of {os.cpu_count()} processors"
