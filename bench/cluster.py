# SPDX-License-Identifier: Apache-2.0
"""Figure 5: start, one change, many changes, memory, idle; with a real API server, compared with the real kube-proxy.

Besides the API server, only one process runs at a time: the proxies take turns, each on a new node, round by round.
"""

from __future__ import annotations

import compileall
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from . import workload
from .api_load import CONNECTIONS, Connections, loaded, slice_path
from .cluster_node import Node, in_namespace
from .cluster_rows import JUDGED, judged, rounds_in_words, rows
from .flips import Flips, flips
from .measure import ROOT, Result, machine, say, slowness, speed
from .proxies import IPTABLES, NFTABLES, OURS, WORDS

KINDS = (OURS, NFTABLES, IPTABLES)
PER_SECOND = 100
#: Pause between two changes: the work after one must not overlap with the next.
SETTLE_SECONDS = 0.35
CHANGE_SECONDS = 120.0
_PATCH = "application/json-patch+json"


class Size(NamedTuple):
    """A cluster: its services, the endpoints of each, the number of rounds, and of changes in a round, by kind."""

    services: int
    endpoints: int
    rounds: int
    changes: dict[str, int]


class Plan(NamedTuple):
    """The extent of the measurement. Idle and many changes are measured once, at the size that has the goals."""

    sizes: tuple[Size, ...]
    rate_seconds: int
    idle_seconds: dict[str, int]


_CHANGES = {OURS: 100, NFTABLES: 3, IPTABLES: 3}
FULL = Plan(
    (
        Size(100, 10, 5, _CHANGES),
        Size(1_000, 10, 5, _CHANGES),
        Size(JUDGED, 10, 5, _CHANGES),
        # kube-proxy in mode nftables takes one or two minutes to start here, and half a minute for a change.
        Size(30_000, 3, 3, {OURS: 100, NFTABLES: 1, IPTABLES: 2}),
    ),
    20,
    {OURS: 60, NFTABLES: 10, IPTABLES: 10},
)
QUICK = Plan((Size(1_000, 10, 1, {OURS: 20, NFTABLES: 10, IPTABLES: 5}),), 10, {OURS: 30, NFTABLES: 10, IPTABLES: 10})


def planned(
    quick: bool, sizes: Sequence[int] = (), rest_seconds: int | None = None, many_seconds: int | None = None
) -> Plan:
    """The plan with the options: only these sizes, and these durations of idle and of many changes.

    Raises ValueError for an unknown size.
    """
    plan = QUICK if quick else FULL
    there = {size.services: size for size in FULL.sizes} | {size.services: size for size in plan.sizes}
    for services in sizes:
        if services not in there:
            raise ValueError(f"no such size: {services}; there are {', '.join(map(str, sorted(there)))}")
    if sizes:
        rounds = plan.sizes[0].rounds if quick else None
        chosen = (there[services] for services in sorted(set(sizes)))
        plan = plan._replace(sizes=tuple(each._replace(rounds=rounds or each.rounds) for each in chosen))
    if rest_seconds is not None:
        plan = plan._replace(idle_seconds=plan.idle_seconds | {OURS: rest_seconds})
    return plan if many_seconds is None else plan._replace(rate_seconds=many_seconds)


class Bench:
    """One size: an API server with its objects, and the measurements against it."""

    def __init__(self, connections: Connections, services: int) -> None:
        self._connections = connections
        self._services = services
        self._turn = 0
        self._lock = threading.Lock()

    def next_change(self, watch: Flips) -> tuple[str, str]:
        """Choose a service far from the last one, and announce its change. The result: the slice's path and address."""
        with self._lock:
            self._turn += 1
            turn = self._turn
        number = turn * 7919 % self._services
        address = workload.pod_ip(1_200_000 + turn)
        watch.expect(number, address)
        return slice_path(number), address

    def write(self, path: str, address: str) -> None:
        """Write the change to the API server, and wait for the answer."""
        body = [{"op": "replace", "path": "/endpoints/0/addresses/0", "value": address}]
        self._connections.mine().write("PATCH", path, body, _PATCH)

    def one_by_one(self, watch: Flips, times: int) -> list[dict[str, float]]:
        """Milliseconds until a change has taken effect, since it was sent and since the API server answered."""
        found = []
        for turn in range(times + 1):
            path, address = self.next_change(watch)
            sent = time.time()
            self.write(path, address)
            answered = time.time()
            seen = watch.wait(address, CHANGE_SECONDS)
            if turn:  # the first is a warm-up
                found.append({"since_sent_ms": (seen - sent) * 1e3, "since_answer_ms": (seen - answered) * 1e3})
            time.sleep(SETTLE_SECONDS)
        return found

    def many(self, watch: Flips, seconds: int) -> list[dict[str, float | None]]:
        """Send PER_SECOND changes per second, whether or not they complete. The result: send time, duration of each."""
        begin = time.time() + 0.1
        found: list[dict[str, float | None]] = []
        addresses: dict[float | None, str] = {}

        def change(number: int) -> None:
            due = begin + number / PER_SECOND
            time.sleep(max(0.0, due - time.time()))
            path, address = self.next_change(watch)
            sent = time.time()
            self.write(path, address)
            addresses[due - begin] = address
            found.append({"due": due - begin, "sent": sent - begin, "answered": time.time() - begin})

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            for done in pool.map(change, range(seconds * PER_SECOND)):
                assert done is None
        end = time.time() + CHANGE_SECONDS
        while time.time() < end and any(watch.seen(each) is None for each in addresses.values()):
            time.sleep(0.1)
        for each in found:
            seen = watch.seen(addresses[each["due"]])
            each["in_force"] = None if seen is None else seen - begin
            each.update({name: round(value, 5) for name, value in each.items() if value is not None})
        return sorted(found, key=lambda each: each["sent"] or 0.0)


