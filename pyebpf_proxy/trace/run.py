# SPDX-License-Identifier: Apache-2.0
"""``trace [FILTER …]``: prints decisions until it is stopped."""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from typing import Self

from pyebpf_proxy.config import durations
from pyebpf_proxy.datapath.loader.reasons import reasons
from pyebpf_proxy.see import model
from pyebpf_proxy.see.agent import running_agent
from pyebpf_proxy.see.answers import NOT_RIGHT, RIGHT, QuestionError, SeeError
from pyebpf_proxy.see.maps import Pinned
from pyebpf_proxy.see.text import terminal
from pyebpf_proxy.trace import events
from pyebpf_proxy.trace.filters import Filter, FilterNames
from pyebpf_proxy.trace.joins import Joins
from pyebpf_proxy.trace.kernel import Kernel, KernelEvent, MissingError
from pyebpf_proxy.trace.lines import Line, printed
from pyebpf_proxy.trace.names import Lookup
from pyebpf_proxy.trace.session import Session

#: Seconds between regular checks: for lost events, changed service ids, and whether the programs still report.
_LOOK = 1.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    text = "an address, service, protocol, path, reason or device; or FIELD=VALUE with service, address, client,"
    text += " destination, endpoint, port, protocol, reason, path, device or process; a decision must match all filters"
    parser.add_argument("filter", nargs="*", metavar="FILTER", help=text)
    parser.add_argument("--count", type=int, metavar="N", help="stop after N decisions")
    parser.add_argument("--duration", metavar="TIME", help="stop after this time, for example 30s or 5m")
    parser.add_argument("--no-kernel", action="store_true", help="decisions only, no kernel events")
    parser.add_argument(
        "--buffer", type=int, default=1024, metavar="KIB", help="size of each CPU's buffer (default: 1024)"
    )


def run(parsed: argparse.Namespace) -> int:
    """``trace``. Exit status 1: events were lost."""
    if parsed.count is not None and parsed.count < 1:
        raise QuestionError(f"--count {parsed.count}: at least 1")
    if not 4 <= parsed.buffer <= 1 << 16:
        raise QuestionError(f"--buffer {parsed.buffer}: from 4 to 65536 KiB")
    seconds = _seconds(parsed.duration)
    with Pinned(parsed.directory) as maps, Lookup(maps, parsed.directory) as lookup:
        known = FilterNames(lookup.read(), reasons(maps.enum), {name: index for index, name in socket.if_nameindex()})
        chosen = Filter(parsed.filter, known)
        if chosen.names_pods and running_agent(parsed.directory) is None:
            raise SeeError("only a running agent knows names of pods, and none runs: give the address instead")
        with Session(maps, parsed.buffer << 10) as session:
            kernel = _kernel(parsed, maps)
            try:
                session.control.start(chosen.wanted)
                print("tracing; press Ctrl-C to stop", file=sys.stderr, flush=True)
                return _Trace(parsed, maps, lookup, chosen, session, known, kernel).follow(seconds)
            finally:
                if kernel is not None:
                    kernel.close()


def _kernel(parsed: argparse.Namespace, maps: Pinned) -> Kernel | None:
    """The kernel's events; None if not requested or not available. If not available, a line on stderr has the cause."""
    if parsed.no_kernel:
        return None
    try:
        return Kernel(maps.folder / "maps", parsed.buffer << 10)
    except MissingError as missing:
        print(f"kernel drops and TCP states are not shown: {missing}", file=sys.stderr, flush=True)
        return None


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = durations.parse(text) / durations.SECOND
    except ValueError as error:
        raise QuestionError(f"--duration: {error}") from None
    if seconds <= 0:
        raise QuestionError(f"--duration {text}: must be positive")
    return seconds


class _Signals:
    """SIGINT and SIGTERM as a descriptor to poll. An exception, instead, could lose events that are being read."""

    def __init__(self) -> None:
        self.received = 0
        self.fd, self._write = os.pipe()

    def _take(self, number: int, _frame: object) -> None:
        self.received = number
        os.write(self._write, b"!")

    def __enter__(self) -> Self:
        self._former = {number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write)


