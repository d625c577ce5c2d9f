# SPDX-License-Identifier: Apache-2.0
"""CPU time of the control plane by phases, in clusters of several shapes: ``make profile``.

Each shape in a fresh process: a cold start (decode, plan, apply), changes one after another, 100 changes a second. CPU
time of the one thread; what each phase touches is counted. Results: ``bench/profiles``, a text for people and JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import json
import math
import os
import pstats
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from pyebpf_proxy.common import memory
from pyebpf_proxy.common.cycles import without_cycle_search
from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.maps.writer import Writer
from pyebpf_proxy.kube.api.inventory import Inventory
from pyebpf_proxy.kube.source import Change, Kind
from pyebpf_proxy.services.model import ServicePort, ServicePortName
from pyebpf_proxy.services.planner import Planner, PlanSettings

from . import workload
from .filled import load_programs
from .measure import ROOT, machine, say, speed, undisturbed

PROFILES = ROOT / "bench" / "profiles"
#: Number of objects of a first list that are planned at a time (kube/api/follower.py).
PART = 500
PER_SECOND = 100


class Shape(NamedTuple):
    """Numbers of services, endpoints per service, slices per service."""

    services: int
    endpoints: int
    slices: int = 1

    @property
    def name(self) -> str:
        return f"{self.services}x{self.endpoints}"

    @property
    def words(self) -> str:
        slices = f" over {self.slices} slices" if self.slices > 1 else ""
        return f"{self.services} services × {self.endpoints} endpoints{slices}"


#: The first one is the reference: a change must not cost more in a larger cluster.
SHAPES = (
    Shape(100, 10),
    Shape(10_000, 10),
    Shape(1_000, 100),
    Shape(1, 5_000, 50),
    Shape(30_000, 3),
)


class Text(NamedTuple):
    """An object as the API server sends it."""

    kind: Kind
    json: bytes


def endpoint_slice(shape: Shape, number: int, which: int, other: int | None = None) -> Text:
    """A slice of a service; ``other``: its first endpoint is that pod instead."""
    each = shape.endpoints // shape.slices
    document = workload.endpoint_slice(number, number * shape.endpoints + which * each, each)
    document["metadata"]["name"] += f"-{which}"
    if other is not None:
        document["endpoints"][0]["addresses"] = [workload.pod_ip(other)]
    return Text("EndpointSlice", json.dumps(document).encode())


def everything(shape: Shape) -> list[Text]:
    texts = [Text("Node", json.dumps(workload.node(1)).encode())]
    for number in range(shape.services):
        texts.append(Text("Service", json.dumps(workload.service(number)).encode()))
        texts += [endpoint_slice(shape, number, which) for which in range(shape.slices)]
    return texts


def changes(shape: Shape, first: int, count: int) -> list[Text]:
    """Changes of one endpoint of a slice, spread over the table."""
    texts = []
    for turn in range(first, first + count):
        number, which = turn * 7919 % shape.services, turn % shape.slices
        texts.append(endpoint_slice(shape, number, which, other=1_200_000 + turn))
    return texts


class Phases:
    """The agent's work by phase: CPU seconds, and numbers of affected items."""

    def __init__(self) -> None:
        self._inventories: dict[Kind, Inventory] = {
            kind: Inventory(kind, _refuse) for kind in ("Node", "Service", "EndpointSlice")
        }
        self._planner = Planner(PlanSettings(node_name="node1"))
        self._loaded = load_programs()
        self.writer = Writer(self._loaded)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.touched: Counter[str] = Counter()
        self._count_writes()

    def run(self, texts: list[Text], part: int = PART) -> None:
        """Decode, plan and apply, as one sync."""
        delta: dict[ServicePortName, ServicePort | None] = {}
        for start in range(0, len(texts), part):
            with self._phase("decode"):
                taken: list[Change] = []
                for kind, data in texts[start : start + part]:
                    inventory = self._inventories[kind]
                    taken += inventory.change(inventory.read(data))
            self.touched["objects decoded"] += len(taken)
            with self._phase("plan"):
                delta.update(self._planner.update(taken))
        self.touched["service ports planned"] += len(delta)
        with self._phase("apply"):
            problems = self.writer.apply(delta)
        if problems:
            raise RuntimeError(f"{len(problems)} service ports could not be written, first: {problems[0]}")

    def close(self) -> None:
        """Close the maps."""
        self._loaded.close()

    def collect(self) -> None:
        """Delete old versions. The grace period is waiting time, not CPU time."""
        with self._phase("collect"):
            self.writer.collect()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self.seconds[name] += time.thread_time() - begin

    def _count_writes(self) -> None:
        touched, writer = self.touched, self.writer

        def counted(table: Map, verb: str) -> None:
            plain: Callable[..., Any] = getattr(table, verb)
            what = "map entries removed" if verb.startswith("delete") else "map entries written"

            def count(keys: bytes, *rest: Any) -> Any:
                touched[what] += len(keys) // table.key_size
                return plain(keys, *rest)

            setattr(table, verb, count)

        for table in self._loaded.maps.values():
            for verb in ("update", "update_batch", "delete", "delete_batch"):
                counted(table, verb)
        fill, flip = writer._fill, writer._flip

        def count_slots(first: int, backends: list[int]) -> None:
            touched["slots written"] += len(backends)
            fill(first, backends)

        def count_flip(service: int, config_id: int) -> None:
            touched["services flipped"] += 1
            flip(service, config_id)

        writer._fill, writer._flip = count_slots, count_flip  # type: ignore[method-assign]


