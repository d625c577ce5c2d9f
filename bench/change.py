# SPDX-License-Identifier: Apache-2.0
"""Figure 2: one EndpointSlice file changes, with agents that hold clusters of three sizes.

The agents are real processes, each in its own lab, with a directory that has one file for each object. They take turns,
so that other load of the machine affects all sizes equally.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import Map, Object
from pyebpf_proxy.datapath.loader.programs import OBJECTS
from pyebpf_proxy.datapath.maps.layouts import Layouts
from pyebpf_proxy.lab.cluster import Lab

from . import workload
from .measure import Result, Row, machine, say, slowness, speed, summary
from .rows import absolute, ratio

SIZES = (100, 1_000, 10_000)
#: Every cluster has one more service, for changes of a large slice.
LARGE = 65_000
LARGE_ENDPOINTS = 1_000
GOAL_MS = 10.0
#: The agent removes old versions after 0.2 s without changes; this is a part of the work of a change.
SETTLE_SECONDS = 0.35
DEADLINE_SECONDS = 10.0


class Change(NamedTuple):
    """One change: milliseconds from just before the rename until the flip, and the agent's CPU time."""

    latency_ms: float
    cpu_ms: float


class Cluster:
    """A lab with one node, its agent, and ``services`` services."""

    def __init__(self, lab: Lab, services: int, layouts: Layouts) -> None:
        self.services = services
        self._lab = lab
        self._layouts = layouts
        self._agent = lab.nodes[0].agent
        self._turn = 0

    def start(self) -> float:
        """Write the directory, start the agent, and wait until it has programmed everything. The result: seconds."""
        folder = self._lab.manifests
        for name, document in workload.everything(self.services):
            (folder / name).write_text(json.dumps(document))
        (folder / "large.json").write_text(json.dumps(workload.service(LARGE)))
        (folder / workload.slice_file(LARGE)).write_text(json.dumps(self._slice(LARGE, LARGE_ENDPOINTS)))
        begin = time.monotonic()
        self._agent.start({"clusterCIDR": workload.POD_CIDR, "iptables": {"minSyncPeriod": "1ms"}})
        self._agent.wait_synced(deadline=240)
        took = time.monotonic() - begin
        names = Map.open_pinned(self._agent.pin("service_names"))
        self._ids = {self._layouts.unpack_name(value).name: struct.unpack("=I", key)[0] for key, value in names.items()}
        names.close()
        if len(self._ids) != self.services + 1:
            raise RuntimeError(f"{len(self._ids)} service ports in the maps instead of {self.services + 1}")
        services = Map.open_pinned(self._agent.pin("services"))
        self._words = services.mmap().cast("Q")
        services.close()
        return took

    def _slice(self, number: int, endpoints: int) -> workload.Object:
        """The service's slice; its first endpoint is different in every turn."""
        document = workload.endpoint_slice(number, number * workload.ENDPOINTS, endpoints)
        document["endpoints"][0]["addresses"] = [workload.pod_ip(1_200_000 + self._turn)]
        return document

    def change(self, large: bool) -> Change:
        """Replace one slice by a rename, as editors do, and wait for the flip."""
        self._turn += 1
        # Spread changes over the table, so that successive ones are not near each other.
        number = LARGE if large else self._turn * 7919 % self.services
        document = self._slice(number, LARGE_ENDPOINTS if large else workload.ENDPOINTS)
        path = self._lab.manifests / workload.slice_file(number)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(json.dumps(document))
        service = self._ids[workload.name_of(number)]
        before = self._words[service]
        cpu = self._cpu_ns()
        begin = time.monotonic_ns()
        os.rename(temporary, path)
        # No busy loop, because the agent may need this CPU. The kernel wakes this process about 60 µs late.
        while self._words[service] == before:
            time.sleep(0.00005)
            if time.monotonic_ns() - begin > DEADLINE_SECONDS * 1e9:
                raise RuntimeError(f"no flip within {DEADLINE_SECONDS} s:\n{self._agent.log()[-2000:]}")
        latency = time.monotonic_ns() - begin
        time.sleep(SETTLE_SECONDS)
        return Change(latency / 1e6, (self._cpu_ns() - cpu) / 1e6)

    def _cpu_ns(self) -> int:
        """CPU time of all threads of the agent in nanoseconds, as the scheduler counts it."""
        process = self._agent.process
        assert process is not None
        tasks = Path(f"/proc/{process.pid}/task")
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir())

    def idle_cpu(self, seconds: float) -> float:
        """CPU milliseconds per second of an idle agent."""
        before = self._cpu_ns()
        time.sleep(seconds)
        return (self._cpu_ns() - before) / 1e6 / seconds


