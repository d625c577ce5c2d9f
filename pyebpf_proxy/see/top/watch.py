# SPDX-License-Identifier: Apache-2.0
"""``top``: live rates of services and their endpoints."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import msgspec

from pyebpf_proxy.common.printable import printable, printable_json
from pyebpf_proxy.see import local, model, services
from pyebpf_proxy.see.agent import running_agent
from pyebpf_proxy.see.answers import SeeError
from pyebpf_proxy.see.maps import Pinned
from pyebpf_proxy.see.pods import Pods, fill_pod_names
from pyebpf_proxy.see.state import State
from pyebpf_proxy.see.text import Cell, Terminal, safe, table, terminal, wrapped
from pyebpf_proxy.see.top.arguments import Order
from pyebpf_proxy.see.top.fast_path import FastPath, line
from pyebpf_proxy.see.top.meter import Amount, Meter, Place
from pyebpf_proxy.see.top.rates import ordered, short, top
from pyebpf_proxy.see.top.service_counters import ServiceCounters

#: Up to this many packets a second, every packet is counted. At higher rates, one in two, four, … is sampled.
MOST_PACKETS = 50_000
_MOST_ONE_IN = 256


class Watch:
    """The measurement, from one interval to the next."""

    def __init__(self, arguments: argparse.Namespace, maps: Pinned, stack: ExitStack) -> None:
        self._arguments = arguments
        self._maps = maps
        self.notes: list[str] = []
        self._board = ServiceCounters(maps)
        self._fast_path = FastPath(maps, arguments.directory)
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
        """The rates since the last call. SeeError if the maps are gone."""
        self._maps.check()
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
        fill_pod_names((backend for view in found.services for backend in view.backends), self._pods.names)
        found.time = time.time()
        found.fast_path = self._fast_path.look(seconds)
        found.notes = list(self._notes(found))
        if self._board.meter is not None:
            found.one_in = self._board.meter.one_in
            self._board.meter.one_in = one_in(found.packets or 0.0)
        return found

    def _notes(self, found: model.Top) -> Iterator[str]:
        yield from self.notes
        if running_agent(self._arguments.directory) is None:
            yield "the agent is not running"
        sent = self._board.sent_by_xdp / found.seconds
        if sent >= 1 and found.packets is not None:
            yield f"XDP sent {short(sent)} packets a second, which packets and bytes do not include"


def one_in(packets: float) -> int:
    """The sampling interval at this rate: one packet of this many is sampled."""
    number = 1
    while packets / number > MOST_PACKETS and number < _MOST_ONE_IN:
        number *= 2
    return number


def head(found: model.Top) -> str:
    """The total rates, on one line."""
    words = [f"{short(found.new_flows)} new flows"]
    if found.packets is not None:
        about = "about " if found.one_in > 1 else ""
        words += [f"{about}{short(found.packets)} packets", f"{about}{short(found.bytes)} bytes"]
    words.append(f"{short(found.drops)} drops")
    return ", ".join(words) + " a second"


def notes(found: model.Top) -> list[str]:
    """Notes on the rates."""
    every = list(found.notes)
    if found.one_in > 1:
        every.append(f"packets and bytes are estimates: one of {found.one_in} packets is sampled")
    if found.reasons:
        every.append("drops: " + ", ".join(f"{each.reason} {short(each.drops)}" for each in found.reasons))
    return every


def text(found: model.Top, order: Order, backends: int, terminal: Terminal) -> list[str]:
    """One interval as plain text."""
    rows: list[list[Cell | str]] = []
    for view in ordered(found.services, order):
        rows.append([view.name, view.protocol, *_rates(view), short(view.drops), ""])
        rows += [[f"  {place(each)}", "", *_rates(each), "", f"{each.share:.0%}"] for each in view.backends[:backends]]
    lines = [part for words in (head(found), line(found.fast_path), *notes(found)) for part in wrapped(terminal, words)]
    titles = ["SERVICE", "PROTO", "FLOWS/S", "PACKETS/S", "BYTES/S", "DROPS/S", "SHARE"]
    lines += table(terminal, titles, rows)
    if found.at_rest:
        lines.append(f"{found.at_rest} idle service ports")
    return lines


def place(view: model.TopBackend) -> str:
    """A backend: its address, its pod, and whether it is local."""
    return " ".join([view.address, *([view.pod] if view.pod else []), *(["(local)"] if view.local else [])])


def _rates(view: model.TopService | model.TopBackend) -> list[str]:
    return [short(view.new_flows), short(view.packets), short(view.bytes)]


def show(arguments: argparse.Namespace, found: model.Top) -> None:
    """Print one interval in the requested format. Raises BrokenPipeError."""
    if arguments.output == "json":
        found.services = ordered(found.services, arguments.sort)
        print(printable_json(msgspec.json.encode(found).decode()), flush=True)
    elif arguments.output == "name":
        names = (view.name for view in ordered(found.services, arguments.sort))
        print("".join(f"{printable(name)}\n" for name in dict.fromkeys(names)), end="", flush=True)
    else:
        lines = text(found, arguments.sort, arguments.backends, terminal())
        print("\n".join([*map(safe, lines), ""]), flush=True)