def _refuse(text: str) -> None:
    raise RuntimeError(f"the workload is not valid: {text}")


def once(shape: Shape, count: int, rate_seconds: float, freeze: bool = True, profiled: bool = False) -> dict[str, Any]:
    """One cluster in this process. ``freeze``: the garbage collector as in the agent, else Python's default."""
    texts = everything(shape)
    phases = Phases()
    found: dict[str, Any] = {}
    profiles = {"cold start": cProfile.Profile(), "changes": cProfile.Profile()}
    with undisturbed():
        with _profile(profiles["cold start"], profiled):
            if freeze:
                with without_cycle_search():
                    phases.run(texts)
                    gc.freeze()
                memory.give_back()
            else:
                phases.run(texts)
        found["cold start"] = _taken(phases)
        del texts

        waiting = changes(shape, 1, count)
        milliseconds: dict[str, list[float]] = {name: [] for name in ("decode", "plan", "apply", "all")}
        with _profile(profiles["changes"], profiled):
            for text in waiting:
                before = dict(phases.seconds)
                phases.run([text])
                took = {name: (now - before.get(name, 0.0)) * 1e3 for name, now in phases.seconds.items()}
                for name in ("decode", "plan", "apply"):
                    milliseconds[name].append(took[name])
                milliseconds["all"].append(sum(took.values()))
        phases.collect()
        found["one change"] = _taken(phases, count)
        found["one change"]["milliseconds"] = {name: _spread(values) for name, values in milliseconds.items()}
        if rate_seconds:
            found["100 changes a second"] = _at_rate(phases, shape, count + 1, rate_seconds)
    found["memory"] = {"resident MiB": _resident()}
    if profiled:
        found["profiles"] = {name: _top(profile) for name, profile in profiles.items()}
    return found


def _at_rate(phases: Phases, shape: Shape, first: int, seconds: float) -> dict[str, Any]:
    """Changes at a fixed rate; a sync processes all pending ones. Latency counts from when a change was due."""
    waiting = changes(shape, first, int(seconds * PER_SECOND))
    late: list[float] = []
    cpu, begin, done, syncs = time.thread_time(), time.monotonic() + 0.01, 0, 0
    while done < len(waiting):
        due = begin + done / PER_SECOND
        time.sleep(max(0.0, due - time.monotonic()))
        come = min(len(waiting), 1 + int((time.monotonic() - begin) * PER_SECOND))
        phases.run(waiting[done:come])
        end = time.monotonic()
        late += [(end - begin - number / PER_SECOND) * 1e3 for number in range(done, come)]
        done, syncs = come, syncs + 1
        if syncs % 50 == 0:
            phases.collect()
    elapsed = time.monotonic() - begin
    return {
        "milliseconds": _spread(late),
        "cpu percent": round(100 * (time.thread_time() - cpu) / elapsed, 2),
        "syncs": syncs,
        "changes": len(waiting),
    }


def _taken(phases: Phases, times: int = 1) -> dict[str, Any]:
    """CPU seconds and counts since the last call, per change."""
    found = {
        "cpu seconds": {name: round(value / times, 6) for name, value in phases.seconds.items()},
        "touched": {name: round(value / times, 2) for name, value in phases.touched.items()},
    }
    phases.seconds.clear()
    phases.touched.clear()
    return found


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[math.ceil(share * len(ordered)) - 1], 3) for name, share in at.items()}


