# SPDX-License-Identifier: Apache-2.0
"""The table of the cluster figure: computes rows with goals from samples."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .measure import Row, summary
from .proxies import IPTABLES, NFTABLES, OURS, WORDS
from .rows import absolute, ratio

Run = dict[str, Any]
CHANGE_MS, MEMORY_MIB, IDLE_PERCENT = 20.0, 150.0, 0.5
#: If the last seconds of many changes take this many times as long as the first ones, the queue is growing.
GROWTH = 1.5
#: The size that has the goals; if it was not measured, the largest has them.
JUDGED = 10_000


def judged(sizes: Sequence[int]) -> int:
    """The size that has the goals."""
    return JUDGED if JUDGED in sizes else max(sizes)


def rounds_in_words(runs: Sequence[Run]) -> str:
    """How many rounds of pyebpf-proxy were measured for each size, in words."""
    counted = Counter(run["services"] for run in runs if run["kind"] == OURS)
    words = [f"{rounds} with {services}" for services, rounds in sorted(counted.items())]
    return f"rounds: {', '.join(words)} services"


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile: the smallest value that is not exceeded by that percentage of all."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def rows(runs: Sequence[Run], slow: float) -> list[Row]:
    """The rows of the table. ``slow``: how many times slower than normal the machine was."""
    made = []
    sizes = sorted({run["services"] for run in runs}, reverse=True)
    for size in sizes:
        of = {kind: [r for r in runs if r["services"] == size and r["kind"] == kind] for kind in WORDS}
        goals = size == judged(sizes)
        made += [*_starts(of, size, slow, goals), *_changes(of, size, slow, goals)]
        if goals:
            made += [*_many(of, size), *_idle(of, size, slow)]
        made += _memory(of, size, goals)
    if len(sizes) > 1:
        made.append(_flat(runs, sizes[-1], sizes[0]))
    return made


def _starts(of: dict[str, list[Run]], size: int, slow: float, judged: bool) -> list[Row]:
    def value(run: Run) -> float:
        return float(run["start_seconds"])

    what = f"{size} services: start of the process → everything programmed"
    first = _compared(what, "s", of, NFTABLES, value, "≤ 1/3 ×" if judged else "", 1 / 3)
    return [first, _compared(what, "s", of, IPTABLES, value)]


def _changes(of: dict[str, list[Run]], size: int, slow: float, judged: bool) -> list[Row]:
    made = []
    for since, words in (("since_sent_ms", "since it was sent"), ("since_answer_ms", "since the server's answer")):
        for percent in (50, 99):

            def value(run: Run, since: str = since, percent: int = percent) -> float:
                return percentile([each[since] for each in run["changes"]], percent)

            what = f"{size} services: EndpointSlice written → in force, p{percent} of a round, {words}"
            if since == "since_sent_ms":
                goal = judged and percent == 99
                made.append(_compared(what, "ms", of, NFTABLES, value, "≤ 1/10 ×" if goal else "", 1 / 10))
                made.append(_compared(what, "ms", of, IPTABLES, value))
            if judged and percent == 99:
                made.append(
                    _absolute(what, "ms", [value(run) for run in of[OURS]], slow, f"≤ {CHANGE_MS:.0f} ms", CHANGE_MS)
                )
    return made


def _flat(runs: Sequence[Run], few: int, many: int) -> Row:
    """One change among many services, compared with one among few: for pyebpf-proxy, the time must not grow."""
    of = {
        size: [
            statistics.median(each["since_sent_ms"] for each in run["changes"])
            for run in runs
            if (run["kind"], run["services"]) == (OURS, size)
        ]
        for size in (few, many)
    }
    what = f"{many} services: EndpointSlice written → in force, median of a round, {WORDS[OURS]}"
    goal = f"flat: ≤ {GROWTH} times"
    return ratio(what, "ms", of[many], f"{few} services", of[few], most=GROWTH, judged_unit="times", goal=goal)


def _many(of: dict[str, list[Run]], size: int) -> list[Row]:
    made = []
    for kind in (OURS, NFTABLES):
        for run in of[kind]:
            if "many" not in run:
                continue
            made += [_trend(run, since, size) for since in (("sent", "answered") if kind == OURS else ("sent",))]
    return made


def _trend(run: Run, since: str, size: int) -> Row:
    """The last seconds of many changes compared with the first ones."""
    took = [(each["sent"], _latency(each, since)) for each in run["many"]]
    edge = max(sent for sent, _ in took) / 6
    seen = [(sent, ms) for sent, ms in took if ms is not None]
    first = [ms for sent, ms in seen if sent <= edge] or [math.inf]
    last = [ms for sent, ms in seen if sent >= 5 * edge] or [math.inf]
    rate = len(took) / max(sent for sent, _ in took)
    ratio_of_both = statistics.median(last) / statistics.median(first)
    lost = len(took) - len(seen)
    words = "it was sent" if since == "sent" else "the server's answer"
    what = (
        f"{size} services, {rate:.0f} changes a second, {WORDS[run['kind']]}: in force since {words}, in the last sixth"
    )
    goal = f"≤ {GROWTH} times, none lost" if run["kind"] == OURS and since == "sent" else ""
    row = absolute(
        what + (f" ({lost} of {len(took)} never seen)" if lost else ""),
        "ms",
        last,
        ratio_of_both,
        GROWTH if goal else None,
        goal,
        "in the first sixth",
        first,
        "times",
    )
    row.judged = summary([ratio_of_both])
    row.met = row.met and not lost if goal else None
    return row


def _latency(each: dict[str, Any], since: str) -> float | None:
    return None if each["in_force"] is None else float(each["in_force"] - each[since]) * 1e3


def _idle(of: dict[str, list[Run]], size: int, slow: float) -> list[Row]:
    made = []
    for kind, found in of.items():
        values = [run["idle_percent"] for run in found if "idle_percent" in run]
        if values:
            seconds = next(run["idle_seconds"] for run in found if "idle_seconds" in run)
            what = f"{size} services: CPU at rest for {seconds} s, {WORDS[kind]}"
            goal, limit = (f"≤ {IDLE_PERCENT} %", IDLE_PERCENT) if kind == OURS else ("", 0.0)
            made.append(_absolute(what, "% of a core", values, slow, goal, limit))
    return made


def _memory(of: dict[str, list[Run]], size: int, judged: bool) -> list[Row]:
    def value(run: Run) -> float:
        return max(float(run[name]) for name in ("memory_mib", "memory_after_many_mib") if name in run)

    what = f"{size} services: resident memory after the changes"
    made = [_compared(what, "MiB", of, kind, value, "≤ 1 ×" if judged else "", 1.0) for kind in (NFTABLES, IPTABLES)]
    if judged:
        measured = [value(run) for run in of[OURS]]
        made.append(_absolute(what, "MiB", measured, 1.0, f"≤ {MEMORY_MIB:.0f} MiB", MEMORY_MIB))
    return made


def _compared(
    what: str,
    unit: str,
    of: dict[str, list[Run]],
    other: str,
    value: Callable[[Run], float],
    goal: str = "",
    limit: float = 0.0,
) -> Row:
    """pyebpf-proxy compared with one of kube-proxy's modes, round by round."""
    measured, compared = [value(run) for run in of[OURS]], [value(run) for run in of[other]]
    return ratio(what, unit, measured, WORDS[other], compared, most=limit if goal else None, goal=goal)


def _absolute(what: str, unit: str, values: Sequence[float], slow: float, goal: str, limit: float) -> Row:
    return absolute(what, unit, values, statistics.median(values) / slow, limit if goal else None, goal)
