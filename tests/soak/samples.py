# SPDX-License-Identifier: Apache-2.0
"""What a soak measures, and the rule for "does not grow". Pure, except for ``sample``."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pyebpf_proxy.see.maps import Pinned
from tests.faults.ground import Ground, wait_until

_ENTRIES = re.compile(r'^pyebpf_proxy_map_entries\{map="(\w+)"\} (\S+)$', re.MULTILINE)
_MEMLOCK = re.compile(r"^memlock:\s+(\d+)$", re.MULTILINE)
#: Free entries of conntrack: the limit is always near, and the load just fits.
FREE = 15_000
#: The first part of a run is the warm-up: caches and the rings of flows fill.
WARM_UP = 0.15
#: The allowed growth from the first to the last third after the warm-up, relative and absolute.
MOST_GROWTH, SLACK = (
    0.03,
    {
        "rss_kib": 2048,
        "fds": 2,
        "map_kib": 64,
        "kernel_kib": 1024,
        "conntrack_kib": 2048,
        "flows": 4000,
        "map_entries": 8,
    },
)


class Sample(msgspec.Struct, kw_only=True):
    """One measurement of the node."""

    seconds: float
    #: Resident memory of the agent.
    rss_kib: int
    #: Its open file descriptors.
    fds: int
    #: Memory of the maps in the kernel, as their descriptors report it.
    map_kib: int
    #: Entries of the flow table.
    flows: int
    #: Entries of all maps that Services fill.
    map_entries: int
    #: Entries of the node's conntrack table.
    conntrack: int
    #: Connections so far, and the smallest number of round trips of the long ones.
    made: int
    rounds: int
    #: Kernel memory that is charged to the agent's cgroup: maps, programs, sockets and their slabs. 0: not sampled.
    kernel_kib: int = 0
    #: Slabs of conntrack, of the whole machine; 0: not sampled.
    conntrack_kib: int = 0


class Soak(msgspec.Struct, kw_only=True):
    """A whole run."""

    machine: dict[str, Any]
    minutes: float
    rate: int
    changes: int
    conntrack_max: int
    tried: int
    failed: int
    how: dict[str, int]
    lost: int
    samples: list[Sample]
    #: Free entries of conntrack. Results from before this field had 3000.
    room: int = 3000


def sample(ground: Ground, start: float, group: Path | None) -> Sample:
    """Measure once. The agent must run. ``group``: its memory cgroup, which contains nothing else."""
    pid = ground.proxy.pid
    status = Path(f"/proc/{pid}/status").read_text()
    rss = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    assert rss is not None
    fds = [path.name for path in Path(f"/proc/{pid}/fd").iterdir()]
    with Pinned(ground.node.agent.directory) as pinned:
        memory = sum(_memlock(pinned.map(name).fd) for name in pinned.names)
    entries = _entries(ground)
    # Traffic fills the flow table, Services fill the others.
    flows = entries.pop("flows")
    return Sample(
        seconds=round(time.monotonic() - start, 1),
        rss_kib=int(rss[1]),
        fds=len(fds),
        map_kib=memory // 1024,
        flows=flows,
        map_entries=sum(entries.values()),
        conntrack=int(ground.node.namespace.run("sysctl", "-n", "net.netfilter.nf_conntrack_count")),
        made=sum(load.made for load in ground.news),
        rounds=min(each.status()[1] for each in ground.long),
        kernel_kib=0 if group is None else _kernel_memory(group) // 1024,
        conntrack_kib=_slabs("nf_conntrack") // 1024,
    )


def _entries(ground: Ground) -> dict[str, int]:
    """The used entries of each map. On a busy machine, the agent may not answer in time: then it is asked again."""
    found: dict[str, int] = {}

    def answered() -> bool:
        found.update((name, int(float(value))) for name, value in _ENTRIES.findall(ground.proxy.metrics()))
        return bool(found)

    wait_until(answered, "the agent shows its metrics")
    return found


def _kernel_memory(group: Path) -> int:
    """In bytes, of a cgroup of version 1 or 2."""
    first = group / "memory.kmem.usage_in_bytes"
    if first.exists():
        return int(first.read_text())
    return int(dict(line.split() for line in (group / "memory.stat").read_text().splitlines()).get("kernel", 0))


def _slabs(name: str) -> int:
    """Bytes of a cache's slabs; 0: the kernel does not show them."""
    try:
        lines = Path("/proc/slabinfo").read_text().splitlines()
    except OSError:
        return 0
    # name active_objs num_objs objsize …
    rows = (line.split() for line in lines)
    return sum(int(row[2]) * int(row[3]) for row in rows if row[0] == name)


def _memlock(fd: int) -> int:
    found = _MEMLOCK.search(Path(f"/proc/self/fdinfo/{fd}").read_text())
    return int(found[1]) if found else 0


def growth(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """Medians of the first and the last third after the warm-up."""
    kept = [each for each in samples if each.seconds >= samples[-1].seconds * WARM_UP]
    third = max(1, len(kept) // 3)
    first, last = ([getattr(each, name) for each in part] for part in (kept[:third], kept[-third:]))
    return float(statistics.median(first)), float(statistics.median(last))


def grown(samples: Sequence[Sample]) -> list[str]:
    """What grows."""
    found = []
    for name, slack in SLACK.items():
        first, last = growth(samples, name)
        if last > first * (1 + MOST_GROWTH) + slack:
            found.append(f"{name} grew from {first:.0f} to {last:.0f}")
    return found


def problems(run: Soak) -> list[str]:
    """What grows, and which connections were not answered."""
    found = grown(run.samples)
    if run.failed:
        how = ", ".join(f"{count} {end}" for end, count in sorted(run.how.items()))
        found.append(f"{run.failed} of {run.tried} connections failed ({how})")
    if run.lost:
        found.append(f"{run.lost} long connections were lost")
    return found
