# SPDX-License-Identifier: Apache-2.0
"""Figure: the additional cost of packets that belong to no service. pyebpf-proxy is compared with empty programs.

Both nodes have the agent's nftables rules, and therefore use conntrack in the same way. One node has the agent's
programs; the other has programs that do nothing, on ingress and egress of the same devices. The load is one UDP flow to
the pod's own address, generated and received on one CPU as in ``udp``. The time for a packet is the inverse of the
rate.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from .contenders import EMPTY, PAST, CannotTakePartError, Field, Ground, serving, turns
from .loads import Options
from .measure import TOOLS, Result, Row, machine, say, slowness, speed, summary
from .rows import more
from .udp import ECHO, Way, establish

GOAL_NS = 25.0
FLOWS = 1
#: A port of the pod that belongs to no endpoint.
PORT = 9083


def run(asked: Options) -> Result:
    """Measure it."""
    rounds, seconds = asked.rounds or (11 if asked.quick else 25), asked.seconds or 0.4
    speeds = speed(1)
    taken: dict[str, list[float]] = {PAST: [], EMPTY: []}
    grounds = Field()
    try:
        with ExitStack() as stack:
            nodes = grounds.grounds((PAST, EMPTY))
            _prepare_empty(nodes[0], nodes[1], stack)
            ways = [Way(ground, stack, PORT) for ground in nodes]
            establish(ways, FLOWS)
            of = {way.ground.contender.name: way for way in ways}
            for _, order in turns(rounds, nodes):
                for ground in order:
                    name = ground.contender.name
                    taken[name].append(1e9 / of[name].flood(FLOWS, seconds, ECHO))
            speeds += speed(1)
    finally:
        grounds.close()
    made = list(table(taken[PAST], taken[EMPTY], slowness(speeds)))
    say(f"passing: {summary(taken[PAST]).median:.0f} ns, beside empty programs {summary(taken[EMPTY]).median:.0f}")
    return Result(
        figure="passing",
        title="A packet of no service, real ones",
        quick=asked.quick,
        machine=machine(speeds),
        rows=made,
        samples={"ns": taken, "speed_seconds": speeds},
    )


def _prepare_empty(real: Ground, empty: Ground, stack: ExitStack) -> None:
    """Give the node ``empty`` the same rules, and empty programs. CannotTakePartError if these cannot be attached."""
    empty.node.namespace.run("nft", "-f", "-", stdin=real.node.namespace.run("nft", "-s", "list", "ruleset"))
    devices = ["eth0", *(pod.device for pod in empty.node.pods)]
    command = [str(TOOLS / "flood"), "nothing", str(TOOLS / "empty.bpf.o"), *devices]
    try:
        stack.enter_context(serving(empty.node.namespace, command))
    except (RuntimeError, subprocess.SubprocessError) as error:
        raise CannotTakePartError(f"no empty programs on tcx: {error}") from None


def table(real: Sequence[float], empty: Sequence[float], slow: float) -> Iterator[Row]:
    """Nanoseconds for a packet, and the difference to empty programs; the goal is for a machine of normal speed."""
    what = "a UDP datagram of no service, from outside to a pod, with the programs that it passes"
    yield more(what, "ns", real, "empty programs in their place", empty, slow, GOAL_NS)
