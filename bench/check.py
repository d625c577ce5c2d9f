# SPDX-License-Identifier: Apache-2.0
"""``make bench-check``: does a packet cost more than at the base commit? Both commits are built and measured in turns.

BASE is the base commit; the default is the merge base with ``main``, or the previous commit. Exit status 1 if a row of
``bench/packet.py`` is worse.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from .measure import ROOT, say
from .plots import significant

#: A row is worse if it takes this many times as long as the base, and this many nanoseconds more.
WORSE = 1.10
WORSE_NS = 2.0
#: How often both are loaded again: the memory layout of program and maps changes results by up to a fifth.
LOADS = 5
FOLDER = ROOT / "build" / "bench" / "base"


class Verdict(NamedTuple):
    """A row's medians, the median of the rounds' ratios, and whether the row is worse."""

    what: str
    base_ns: float
    ns: float
    ratio: float
    worse: bool


def judge(what: str, base: Sequence[float], changed: Sequence[float]) -> Verdict:
    """Compare the rounds of both commits.

    A row is worse if, in the median of the rounds, it takes WORSE times as long and WORSE_NS more, and if it takes
    longer in three of four rounds: results are rounded to nanoseconds, and other work disturbs the machine.
    """
    pairs = list(zip(base, changed, strict=True))
    ratio = statistics.median(b / max(a, 1.0) for a, b in pairs)
    difference = statistics.median(b - a for a, b in pairs)
    often = sum(b > a for a, b in pairs) >= 0.75 * len(pairs)
    worse = ratio > WORSE and difference >= WORSE_NS and often
    return Verdict(what, statistics.median(base), statistics.median(changed), ratio, worse)


def compare(base: Sequence[Mapping[str, float]], changed: Sequence[Mapping[str, float]]) -> list[Verdict]:
    """A verdict for each row that both commits have."""
    rows = [what for what in changed[0] if what in base[0]]
    return [judge(what, [each[what] for each in base], [each[what] for each in changed]) for what in rows]


class Side:
    """One of the two trees, with its measuring process."""

    def __init__(self, tree: Path, stack: ExitStack) -> None:
        command = [sys.executable, "-m", "bench.packet"]
        env = {**os.environ, "PYTHONPATH": str(tree)}
        self._process = subprocess.Popen(
            command, cwd=tree, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(self._close)
        self._read()

    def round(self) -> dict[str, float]:
        """Nanoseconds by row."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._read())
        return found

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the measurement failed; its output is above")
        return line

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def base_commit(wanted: str) -> str:
    """The commit to compare with. SystemExit if there is none."""
    for name in [wanted] if wanted else [_git("merge-base", "main", "HEAD", check=False), "HEAD~1"]:
        found = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", check=False) if name else ""
        if found and (wanted or found != _git("rev-parse", "HEAD") or _git("status", "--porcelain")):
            return found
    raise SystemExit(f"there is no commit {wanted or 'before this one'} to compare with: set BASE=commit")


def build(commit: str) -> Path:
    """The commit's tree, built; cached for the next run."""
    tree = FOLDER / commit[:12]
    if not (tree / "built").exists():
        tree.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(_command("archive", commit), check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
        if not (tree / "bench" / "packet_world.py").exists():
            raise SystemExit(f"{commit[:12]} lacks this measurement: choose a later BASE")
        subprocess.run(["make", "--no-print-directory", "-C", str(tree), "build"], check=True)
        (tree / "built").touch()
    return tree


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.check", description="Compare a packet's cost with a base.")
    parser.add_argument("--base", default="", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        print("bench-check needs root: it loads programs and makes network namespaces", file=sys.stderr)
        return 1
    commit = base_commit(arguments.base)
    say(f"comparing with {commit[:12]}, {arguments.rounds} rounds")
    found: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    trees = (build(commit), ROOT)
    for _ in range(LOADS):
        with ExitStack() as stack:
            sides = [Side(tree, stack) for tree in trees]
            for side in sides:
                side.round()  # a warm-up
            for number in range(math.ceil(arguments.rounds / LOADS)):
                for place in (0, 1) if number % 2 else (1, 0):
                    found[place].append(sides[place].round())
    verdicts = compare(*found)
    for each in verdicts:
        word = "WORSE " if each.worse else "      "
        times = f"{significant(each.base_ns)} → {significant(each.ns)} ns, {each.ratio:.2f} times"
        print(f"{word}{each.what}: {times}")
    return 1 if any(each.worse for each in verdicts) else 0


def _command(*arguments: str) -> list[str]:
    # Under sudo the checkout belongs to another user.
    return ["git", "-c", "safe.directory=*", "-C", str(ROOT), *arguments]


def _git(*arguments: str, check: bool = True) -> str:
    return subprocess.run(_command(*arguments), capture_output=True, text=True, check=check).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
