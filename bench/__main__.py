# SPDX-License-Identifier: Apache-2.0
"""``python -m bench``: measure, keep the results, draw them, put them into docs/performance.md."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import api_load, change, cluster, connect, fast, first, memory, packet, plan, write
from .measure import ROOT, load_result, save, say
from .plots import draw
from .report import PAGE, lines, relative, write_page

FIGURES = {
    "plan": plan.run,
    "write": write.run,
    "change": change.run,
    "packet": packet.run,
    "first": first.run,
    "connect": connect.run,
    "fast": fast.run,
    "memory": memory.run,
    "cluster": cluster.run,
}
RESULTS = ROOT / "bench" / "results"
QUICK_RESULTS = ROOT / "build" / "bench" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure the figures of docs/performance.md.")
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"only these of {', '.join(FIGURES)}")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"few repetitions, for a look: results go to {relative(QUICK_RESULTS)} and the page stays as it is",
    )
    parser.add_argument("--report", action="store_true", help="measure nothing, draw and write from the kept results")
    arguments = parser.parse_args()
    unknown = set(arguments.figures) - set(FIGURES)
    if unknown:
        parser.error(f"no such figure: {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    folder = QUICK_RESULTS if arguments.quick else RESULTS
    if not arguments.report:
        if os.geteuid() != 0:
            print("bench needs root: it loads programs and makes network namespaces", file=sys.stderr)
            return 1
        for name in arguments.figures or FIGURES:
            if name == "cluster" and (missing := api_load.missing()):
                say(f"cluster skipped: there is no {missing}")
                continue
            say(f"{name} …")
            say(f"{relative(save(FIGURES[name](arguments.quick), folder))} written")
    results = [load_result(path) for name in FIGURES if (path := folder / f"{name}.json").exists()]
    for result in results:
        draw(result, folder)
    if not arguments.quick:
        write_page(results)
        say(f"{relative(PAGE)} written")
    _return_to_owner(folder)
    for line in lines(results):
        print(line)
    return 0


def _return_to_owner(folder: Path) -> None:
    """Under sudo: the files belong to whoever asked."""
    owner = os.environ.get("SUDO_UID")
    if owner:
        for path in (folder, *folder.iterdir(), PAGE):
            os.chown(path, int(owner), int(os.environ["SUDO_GID"]))


if __name__ == "__main__":
    sys.exit(main())
