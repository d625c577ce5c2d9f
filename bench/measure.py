# SPDX-License-Identifier: Apache-2.0
"""Shared by all figures: samples and their spread, the machine, the format of results."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "build" / "bench"

#: The speed of this machine running Python; goals are for a machine that takes NORMAL_SECONDS.
SPEED_COMMAND = "import time;t=time.time();x=0;[x:=x+i for i in range(3000000)];print(time.time()-t)"
NORMAL_SECONDS = 0.2


class Summary(msgspec.Struct, frozen=True):
    """A summary of samples: the median, the quartiles, the extremes."""

    median: float
    lower_quartile: float
    upper_quartile: float
    minimum: float
    maximum: float
    samples: int


def summary(samples: Sequence[float]) -> Summary:
    quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    lower, middle, upper, least, most = (round(value, 6) for value in (*quartiles, min(samples), max(samples)))
    return Summary(middle, lower, upper, least, most, len(samples))


class Row(msgspec.Struct, kw_only=True):
    """One line of the table in docs/performance.md.

    ``judged`` is the value for the goal, on this machine; ``at_normal_speed`` the same on a machine of NORMAL_SECONDS
    (equal to ``judged`` for ratios). Rows without a goal are for comparison.
    """

    what: str
    unit: str
    measured: Summary
    compared_with: str = ""
    compared: Summary | None = None
    judged: Summary
    judged_unit: str
    at_normal_speed: float
    goal: str = ""
    met: bool | None = None


class Result(msgspec.Struct, kw_only=True):
    """A figure: ``samples`` holds all measurements, for other evaluations and the plot.

    ``note``: a remark about this run, e.g. that it was aborted.
    """

    figure: str
    title: str
    quick: bool
    machine: dict[str, Any]
    rows: list[Row]
    samples: dict[str, Any]
    note: str = ""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Use one CPU without preemption (also for children): for measurements of a few seconds on one CPU."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cpus)})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(0, cpus)


def speed(times: int = 3) -> list[float]:
    """Seconds of SPEED_COMMAND, measured several times, under the current load."""
    run = ["/usr/bin/python3", "-c", SPEED_COMMAND]
    with undisturbed():
        return [float(subprocess.run(run, check=True, capture_output=True, text=True).stdout) for _ in range(times)]


def slowness(speeds: Sequence[float]) -> float:
    """How many times slower than normal."""
    return statistics.median(speeds) / NORMAL_SECONDS


def machine(speeds: Sequence[float]) -> dict[str, Any]:
    """Where and when this was measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "kernel": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "virtual": _is_virtual(),
        "python": platform.python_version(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "speed_command": f"python3 -c '{SPEED_COMMAND}'",
        "speed_seconds": summary(speeds),
    }


def commit(*more: str) -> str:
    """The commit of the sources, with "+changes" if they differ from it. ``more``: other paths that count."""
    # Under sudo the checkout belongs to another user.
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]

    def ask(*what: str) -> str:
        return subprocess.run([*git, *what], capture_output=True, text=True, check=False).stdout.strip()

    sources = ["bpf", "pyebpf_proxy", "bench/*.py", "bench/*.c"]
    return ask("rev-parse", "--short=12", "HEAD") + (
        "+changes" if ask("status", "--porcelain", *sources, *more) else ""
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _is_virtual() -> bool:
    return " hypervisor" in Path("/proc/cpuinfo").read_text()


def save(result: Result, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.figure}.json"
    text = json.dumps(msgspec.to_builtins(result), indent=1)
    path.write_text(_join_numbers(text) + "\n")
    return path


def _join_numbers(text: str) -> str:
    """Put lists of numbers on one line, so that diffs of results are readable."""
    lines: list[str] = []
    within = False
    for line in text.splitlines():
        bare = line.strip()
        number = bare.rstrip(",").lstrip("-").replace(".", "", 1).replace("e-", "", 1).isdigit()
        if within and (number or bare.startswith("]")):
            lines[-1] += bare if bare.startswith("]") or lines[-1].endswith("[") else f" {bare}"
            within = not bare.startswith("]")
            continue
        lines.append(line)
        within = line.endswith("[")
    return "\n".join(lines)


def load_result(path: Path) -> Result:
    return msgspec.json.decode(path.read_bytes(), type=Result)


def say(text: str) -> None:
    """Print progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