def run(
    quick: bool, plan: Plan | None = None, kept: Result | None = None, keep: Callable[[Result], object] = bool
) -> Result:
    """Measure the figure. ``keep`` receives the result so far after each size.

    ``kept``: an earlier result; its runs of other sizes are kept if they have the same commit and machine.
    """
    plan = plan or planned(quick)
    # Compile the modules, as in an installed package; a checkout may not have bytecode.
    compileall.compile_dir(ROOT / "pyebpf_proxy", quiet=1)
    speeds = speed()
    runs, others = other_runs(kept, plan, machine(speeds))
    speeds += others
    goals_at = judged([*(run["services"] for run in runs), *(size.services for size in plan.sizes)])
    with in_namespace(f"bench-api-{os.getpid()}"):
        for size in plan.sizes:
            with loaded(size.services, size.endpoints) as server:
                connections = Connections(server)
                bench = Bench(connections, size.services)
                for turn in range(size.rounds):
                    for kind in KINDS:
                        last = size.services == goals_at and turn == size.rounds - 1
                        with Node(kind, server, size.services) as node:
                            found = _measure(bench, node, plan, size, last)
                        runs.append(found)
                        _tell(found)
                connections.close()
            speeds += speed(1)
            result = _result(quick, runs, speeds)
            keep(result)
    return result


def other_runs(kept: Result | None, plan: Plan, here: dict[str, Any]) -> tuple[list[dict[str, Any]], list[float]]:
    """Earlier runs of sizes that are not measured now, and the machine speeds at their time."""
    if kept is None:
        return [], []
    measured = {size.services for size in plan.sizes}
    runs = [run for run in kept.samples["runs"] if run["services"] not in measured]
    alike = all(kept.machine[what] == here[what] for what in ("commit", "kernel", "processor", "cpus"))
    if runs and not alike:
        sizes = ", ".join(str(each) for each in sorted({run["services"] for run in runs}))
        say(f"cluster: {sizes} services: the kept runs are of another commit or machine: removed")
    return (runs, list(kept.samples["speed_seconds"])) if alike and runs else ([], [])


def _result(quick: bool, runs: list[dict[str, Any]], speeds: list[float]) -> Result:
    made = rows(runs, slowness(speeds))
    return Result(
        figure="cluster",
        title=f"With an API server, compared with kube-proxy ({rounds_in_words(runs)})",
        quick=quick,
        machine=machine(speeds),
        rows=made,
        samples={"runs": runs, "speed_seconds": speeds},
    )


def _measure(bench: Bench, node: Node, plan: Plan, size: Size, last: bool) -> dict[str, Any]:
    """Measure one process from its start. Measurements that are done only once are in the last round."""
    found: dict[str, Any] = {"kind": node.kind, "services": node.services, "start_seconds": node.start_seconds}
    found["load_average"] = round(os.getloadavg()[0], 2)
    watch = flips(node)
    try:
        found["changes"] = bench.one_by_one(watch, size.changes[node.kind])
        found["memory_mib"] = node.proxy.memory_mib()
        if last:
            seconds = plan.idle_seconds[node.kind]
            before, begin = node.proxy.cpu_seconds(), time.monotonic()
            time.sleep(seconds)
            found["idle_percent"] = 100 * (node.proxy.cpu_seconds() - before) / (time.monotonic() - begin)
            found["idle_seconds"] = seconds
            # Each change is to another service: of two changes of one service, the first may never be seen.
            if node.kind != IPTABLES and node.services >= plan.rate_seconds * PER_SECOND:
                before = node.proxy.cpu_seconds()
                found["many"] = bench.many(watch, plan.rate_seconds)
                found["many_cpu_seconds"] = node.proxy.cpu_seconds() - before
                found["memory_after_many_mib"] = node.proxy.memory_mib()
    finally:
        watch.close()
    return found


def _tell(found: dict[str, Any]) -> None:
    milliseconds = [each["since_sent_ms"] for each in found["changes"]]
    rest = f", {found['idle_percent']:.2f} % at rest" if "idle_percent" in found else ""
    say(
        f"cluster: {WORDS[found['kind']]}, {found['services']} services: started in {found['start_seconds']:.1f} s,"
        f" a change {statistics.median(milliseconds):.1f} ms, {found['memory_mib']:.0f} MiB{rest}"
    )
