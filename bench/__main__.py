# SPDX-License-Identifier: Apache-2.0
"""``python -m bench``: measures, saves and draws the results, and writes them into docs/performance.md."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from . import (
    api_load,
    change,
    cluster,
    commands,
    connect,
    dns,
    exchange,
    first,
    latency,
    memory,
    packet,
    passing,
    plan,
    services,
    stream,
    udp,
    write,
)
from .contenders import OPTIONAL, WAYS, field
from .loads import Options
from .measure import ROOT, Result, load_result, save, say
from .overview import draw_overview
from .plots import draw
from .report import PAGE, lines, relative, write_page

Figure = Callable[[Options], Result]


def _plain(run: Callable[[bool], Result]) -> Figure:
    """A figure that ignores the options for loads."""
    return lambda asked: run(asked.quick)


FIGURES: dict[str, Figure] = {
    "connect": connect.run,
    "exchange": exchange.run,
    "stream": stream.run,
    "latency": latency.run,
    "dns": dns.run,
    "udp": udp.run,
    "passing": passing.run,
    "packet": _plain(packet.run),
    "services": services.run,
    "memory": memory.run,
    "plan": _plain(plan.run),
    "write": _plain(write.run),
    "change": _plain(change.run),
    "first": _plain(first.run),
    "commands": _plain(commands.run),
    "cluster": _plain(cluster.run),
}
#: Short names for rows of the goals' table, and the figures that measure them: a quick run measures only these.
ROWS = {
    "crr": ("connect",),
    "rr": ("exchange",),
    "stream": ("stream",),
    "latency": ("latency",),
    "dns": ("dns",),
    "udp": ("udp",),
    "none": ("passing", "packet"),
    "services": ("services",),
    "memory": ("memory",),
}
#: These figures share their grounds (contenders.py), which are kept from one figure to the next.
BESIDE = {"connect", "exchange", "stream", "latency", "dns", "services"}
#: This figure takes longer than all others: it is measured only if named.
APART = {"cluster"}
RESULTS = ROOT / "bench" / "results"
QUICK_RESULTS = ROOT / "build" / "bench" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure the figures of docs/performance.md.")
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"only these of {', '.join(FIGURES)}")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"measure only the rows, in a few short rounds; write to {relative(QUICK_RESULTS)}, keep the page",
    )
    parser.add_argument("--rows", type=_rows, default=[], metavar="ROW,…", help=f"only these of {', '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, metavar="N", help="number of rounds of the loads (default: until steady)")
    parser.add_argument("--seconds", type=float, metavar="S", help="duration of each load")
    parser.add_argument("--ways", type=_of(WAYS), default=(), metavar="WAY,…", help=f"only these of {', '.join(WAYS)}")
    parser.add_argument("--families", type=_of(("4", "6")), default=(), metavar="4,6", help="only this family")
    parser.add_argument(
        "--also",
        "--beside",
        dest="also",
        type=_of(OPTIONAL),
        default=(),
        metavar="NAME,…",
        help=f"also measure these of {', '.join(OPTIONAL)}",
    )
    parser.add_argument(
        "--sizes", type=_sizes, default=(), metavar="N,…", help="cluster: only these numbers of services"
    )
    parser.add_argument("--rest", type=int, metavar="SECONDS", help="cluster: duration of the idle measurement")
    parser.add_argument("--many", type=int, metavar="SECONDS", help="cluster: duration of many changes")
    parser.add_argument("--report", action="store_true", help="do not measure; draw and write the stored results")
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
        parser.error("--sizes, --rest and --many require the figure cluster")
    asked = Options(
        arguments.quick,
        arguments.rounds,
        arguments.seconds,
        arguments.ways,
        tuple(map(int, arguments.families)),
        arguments.also,
    )
    measured = [] if arguments.report else arguments.figures + arguments.rows or _all(arguments.quick)
    if not arguments.report:
        if os.geteuid() != 0:
            print("bench needs root: it loads programs and creates network namespaces", file=sys.stderr)
            return 1
        _measure(measured, asked, folder, FIGURES | {"cluster": _cluster(plan, folder)})
    kept = [load_result(path) for name in FIGURES if (path := folder / f"{name}.json").exists()]
    results = [result for result in kept if _drawn(result, folder, result.figure in measured)]
    draw_overview(results, folder)
    if not arguments.quick:
        write_page(results)
        say(f"{relative(PAGE)} written")
    _return_to_owner(folder)
    for line in lines(results):
        print(line)
    return 0


def _all(quick: bool) -> list[str]:
    """The figures that are measured by default."""
    if quick:
        return [figure for figures in ROWS.values() for figure in figures]
    return [name for name in FIGURES if name not in APART]


def _rows(text: str) -> list[str]:
    """The figures that measure these rows."""
    return [figure for row in _of(ROWS)(text) for figure in ROWS[row]]


def _of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma-separated names."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no such name: {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return read


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"comma-separated numbers, not {text}") from None


def _cluster(plan: cluster.Plan, folder: Path) -> Figure:
    """Measure the figure cluster with its options. It is saved after each size, with earlier results of other sizes."""
    path = folder / "cluster.json"

    def run(asked: Options) -> Result:
        kept = load_result(path) if path.exists() else None
        return cluster.run(asked.quick, plan, kept, lambda result: save(result, folder))

    return run


def _measure(names: Sequence[str], asked: Options, folder: Path, figures: Mapping[str, Figure]) -> None:
    """Measure one figure after the other, and save each when it is complete."""
    try:
        for name in names:
            if name not in BESIDE:
                field().close()  # nothing else may run during this figure
            if name in APART and (missing := api_load.missing()):
                say(f"{name} skipped: there is no {missing}")
                continue
            begin = time.monotonic()
            say(f"{name} …")
            path = save(figures[name](asked), folder)
            say(f"{relative(path)} written after {time.monotonic() - begin:.0f} s")
    finally:
        field().close()


def _drawn(result: Result, folder: Path, new: bool) -> bool:
    """Draw the figure. Results of an older format cannot be drawn or compared."""
    try:
        draw(result, folder)
    except (KeyError, TypeError, AttributeError):
        if new:
            raise
        say(f"{result.figure}: the results of {result.machine['date']} have an older format: measure it again")
        return False
    return True


def _return_to_owner(folder: Path) -> None:
    """Under sudo, make the user who ran it the owner of the files."""
    owner = os.environ.get("SUDO_UID")
    if owner:
        for path in (folder, *folder.iterdir(), PAGE):
            os.chown(path, int(owner), int(os.environ["SUDO_GID"]))


if __name__ == "__main__":
    sys.exit(main())
