# SPDX-License-Identifier: Apache-2.0
"""``python -m bench``: measure, keep the results, draw them, put them into docs/performance.md."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import api_load, change, cluster, connect, fast, first, latency, memory, packet, plan, services, udp, write
from .contenders import field
from .measure import ROOT, Result, load_result, save, say
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
    "latency": latency.run,
    "udp": udp.run,
    "services": services.run,
    "memory": memory.run,
    "cluster": cluster.run,
}
#: They use the same grounds (contenders.py), which stay from one to the next.
BESIDE = {"connect", "fast", "latency", "services"}
#: Takes longer than all others: only when it is named.
APART = {"cluster"}
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
    measured = [] if arguments.report else arguments.figures or [name for name in FIGURES if name not in APART]
    if not arguments.report:
        if os.geteuid() != 0:
            print("bench needs root: it loads programs and makes network namespaces", file=sys.stderr)
            return 1
        _measure(measured, arguments.quick, folder)
    kept = [load_result(path) for name in FIGURES if (path := folder / f"{name}.json").exists()]
    results = [result for result in kept if _drawn(result, folder, result.figure in measured)]
    if not arguments.quick:
        write_page(results)
        say(f"{relative(PAGE)} written")
    _return_to_owner(folder)
    for line in lines(results):
        print(line)
    return 0


def _measure(names: Sequence[str], quick: bool, folder: Path) -> None:
    """One figure after the other; each is kept as soon as it is there."""
    try:
        for name in names:
            if name not in BESIDE:
                field().close()  # nobody idles beside what is measured alone
            if name in APART and (missing := api_load.missing()):
                say(f"{name} skipped: there is no {missing}")
                continue
            begin = time.monotonic()
            say(f"{name} …")
            path = save(FIGURES[name](quick), folder)
            say(f"{relative(path)} written after {time.monotonic() - begin:.0f} s")
    finally:
        field().close()


def _drawn(result: Result, folder: Path, new: bool) -> bool:
    """Draw it; of a version that kept other samples nothing can be drawn, nor told beside the others."""
    try:
        draw(result, folder)
    except (KeyError, TypeError, AttributeError):
        if new:
            raise
        say(f"{result.figure}: the results of {result.machine['date']} are of an older kind: measure it again")
        return False
    return True


def _return_to_owner(folder: Path) -> None:
    """Under sudo: the files belong to whoever asked."""
    owner = os.environ.get("SUDO_UID")
    if owner:
        for path in (folder, *folder.iterdir(), PAGE):
            os.chown(path, int(owner), int(os.environ["SUDO_GID"]))


if __name__ == "__main__":
    sys.exit(main())