@contextmanager
def _profile(profile: cProfile.Profile, wanted: bool) -> Iterator[None]:
    if wanted:
        profile.enable()
    try:
        yield
    finally:
        profile.disable()


def _top(profile: cProfile.Profile, lines: int = 18) -> list[str]:
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(lines)
    rows = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    begin = next(number for number, line in enumerate(rows) if line.lstrip().startswith("ncalls"))
    return [line.replace(f"{ROOT}/", "") for line in rows[begin:]]


def _resident() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return round(int(file.read().split()[1]) * 4096 / 2**20, 1)


# ---- all of them -----------------------------------------------------------------------------------------------


def run(quick: bool) -> list[str]:
    """Profile every shape; returns the text report."""
    count, seconds = (100, 2.0) if quick else (500, 10.0)
    folder = ROOT / "build" / "bench" / "profiles" if quick else PROFILES
    folder.mkdir(parents=True, exist_ok=True)
    speeds = speed(1)
    found: dict[str, Any] = {}
    for shape in SHAPES:
        found[shape.name] = {
            "words": shape.words,
            **_fresh(shape, count, seconds),
            "python's own collector": _fresh(shape, count, seconds, freeze=False),
        }
        profiles = _fresh(shape, count, 0.0, profiled=True)["profiles"]
        (folder / f"{shape.name}.txt").write_text(_text(shape, found[shape.name], profiles))
        say(f"profile: {shape.words}")
    speeds += speed(1)
    kept = {"machine": msgspec.to_builtins(machine(speeds)), "shapes": found}
    (folder / "profile.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    table = _table(found)
    (folder / "summary.txt").write_text("\n".join(table) + "\n")
    return table


def _fresh(shape: Shape, count: int, seconds: float, freeze: bool = True, profiled: bool = False) -> dict[str, Any]:
    call = f"once(Shape(*{tuple(shape)}), {count}, {seconds}, freeze={freeze}, profiled={profiled})"
    program = f"import json; from bench.profile import Shape, once; print(json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, cwd=ROOT)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _text(shape: Shape, found: dict[str, Any], profiles: dict[str, list[str]]) -> str:
    lines = [shape.words, ""]
    for what in ("cold start", "one change"):
        seconds = ", ".join(f"{name} {value * 1e3:.3f} ms" for name, value in found[what]["cpu seconds"].items())
        touched = ", ".join(f"{name} {value:g}" for name, value in found[what]["touched"].items())
        lines += [f"{what}, CPU: {seconds}", f"{what}, touched: {touched}"]
    lines += [f"one change, CPU ms: {found['one change']['milliseconds']}"]
    lines += [f"100 changes a second: {found['100 changes a second']}"]
    for name, rows in profiles.items():
        lines += ["", f"{name}, by cProfile (which makes calls slower than they are)", *rows]
    return "\n".join(lines) + "\n"


_COLUMNS: tuple[str, ...] = ("cluster", "start: decode", "plan", "apply s", "change: decode", "plan", "apply", "p99 ms")
_COLUMNS += ("ports", "entries", "slots", "100/s: p50", "p99 ms", "CPU %", "RSS MiB", "own GC: start s", "p99 ms")


def _table(found: dict[str, Any]) -> list[str]:
    rows: list[Sequence[str]] = [_COLUMNS]
    for name, one in found.items():
        start, change, rate = one["cold start"]["cpu seconds"], one["one change"], one["100 changes a second"]
        touched, plain = change["touched"], one["python's own collector"]
        spent = [f"{change['milliseconds'][phase]['p50']:.3f}" for phase in ("decode", "plan", "apply")]
        rows.append(
            [
                name,
                *(f"{start[phase]:.3f}" for phase in ("decode", "plan", "apply")),
                *spent,
                f"{change['milliseconds']['all']['p99']:.2f}",
                f"{touched['service ports planned']:g}",
                f"{touched['map entries written'] + touched.get('map entries removed', 0):g}",
                f"{touched['slots written']:g}",
                f"{rate['milliseconds']['p50']:.2f}",
                f"{rate['milliseconds']['p99']:.2f}",
                f"{rate['cpu percent']:.1f}",
                f"{one['memory']['resident MiB']:.0f}",
                f"{sum(plain['cold start']['cpu seconds'].values()):.2f}",
                f"{plain['100 changes a second']['milliseconds']['p99']:.2f}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer changes; results go to build/bench/profiles")
    quick = parser.parse_args().quick
    if os.geteuid() != 0:
        print("bench needs root: it loads programs", file=sys.stderr)
        return 1
    print("\n".join(run(quick)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
