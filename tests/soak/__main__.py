# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.soak``: load and churn near the limit of conntrack; writes results.json and docs/soak.svg.

The exit status is 1 if a resource grows or a connection fails.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from bench.measure import machine, say, speed
from tests.changes.checker import ANSWERED
from tests.faults.ground import LONG, Ground
from tests.faults.of_process import cgroup
from tests.soak.plot import PICTURE, draw
from tests.soak.samples import FREE, Sample, Soak, problems, sample
from tests.support.damage import CannotBeMadeError, full_conntrack

RESULTS = Path(__file__).with_name("results.json")
PERIOD = 15.0
#: How often a second a Service changes its endpoints; every tenth time it is deleted and created again.
CHANGES = 2.0


def run(minutes: float, rate: int, free: int) -> Soak:
    """One run on its own node."""
    samples: list[Sample] = []
    with (
        own_group() as group,
        Ground(group=group) as ground,
        full_conntrack(ground.node.namespace, free=free, seconds=int(minutes * 60) + 600),
    ):
        limit = int(ground.node.namespace.run("sysctl", "-n", "net.netfilter.nf_conntrack_max"))
        ground.begin_traffic(rate)
        start = time.monotonic()
        end, looked, turns = start + minutes * 60, 0.0, itertools.count()
        churn = ground.lab.manifests / "churn.yaml"
        while (now := time.monotonic()) < end:
            turn = next(turns)
            if turn % 10 == 9:
                churn.unlink(missing_ok=True)
            else:
                pods = (("web-1",), ("web-2",), ("web-1", "web-2"))[turn % 3]
                ground.proxy.apply("churn", ground.service("churn", 60 + turn % 7, *pods))
            if now - looked >= PERIOD:
                looked = now
                samples.append(sample(ground, start, group))
                say(f"{samples[-1]}")
            time.sleep(max(0.0, start + (turn + 1) / CHANGES - time.monotonic()))
        lost = ground.wait_for_long_connections()
        new, long, _ = ground.end_traffic()
    how: dict[str, int] = {}
    for record in new:
        if record.end != ANSWERED:
            how[record.end] = how.get(record.end, 0) + 1
    return Soak(
        machine=machine(speed()),
        minutes=minutes,
        rate=rate,
        changes=next(turns),
        conntrack_max=limit,
        tried=len(new),
        failed=sum(how.values()),
        how=how,
        lost=max(lost, sum(record.end != ANSWERED for record in long)),
        samples=samples,
        room=free,
    )


@contextmanager
def own_group() -> Iterator[Path | None]:
    """A memory cgroup for the agent alone; None: this machine offers none."""
    with ExitStack() as stack:
        try:
            group = stack.enter_context(cgroup("memory", {}, {}))
        except (OSError, CannotBeMadeError) as error:
            say(f"the kernel's memory for the agent is not sampled: {error}")
            group = None
        yield group


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="duration (default: 60)")
    parser.add_argument("--rate", type=int, default=300, help="new connections per second")
    parser.add_argument("--free", type=int, default=FREE, help="conntrack entries that stay free")
    parser.add_argument("--dry", action="store_true", help="print the results; write no file")
    arguments = parser.parse_args()
    found = run(arguments.minutes, arguments.rate, arguments.free)
    bad = problems(found)
    say(f"{found.tried} connections, {LONG} long ones, {found.changes} changes: {'; '.join(bad) or 'flat'}")
    if not arguments.dry:
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        draw(found, PICTURE)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
