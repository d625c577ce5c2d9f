# SPDX-License-Identifier: Apache-2.0
"""Loads on a ground, each from a real program with real-time priority, and the rows that compare contenders."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .contenders import (
    BEFORE_OTHERS,
    CONNECT,
    CONTENDERS,
    DNS,
    EXCHANGE,
    NONE,
    OURS,
    STREAM,
    WAYS,
    Ground,
    pinned,
    turns,
)
from .measure import TOOLS, Row, say, speed, summary
from .rows import ratio

#: So long, at most, the fast path sends packets of a flow that conntrack has forgotten (docs/fast-path.md, Limits).
CONFIRMED_SECONDS = 1.1
IN_FLIGHT = 64
#: Real-time tasks may use a CPU for this many microseconds of each second; -1: always.
THROTTLE = Path("/proc/sys/kernel/sched_rt_runtime_us")
#: The kernel's default.
THROTTLED = "950000"
#: Samples by (load, way, family), then by contender, in the order of the rounds.
Samples = dict[str, dict[str, list[float]]]
#: Rounds continue until the quartiles of the ratio to no proxy are this close to its median, or the plan ends.
STEADY = 0.03


class Options(NamedTuple):
    """The command line's options for loads. If one is empty or None, the figure's own value is used."""

    quick: bool = False
    rounds: int | None = None
    seconds: float | None = None
    ways: tuple[str, ...] = ()
    families: tuple[int, ...] = ()
    #: Contenders in addition to the usual ones.
    also: tuple[str, ...] = ()


class Plan(NamedTuple):
    """At least ``rounds``; at most ``most``, until the results are steady. Each load takes ``seconds``.

    ``cells``: way and family.
    """

    rounds: int
    most: int
    seconds: float
    cells: tuple[tuple[str, int], ...]

    def of(self, asked: Options) -> Plan:
        """The plan with the command line's options."""
        cells = tuple(
            (way, family)
            for way, family in self.cells
            if way in (asked.ways or (way,)) and family in (asked.families or (family,))
        )
        rounds, most = (asked.rounds, asked.rounds) if asked.rounds else (self.rounds, self.most)
        return Plan(rounds, most, asked.seconds or self.seconds, cells)


def cells(ways: Sequence[str], families: Sequence[int] = (4, 6)) -> tuple[tuple[str, int], ...]:
    """Each way in each family."""
    return tuple((way, family) for way in ways for family in families)


def connect(ground: Ground, way: str, family: int, seconds: float) -> float:
    """Connections per second: connect, one byte each way, reset, IN_FLIGHT at a time. Raises RuntimeError."""
    command = [str(TOOLS / "connections"), "load", *ground.target(CONNECT, way, family), str(IN_FLIGHT)]
    outcome = _ask(ground, way, [*command, str(seconds / 4), str(seconds)])
    if outcome["failed"]:
        raise RuntimeError(f"{ground.contender.words}: {outcome['failed']} connections failed: {outcome}")
    return float(outcome["per_second"])


def exchange(ground: Ground, way: str, family: int, seconds: float) -> float:
    """Exchanges per second: one byte each way on one connection, at the maximum rate."""
    command = [str(TOOLS / "pingpong"), "load", *ground.target(EXCHANGE, way, family)]
    return float(_ask(ground, way, command, stdin=f"{seconds}\n")["per_second"])


