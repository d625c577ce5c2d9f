# SPDX-License-Identifier: Apache-2.0
"""Figure: planning of parsed objects, everything at once and one changed slice, compared with 100 services.

Only the planner: no file, no kernel. What follows in the maps is in the figures ``write`` and ``change``.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from pyebpf_proxy.common.cycles import without_cycle_search
from pyebpf_proxy.kube.decode import decode_object
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.services.planner import Planner, PlanSettings

from . import workload
from .measure import NORMAL_SECONDS, ROOT, Result, machine, say, speed, summary, undisturbed
from .rows import absolute

SIZES = (100, 10_000)
GOAL_CHANGE_MS = 1.0
GOAL_ALL_SECONDS = 1.0


def once(services: int, changes: int) -> dict[str, Any]:
    """Plan everything in this process, as fresh as an agent that was just started; then change one slice after another.

    CPU time of this thread. The collector is treated as the agent treats it.
    """
    everything = workload.parsed(services)
    planner = Planner(PlanSettings(node_name="node1"))
    slices = list(_changed_slices(services, changes))
    with undisturbed():
        begin = time.thread_time()
        with without_cycle_search():
            planned = len(planner.update(everything))
        seconds = time.thread_time() - begin
        del everything
        gc.freeze()
        milliseconds = []
        for change in slices:
            begin = time.thread_time()
            delta = planner.update([change])
            milliseconds.append((time.thread_time() - begin) * 1e3)
            if len(delta) != 1:
                raise RuntimeError(f"a changed slice changes {len(delta)} service ports")
    if planned != services:
        raise RuntimeError(f"{planned} service ports were planned instead of {services}")
    return {"everything_seconds": seconds, "change_ms": milliseconds}


def _changed_slices(services: int, count: int) -> Iterator[Change]:
    """Slices with a changed first endpoint, spread over the table."""
    for turn in range(1, count + 1):
        number = turn * 7919 % services
        document = workload.endpoint_slice(number)
        document["endpoints"][0]["addresses"] = [workload.pod_ip(1_200_000 + turn)]
        found = decode_object("EndpointSlice", json.dumps(document).encode())
        assert found.key is not None
        yield Change("EndpointSlice", found.key.namespace, found.key.name, found.object)


def run(quick: bool) -> Result:
    rounds, changes = (2, 50) if quick else (7, 300)
    runs: dict[int, list[dict[str, Any]]] = {size: [] for size in SIZES}
    slow: list[float] = []
    speeds: list[float] = []
    for number in range(rounds):
        before = speed(1)
        for size in SIZES:
            program = f"import json; from bench.plan import once; print(json.dumps(once({size}, {changes})))"
            done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, cwd=ROOT)
            runs[size].append(json.loads(done.stdout))
        after = speed(1)
        speeds += before + after
        # Each round is related to the machine's speed just before and after it, because of other load.
        slow.append((before[0] + after[0]) / 2 / NORMAL_SECONDS)
        latest = runs[SIZES[-1]][-1]
        say(
            f"plan {number + 1}: {latest['everything_seconds']:.2f} s for everything,"
            f" {summary(latest['change_ms']).median:.3f} ms for a slice"
        )

    def changes_of(size: int) -> list[float]:
        return [each for one in runs[size] for each in one["change_ms"]]

    few, many = SIZES
    all_normal = summary([one["everything_seconds"] / by for one, by in zip(runs[many], slow, strict=True)]).median
    slice_normal = summary(
        [each / by for one, by in zip(runs[many], slow, strict=True) for each in one["change_ms"]]
    ).median
    endpoints = many * workload.ENDPOINTS
    return Result(
        figure="plan",
        title="Parsed objects → plan",
        quick=quick,
        machine=machine(speeds),
        rows=[
            absolute(
                f"{many} services, {endpoints} endpoints, everything: objects → plan, CPU time",
                "s",
                [one["everything_seconds"] for one in runs[many]],
                all_normal,
                GOAL_ALL_SECONDS,
            ),
            absolute(
                f"one changed slice of {workload.ENDPOINTS} endpoints, {many} services: object → plan, CPU time",
                "ms",
                changes_of(many),
                slice_normal,
                GOAL_CHANGE_MS,
                compared_with=f"{few} services",
                compared=changes_of(few),
            ),
        ],
        samples={
            "runs": {
                str(size): [one | {"change_ms": [round(each, 4) for each in one["change_ms"]]} for one in of]
                for size, of in runs.items()
            },
            "speed_seconds": speeds,
        },
    )
