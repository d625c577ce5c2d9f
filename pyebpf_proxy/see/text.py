# SPDX-License-Identifier: Apache-2.0
"""Tables that fit the terminal's width, without truncation.

Cells that do not fit are wrapped between words, not cut, so that addresses can be copied. If columns would become too
narrow for that, each row becomes a block of lines. Output that does not go to a terminal is not wrapped.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pyebpf_proxy.common.printable import printable

Colour = Literal["", "bold", "red", "green", "yellow", "dim"]
_CODES = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "dim": "2"}
_COLOUR = re.compile(rf"(\x1b\[(?:0|{'|'.join(_CODES.values())})m)")
_GAP = 2
UNLIMITED = 1 << 30


class Cell(NamedTuple):
    """A text with a colour."""

    text: str
    colour: Colour = ""


class Terminal(NamedTuple):
    """The output's width, and whether it shows colours."""

    width: int = UNLIMITED
    colour: bool = False

    def paint(self, text: str, colour: Colour) -> str:
        """The text in a colour, if the terminal shows colours."""
        text = printable(text)
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self.colour and colour and text else text


def terminal() -> Terminal:
    """The terminal of stdout. COLUMNS always applies, NO_COLOR on a terminal."""
    is_terminal = sys.stdout.isatty()
    given = os.environ.get("COLUMNS", "")
    width = shutil.get_terminal_size().columns if is_terminal or given.isdigit() else UNLIMITED
    colour = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Terminal(max(width, 20), colour)


def table(terminal: Terminal, head: Sequence[str], rows: Sequence[Sequence[Cell | str]]) -> list[str]:
    """Lines of a table, without empty columns."""
    cells = [[_clean(cell) for cell in row] for row in rows]
    if not rows:
        return []
    used = [i for i in range(len(head)) if any(row[i].text for row in cells)]
    head = [head[i] for i in used]
    cells = [[row[i] for i in used] for row in cells]
    natural = [max([len(title), *(len(row[i].text) for row in cells)]) for i, title in enumerate(head)]
    widths: list[int] | None = natural
    if sum(natural) + _GAP * (len(natural) - 1) > terminal.width:
        words = ((title, *(word for row in cells for word in row[i].text.split())) for i, title in enumerate(head))
        widths = _widths(natural, [max(map(len, each)) for each in words], terminal.width)
    if widths is None:
        return _blocks(terminal, head, cells)
    lines = _row(terminal, [Cell(title, "bold") for title in head], widths)
    for row in cells:
        lines += _row(terminal, row, widths)
    return lines


def wrapped(terminal: Terminal, text: str, indent: str = "", colour: Colour = "") -> list[str]:
    """A sentence, wrapped between words where possible."""
    width = max(terminal.width - len(indent), 10)
    return [indent + terminal.paint(part, colour) for part in _broken(printable(text), width)]


def fields(terminal: Terminal, pairs: Sequence[tuple[str, str | Cell]], indent: str = "  ") -> list[str]:
    """``name  value`` lines with aligned values."""
    shown = [(printable(name), _clean(value)) for name, value in pairs]
    margin = max((len(name) for name, _ in shown), default=0) + _GAP + len(indent)
    longest = max((len(word) for _, value in shown for word in value.text.split()), default=0)
    if terminal.width - margin < longest:
        margin = len(indent) + 2
    lines = []
    for name, value in shown:
        title = f"{indent}{name}"
        parts = _broken(value.text, max(terminal.width - margin, 10))
        if len(title) + 1 > margin:
            lines += wrapped(terminal, name, indent)
            title = ""
        for part in parts:
            lines.append((title.ljust(margin) + terminal.paint(part, value.colour)).rstrip())
            title = ""
    return lines


def safe(line: str) -> str:
    """A complete line, with only printable text and the colours of this module."""
    return "".join(part if _COLOUR.fullmatch(part) else printable(part) for part in _COLOUR.split(line))


def duration(seconds: float) -> str:
    """A duration such as ``3h`` or ``90s``, in the largest unit without a remainder."""
    whole = int(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if whole >= size and whole % size == 0:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def ago(seconds: float) -> str:
    """``12 s ago``, ``3 min ago``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _clean(cell: Cell | str) -> Cell:
    return cell._replace(text=printable(cell.text)) if isinstance(cell, Cell) else Cell(printable(cell))


def _widths(natural: list[int], least: list[int], width: int) -> list[int] | None:
    """Widths of columns. The widest are shrunk until all fit, but not below the longest word; None: they do not fit."""
    widths = list(natural)
    while (over := sum(widths) + _GAP * (len(widths) - 1) - width) > 0:
        flexible = [i for i in range(len(widths)) if widths[i] > least[i]]
        if not flexible:
            return None
        widest = max(flexible, key=lambda i: widths[i])
        widths[widest] -= min(over, widths[widest] - least[widest], max(1, over // len(flexible)))
    return widths


def _row(terminal: Terminal, row: Sequence[Cell], widths: Sequence[int]) -> list[str]:
    parts = [_broken(cell.text, width) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for i in range(max(map(len, parts))):
        line = ""
        at = 0
        for part, cell, width in zip(parts, row, widths, strict=True):
            text = part[i] if i < len(part) else ""
            if text:
                line += " " * at + terminal.paint(text, cell.colour)
                at = 0
            at += width - len(text) + _GAP
        lines.append(line)
    return lines


def _blocks(terminal: Terminal, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    lines: list[str] = []
    for row in rows:
        first, *rest = zip(head, row, strict=True)
        lines += wrapped(terminal, first[1].text, colour=first[1].colour or "bold")
        lines += fields(terminal, [(title.lower(), cell) for title, cell in rest if cell.text])
    return lines


def _broken(text: str, width: int) -> list[str]:
    """The text, wrapped at spaces, else after the last comma or slash, else anywhere."""
    lines = []
    while len(text) > width:
        at = text.rfind(" ", 1, width + 1)
        if at <= 0:
            at = max(text.rfind(mark, 1, width - 1) for mark in ",/") + 1
        at = at if at > 0 else width
        lines.append(text[:at].rstrip())
        text = text[at:].lstrip()
    return [*lines, text]
