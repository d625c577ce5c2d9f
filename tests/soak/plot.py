# SPDX-License-Identifier: Apache-2.0
"""The picture of a soak."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.plots_peers import BLUE, GREY, ORANGE
from tests import ROOT
from tests.soak.samples import Soak

PICTURE = ROOT / "docs" / "soak.svg"


def draw(run: Soak, path: Path) -> None:
    """A curve over time for each sampled number; the same results give the same file."""
    minutes = [each.seconds / 60 for each in run.samples]
    panels = (
        ("agent: resident memory, MiB", [each.rss_kib / 1024 for each in run.samples], BLUE),
        ("agent: file descriptors", [each.fds for each in run.samples], BLUE),
        ("BPF maps: memory, MiB", [each.map_kib / 1024 for each in run.samples], ORANGE),
        ("agent: kernel memory, MiB", [each.kernel_kib / 1024 for each in run.samples], ORANGE),
        ("BPF maps: entries of Services", [each.map_entries for each in run.samples], ORANGE),
        ("entries of the flow table", [each.flows for each in run.samples], ORANGE),
        ("conntrack: slabs, MiB", [each.conntrack_kib / 1024 for each in run.samples], GREY),
        ("conntrack: per cent of its limit", [100 * each.conntrack / run.conntrack_max for each in run.samples], GREY),
    )
    panels = tuple(panel for panel in panels if max(panel[1]))
    with mpl.rc_context({"svg.hashsalt": "soak", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        columns = -(-len(panels) // 2)
        figure = Figure(figsize=(3 * columns, 5))
        figure.set_layout_engine("constrained", rect=(0, 0.03, 1, 0.97))
        for axes, (title, values, colour) in zip(figure.subplots(2, columns).flat, panels, strict=False):
            axes.plot(minutes, values, color=colour, linewidth=1)
            axes.set(title=title, xlabel="minutes", xlim=(0, None), ylim=(0, 1.15 * max(values)))
            axes.title.set_fontsize(9)
        m = run.machine
        where = f"{m['processor']}, {m['cpus']} CPUs, {m['kernel']}, {m['date'][:10]}, {m['commit']}"
        figure.text(0.995, 0.005, where, ha="right", va="bottom", fontsize=6, color="#666666")
        figure.savefig(path, metadata={"Date": None})
