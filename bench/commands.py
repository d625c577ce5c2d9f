# SPDX-License-Identifier: Apache-2.0
"""Figure: duration of the inspection commands on a node with 10 000 services.

Each command is run as from a shell, in the network namespace of a node with an agent. Wall-clock time and CPU time are
measured. ``--version``, which reads nothing, shows the time that the start of the interpreter takes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pyebpf_proxy.lab.addresses import CLIENT
from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.cluster import Lab, Node

from . import workload
from .measure import Result, machine, say, slowness, speed, summary
from .rows import absolute

SERVICES = 10_000
#: Seconds of wall-clock time; None: no goal.
COMMANDS: dict[tuple[str, ...], float | None] = {
    ("services",): 1.0,
    ("services", "-o", "json"): None,
    ("explain", CLIENT.v4, f"{workload.cluster_ip(SERVICES // 2)}:80"): 0.5,
    ("status",): 0.5,
    ("flows",): None,
    ("drops",): None,
    ("--version",): None,
}


@contextmanager
def _node() -> Iterator[Node]:
    with Lab(nodes=1) as lab:
        for name, document in workload.everything(SERVICES):
            (lab.manifests / name).write_text(json.dumps(document))
        agent = lab.nodes[0].agent
        agent.start({"clusterCIDR": workload.POD_CIDR})
        agent.wait_synced(deadline=240)
        yield lab.nodes[0]


def once(node: Node, arguments: tuple[str, ...], cache: str) -> tuple[float, float]:
    """Wall-clock and CPU seconds of one command; its output is discarded."""
    known = {"PYEBPF_PROXY_DIRECTORY": str(node.agent.directory), "PYTHONPYCACHEPREFIX": cache}
    # Modules of an installed package are compiled; settings of a checkout's interpreter must not change the result.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | known
    run = ["ip", "netns", "exec", node.namespace.name, *command(), *arguments]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(run, env=environment, stdout=subprocess.DEVNULL, check=True)
    took, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(quick: bool) -> Result:
    rounds = 3 if quick else 25
    speeds = speed()
    clock: dict[str, list[float]] = {" ".join(each): [] for each in COMMANDS}
    cpu: dict[str, list[float]] = {name: [] for name in clock}
    with _node() as node, tempfile.TemporaryDirectory(prefix="pyebpf-proxy-bench-") as cache:
        for number in range(rounds + 1):
            for arguments in COMMANDS:
                took, used = once(node, arguments, cache)
                if number:  # the first run compiles the modules
                    clock[" ".join(arguments)].append(took)
                    cpu[" ".join(arguments)].append(used)
    speeds += speed()
    slow = slowness(speeds)
    rows = []
    for arguments, goal in COMMANDS.items():
        name = " ".join(arguments)
        what = f"{SERVICES} services, {SERVICES * workload.ENDPOINTS} endpoints: {name}"
        found = summary(clock[name])
        rows.append(
            absolute(
                *(what, "s", clock[name], found.median / slow, goal),
                compared_with="of that processor time",
                compared=cpu[name],
            )
        )
        say(f"commands: {name}: {found.median:.3f} s, {summary(cpu[name]).median:.3f} s of processor time")
    return Result(
        figure="commands",
        title="Commands on a node with 10 000 services",
        quick=quick,
        machine=machine(speeds),
        rows=rows,
        samples={"clock_seconds": clock, "cpu_seconds": cpu, "speed_seconds": speeds},
    )
