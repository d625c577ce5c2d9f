# SPDX-License-Identifier: Apache-2.0
"""Generates the tables in docs/performance.md from the results. Text outside the marks is written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from . import overview
from .measure import ROOT, Result, Row, Summary
from .plots import significant

PAGE = ROOT / "docs" / "performance.md"
_NOTE = "made by `make bench` from bench/results: do not edit -->"
_END = "<!-- end of what `make bench` made -->"
#: Units of ratios; they name the reference.
_RATIOS = {"×": "× {}", "times": "times the value with {}"}
OVERVIEW, GOALS, FIGURES = "overview", "goals", "figures"


def write_page(results: Iterable[Result]) -> None:
    """Write the overview, the goals and each figure between the marks of the page."""
    kept = list(results)
    text = PAGE.read_text()
    text = between(text, OVERVIEW, overview.section(kept))
    text = between(text, GOALS, goals(kept))
    text = between(text, FIGURES, "\n".join(section(result) for result in kept))
    PAGE.write_text(text)


def between(text: str, part: str, made: str) -> str:
    """The page with this part replaced. ValueError if its marks are missing."""
    before, begin, rest = text.partition(f"<!-- {part}: {_NOTE}")
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: the marks of {part} are missing")
    return f"{before}{begin}\n\n{made}\n{end}{after}"


def goals(results: Sequence[Result]) -> str:
    """Every row that has a goal."""
    lines = ["| measurement | result | goal | |", "|---|---|---|---|"]
    for result in results:
        for row in result.rows:
            if row.met is not None:
                met = "met" if row.met else "**missed**"
                lines.append(f"| {row.what} | {judged(row)} | {row.goal} | {met} |")
    return "\n".join([*lines, ""])


def section(result: Result) -> str:
    """One figure: its table, its picture, place and time of the measurement."""
    m = result.machine
    header = ("what", "measured", "compared with", "result", "at normal speed", "goal", "")
    lines = [
        f"### {result.title}",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(cells(row)) + " |" for row in result.rows),
        "",
        f"![{result.title}](../bench/results/{result.figure}.svg)",
        "",
        f"{m['date']}, commit {m['commit']}, {m['kernel']}, {m['processor']}, {m['cpus']} CPUs"
        f"{' (virtual)' if m['virtual'] else ''}."
        + ("" if m["speed_seconds"] else " The speed measure is missing: nothing is scaled.")
        + (" **A quick run.**" if result.quick else "")
        + (f" **{result.note}**" if result.note else ""),
        "",
    ]
    return "\n".join(lines)


def cells(row: Row) -> tuple[str, ...]:
    unit = "×" if row.judged_unit in _RATIOS else row.judged_unit
    result = f"{spread(row.judged)} {unit}"
    reference = row.compared_with
    compared = f"{reference}: {spread(row.compared)} {row.unit}" if row.compared else reference
    normal = significant(row.at_normal_speed)
    met = "" if row.met is None else "met" if row.met else "**missed**"
    return row.what, f"{spread(row.measured)} {row.unit}", compared, result, normal, row.goal, met


def judged(row: Row) -> str:
    """The judged value with its reference, such as ``1.03 (1.02 – 1.05) × no proxy``."""
    value, reference = spread(row.judged), row.compared_with
    if row.judged_unit in _RATIOS:
        return f"{value} {_RATIOS[row.judged_unit].format(reference)}"
    text = f"{value} {row.judged_unit}"
    if not reference or row.compared is None:
        return text
    if row.judged_unit.endswith(" more"):
        return f"{text} than {reference}"
    return f"{text} ({reference}: {significant(row.compared.median)} {row.unit})"


def spread(s: Summary) -> str:
    """Median and quartiles."""
    return f"{significant(s.median)} ({significant(s.lower_quartile)} – {significant(s.upper_quartile)})"


def lines(results: Iterable[Result]) -> Iterable[str]:
    """The goals for a terminal, one on each line."""
    for result in results:
        for row in result.rows:
            if row.met is not None:
                verdict = "met   " if row.met else "MISSED"
                found = f"{judged(row)}, {significant(row.at_normal_speed)} at normal speed"
                yield f"{verdict} {row.what}: {found}; goal {row.goal}"


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))
