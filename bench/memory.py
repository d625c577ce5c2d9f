# SPDX-License-Identifier: Apache-2.0
"""Figure: kernel memory of all maps, with one service and with 10 000 services, 100 000 endpoints.

A real agent with its defaults is measured: for every map of its process, the memory that the kernel reports
(``memlock`` of bpftool).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.lab.cluster import Lab

from . import workload
from .loads import Options
from .measure import Result, machine, say, speed
from .rows import absolute

SERVICES = 10_000
GOAL_MB = 64.0
MB = 1e6
#: The measured configurations, by field of the DatapathConfiguration; the first has the goal.
CONFIGURATIONS: Mapping[str, Mapping[str, object]] = {"defaults": {}, "socketLB: all": {"socketLB": "all"}}


def map_memory(maps: Mapping[str, Map]) -> dict[str, int]:
    """The kernel memory of each map, in bytes, as the kernel reports it."""
    return {name: _fields(Path(f"/proc/self/fdinfo/{each.fd}").read_text())["memlock"] for name, each in maps.items()}


def held_memory(pid: int) -> dict[int, int]:
    """The same for all open maps of a process, by map id."""
    found = {}
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            fields = _fields(path.read_text())
            if "map_id" in fields:
                found[fields["map_id"]] = fields["memlock"]
    return found


def _fields(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0].rstrip(":"): int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def once(services: int, own: Mapping[str, object]) -> dict[int, int]:
    """Start a node with that many services. The result: the memory of its maps, by map id."""
    with Lab(nodes=1) as lab:
        for name, document in workload.everything(services):
            (lab.manifests / name).write_text(json.dumps(document))
        agent = lab.nodes[0].agent
        agent.start({"clusterCIDR": workload.POD_CIDR}, own=dict(own))
        agent.wait_synced(deadline=240)
        assert agent.process is not None
        found = held_memory(agent.process.pid)
        if not found:
            raise RuntimeError("the agent holds no map")
        return found


def run(asked: Options) -> Result:
    """Measure it once: the result is the same each time."""
    rows = []
    samples: dict[str, dict[str, list[int]]] = {}
    for name, own in CONFIGURATIONS.items():
        few, many = (sorted(once(number, own).values(), reverse=True) for number in (1, SERVICES))
        samples[name] = {"one": few, "many": many}
        took, before = sum(many) / MB, sum(few) / MB
        what = f"{SERVICES} services, {SERVICES * workload.ENDPOINTS} endpoints, {name}: all maps"
        goal = GOAL_MB if not own else None
        rows.append(absolute(what, "MB", [took], took, goal, compared_with="one service", compared=[before]))
        say(f"memory: {name}: {took:.1f} MB of maps, with one service {before:.1f}; load {os.getloadavg()[0]:.1f}")
    return Result(
        figure="memory",
        title="What the maps take in the kernel",
        quick=asked.quick,
        machine=machine(speed(1)),
        rows=rows,
        samples={"runs": samples},
    )