class _Trace:
    def __init__(
        self,
        parsed: argparse.Namespace,
        maps: Pinned,
        lookup: Lookup,
        chosen: Filter,
        session: Session,
        known: FilterNames,
        kernel: Kernel | None,
    ) -> None:
        self._kernel = kernel
        if kernel is not None:
            self._joins = Joins(kernel.reasons, lookup.names.device, os.stat("/proc/self/ns/net").st_ino)
        self._kernel_lost = 0

        self._form: str = parsed.output
        self._left: int | None = parsed.count
        self._maps = maps
        self._lookup = lookup
        self._filter = chosen
        self._session = session
        self._layout = maps.packer("decision", *events.FIELDS)
        self._reasons = {number: name for name, number in known.reasons.items()}
        self._sheet = terminal()
        self._lost_any = False

    def follow(self, seconds: float | None) -> int:
        """Print decisions until the limit or a signal. Decisions from before the signal are still printed."""
        with _Signals() as signals:
            self._follow(seconds, signals)
            if self._kernel is not None:
                self._print(self._kernel_lines(self._kernel.rest()))
        self._look()
        if signals.received:
            return 128 + signals.received
        return NOT_RIGHT if self._lost_any else RIGHT

    def _follow(self, seconds: float | None, signals: _Signals) -> None:
        poll = select.poll()
        poll.register(self._session.rings.fd, select.POLLIN)
        # Request no events: POLLERR and POLLHUP are always reported.
        poll.register(sys.stdout.fileno(), 0)
        poll.register(signals.fd, select.POLLIN)
        if self._kernel is not None:
            poll.register(self._kernel.fd, select.POLLIN)
        end = None if seconds is None else time.monotonic() + seconds
        look = time.monotonic() + _LOOK
        while self._left is None or self._left > 0:
            now = time.monotonic()
            if end is not None and now >= end:
                break
            until = look if end is None else min(look, end)
            ready = dict(poll.poll(max(0.0, until - now) * 1000))
            if ready.get(sys.stdout.fileno(), 0) & (select.POLLERR | select.POLLHUP):
                raise BrokenPipeError
            if self._kernel is not None and self._kernel.ended:
                poll.unregister(self._kernel.fd)
                self._kernel = None
                print("kernel events have ended", file=sys.stderr, flush=True)
            # Events that arrive while lines are printed are read in the next iteration.
            last = bool(signals.received)
            self._print(self._kernel_lines(self._kernel.read() if self._kernel is not None else []))
            if last:
                break
            if time.monotonic() >= look:
                look = time.monotonic() + _LOOK
                self._look()

    def _kernel_lines(self, events: list[KernelEvent]) -> list[Line]:
        """New lines, in order of time. Decisions were read after the kernel events, so they are known by now."""
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        lines = self._decisions(booted)
        for each in events:
            self._kernel_lost += each.lost
            line = self._joins.line(each, booted) if not each.lost else None
            if line is not None:
                lines.append(line)
        return sorted(lines, key=lambda line: line.time)

    def _decisions(self, booted: float) -> list[Line]:
        names = self._lookup.names
        every = (events.decode(raw, self._layout, self._reasons) for raw in self._session.rings.read())
        # Not by the other fields: they cannot be compared if only one of two has an endpoint.
        found = sorted(every, key=lambda event: event.when)
        self._lookup.look(found)
        lines: list[Line] = []
        for event in found:
            view = events.view(event, names, booted)
            if not self._filter.fits(view):
                continue
            lines.append(view)
            if self._kernel is not None:
                self._joins.remember(view)
            if self._left is not None:
                self._left -= 1
                if not self._left:
                    break
        return lines

    def _look(self) -> None:
        self._maps.check()
        lost, self._kernel_lost = (self._session.control.lost(), self._kernel_lost), 0
        now = events.utc(time.time())
        lines = [model.Lost(time=now, what="decisions", count=lost[0])] if lost[0] else []
        lines += [model.Lost(time=now, what="kernel events", count=lost[1])] if lost[1] else []
        self._lost_any = self._lost_any or bool(lines)
        self._print(lines)
        if self._filter.names_services:
            before = dict(self._filter.wanted)
            if self._filter.renumber(self._lookup.read()) != before:
                self._session.control.start(self._filter.wanted)
        if not self._session.control.is_active():
            self._session.control.start(self._filter.wanted)

    def _print(self, lines: Iterable[Line]) -> None:
        texts = [text for line in lines if (text := printed(line, self._form, self._sheet))]
        if texts:
            sys.stdout.write("\n".join(texts) + "\n")
            sys.stdout.flush()
