# SPDX-License-Identifier: Apache-2.0
"""``top`` on a terminal: redrawn each interval, with keys."""

from __future__ import annotations

import argparse
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pyebpf_proxy.common.printable import printable
from pyebpf_proxy.see import model
from pyebpf_proxy.see.text import Terminal, wrapped
from pyebpf_proxy.see.top.arguments import Order
from pyebpf_proxy.see.top.fast_path import line
from pyebpf_proxy.see.top.rates import Part, ordered, short
from pyebpf_proxy.see.top.watch import Watch, head, notes, place

#: Keys and their sort orders.
ORDER_KEYS: dict[str, Order] = {"f": "flows", "p": "packets", "b": "bytes", "d": "drops", "n": "name"}
_TICK = 0.25
#: From these terminal widths on, more columns are shown.
_WIDE, _MIDDLE = 78, 58


class Screen:
    """The picture on the terminal, and the settings that keys change."""

    def __init__(self, order: Order, backends: int, interval: float) -> None:
        self.order = order
        self.backends = backends
        self.interval = interval
        self.paused = False
        self.ended = False
        self._usual = backends or 3

    def press(self, key: str) -> bool:
        """Handle one key. True if the picture changes."""
        if key in ORDER_KEYS:
            self.order = ORDER_KEYS[key]
        elif key == "e":
            self.backends = 0 if self.backends else self._usual
        elif key == "+":
            self.interval = min(self.interval * 2, 60.0)
        elif key == "-":
            self.interval = max(self.interval / 2, 0.25)
        elif key == " ":
            self.paused = not self.paused
        elif key == "q":
            self.ended = True
        else:
            return False
        return True

    def draw(self, found: model.Top, width: int, height: int) -> Group:
        """The picture, within this width and height."""
        terminal = Terminal(width)
        parts: list[Text | Table] = [_line(words, "bold") for words in wrapped(terminal, head(found))]
        # Cut the line instead of wrapping it: the most important part, what closes the fast path, comes first.
        parts.append(_line(line(found.fast_path), ""))
        shown = [words for note in notes(found) for words in wrapped(terminal, note)]
        parts += [_line(words, "yellow") for words in shown[: max(0, height // 3)]]
        height_left = max(0, height - len(parts) - 3)
        parts.append(self._table(found, width, height_left))
        rest = f"{found.at_rest} idle, " if found.at_rest else ""
        state = "paused" if self.paused else f"every {self.interval:g} s"
        parts.append(_line(f"{rest}{state}, by {self.order}", "dim"))
        parts.append(_line("q quit  f p b d n order  e endpoints  + - interval  space pause", "dim"))
        return Group(*parts)

    def _table(self, found: model.Top, width: int, height_left: int) -> Table:
        made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=True, header_style="bold")
        made.add_column("SERVICE", no_wrap=True, overflow="ellipsis", ratio=1)
        titles = {"FLOWS/S": 7, "BYTES/S": 7, "DROPS/S": 7}
        if width >= _MIDDLE:
            titles = {"FLOWS/S": 7, "PACKETS/S": 9, "BYTES/S": 7, "DROPS/S": 7, "SHARE": 5}
        if width >= _WIDE:
            titles = {"PROTO": 5, **titles}
        if width < _MIDDLE:
            titles = {"FLOWS": 5, "BYTES": 5, "DROPS": 5}
        for title, least in titles.items():
            made.add_column(title, justify="left" if title == "PROTO" else "right", no_wrap=True, min_width=least)
        for view in _lines(found, self.order, self.backends, height_left):
            cells = _cells(view)
            made.add_row(_name(view), *(cells[title.removesuffix("/S")] for title in titles))
        return made


def _lines(found: model.Top, order: Order, backends: int, most: int) -> list[Part]:
    """The rows that fit: services, each followed by its endpoints."""
    lines: list[Part] = []
    for view in ordered(found.services, order):
        if len(lines) >= most:
            break
        lines += [view, *view.backends[:backends]]
    return lines[:most]


def _line(words: str, style: str) -> Text:
    return Text(printable(words), style=style, no_wrap=True, overflow="ellipsis")


def _name(view: Part) -> Text:
    if isinstance(view, model.TopService):
        return Text(printable(view.name), style="cyan")
    return Text(f"  {printable(place(view))}", style="dim")


def _cells(view: Part) -> dict[str, Text]:
    cells = {
        "FLOWS": Text(short(view.new_flows)),
        "PACKETS": Text(short(view.packets)),
        "BYTES": Text(short(view.bytes)),
    }
    if isinstance(view, model.TopService):
        drops = Text(short(view.drops), style="red" if view.drops else "")
        return {**cells, "PROTO": Text(view.protocol), "DROPS": drops, "SHARE": Text("")}
    return {**cells, "PROTO": Text(""), "DROPS": Text(""), "SHARE": Text(f"{view.share:.0%}")}


@contextmanager
def _keys() -> Iterator[None]:
    """Read keys one by one without echo; restore the terminal afterwards."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def live(watch: Watch, arguments: argparse.Namespace, count: int | None) -> None:
    """Run until q, Ctrl-C, or ``count`` intervals."""
    screen = Screen(arguments.sort, arguments.backends, arguments.interval)
    console = Console()
    with _keys(), Live(console=console, screen=True, auto_refresh=False, transient=True) as shown:
        shown.update(_line("measuring …", "dim"), refresh=True)
        found: model.Top | None = None
        due = time.monotonic() + screen.interval
        done = 0
        size = console.size
        while not screen.ended and (count is None or done < count):
            changed = _pressed(screen, max(0.0, min(_TICK, due - time.monotonic())))
            if time.monotonic() >= due:
                looked = watch.look()
                found = found if screen.paused and found is not None else looked
                done += 1
                changed = True
                due = time.monotonic() + screen.interval
            if found is not None and (changed or console.size != size):
                size = console.size
                shown.update(screen.draw(found, size.width, size.height), refresh=True)


def _pressed(screen: Screen, seconds: float) -> bool:
    """Wait for keys, but at most ``seconds``."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if not ready:
        return False
    typed = os.read(sys.stdin.fileno(), 64).decode(errors="ignore")
    if not typed:  # the terminal is gone
        screen.ended = True
    pressed = [screen.press(key) for key in typed]
    return any(pressed)
