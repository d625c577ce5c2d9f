# SPDX-License-Identifier: Apache-2.0
"""The first part of docs/performance.md: one picture and one table of ten lines that compare four contenders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from .contenders import CONTENDERS, IPTABLES, NFTABLES, NONE, OURS
from .loads import cell
from .measure import Result, Summary, summary
from .plots import significant
from .plots_peers import BLUE, GREY, ORANGE
from .stream import STREAMS

COLUMNS = (NONE, IPTABLES, NFTABLES, OURS)
_COLOURS = dict(zip(COLUMNS, (GREY, "#8fb8cf", BLUE, ORANGE), strict=True))
_MILLION = 1e6


class Wanted(NamedTuple):
    """A line: its label, and where its samples are. ``scale``: samples per unit."""

    what: str
    unit: str
    figure: str
    keys: tuple[str, ...]
    scale: float = 1.0


class Line(NamedTuple):
    """By contender, the median, and the ratio to no proxy in the same round (in the last line: to one service)."""

    what: str
    unit: str
    values: Mapping[str, Summary]
    ratios: Mapping[str, Summary]


LINES = (
    Wanted("Short connections, pod → ClusterIP", "/s", "connect", (cell("pod", 4),)),
    Wanted("Short connections, client → NodePort, policy Local", "/s", "connect", (cell("client", 4),)),
    Wanted("Short connections, client → NodePort, policy Cluster", "/s", "connect", (cell("cluster", 4),)),
    Wanted("Request-response, pod → ClusterIP", "/s", "exchange", (cell("pod", 4),)),
    Wanted("Request-response, client → NodePort", "/s", "exchange", (cell("cluster", 4),)),
    Wanted("TCP stream, pod → ClusterIP", "Gbit/s", "stream", (STREAMS, cell("pod", 4))),
    Wanted("Latency p99 at 70 % load, pod → ClusterIP (less is better)", "µs", "latency", ("p99_us", cell("pod", 4))),
    Wanted("UDP of 64 bytes, 10 000 flows, one core", "million/s", "udp", ("10 000 flows",), _MILLION),
    Wanted("DNS: query and answer, a new port each time", "/s", "dns", (cell("pod", 4),)),
    Wanted("Short connections among 30 000 services (compared with one)", "/s", "services", ("found", "30000")),
)


def overview(results: Iterable[Result]) -> list[Line]:
    """The ten lines. Those that were not measured have no values."""
    known = {result.figure: result for result in results}
    return [_line(wanted, known.get(wanted.figure)) for wanted in LINES]


def _line(wanted: Wanted, result: Result | None) -> Line:
    found: Any = result.samples if result is not None else {}
    for key in wanted.keys:
        found = found.get(key, {})
    many: dict[str, Sequence[float]] = {}
    one: dict[str, Sequence[float]] = {}
    for name in COLUMNS:
        if name in found and isinstance(found[name], dict):  # with many services, each is compared with itself
            many[name], one[name] = found[name]["many"], found[name]["one"]
        elif name in found and NONE in found:
            many[name], one[name] = found[name], found[NONE]
    values = {name: summary([each / wanted.scale for each in of]) for name, of in many.items()}
    ratios = {name: summary([a / b for a, b in zip(many[name], one[name], strict=False)]) for name in many}
    return Line(wanted.what, wanted.unit, values, ratios)


def table(found: Sequence[Line]) -> list[str]:
    """A Markdown table: a line for each measurement, a column for each contender."""
    names = [CONTENDERS[name].words for name in COLUMNS]
    names[-1] = f"**{names[-1]}**"
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for line in found:
        cells = []
        for name in COLUMNS:
            if name not in line.values:
                cells.append("–")
                continue
            text = f"{significant(line.values[name].median)} {line.unit}"
            ratio = "" if line.ratios[name].median == 1.0 and name == NONE else f" ({line.ratios[name].median:.2f})"
            cells.append(f"**{text}{ratio}**" if name == OURS else text + ratio)
        lines.append(f"| {line.what} | " + " | ".join(cells) + " |")
    return lines


def section(results: Sequence[Result]) -> str:
    """Picture, table, and the machine of the measurement."""
    parts = [
        "![pyebpf-proxy with its defaults, kube-proxy, and no proxy](../bench/results/overview.svg)",
        "",
        *table(overview(results)),
        "",
        "Medians; in brackets, the ratio to no proxy in the same round (in the last line: to the same with one"
        " service). " + _where(results),
        "",
    ]
    return "\n".join(parts)


def _where(results: Sequence[Result]) -> str:
    figures = {wanted.figure for wanted in LINES}
    machines = {
        f"{m['kernel']}, {m['processor']}, {m['cpus']} CPUs, commit {m['commit']}, {m['date'][:10]}"
        for m in (result.machine for result in results if result.figure in figures)
    }
    return "Measured on " + "; ".join(sorted(machines)) + "." if machines else "Not measured yet."


def draw_overview(results: Sequence[Result], folder: Path) -> None:
    """Write ``folder/overview.svg`` and ``.png``: ratios to no proxy, for every contender and measured line."""
    found = [line for line in overview(results) if line.ratios]
    if not found:
        return
    with mpl.rc_context({"svg.hashsalt": "overview", "font.size": 9, "axes.spines.top": False,
                         "axes.spines.right": False}):  # fmt: skip
        figure = Figure(figsize=(9, 0.9 + 0.62 * len(found)))
        figure.set_layout_engine("constrained")
        axes = figure.subplots()
        height = 0.8 / len(COLUMNS)
        for place, name in enumerate(COLUMNS):
            lines = [(at, line.ratios[name]) for at, line in enumerate(found) if name in line.ratios]
            rows = [at + (place - 1.5) * height for at, _ in lines]
            middle = [ratio.median for _, ratio in lines]
            apart = [
                [ratio.median - ratio.lower_quartile for _, ratio in lines],
                [ratio.upper_quartile - ratio.median for _, ratio in lines],
            ]
            words = CONTENDERS[name].words
            axes.barh(rows, middle, height, xerr=apart, color=_COLOURS[name], label=words, error_kw={"elinewidth": 0.8})
        axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
        axes.set_yticks(range(len(found)), [line.what for line in found])
        axes.invert_yaxis()
        axes.set(xlabel="ratio to no proxy (medians, quartiles)", xlim=(0, None))
        figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=len(COLUMNS))
        for kind in ("svg", "png"):
            figure.savefig(folder / f"overview.{kind}", dpi=130, metadata={"Date": None} if kind == "svg" else {})
