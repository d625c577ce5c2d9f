# SPDX-License-Identifier: Apache-2.0
"""Loads on a ground, each by a real program with real-time priority; and the rows of contenders beside each other."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from .contenders import BEFORE_OTHERS, CONNECT, CONTENDERS, EXCHANGE, STREAM, WAYS, Ground, pinned, turns
from .measure import TOOLS, Row, say, speed
from .rows import ratio

IN_FLIGHT = 64
#: Microseconds of each second that real-time tasks may have of a CPU; -1: all of it.
THROTTLE = Path("/proc/sys/kernel/sched_rt_runtime_us")
#: Samples by (load, way, family), then by contender, in the order of the rounds.
Samples = dict[str, dict[str, list[float]]]


def connect(ground: Ground, way: str, family: int, seconds: float) -> float:
    """Connect, one byte there, one back, reset, IN_FLIGHT at a time: connections a second. Raises RuntimeError."""
    command = [str(TOOLS / "connections"), "load", *ground.target(CONNECT, way, family), str(IN_FLIGHT)]
    outcome = _ask(ground, way, [*command, str(seconds / 4), str(seconds)])
    if outcome["failed"]:
        raise RuntimeError(f"{ground.contender.words}: {outcome['failed']} connections failed: {outcome}")
    return float(outcome["per_second"])


def exchange(ground: Ground, way: str, family: int, seconds: float) -> float:
    """One byte there, one back, on one connection, as often as it goes: exchanges a second."""
    command = [str(TOOLS / "pingpong"), "load", *ground.target(EXCHANGE, way, family), str(seconds)]
    return float(_ask(ground, way, command)["per_second"])


def stream(ground: Ground, way: str, family: int, seconds: float) -> tuple[float, float]:
    """One TCP stream: Gbit/s, and CPU nanoseconds a byte.

    The CPU time is that of both ends, in which the kernel does most of the way, and of its threads for what is left.
    """
    address, port = ground.target(STREAM, way, family)
    before = _softirq_threads()
    # iperf3 takes whole seconds only.
    length = ["-t", str(round(seconds))] if seconds >= 1 else ["-n", f"{round(seconds * 2000)}M"]
    end = _ask(ground, way, [*BEFORE_OTHERS, "iperf3", "-c", address, "-p", port, *length, "-J"])["end"]
    threads = _softirq_threads() - before
    got, use = end["sum_received"], end["cpu_utilization_percent"]
    ends = (use["host_total"] + use["remote_total"]) / 100 * got["seconds"]
    return float(got["bits_per_second"]) / 1e9, (ends * 1e9 + threads) / float(got["bytes"])


def paced(ground: Ground, way: str, family: int, connections: int, rate: float, seconds: float) -> dict[str, float]:
    """So many requests a second on connections that stay, and what they took; ``rate`` 0: as many as there can be."""
    command = [str(TOOLS / "paced"), *ground.target(CONNECT, way, family), str(connections), str(rate)]
    found: dict[str, float] = _ask(ground, way, [*command, str(seconds / 4), str(seconds)])
    return found


_watch: list[str] = []


@contextmanager
def watched(command: Sequence[str]) -> Iterator[None]:
    """Loads are started by this command (perf record), which prints nothing, and not from here."""
    _watch.extend(command)
    try:
        yield
    finally:
        _watch.clear()


@contextmanager
def unthrottled() -> Iterator[None]:
    """Real-time tasks may have a CPU for themselves.

    Otherwise all of them stand still for 50 ms of a second, and whose load that falls on is a matter of chance.
    """
    before = THROTTLE.read_text()
    THROTTLE.write_text("-1")
    try:
        yield
    finally:
        THROTTLE.write_text(before)


def alternate(
    rounds: int,
    grounds: Sequence[Ground],
    families: Sequence[int],
    take: Callable[[Ground, str, int], Mapping[str, float]],
    tell: Callable[[int, dict[str, Samples]], str],
) -> tuple[dict[str, Samples], list[float]]:
    """``take`` of each ground in turns, each way, in each family: samples by what it measured, and the speed measures.

    A ground of which it measures nothing takes no part that way. ``tell``: a line for each round.
    """
    speeds = speed(1)
    samples: dict[str, Samples] = {}
    for number, order in turns(rounds, grounds):
        for way, words in WAYS.items():
            for family in families:
                for ground in order:
                    for what, value in take(ground, way, family).items():
                        of = samples.setdefault(what, {}).setdefault(f"{words}, IPv{family}", {})
                        of.setdefault(ground.contender.name, []).append(value)
        speeds += speed(1)
        say(tell(number + 1, samples))
    return samples, speeds


def latest(samples: Samples, form: str) -> str:
    """What each contender has shown last, the first way."""
    of = next(iter(samples.values()))
    return ", ".join(f"{name} {of[name][-1]:{form}}" for name in sorted(of))


def rows(
    samples: Samples,
    words: str,
    unit: str,
    pairs: Sequence[tuple[str, str]],
    goals: Mapping[tuple[str, str], float],
    most: bool = False,
    judged_unit: str = "of it",
) -> Iterator[Row]:
    """Each of the pairs of contenders beside each other, for every key of the samples; goals by pair.

    ``most``: goals are upper limits.
    """
    for key, of in samples.items():
        for ours, theirs in pairs:
            if ours in of and theirs in of:
                goal = goals.get((ours, theirs))
                yield ratio(
                    f"{words}, {key}: {CONTENDERS[ours].words}",
                    unit,
                    of[ours],
                    CONTENDERS[theirs].words,
                    of[theirs],
                    least=None if most else goal,
                    most=goal if most else None,
                    judged_unit=judged_unit,
                )


def _ask(ground: Ground, way: str, command: Sequence[str]) -> dict[str, Any]:
    with unthrottled():
        outcome: dict[str, Any] = json.loads(ground.asks[way].run(*_watch, *pinned(command)))
    return outcome


def _softirq_threads() -> int:
    """CPU nanoseconds that ksoftirqd of all CPUs have used."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in _threads())


@cache
def _threads() -> list[int]:
    found = subprocess.run(["pgrep", "-x", "ksoftirqd/[0-9]+"], check=True, capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]