class Conversation:
    """One connection for many rounds: its flow is old, as most packets' flows are."""

    def __init__(self, ground: Ground, way: str, family: int, stack: ExitStack) -> None:
        load = [str(TOOLS / "pingpong"), "load", *ground.target(EXCHANGE, way, family)]
        command = ["ip", "netns", "exec", ground.asks[way].name, *pinned(load)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(self._close)

    def rate(self, seconds: float) -> float:
        """Exchanges per second, measured for that time. RuntimeError if the connection has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with unthrottled():
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the connection of request-response has ended; its output is above")
        return float(json.loads(line)["per_second"])

    def _close(self) -> None:
        self._process.kill()
        self._process.communicate()


def query(ground: Ground, way: str, family: int, seconds: float) -> float:
    """Queries per second: a datagram from a new port and its reply, IN_FLIGHT at a time. RuntimeError if one fails."""
    time.sleep(max(0.0, ground.flushed + CONFIRMED_SECONDS - time.monotonic()))
    command = [str(TOOLS / "datagrams"), "load", *ground.target(DNS, way, family), str(IN_FLIGHT)]
    try:
        outcome = _ask(ground, way, [*command, str(seconds / 4), str(seconds)])
    finally:
        # Flows of this load must not fill tables, and a port that is used again must have no old flow.
        ground.forget_flows()
    if outcome["failed"]:
        raise RuntimeError(f"{ground.contender.words}: {outcome['failed']} queries without an answer: {outcome}")
    return float(outcome["per_second"])


def stream(ground: Ground, way: str, family: int, seconds: float) -> tuple[float, float]:
    """Gbit/s of one TCP stream, and CPU nanoseconds per byte.

    The CPU time is that of both ends, which includes most of the kernel's work, and of the kernel's softirq threads.
    """
    address, port = ground.target(STREAM, way, family)
    before = _softirq_threads()
    # iperf3 accepts only whole seconds.
    length = ["-t", str(round(seconds))] if seconds >= 1 else ["-n", f"{round(seconds * 2000)}M"]
    end = _ask(ground, way, [*BEFORE_OTHERS, "iperf3", "-c", address, "-p", port, *length, "-J"])["end"]
    threads = _softirq_threads() - before
    got, use = end["sum_received"], end["cpu_utilization_percent"]
    ends = (use["host_total"] + use["remote_total"]) / 100 * got["seconds"]
    return float(got["bits_per_second"]) / 1e9, (ends * 1e9 + threads) / float(got["bytes"])


def paced(ground: Ground, way: str, family: int, connections: int, rate: float, seconds: float) -> dict[str, float]:
    """Requests at a fixed rate on persistent connections, and their latencies; ``rate`` 0: the maximum rate."""
    command = [str(TOOLS / "paced"), *ground.target(CONNECT, way, family), str(connections), str(rate)]
    found: dict[str, float] = _ask(ground, way, [*command, str(seconds / 4), str(seconds)])
    return found


_watch: list[str] = []


@contextmanager
def watched(command: Sequence[str]) -> Iterator[None]:
    """Start loads through this command (perf record), which must print nothing."""
    _watch.extend(command)
    try:
        yield
    finally:
        _watch.clear()


@contextmanager
def unthrottled() -> Iterator[None]:
    """Allow real-time tasks to use a CPU completely.

    Otherwise all of them pause for 50 ms of each second, and chance decides which load is affected. A separate process
    restores the setting when this one requests it or dies, even by SIGKILL.
    """
    before = THROTTLE.read_text().strip()
    if before == "-1":  # another benchmark has set this: it must not become the value to restore
        before = THROTTLED
    command = ["sh", "-c", 'cat >/dev/null; echo "$1" >"$2"', "sh", before, str(THROTTLE)]
    # A session of its own: signals to this process group must not end it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as keeper:
        THROTTLE.write_text("-1")
        try:
            yield
        finally:
            assert keeper.stdin is not None
            keeper.stdin.close()
            keeper.wait()


def alternate(
    plan: Plan,
    grounds: Sequence[Ground],
    take: Callable[[Ground, str, int], Mapping[str, float]],
    tell: Callable[[int, dict[str, Samples]], str],
) -> tuple[dict[str, Samples], list[float]]:
    """Run ``take`` in turns on each ground, for each cell. The result: samples by measure, and machine speeds.

    A ground for which ``take`` returns no samples does not take part. ``tell`` returns a line for each round.
    """
    speeds = speed(1)
    samples: dict[str, Samples] = {}
    for number, order in turns(plan.most, grounds):
        open_cells = [
            (way, family)
            for way, family in plan.cells
            if number < plan.rounds or not steady(samples, cell(way, family))
        ]
        if not open_cells:
            break
        for way, family in open_cells:
            for ground in order:
                for what, value in take(ground, way, family).items():
                    of = samples.setdefault(what, {}).setdefault(cell(way, family), {})
                    of.setdefault(ground.contender.name, []).append(value)
        speeds += speed(1)
        say(tell(number + 1, samples))
    return samples, speeds


def cell(way: str, family: int) -> str:
    """The label of a way and a family."""
    return f"{WAYS[way]}, IPv{family}"


def steady(samples: Mapping[str, Samples], key: str) -> bool:
    """Whether the quartiles of the ratio to no proxy are near the median in this cell, for all measures."""
    for of in (each[key] for each in samples.values() if key in each):
        if OURS in of and NONE in of:
            found = summary([a / b for a, b in zip(of[OURS], of[NONE], strict=False)])
            apart = max(found.upper_quartile - found.median, found.median - found.lower_quartile)
            if apart > STEADY * found.median:
                return False
    return True


def latest(samples: Samples, form: str) -> str:
    """The latest value of each contender, for the first way."""
    of = next(iter(samples.values()))
    return ", ".join(f"{name} {of[name][-1]:{form}}" for name in sorted(of))


def rows(
    samples: Samples,
    words: str,
    unit: str,
    pairs: Sequence[tuple[str, str]],
    goals: Mapping[tuple[str, str], float],
    most: bool = False,
    judged_unit: str = "×",
) -> Iterator[Row]:
    """Compare each pair of contenders, for every key of the samples; goals by pair.

    ``most``: goals are upper limits.
    """
    for key, of in samples.items():
        for name, reference in pairs:
            if name in of and reference in of:
                goal = goals.get((name, reference))
                yield ratio(
                    f"{words}, {key}: {CONTENDERS[name].words}",
                    unit,
                    of[name],
                    CONTENDERS[reference].words,
                    of[reference],
                    least=None if most else goal,
                    most=goal if most else None,
                    judged_unit=judged_unit,
                )


def _ask(ground: Ground, way: str, command: Sequence[str], stdin: str | None = None) -> dict[str, Any]:
    with unthrottled():
        outcome: dict[str, Any] = json.loads(ground.asks[way].run(*_watch, *pinned(command), stdin=stdin))
    return outcome


def _softirq_threads() -> int:
    """CPU nanoseconds used by ksoftirqd of all CPUs."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in _threads())


@cache
def _threads() -> list[int]:
    found = subprocess.run(["pgrep", "-x", "ksoftirqd/[0-9]+"], check=True, capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]
