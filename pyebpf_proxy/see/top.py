# SPDX-License-Identifier: Apache-2.0
"""``top``: services by what happens to them just now, and their endpoints' shares."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from types import FrameType

import msgspec

from pyebpf_proxy.printable import printable, printable_json
from pyebpf_proxy.see import local, model, services
from pyebpf_proxy.see.agent import running_agent
from pyebpf_proxy.see.answers import RIGHT, SeeError
from pyebpf_proxy.see.maps import Pinned
from pyebpf_proxy.see.meter import Amount, Meter, Place
from pyebpf_proxy.see.pods import Pods, tell
from pyebpf_proxy.see.rates import ordered, short, top
from pyebpf_proxy.see.service_counters import ServiceCounters
from pyebpf_proxy.see.state import State
from pyebpf_proxy.see.text import Cell, Terminal, safe, table, terminal, wrapped
from pyebpf_proxy.see.top_arguments import Order

#: Packets a second that are looked at one by one. Of more, one in two, four, … is looked at.
MOST_PACKETS = 50_000
_MOST_ONE_IN = 256


class Watch:
    """What is looked at, from one interval to the next."""

    def __init__(self, arguments: argparse.Namespace, maps: Pinned, stack: ExitStack) -> None:
        self._arguments = arguments
        self.notes: list[str] = []
        self._board = ServiceCounters(maps)
        if not arguments.light:
            try:
                self._board.meter = stack.enter_context(Meter(maps, len(self._board.backends)))
            except SeeError as error:
                self.notes.append(f"packets and bytes are not measured: {error}")
        self._pods = Pods(partial(local.pods, arguments.directory))
        self._named = None
        if arguments.name or arguments.namespace:
            chosen = services.chosen(State(services=self._board.services), arguments.name, arguments.namespace)
            self._named = frozenset(chosen) if arguments.name else None
        self._amounts: dict[Place, Amount] | None = None
        if self._board.meter is not None:
            self._amounts = dict(self._board.meter.read())
        self._at = time.monotonic()

    def look(self) -> model.Top:
        """The rates since the last look. SeeError: the maps are gone."""
        sample = self._board.sample()
        now = time.monotonic()
        seconds = max(now - self._at, 1e-6)
        found = top(
            self._board.services,
            self._board.backends,
            sample,
            self._amounts,
            seconds,
            self._named,
            self._arguments.namespace,
            whole=self._arguments.name is not None,
        )
        self._amounts, self._at = sample.amounts, now
        tell((backend for view in found.services for backend in view.backends), self._pods.names)
        found.time = time.time()
        found.notes = list(self._notes(found))
        if self._board.meter is not None:
            found.one_in = self._board.meter.one_in
            self._board.meter.one_in = one_in(found.packets or 0.0)
        return found

    def _notes(self, found: model.Top) -> Iterator[str]:
        yield from self.notes
        if running_agent(self._arguments.directory) is None:
            yield "the agent does not run"
        sent = self._board.sent_by_xdp / found.seconds
        if sent >= 1 and found.packets is not None:
            yield f"{short(sent)} packets a second were sent by XDP: they are not in packets and bytes"


def one_in(packets: float) -> int:
    """How many packets one shall be looked at of, at this rate of a second."""
    number = 1
    while packets / number > MOST_PACKETS and number < _MOST_ONE_IN:
        number *= 2
    return number


def head(found: model.Top) -> str:
    """The rates of all, in a line."""
    words = [f"{short(found.new_flows)} new flows"]
    if found.packets is not None:
        about = "about " if found.one_in > 1 else ""
        words += [f"{about}{short(found.packets)} packets", f"{about}{short(found.bytes)} bytes"]
    words.append(f"{short(found.drops)} drops")
    return ", ".join(words) + " a second"


def notes(found: model.Top) -> list[str]:
    """What must be known to read the rates."""
    every = list(found.notes)
    if found.one_in > 1:
        every.append(f"one of {found.one_in} packets is looked at")
    if found.reasons:
        every.append("drops: " + ", ".join(f"{each.reason} {short(each.drops)}" for each in found.reasons))
    return every


def text(found: model.Top, order: Order, backends: int, terminal: Terminal) -> list[str]:
    """One interval for what is no terminal."""
    rows: list[list[Cell | str]] = []
    for view in ordered(found.services, order):
        rows.append([view.name, view.protocol, *_rates(view), short(view.drops), ""])
        rows += [[f"  {place(each)}", "", *_rates(each), "", f"{each.share:.0%}"] for each in view.backends[:backends]]
    lines = wrapped(terminal, head(found)) + [line for note in notes(found) for line in wrapped(terminal, note)]
    titles = ["SERVICE", "PROTO", "FLOWS/S", "PACKETS/S", "BYTES/S", "DROPS/S", "SHARE"]
    lines += table(terminal, titles, rows)
    if found.at_rest:
        lines.append(f"{found.at_rest} service ports at rest")
    return lines


def place(view: model.TopBackend) -> str:
    """Who a backend is: its address, its pod, and whether it is of this node."""
    return " ".join([view.address, *([view.pod] if view.pod else []), *(["(here)"] if view.local else [])])


def _rates(view: model.TopService | model.TopBackend) -> list[str]:
    return [short(view.new_flows), short(view.packets), short(view.bytes)]


def show(arguments: argparse.Namespace, found: model.Top) -> None:
    """One interval on stdout, as it was asked for. BrokenPipeError."""
    if arguments.output == "json":
        found.services = ordered(found.services, arguments.sort)
        print(printable_json(msgspec.json.encode(found).decode()), flush=True)
    elif arguments.output == "name":
        names = (view.name for view in ordered(found.services, arguments.sort))
        print("".join(f"{printable(name)}\n" for name in dict.fromkeys(names)), end="", flush=True)
    else:
        lines = text(found, arguments.sort, arguments.backends, terminal())
        print("\n".join([*map(safe, lines), ""]), flush=True)


def _end(number: int, frame: FrameType | None) -> None:
    # So that the terminal is as it was.
    raise SystemExit(128 + number)


def run(arguments: argparse.Namespace) -> int:
    """``top``. Until it is interrupted, or ``--count`` intervals."""
    count = 1 if arguments.once else arguments.count
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    with ExitStack() as stack:
        maps = stack.enter_context(Pinned(arguments.directory))
        watch = Watch(arguments, maps, stack)
        if sys.stdout.isatty() and sys.stdin.isatty() and arguments.output == "table" and not arguments.once:
            from pyebpf_proxy.see.top_screen import live

            live(watch, arguments, count)
            return RIGHT
        due = time.monotonic()
        done = 0
        while count is None or done < count:
            due = max(due + arguments.interval, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            show(arguments, watch.look())
            done += 1
    return RIGHT