@contextmanager
def _clusters(sizes: tuple[int, ...]) -> Iterator[list[Cluster]]:
    with Object.open(OBJECTS / "tc.bpf.o") as unloaded:
        btf: Btf = unloaded.btf
        layouts = Layouts(btf)
    with ExitStack() as stack:
        yield [Cluster(stack.enter_context(Lab(nodes=1)), size, layouts) for size in sizes]


def run(quick: bool) -> Result:
    speeds = speed()
    rounds, large_rounds = (8, 3) if quick else (45, 15)
    latency: dict[str, dict[int, list[float]]] = {"small": {}, "large": {}}
    cpu: dict[str, dict[int, list[float]]] = {"small": {}, "large": {}}
    starts: dict[int, float] = {}
    with _clusters(SIZES) as clusters:
        for cluster in clusters:
            starts[cluster.services] = cluster.start()
            say(f"change: agent with {cluster.services} services ready after {starts[cluster.services]:.1f} s")
        idle = {cluster.services: cluster.idle_cpu(2) for cluster in clusters}
        for kind, times in (("small", rounds), ("large", large_rounds)):
            for cluster in clusters:
                latency[kind][cluster.services], cpu[kind][cluster.services] = [], []
                cluster.change(kind == "large")  # a warm-up
            for _ in range(times):
                for cluster in clusters:
                    change = cluster.change(kind == "large")
                    latency[kind][cluster.services].append(change.latency_ms)
                    cpu[kind][cluster.services].append(change.cpu_ms)
            for size, values in latency[kind].items():
                say(f"change: {kind}, {size} services: {summary(values).median:.2f} ms")
    speeds += speed()
    slow = slowness(speeds)
    return Result(
        figure="change",
        title="One EndpointSlice file changed → map flipped",
        quick=quick,
        machine=machine(speeds),
        rows=_rows(latency, cpu, slow),
        samples={
            "latency_ms": latency,
            "cpu_ms": cpu,
            "idle_cpu_ms_per_second": idle,
            "start_seconds": starts,
            "speed_seconds": speeds,
        },
    )


def _rows(latency: dict[str, dict[int, list[float]]], cpu: dict[str, dict[int, list[float]]], slow: float) -> list[Row]:
    largest, smallest = max(SIZES), min(SIZES)
    flipped = summary(latency["small"][largest])
    names = {"small": f"{workload.ENDPOINTS} endpoints", "large": f"{LARGE_ENDPOINTS} endpoints"}
    rows = [
        absolute(
            f"slice of {names['small']} changed, {largest} services: file event → map flipped",
            "ms",
            latency["small"][largest],
            flipped.median / slow,
            GOAL_MS,
            f"median ≤ {GOAL_MS:.0f} ms",
            compared_with=f"{smallest} services",
            compared=latency["small"][smallest],
        )
    ]
    for kind, name in names.items():
        judged = kind == "small"
        rows.append(
            ratio(
                f"the agent's CPU time for a change of a slice of {name}, {largest} services",
                "ms",
                cpu[kind][largest],
                f"{smallest} services",
                cpu[kind][smallest],
                # The table is 100 times larger: work that grows with it would exceed this by far; cache effects do not.
                most=2.0 if judged else None,
                judged_unit="times",
                goal="does not grow with the table" if judged else "",
            )
        )
    return rows
