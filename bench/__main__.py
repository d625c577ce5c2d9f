# SPDX-License-Identifier: Apache-2.0
"""``python -m bench``: measure, keep the results, draw them, put them into docs/performance.md."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import (
    api_load,
    change,
    cluster,
    commands,
    connect,
    fast,
    first,
    latency,
    memory,
    packet,
    plan,
    services,
    udp,
    write,
)
from .contenders import field
from .measure import ROOT, Result, load_result, save, say
from .plots import draw
from .report import PAGE, lines, relative, write_page

Figure = Callable[[bool], Result]
FIGURES: dict[str, Figure] = {
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
    "commands": commands.run,
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
    parser.add_argument("--sizes", type=_sizes, default=(), metavar="N,…", help="cluster: only with so many services")
    parser.add_argument("--rest", type=int, metavar="SECONDS", help="cluster: so long at rest")
    parser.add_argument("--many", type=int, metavar="SECONDS", help="cluster: so long of many changes")
    parser.add_argument("--report", action="store_true", help="measure nothing, draw and write from the kept results")
    arguments = parser.parse_args()
    unknown = set(arguments.figures) - set(FIGURES)
    if unknown:
        parser.error(f"no such figure: {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    folder = QUICK_RESULTS if arguments.quick else RESULTS
    try:
        plan = cluster.planned(arguments.quick, arguments.sizes, arguments.rest, arguments.many)
    except ValueError as error:
        parser.error(str(error))
    if plan != cluster.planned(arguments.quick) and "cluster" not in arguments.figures:
        parser.error("--sizes, --rest and --many are for the figure cluster, which is to be named")
    measured = [] if arguments.report else arguments.figures or [name for name in FIGURES if name not in APART]
    if not arguments.report:
        if os.geteuid() != 0:
            print("bench needs root: it loads programs and makes network namespaces", file=sys.stderr)
            return 1
        _measure(measured, arguments.quick, folder, FIGURES | {"cluster": _cluster(plan, folder)})
    kept = [load_result(path) for name in FIGURES if (path := folder / f"{name}.json").exists()]
    results = [result for result in kept if _drawn(result, folder, result.figure in measured)]
    if not arguments.quick:
        write_page(results)
        say(f"{relative(PAGE)} written")
    _return_to_owner(folder)
    for line in lines(results):
        print(line)
    return 0


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"numbers with commas between them, not {text}") from None


def _cluster(plan: cluster.Plan, folder: Path) -> Figure:
    """The figure cluster as it is asked for: kept after each size, beside what is kept of the others."""
    path = folder / "cluster.json"

    def run(quick: bool) -> Result:
        kept = load_result(path) if path.exists() else None
        return cluster.run(quick, plan, kept, lambda result: save(result, folder))

    return run


def _measure(names: Sequence[str], quick: bool, folder: Path, figures: Mapping[str, Figure]) -> None:
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
            path = save(figures[name](quick), folder)
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
