# SPDX-License-Identifier: Apache-2.0
"""One picture per figure, as SVG, and as PNG for previews."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from . import packet, plots_peers
from .measure import Result, summary
from .plots_peers import BLUE, GREY, ORANGE, whiskers
from .proxies import WORDS as PROXIES


def draw(result: Result, folder: Path) -> list[Path]:
    """Write ``folder/FIGURE.svg`` and ``.png``."""
    # Fixed ids and no date: the same results make the same file.
    with mpl.rc_context({"svg.hashsalt": result.figure, "font.size": 9, "axes.spines.top": False,
                         "axes.spines.right": False}):  # fmt: skip
        figure = Figure(figsize=(8, 3.8))
        # The lowest strip describes the machine.
        figure.set_layout_engine("constrained", rect=(0, 0.035, 1, 0.965))
        figure.suptitle(result.title + (" (quick run)" if result.quick else ""))
        _DRAWERS[result.figure](result, figure)
        figure.text(0.995, 0.005, _where(result), ha="right", va="bottom", fontsize=6, color="#666666")
        paths = [folder / f"{result.figure}.{kind}" for kind in ("svg", "png")]
        for path in paths:
            figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else {})
    return paths


def _where(result: Result) -> str:
    m = result.machine
    return f"{m['processor']}, {m['cpus']} CPUs, {m['kernel']}, {m['date'][:10]}, {m['commit']}"


def _plan(result: Result, figure: Figure) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1, 3))
    sizes = sorted(result.samples["runs"], key=int)
    seconds = [summary([run["everything_seconds"] for run in result.samples["runs"][size]]).median for size in sizes]
    bars = left.bar([f"{int(size):,}".replace(",", " ") for size in sizes], seconds, color=[GREY, BLUE])
    left.bar_label(bars, fmt="%.2g s")
    left.set(xlabel="services", ylabel="everything: seconds of CPU on this machine")
    for size, colour in zip(sizes, (GREY, BLUE), strict=True):
        took = sorted(each for run in result.samples["runs"][size] for each in run["change_ms"])
        shares = [100 * (i + 1) / len(took) for i in range(len(took))]
        right.plot(took, shares, color=colour, label=f"{int(size):,} services".replace(",", " "))
    right.set(xscale="log", xlabel="one changed slice: ms of CPU on this machine", ylabel="% of changes", ylim=(0, 101))
    right.legend(frameon=False)


def _write(result: Result, figure: Figure) -> None:
    runs = result.samples["runs"]

    def median(name: str) -> float:
        return float(statistics.median(run[name] for run in runs))

    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    writes = median("map_writes")
    parts = [("plan", median("planning"), GREY), ("pack, keep the mirror", median("writing") - writes, BLUE),
             ("map writes", writes, ORANGE)]  # fmt: skip
    start = 0.0
    for name, seconds, colour in parts:
        left.barh(0, seconds, left=start, color=colour, label=f"{name}: {seconds:.2f} s")
        start += seconds
    left.set(xlabel="seconds on this machine", yticks=[], ylim=(-0.8, 1.2))
    left.legend(frameon=False, loc="upper left")
    values = [writes, median("map_writes_one_by_one")]
    bars = right.bar(["in batches", "one by one"], values, color=[ORANGE, GREY])
    right.bar_label(bars, fmt="%.2f s")
    right.set_ylabel(f"seconds for {runs[0]['map_entries']:.0f} entries")


def _change(result: Result, figure: Figure) -> None:
    left, right = figure.subplots(1, 2)
    for axes, key, label in (
        (left, "latency_ms", "file event → map flipped, ms"),
        (right, "cpu_ms", "the agent's CPU time per change, ms"),
    ):
        for kind, name, colour in (("small", "10 endpoints", BLUE), ("large", "1 000 endpoints", ORANGE)):
            by_size = sorted((int(size), values) for size, values in result.samples[key][kind].items())
            sizes = [float(size) for size, _ in by_size]
            summaries = [summary(values) for _, values in by_size]
            whiskers(axes, sizes, summaries, color=colour, marker="o", label=f"slice of {name}")
        axes.set(xscale="log", xlabel="services in the cluster", ylabel=label, ylim=(0, None))
        axes.set_xticks(sizes, [f"{size:,.0f}".replace(",", " ") for size in sizes])
        axes.minorticks_off()
        axes.legend(frameon=False)


def _packet(result: Result, figure: Figure) -> None:
    samples = result.samples["ns"]
    kinds = [kind for kind in packet.KINDS if any(what.startswith(f"{kind}: ") for what in samples)]
    panels = figure.subplots(1, len(kinds), width_ratios=[3 if kind.startswith("no") else 2 for kind in kinds])
    figure.set_size_inches(12, 3.8)
    for axes, kind in zip(panels, kinds, strict=True):
        of = {what.removeprefix(f"{kind}: "): each for what, each in samples.items() if what.startswith(f"{kind}: ")}
        found = [summary(each) for each in of.values()]
        axes.bar(range(len(of)), [each.median for each in found], color=GREY if kind.startswith("no") else BLUE)
        whiskers(axes, range(len(of)), found, fmt="none", ecolor="black")
        axes.set_xticks(range(len(of)), list(of), rotation=45, ha="right", fontsize=7)
        axes.set_title(kind.replace(", ", ",\n").replace(" that ", " that\n").replace(" of ", "\nof "), fontsize=8)
    panels[0].set_ylabel("ns more than an empty program, on this machine")


def _first(result: Result, figure: Figure) -> None:
    axes = figure.subplots()
    bars = {row.compared_with: row.compared for row in result.rows if row.compared}
    bars |= {row.what: row.measured for row in result.rows}
    names = sorted(bars, key=lambda name: -bars[name].median)
    ratios = {row.what: f"{row.judged.median:.2f} times" for row in result.rows}
    colours = [GREY if name.startswith("plain") else BLUE for name in names]
    axes.barh(names, [bars[name].median for name in names], color=colours)
    for i, name in enumerate(names):
        axes.annotate(ratios.get(name, ""), (bars[name].upper_quartile, i), va="center",
                      xytext=(4, 0), textcoords="offset points")  # fmt: skip
    axes.set_xlabel("ns on this machine, an empty program's taken off")
    axes.margins(x=0.12)


def _cluster(result: Result, figure: Figure) -> None:
    runs = result.samples["runs"]
    sizes = sorted({run["services"] for run in runs})
    colours = dict(zip(PROXIES, (BLUE, ORANGE, GREY), strict=True))
    left, middle, right = figure.subplots(1, 3, width_ratios=(3, 3, 4))
    for kind, words in PROXIES.items():
        of = [[run for run in runs if (run["kind"], run["services"]) == (kind, size)] for size in sizes]
        style = {"color": colours[kind], "marker": "o"}
        whiskers(left, sizes, [summary([run["start_seconds"] for run in found]) for found in of], label=words, **style)
        changes = [[each["since_sent_ms"] for run in found for each in run["changes"]] for found in of]
        whiskers(middle, sizes, [summary(values) for values in changes], **style)
        for run in (run for found in of for run in found if "many" in run):
            seen = [each for each in run["many"] if each["in_force"] is not None]
            took = [(each["in_force"] - each["sent"]) * 1e3 for each in seen]
            right.plot([each["sent"] for each in seen], took, ".", color=colours[kind], markersize=1, alpha=0.6,
                       rasterized=True)  # fmt: skip
    left.set(ylabel="start → everything programmed, s", ylim=(0, None))
    left.legend(frameon=False, fontsize=7)
    middle.set(ylabel="a slice written → in force, ms", yscale="log")
    right.set(xlabel="seconds", ylabel="100 changes a second: each one's ms", yscale="log")
    for axes in (left, middle):
        axes.set(xlabel="services", xscale="log")
        axes.set_xticks(sizes, [f"{size:,}".replace(",", " ") for size in sizes])
        axes.minorticks_off()


def _memory(result: Result, figure: Figure) -> None:
    axes = figure.subplots()
    figure.set_size_inches(8, 2.6)
    for at, (name, of) in enumerate(result.samples["runs"].items()):
        begin = 0.0
        for number, size in enumerate(of["many"]):
            axes.barh([at], [size / 1e6], left=[begin], color=BLUE, alpha=1 - 0.8 * number / len(of["many"]))
            begin += size / 1e6
        axes.text(begin, at, f" {begin:.1f}", va="center")
        axes.text(0.3, at + 0.45, name, fontsize=8)
    axes.axvline(64, color=ORANGE, linestyle="--", linewidth=1)
    axes.set(xlabel="MB in the kernel, map by map; the line: the goal", yticks=[])


def _commands(result: Result, figure: Figure) -> None:
    axes = figure.subplots()
    names = list(result.samples["clock_seconds"])[::-1]
    for at, name in enumerate(names):
        for samples, colour, shift in (("clock_seconds", BLUE, 0.12), ("cpu_seconds", ORANGE, -0.12)):
            values = result.samples[samples][name]
            axes.plot(values, [at + shift] * len(values), ".", color=colour, markersize=3, alpha=0.6)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="seconds of a whole command; orange: of processor time", xlim=(0, None))


_DRAWERS: dict[str, Callable[[Result, Figure], None]] = {
    "plan": _plan,
    "write": _write,
    "change": _change,
    "packet": _packet,
    "first": _first,
    "connect": plots_peers.draw_connect,
    "exchange": plots_peers.draw_exchange,
    "stream": plots_peers.draw_stream,
    "dns": plots_peers.draw_dns,
    "passing": plots_peers.draw_passing,
    "udp": plots_peers.draw_udp,
    "memory": _memory,
    "commands": _commands,
    "services": plots_peers.draw_services,
    "latency": plots_peers.draw_latency,
    "cluster": _cluster,
}


def significant(value: float, digits: int = 3) -> str:
    """A number with that many significant digits."""
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}" if places else f"{round(value):,}".replace(",", "\u202f")
