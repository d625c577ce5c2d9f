# SPDX-License-Identifier: Apache-2.0
"""Full load on a Service while something happens to the proxy: TCP and UDP, connections of every age, all recorded.

* Short connections: one answer each.
* Lasting ones: an answer every ``PAUSE`` for three seconds. They are young flows for two thirds of that time, so two
  hundred are young at any moment.
* Long ones: they begin before the event and end after it.

Each answer names the endpoint. A UDP flow has moved if another endpoint answers than before. A TCP connection that
moves reaches a server that does not know it, and breaks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

from pyebpf_proxy.lab.namespace import Namespace
from tests.changes.checker import ANSWERED, MOVED, STALLED, Record, Stall
from tests.changes.traffic import LongConnections, NewConnections

#: New connections a second of all sources together, on a machine that manages three times as many without a Service.
RATE = 2000
SHARE = 0.35
#: The share of lasting connections; they send QUESTIONS with PAUSE milliseconds in between.
LASTING = 0.05
QUESTIONS, PAUSE = 20, 150
LONG = 200
LONG_PERIOD = 200  # milliseconds
#: Seconds to wait for progress of the load, on any machine.
PATIENCE = 120.0
_SHOWN = 12


class Way(NamedTuple):
    """An address and a port that are used over TCP and UDP. ``names``: the servers that may answer."""

    address: str
    port: int
    names: frozenset[str]

    def targets(self) -> tuple[str, str]:
        """As ``traffic.c`` takes them."""
        return f"{self.address},{self.port}", f"{self.address},{self.port},udp"


class Source(NamedTuple):
    """A client, and the addresses that it uses."""

    namespace: Namespace
    ways: Sequence[Way]


class Flow(NamedTuple):
    """A record, and its connection. ``target``: the client and the address, in words."""

    record: Record
    target: str
    udp: bool
    names: frozenset[str]

    def problem(self, stalls: Iterable[Stall] = ()) -> str:
        """What went wrong with the connection: lost, moved or repeated; "": nothing."""
        record = self.record
        if record.end == MOVED or (record.end == ANSWERED and record.name not in self.names):
            return "moved"
        if record.end != ANSWERED:
            return "lost"
        stood = sum(min(s.ended, record.ended) - max(s.begun, record.begun) for s in stalls if _meet(s, record))
        # Short and lasting ones count retransmitted packets, if the machine gave TCP no reason for them.
        return "repeated" if record.count and stood < STALLED else ""


class Outcome(NamedTuple):
    """All connections of a load. Times are of the monotonic clock."""

    new: list[Flow]
    long: list[Flow]
    stalls: list[Stall]
    #: New connections a second that this machine should manage, and when they began and ended.
    wanted: float
    begun: float
    stopped: float

    def rate(self, until: float = inf) -> float:
        """New connections a second."""
        end = min(until, self.stopped)
        return sum(flow.record.begun < end for flow in self.new) / (end - self.begun)

    def problems(self, until: float = inf) -> dict[str, list[Flow]]:
        """Flows by their problem: ``lost``, ``moved``, ``repeated``.

        ``until``: the Service does not exist after that. Later connections only count if they were answered.
        """
        found: dict[str, list[Flow]] = {}
        for flow in (*self.new, *(each._replace(record=each.record._replace(count=0)) for each in self.long)):
            if flow.record.begun < until or flow.record.name:
                problem = flow.problem(self.stalls)
                if problem:
                    found.setdefault(problem, []).append(flow)
        return found

    def report(self, until: float = inf) -> None:
        """Fail if a connection is lost, moved or repeated, or if there were too few connections."""
        said = self.describe(until)
        assert not said, f"{self.size(until)}\n{said}"
        assert len(self.long) == LONG
        assert self.rate(until) > self.wanted / 2, self.size(until)

    def describe(self, until: float = inf) -> str:
        """The problems, with some of each described in a line; "": none."""
        lines = []
        for what, flows in self.problems(until).items():
            kinds = Counter(f"{'UDP' if flow.udp else 'TCP'} {flow.target}: {flow.record.end}" for flow in flows)
            lines.append(f"{len(flows)} {what}: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common(_SHOWN))}")
            lines += [self._line(flow) for flow in sorted(flows, key=lambda flow: flow.record.begun)[:_SHOWN]]
        return "\n".join(lines)

    def _line(self, flow: Flow) -> str:
        record = flow.record
        return (
            f"  {record.begun - self.begun:.3f} to {record.ended - self.begun:.3f} s, from port {record.port},"
            f" {'UDP' if flow.udp else 'TCP'} {flow.target}: {record.end}, {record.name or 'no name'}, {record.count}"
        )

    def size(self, until: float = inf) -> str:
        """How many connections there were, in words."""
        new = [flow for flow in self.new if flow.record.begun < until]
        worst = max((stall.ended - stall.begun for stall in self.stalls), default=0.0)
        return (
            f"{len(new)} new connections, {sum(flow.udp for flow in new)} of them UDP, {self.rate(until):.0f} a second"
            f" of {self.wanted:.0f} wanted, {len(self.long)} long ones; the machine stood still for"
            f" {worst * 1000:.0f} ms at most"
        )


class FullLoad:
    """``with FullLoad(…) as load``: the long connections are open, and the others run. ``end`` returns the outcome of
    all.

    ``plain``: the result of ``plain_rate`` on this machine. The load is a third of it at most.
    """

    def __init__(self, folder: Path, sources: Mapping[str, Source], plain: float, rate: float = RATE) -> None:
        self._folder = folder
        self._sources = sources
        self.wanted = min(rate, SHARE * plain)
        self._new: list[tuple[str, NewConnections]] = []
        self._long: list[tuple[str, LongConnections]] = []
        self._begun = 0.0

    def __enter__(self) -> FullLoad:
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for _name, each in (*self._new, *self._long):
            each.kill()

    def _begin(self) -> None:
        names = list(self._sources)
        for name, source in self._sources.items():
            count = LONG // len(names) + (LONG % len(names) if name == names[0] else 0)
            file = self._folder / f"long-{name}"
            held = LongConnections(source.namespace, file, _targets(source), count, LONG_PERIOD)
            self._long.append((name, held))
        for _name, held in self._long:
            held.wait_rounds(1)
        self._begun = time.monotonic()
        share = self.wanted / len(names)
        for name, source in self._sources.items():
            asked = _targets(source)
            short, lasting = self._folder / f"short-{name}", self._folder / f"lasting-{name}"
            self._new.append((name, NewConnections(source.namespace, short, asked, (1 - LASTING) * share)))
            self._new.append(
                (name, NewConnections(source.namespace, lasting, asked, LASTING * share, QUESTIONS, PAUSE))
            )

    def wait_progress(self, seconds: float = 1.0) -> None:
        """Wait until each source has made as many short connections as in that time, and the long ones have made
        progress.
        """
        short = [each for _, each in self._new[::2]]
        more = (1 - LASTING) * seconds * self.wanted / len(self._sources)
        wanted = [each.made + more for each in short]
        end = time.monotonic() + PATIENCE
        while any(each.made < least for each, least in zip(short, wanted, strict=True)):
            if time.monotonic() > end:
                raise TimeoutError("connections do not get on")
            time.sleep(0.02)
        for _name, held in self._long:
            held.wait_rounds(2)

    def end(self) -> Outcome:
        """Start no more connections; wait until all have ended."""
        stopped = time.monotonic()
        for _name, each in (*self._new, *self._long):
            each.stop()
        stalls: list[Stall] = []
        new = [flow for name, each in self._new for flow in self._flows(name, each, stalls)]
        long = [flow for name, each in self._long for flow in self._flows(name, each, stalls)]
        self._new, self._long = [], []
        return Outcome(new, long, stalls, self.wanted, self._begun, stopped)

    def _flows(self, name: str, client: NewConnections | LongConnections, stalls: list[Stall]) -> Iterable[Flow]:
        records, stood = client.records()
        stalls += stood
        ways = self._sources[name].ways
        for record in records:
            way, udp = ways[record.target // 2], record.target % 2 == 1
            yield Flow(record, f"from {name} to [{way.address}]:{way.port}", udp, way.names)


def _targets(source: Source) -> list[str]:
    return [target for way in source.ways for target in way.targets()]


def _meet(stall: Stall, record: Record) -> bool:
    return stall.begun < record.ended and record.begun < stall.ended
