# SPDX-License-Identifier: Apache-2.0
"""Computes rows of the table from samples: the judged value, its goal, and whether it was met."""

from __future__ import annotations

from collections.abc import Sequence

from .measure import Row, Summary, summary


def ratio(
    what: str,
    unit: str,
    measured: Sequence[float],
    compared_with: str,
    compared: Sequence[float],
    least: float | None = None,
    most: float | None = None,
    judged_unit: str = "×",
    goal: str = "",
) -> Row:
    """Compare pyebpf-proxy with something else, round by round: the ratio of the two samples of each round.

    ``least``, ``most``: limits of the median of the ratios. ``goal``: the limits as text.
    """
    # The last round of an aborted run may be incomplete.
    ratios = summary([a / b for a, b in zip(measured, compared, strict=False)])
    return Row(
        what=what,
        unit=unit,
        measured=summary(measured),
        compared_with=compared_with,
        compared=summary(compared),
        judged=ratios,
        judged_unit=judged_unit,
        at_normal_speed=ratios.median,
        goal=goal or _goal(least, most, judged_unit),
        met=_met(ratios.median, least, most),
    )


def more(
    what: str,
    unit: str,
    measured: Sequence[float],
    compared_with: str,
    compared: Sequence[float],
    slow: float,
    most: float | None,
) -> Row:
    """The additional cost of pyebpf-proxy, round by round; ``most`` is the limit on a machine of normal speed."""
    found = summary([a - b for a, b in zip(measured, compared, strict=True)])
    row = absolute(
        what,
        unit,
        measured,
        found.median / slow,
        most,
        compared_with=compared_with,
        compared=compared,
        judged_unit=f"{unit} more",
    )
    row.judged = found
    return row


def absolute(
    what: str,
    unit: str,
    values: Sequence[float],
    normal: float,
    most: float | None = None,
    goal: str = "",
    compared_with: str = "",
    compared: Sequence[float] = (),
    judged_unit: str = "",
) -> Row:
    """A value, not a ratio, with a goal of its own. ``normal``: its median on a machine of normal speed."""
    found: Summary = summary(values)
    return Row(
        what=what,
        unit=unit,
        measured=found,
        compared_with=compared_with,
        compared=summary(compared) if compared else None,
        judged=found,
        judged_unit=judged_unit or unit,
        at_normal_speed=normal,
        goal=goal or _goal(None, most, judged_unit or unit),
        met=_met(normal, None, most),
    )


def _goal(least: float | None, most: float | None, unit: str) -> str:
    return f"≥ {least} {unit}" if least is not None else f"≤ {most} {unit}" if most is not None else ""


def _met(value: float, least: float | None, most: float | None) -> bool | None:
    if least is None and most is None:
        return None
    return (least is None or value >= least) and (most is None or value <= most)
