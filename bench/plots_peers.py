# SPDX-License-Identifier: Apache-2.0
"""Pictures that compare contenders."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import connect, dns, exchange, latency, services, stream, udp
from .contenders import CONTENDERS, NONE, WAYS
from .loads import Samples
from .measure import Result, Summary, summary
from .proxies import NFTABLES

BLUE, GREY, ORANGE = "#2a6f97", "#9aa5b1", "#d98324"
#: Hatching distinguishes contenders of the same colour.
STYLES = {"iptables": ":", "slow": "--", "socket": ":", "xdp": "-."}


def colour(name: str) -> str:
    """Colours for pyebpf-proxy and kube-proxy; grey for no proxy."""
    proxy = CONTENDERS[name].proxy if name in CONTENDERS else ""
    return GREY if not proxy or CONTENDERS[name].past else ORANGE if proxy == "ours" else BLUE


def words(name: str) -> str:
    """The contender's label."""
    return CONTENDERS[name].words if name in CONTENDERS else name


def whiskers(axes: Axes, x: Sequence[float], summaries: Sequence[Summary], **style: Any) -> None:
    """Medians with quartiles."""
    middle = [s.median for s in summaries]
    below = [s.median - s.lower_quartile for s in summaries]
    above = [s.upper_quartile - s.median for s in summaries]
    axes.errorbar(x, middle, yerr=[below, above], capsize=3, **style)


def bars(axes: Axes, of: Mapping[str, Sequence[float]], goal: float | None = None, label: bool = True) -> None:
    """Medians and every sample. The dashed line is the goal, as a fraction of the rate without a proxy."""
    names = [name for name in (*CONTENDERS, *of) if name in of]
    names = list(dict.fromkeys(names))
    middle = [statistics.median(of[name]) for name in names]
    axes.barh(range(len(names)), middle, color=[colour(name) for name in names])
    for place, name in enumerate(names):
        axes.plot(of[name], [place] * len(of[name]), "|", color="black", markersize=5, alpha=0.5)
    if goal is not None and NONE in of:
        axes.axvline(goal * statistics.median(of[NONE]), color="black", linewidth=0.8, linestyle="--")
    axes.set(xlim=(0, None), ylim=(len(names) - 0.4, -0.6))
    axes.set_yticks(range(len(names)), [words(name) for name in names] if label else [""] * len(names))


def _grid(figure: Figure, columns: Sequence[tuple[Samples, str, float]]) -> None:
    """One row of panels for each way and family, one column for each measure: samples, its label, its goal."""
    keys = list(columns[0][0])
    figure.set_size_inches(4.5 + 2.2 * len(columns), 1.0 + 1.6 * len(keys))
    panels = figure.subplots(len(keys), len(columns), squeeze=False)
    for line, key in zip(panels, keys, strict=True):
        for place, (axes, (samples, text, goal)) in enumerate(zip(line, columns, strict=True)):
            bars(axes, samples[key], goal, label=place == 0)
            axes.set_xlabel(text, fontsize=7)
            if not place:
                axes.set_title(f"{key} (dashed: the goal)", fontsize=8, loc="left")


def draw_rates(result: Result, figure: Figure, goals: Mapping[str, float], unit: str) -> None:
    """One panel for each way and family. ``goals``: by way, as fractions of the rate without a proxy."""
    samples = {key: of for key, of in result.samples.items() if isinstance(of, dict)}
    rows = (len(samples) + 1) // 2
    figure.set_size_inches(10, 0.8 + 1.7 * rows)
    panels = figure.subplots(rows, 2, squeeze=False)
    for axes in panels.flat[len(samples) :]:
        axes.set_axis_off()
    for place, (axes, (key, of)) in enumerate(zip(panels.flat, samples.items(), strict=False)):
        goal = next((goals.get(way) for way, text in WAYS.items() if key.startswith(f"{text}, ")), None)
        bars(axes, of, goal, label=place % 2 == 0 or len(of) != len(next(iter(samples.values()))))
        axes.set_title(key, fontsize=8, loc="left")
        axes.set_xlabel(f"{unit}{'; dashed: the goal' if goal is not None else ''}", fontsize=7)


def draw_connect(result: Result, figure: Figure) -> None:
    """Connections per second."""
    draw_rates(result, figure, connect.GOALS, "connections per second")


def draw_exchange(result: Result, figure: Figure) -> None:
    """Exchanges per second."""
    draw_rates(result, figure, exchange.GOALS, "exchanges per second")


def draw_dns(result: Result, figure: Figure) -> None:
    """Queries per second."""
    draw_rates(result, figure, {"pod": dns.GOAL}, "queries per second")


def draw_stream(result: Result, figure: Figure) -> None:
    """Streams, CPU per byte."""
    _grid(
        figure,
        [
            (result.samples[stream.STREAMS], "Gbit/s", stream.GOAL),
            (result.samples[stream.CPU], "CPU ns per byte (less is better)", stream.GOAL),
        ],
    )


def draw_passing(result: Result, figure: Figure) -> None:
    """Nanoseconds per packet."""
    axes = figure.subplots()
    bars(axes, result.samples["ns"])
    axes.set_xlabel("nanoseconds per packet, whole path, on this machine", fontsize=7)


def draw_latency(result: Result, figure: Figure) -> None:
    """Percentiles."""
    _grid(figure, [(result.samples[name], f"{text}, µs", latency.GOAL) for name, text in latency.PERCENTILES.items()])


def draw_services(result: Result, figure: Figure) -> None:
    """Rates by the number of services."""
    left, right = figure.subplots(1, 2)
    found = result.samples["found"]
    sizes = [1, *map(int, found)]
    for name in next(iter(found.values())):
        style = {"marker": "o", "color": colour(name), "linestyle": STYLES.get(name, "-"), "label": words(name)}
        first = [rate for of in found.values() for rate in of[name]["one"]]
        rates = [first, *(of[name]["many"] for of in found.values())]
        whiskers(left, sizes, [summary(each) for each in rates], **style)
        pairs = [zip(of[name]["many"], of[name]["one"], strict=True) for of in found.values()]
        whiskers(right, sizes[1:], [summary([a / b for a, b in each]) for each in pairs], **style)
    right.axhline(services.GOAL, color="black", linewidth=0.8, linestyle="--")
    left.set(ylabel="connections per second", ylim=(0, None))
    right.set(ylabel="of the same with one service (dashed: the goal)")
    left.legend(frameon=False, fontsize=7)
    for axes in (left, right):
        axes.set(xlabel="services", xscale="log")
        axes.set_xticks(sizes, [f"{size:,}".replace(",", " ") for size in sizes])
        axes.minorticks_off()


def draw_udp(result: Result, figure: Figure) -> None:
    """Packets per second, compared with forwarding without a proxy and with XDP_DROP."""
    samples = {kind: of for kind, of in result.samples.items() if isinstance(of, dict)}
    rows = -(-len(samples) // 3)
    figure.set_size_inches(11, 3.6 * rows)
    grid = figure.subplots(rows, 3, squeeze=False).flat
    for place, (axes, (kind, of)) in enumerate(zip(grid, samples.items(), strict=False)):
        bars(axes, {name: [rate / 1e6 for rate in rates] for name, rates in of.items()}, label=place % 3 == 0)
        if NFTABLES in of:
            for goal in udp.GOALS.get(kind, {}).values():
                axes.axvline(goal * statistics.median(of[NFTABLES]) / 1e6, color="black", linewidth=0.8, linestyle="--")
        axes.set_title(kind, fontsize=8, loc="left")
        axes.set_xlabel("million packets per second; dashed: the goal", fontsize=7)
