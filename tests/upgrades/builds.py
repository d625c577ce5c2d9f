# SPDX-License-Identifier: Apache-2.0
"""Former commits, and their builds in the cache. The checkout is only read."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pyebpf_proxy.datapath.loader.layout import LAYOUT_VERSION
from tests import CACHE, ROOT

FOLDER = CACHE / "upgrades"
#: The oldest layout version whose last commit is tested by default.
OLDEST = 4
#: So many days before HEAD, the last commits are tested by default.
DAYS = (1, 2)
_LAYOUT = re.compile(r"^LAYOUT_VERSION = (\d+)$", re.MULTILINE)


class BuildError(Exception):
    """There is no such commit, or it cannot be built."""


class Build(NamedTuple):
    """A version of the agent, to be imported from ``tree``."""

    name: str
    tree: Path
    layout: int


#: The version under test.
PRESENT = Build("tree", ROOT, LAYOUT_VERSION)


class Repository:
    """The commits of a clone."""

    def __init__(self, folder: Path = ROOT) -> None:
        self._folder = folder

    def commit(self, name: str) -> str:
        """The full hash. BuildError if the clone has no such commit."""
        found = self._git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", check=False)
        if found:
            return found
        if self._git("rev-parse", "--is-shallow-repository", check=False) == "true":
            raise BuildError(f"the clone is shallow and lacks the commit {name}: run git fetch --unshallow")
        raise BuildError(f"{self._folder} has no commit {name}")

    def layout(self, commit: str) -> int:
        """The layout version of a commit. BuildError if it names none."""
        found = self._git("grep", "-hE", _LAYOUT.pattern.replace(r"\d", "[0-9]"), commit, "--", "*.py", check=False)
        if (named := _LAYOUT.search(found)) is None:
            raise BuildError(f"the commit {commit[:12]} names no LAYOUT_VERSION")
        return int(named[1])

    def default_commits(self) -> list[str]:
        """The first commit of the present layout, the last one of each former layout, and the last ones of some days.

        All commits of one layout must be able to read each other's maps, so the first is the most meaningful.
        """
        return list(dict.fromkeys((*self._at_layouts(), *self._at_days())))

    def _at_layouts(self) -> Iterator[str]:
        present = self.layout(self.commit("HEAD"))
        for change in self._git("log", "--format=%H", "-G^LAYOUT_VERSION = ", "--", "*.py").split():
            last = self.commit(f"{change}~1")
            version, former = self.layout(change), self.layout(last)
            if version == former:  # the line was only moved
                continue
            if version == present:
                yield change
            if former < OLDEST:
                return
            yield last

    def _at_days(self) -> Iterator[str]:
        present = int(self._git("log", "-1", "--format=%ct"))
        for days in DAYS:
            # Of a shallow clone, the commits that are there are enough.
            yield from self._git("rev-list", "-1", f"--before={present - days * 86400}", "HEAD").split()

    def build(self, commit: str, folder: Path = FOLDER) -> Build:
        """The build of a commit, from the cache if it is there. BuildError if it fails."""
        layout, tree = self.layout(commit), folder / commit[:12]
        if not tree.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                made = Path(temporary, "tree")
                made.mkdir()
                archive = subprocess.run(self._command("archive", commit), check=True, stdout=subprocess.PIPE).stdout
                subprocess.run(["tar", "-x", "-C", made], input=archive, check=True)
                done = subprocess.run(
                    ["make", "-s", "-C", made, "objects"], capture_output=True, text=True, check=False
                )
                if done.returncode:
                    raise BuildError(f"make objects fails in {commit[:12]}:\n{done.stderr}")
                made.rename(tree)
        return Build(commit[:8], tree, layout)

    def _git(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(self._command(*arguments), capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise BuildError(f"git {arguments[0]} fails: {done.stderr.strip()}")
        return done.stdout.strip()

    def _command(self, *arguments: str) -> list[str]:
        # Under sudo the checkout belongs to another user.
        return ["git", "-c", "safe.directory=*", "-C", str(self._folder), *arguments]
