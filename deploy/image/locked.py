# SPDX-License-Identifier: Apache-2.0
"""Prints selected entries of a lock file, with their hashes.

    locked.py LOCK NAME…               the entries with these names
    locked.py LOCK --report FILE       the entries that pip's installation report names, except for the project itself

It needs only Python, because it runs before anything is installed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==\S+(?: \\\n +--hash=\S+)+\n", re.MULTILINE)


def normal(name: str) -> str:
    """A project's name in the form in which indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def reported(report: str) -> list[str]:
    """Names in an installation report. Packages installed from a file are left out: they are not in the lock."""
    installs = json.loads(report)["install"]
    return [install["metadata"]["name"] for install in installs if not install["is_direct"]]


def select(lock: str, names: list[str]) -> str:
    """The entries with these names. A KeyError names one that is not locked."""
    entries = {normal(found.group(1)): found.group(0) for found in ENTRY.finditer(lock)}
    return "".join(entries[normal(name)] for name in sorted(names, key=normal))


def main(arguments: list[str]) -> int:
    """Run the command. Status 1, with one line, if a package is not locked."""
    lock, *names = arguments
    if names[:1] == ["--report"]:
        names = reported(Path(names[1]).read_text())
    try:
        sys.stdout.write(select(Path(lock).read_text(), names))
    except KeyError as error:
        print(f"{lock} has no entry with hashes for {error.args[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
