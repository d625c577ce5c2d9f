# SPDX-License-Identifier: Apache-2.0
"""Figure 1: a whole cluster from parsed objects into maps, compared with the same entries written one by one."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from pyebpf_proxy.datapath.loader.libbpf import Map

from . import workload
from .filled import fill, load_programs
from .measure import NORMAL_SECONDS, ROOT, Result, machine, say, slowness, speed, summary, undisturbed
from .rows import absolute

SERVICES = 10_000
GOAL_SECONDS = 1.5
GOAL_SYSCALL_SECONDS = 0.1

_WRITES = ("update", "update_batch", "delete", "delete_batch")


def once() -> dict[str, float]:
    """One fill in this process, as fresh as an agent that was just started."""
    changes = workload.parsed(SERVICES)
    clock = _Clock()
    for name in _WRITES:
        setattr(Map, name, clock.around(getattr(Map, name)))
    with undisturbed():
        filled = fill(changes)
    in_batches, calls = clock.seconds, clock.calls
    entries = {name: used for name, (used, _) in filled.writer.fill().items()}
    if entries["slots"] < SERVICES * workload.ENDPOINTS:
        raise RuntimeError(f"only {entries['slots']} slots were written")

    # The same entries, one call each, into maps that are empty as well.
    other = load_programs()
    clock.seconds = 0.0
    for name, source in filled.loaded.maps.items():
        if entries.get(name) and name not in ("services", "slots"):
            found = list(source.items())
            with undisturbed():
                for key, value in found:
                    other.maps[name].update(key, value)
    return {
        "planning": filled.planning,
        "writing": filled.writing,
        "total": filled.planning + filled.writing,
        "map_writes": in_batches,
        "map_write_calls": calls,
        "map_entries": sum(entries.values()) - entries["slots"] - entries["services"],
        "map_writes_one_by_one": clock.seconds,
    }


class _Clock:
    """Time spent in calls, including about a microsecond of Python for each system call."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - begin
                self.calls += 1

        return timed


def run(quick: bool) -> Result:
    runs: list[dict[str, float]] = []
    speeds: list[float] = []
    for number in range(2 if quick else 7):
        speeds += speed(1)
        command = [sys.executable, "-c", "import json; from bench.write import once; print(json.dumps(once()))"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        runs.append(json.loads(done.stdout))
        say(f"write {number + 1}: {runs[-1]['total']:.2f} s, of it {runs[-1]['map_writes']:.3f} s in map writes")
    speeds += speed(1)
    # Each run is related to the machine's speed just before and after it, because of other load.
    local = [(before + after) / 2 / NORMAL_SECONDS for before, after in itertools.pairwise(speeds)]

    def column(name: str) -> list[float]:
        return [one[name] for one in runs]

    def normal(name: str) -> float:
        return summary([one[name] / slow for one, slow in zip(runs, local, strict=True)]).median

    what = f"{SERVICES} services, {SERVICES * workload.ENDPOINTS} endpoints"
    return Result(
        figure="write",
        title=f"{what}: from parsed objects into maps",
        quick=quick,
        machine=machine(speeds),
        rows=[
            absolute(f"{what}: parsed objects → maps", "s", column("total"), normal("total"), GOAL_SECONDS),
            absolute(
                "of it in map writes (batches)",
                "s",
                column("map_writes"),
                normal("map_writes"),
                GOAL_SYSCALL_SECONDS,
                compared_with="the same entries one by one",
                compared=column("map_writes_one_by_one"),
            ),
        ],
        samples={"runs": runs, "speed_seconds": speeds, "slowness": slowness(speeds)},
    )
