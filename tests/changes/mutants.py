# SPDX-License-Identifier: Apache-2.0
"""Break one rule of the agent at a time, and show that the courses of changes detect it, and by which check.

Not part of `make test` (half a minute for each). Needs root. The exit status is 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests import ROOT

WRITER, PLANNED = "datapath/maps/writer.py", "services/endpoints.py"


class Mutant(NamedTuple):
    """``rules``: any of them must detect it. A short sleep makes a wrong order visible every time."""

    file: str
    there: str
    instead: str
    course: str
    rules: tuple[str, ...]


FLIP = "self._services[service] = config_id << self._layouts.word_shift"
MUTANTS = {
    "addresses of before while the new version is active": Mutant(
        WRITER,
        "self._delete_frontends([c for c in concerned if c.config_changed], family)",
        "__import__('threading').Timer(0.02, self._delete_frontends, ([c for c in concerned if c.config_changed],"
        " family)).start()",
        "deleted and made again",
        ("wrong", "late", "early"),
    ),
    "a moment without a version": Mutant(
        WRITER, FLIP, f"self._services[service] = 0; __import__('time').sleep(0.01); {FLIP}", "endpoints roll",
        ("refused", "unreachable"),
    ),
    "the list is filled after it is active": Mutant(
        WRITER,
        "self._fill(change.new.first_slot, change.slots)",
        "__import__('threading').Timer(0.02, self._fill, (change.new.first_slot, change.slots)).start()",
        "endpoints roll",
        ("lost", "silent", "wrong", "late", "refused"),
    ),
    "reported as programmed too early": Mutant(
        WRITER,
        FLIP,
        "__import__('threading').Timer(0.2, lambda: self._services.__setitem__(service, config_id"
        " << self._layouts.word_shift)).start()",
        "endpoints roll",
        ("late", "refused"),
    ),
    "terminating ones count as ready": Mutant(
        PLANNED, "ready = [entry for entry in known if entry.flags & READY]",
        "ready = [entry for entry in known if entry.flags & (READY | TERMINATING)]", "endpoints roll", ("late",),
    ),
    "starting ones count as ready": Mutant(
        PLANNED, "ready = [entry for entry in known if entry.flags & READY]", "ready = list(known)",
        "endpoints roll", ("early", "late", "wrong"),
    ),
    "no fallback to terminating ones": Mutant(
        PLANNED, "FALLBACK = SERVING | TERMINATING", "FALLBACK = 64", "endpoints roll", ("refused", "unreachable"),
    ),
    "a new endpoint is never chosen": Mutant(
        "datapath/maps/mirror.py", "len(wanted.cluster),\n", "min(3, len(wanted.cluster)),\n", "endpoints roll",
        ("unused",),
    ),
    "no endpoints: dropped": Mutant(
        "datapath/maps/mirror.py", "wanted.any_endpoints,\n            wanted.internal",
        "True,\n            wanted.internal",
        "all endpoints vanish and return", ("silent", "lost"),
    ),
    "hints are not looked at": Mutant(
        PLANNED, "chosen = _nearest(ready, topology) or", "chosen = ready or", "the node changes its zone",
        ("late", "wrong", "early"),
    ),
    "policies are not followed": Mutant(
        "datapath/maps/mirror.py", "wanted.external_local,\n            bool", "False,\n            bool",
        "policies flip", ("late", "wrong", "early"),
    ),
    "an endpoint has another number after each change": Mutant(
        "datapath/maps/mirror.py", "return [e for e in endpoints if e not in had]",
        "return list(endpoints)", "affinity on and off", ("affinity",),
    ),
    "affinity is not switched on": Mutant(
        "datapath/maps/mirror.py", "wanted.affinity_seconds,\n", "0,\n", "affinity on and off", ("affinity",),
    ),
    "connections of what is gone are ended": Mutant(
        WRITER, "self._affinities.changing(done)",
        "__import__('subprocess').run(['conntrack', '-F'], capture_output=True)", "endpoints roll",
        ("transfer", "broken", "lost"),
    ),
}  # fmt: skip


def notices(name: str, mutant: Mutant) -> bool:
    """Run its course with the broken agent; return whether it was detected."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "pyebpf_proxy", Path(folder) / "pyebpf_proxy")
        path = Path(folder) / "pyebpf_proxy" / mutant.file
        text = path.read_text()
        if mutant.there not in text:
            print(f"{name}: not there any more: {mutant.there}")
            return False
        path.write_text(text.replace(mutant.there, mutant.instead))
        test = "tests/netns/test_changes_under_load.py"
        words = " and ".join(word for word in mutant.course.split() if word != "and")
        command = [sys.executable, "-m", "pytest", "-q", "-x", test, "-k", words]
        # The agent is a separate process: it uses the broken package, this test uses the one here.
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": folder}, capture_output=True, text=True, check=False
        )
    rules = sorted(set(re.findall(r"^E +(?:AssertionError: \d+ of \d+:\s+)?(\w+): IPv", done.stdout, re.MULTILINE)))
    rules += sorted(set(re.findall(r"^E +(transfer|unused|affinity): ", done.stdout, re.MULTILINE)))
    if done.returncode == 1 and set(rules) & set(mutant.rules):
        print(f"{name}: noticed as {', '.join(dict.fromkeys(rules))}", flush=True)
        return True
    print(f"{name}: LIVES (exit status {done.returncode}, {rules})\n{done.stdout[-3000:]}", flush=True)
    return False


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.changes.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(MUTANTS)} (default: all)")
    names = parser.parse_args(arguments).names
    if unknown := sorted(set(names) - set(MUTANTS)):
        parser.error(f"no such mutant: {', '.join(unknown)}; there are {', '.join(MUTANTS)}")
    alive = [name for name in names or MUTANTS if not notices(name, MUTANTS[name])]
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
