# SPDX-License-Identifier: Apache-2.0
"""Figure: what all maps take in the kernel, empty and with 10 000 services, 100 000 endpoints in them.

By the maps' own account (``memlock`` of their descriptors, what bpftool shows), and, where there is a memory cgroup to
be had, by what the kernel has charged for them since before they were made: programs and slack are in that.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.tables.pod_network import PodNetwork
from pyebpf_proxy.datapath.tables.writer import Writer
from pyebpf_proxy.services.planner import Planner, PlanSettings

from . import workload
from .filled import load_programs
from .measure import ROOT, Result, Row, machine, say, speed, summary

SERVICES = 10_000
GOAL_MB = 64.0
MB = 1e6
CONFIGURATIONS: Mapping[str, Mapping[str, bool]] = {
    "defaults": {},
    "fastPath, socketLB: all": {"fast_path": True, "pod_sockets": True},
}
_CGROUP1 = Path("/sys/fs/cgroup/memory")
_CGROUP2 = Path("/sys/fs/cgroup")


def map_memory(maps: Mapping[str, Map]) -> dict[str, int]:
    """Bytes that each map takes in the kernel now, by its own account."""
    found = {}
    for name, each in maps.items():
        lines = Path(f"/proc/self/fdinfo/{each.fd}").read_text().splitlines()
        found[name] = next(int(line.split()[1]) for line in lines if line.startswith("memlock:"))
    return found


@contextmanager
def _charged() -> Iterator[Callable[[], int] | None]:
    """What the kernel has charged this process for, bytes, by a memory cgroup of its own; None if there is none."""
    for parent, file in ((_CGROUP1, "memory.kmem.usage_in_bytes"), (_CGROUP2, "memory.stat")):
        group = parent / f"pyebpf-proxy-bench-{os.getpid()}"
        if not (parent / "cgroup.procs").exists():
            continue
        with contextlib.suppress(OSError):
            group.mkdir()
        if (group / file).exists():
            (group / "cgroup.procs").write_text(str(os.getpid()))
            try:
                yield lambda file=file, group=group: _kernel_bytes((group / file).read_text())  # type: ignore[misc]
            finally:
                (parent / "cgroup.procs").write_text(str(os.getpid()))
                with contextlib.suppress(OSError):
                    group.rmdir()
            return
        with contextlib.suppress(OSError):
            group.rmdir()
    yield None


def _kernel_bytes(text: str) -> int:
    """The one number of version 1, or ``kernel`` of version 2's statistics."""
    rows = [line.split() for line in text.splitlines()]
    return int(rows[0][0]) if len(rows[0]) == 1 else int(dict(rows)["kernel"])


def once(configuration: str) -> dict[str, Any]:
    """Load and fill, in this process."""
    planner = Planner(PlanSettings(node_name="node1"))
    pods = PodNetwork()
    pods.update([ip_network(workload.POD_CIDR)], [])
    plan = planner.update(workload.parsed(SERVICES))
    with _charged() as charged:
        before = charged() if charged else 0
        loaded = load_programs(**CONFIGURATIONS[configuration])
        empty = map_memory(loaded.maps)
        writer = Writer(loaded, pods)
        if writer.apply(plan):
            raise RuntimeError("not everything could be written")
        found = {
            "empty": empty,
            "full": map_memory(loaded.maps),
            "charged": charged() - before if charged else None,
        }
        loaded.close()
    return found


def run(quick: bool) -> Result:
    rounds = 1 if quick else 5
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONFIGURATIONS}
    for _ in range(rounds):
        for name in CONFIGURATIONS:
            program = f"import json; from bench.memory import once; print(json.dumps(once({name!r})))"
            done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, cwd=ROOT)
            runs[name].append(json.loads(done.stdout))
    rows = []
    for name, of in runs.items():
        full = summary([sum(one["full"].values()) / MB for one in of])
        what = f"{SERVICES} services, {SERVICES * workload.ENDPOINTS} endpoints, {name}: all maps"
        rows.append(
            Row(
                what=f"{what}, by their own account",
                unit="MB",
                measured=full,
                compared_with="empty",
                compared=summary([sum(one["empty"].values()) / MB for one in of]),
                judged=full,
                judged_unit="MB",
                at_normal_speed=full.median,
                goal=f"≤ {GOAL_MB:.0f} MB",
                met=full.median <= GOAL_MB,
            )
        )
        if all(one["charged"] is not None for one in of):
            charged = summary([one["charged"] / MB for one in of])
            rows.append(
                Row(
                    what=f"{what} and programs, as charged to a memory cgroup",
                    unit="MB",
                    measured=charged,
                    judged=charged,
                    judged_unit="MB",
                    at_normal_speed=charged.median,
                )
            )
        say(f"memory: {name}: {full.median:.1f} MB of maps")
    return Result(
        figure="memory",
        title="What the maps take in the kernel",
        quick=quick,
        machine=machine(speed(1)),
        rows=rows,
        samples={"runs": {name: of[:1] for name, of in runs.items()}},
    )
