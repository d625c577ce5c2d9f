# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests in the lab: clients, the counters of the data plane, waiting for a condition."""

from __future__ import annotations

import functools
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from pyebpf_proxy.datapath.loader.libbpf import Map, Object
from pyebpf_proxy.datapath.loader.programs import OBJECTS
from pyebpf_proxy.datapath.loader.reasons import reasons as all_reasons
from pyebpf_proxy.lab.addresses import CLIENT, SERVICE_CIDR
from pyebpf_proxy.lab.cluster import Lab, Node, Pod
from pyebpf_proxy.lab.namespace import Namespace
from pyebpf_proxy.lab.scenario import Client
from tests.support import damage as tables
from tests.support.damage import CannotBeMadeError
from tests.support.damage import detach_program as detach_program
from tests.support.damage import has_program as has_program

#: For nft: another program's NAT, as every node has. Without any NAT rule the kernel translates no packet any more, not
#: even those of connections that conntrack knows.
NAT_OF_OTHERS = """table ip keep { chain c { type nat hook prerouting priority 0
 ip daddr 203.0.113.250 tcp dport 1 dnat to 203.0.113.251
 }; }
table ip6 keep { chain c { type nat hook prerouting priority 0
 ip6 daddr 2001:db8:3::250 tcp dport 1 dnat to 2001:db8:3::251
 }; }"""


@functools.cache
def reason_names() -> dict[int, str]:
    """The enumerators of bpf/reason.h by number, in lower case."""
    with Object.open(OBJECTS / "tc.bpf.o") as built:
        return {number: name for name, number in all_reasons(built.btf.enum).items()}


def reasons(node: Node) -> dict[str, int]:
    """The counters of every reason on a node, summed over CPUs."""
    counters = Map.open_pinned(node.agent.pin("counters"))
    try:
        values = {
            name: counters.lookup_cpus(number.to_bytes(4, sys.byteorder)) for number, name in reason_names().items()
        }
    finally:
        counters.close()
    return {
        name: sum(int.from_bytes(value, sys.byteorder) for value in found) for name, found in values.items() if found
    }


def counted_between(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """The reasons that were counted in between, without the packets' paths."""
    return {
        name: count - before[name]
        for name, count in after.items()
        if count != before[name] and not name.startswith(("flow_", "stack_", "xdp_"))
    }


def served_by(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """How many new flows tc served ("tc") and how many a socket call ("socket"), and the other reasons that were
    counted.

    The path of a flow that tc serves depends on earlier flows. Reasons that only explain the path are left out; tests
    of the paths use ``counted_between``. Also left out is a closing flow that was replaced because its port was used
    again.
    """
    served: dict[str, int] = {}
    for name, count in counted_between(before, after).items():
        if name != "closing_flow_replaced" and not name.startswith(("slow_", "permit_", "young_")):
            name = _SERVED.get(name, name)
            served[name] = served.get(name, 0) + count
    return served


_SERVED = {"new_flow_fast": "tc", "new_flow_netfilter": "tc", "new_flow_socket": "socket"}


def forget_old_pod_sources(node: Node, seconds: float = 20.0) -> None:
    """Delete the older entries of ``pod_sources``: after a minute tc serves one socket of a pod again, in the middle of
    a test.
    """
    table = Map.open_pinned(node.agent.pin("pod_sources"))
    try:
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        for key, value in list(table.items()):
            if now - int.from_bytes(value[:8], sys.byteorder) > seconds * 1e9:
                table.delete(key)
    finally:
        table.close()


@contextmanager
def full_conntrack(
    namespace: Namespace, answered: bool = True, free: int = 0, protocol: str = "tcp"
) -> Iterator[Callable[[], None]]:
    """``tables.full_conntrack``; skips if the machine's limit is too high."""
    try:
        context = tables.full_conntrack(namespace, answered, free, protocol=protocol)
        top_up = context.__enter__()
    except CannotBeMadeError as error:
        pytest.skip(str(error))
    with ExitStack() as stack:
        stack.push(context.__exit__)
        yield top_up


def wait_until(condition: Callable[[], Any], what: str | Callable[[], str], deadline: float = 60.0) -> Any:
    """Poll until ``condition`` is true, and return its value. Fails with ``what`` after ``deadline`` seconds."""
    end = time.monotonic() + deadline
    while True:
        begun = time.monotonic()
        if value := condition():
            return value
        now = time.monotonic()
        if now > end:
            pytest.fail(f"after {deadline} s still not: {what if isinstance(what, str) else what()}")
        # A condition that runs a command leaves half of the CPU time to what is awaited.
        time.sleep(min(max(0.01, now - begun), 0.25))


def pod_client(pod: Pod) -> Client:
    return Client(pod.name, pod.namespace, "pod", pod.address, pod.node)


def node_client(node: Node) -> Client:
    return Client(node.name, node.namespace, "node", node.address, node)


def outside_client(lab: Lab) -> Client:
    return Client("client", lab.client, "external", CLIENT, None)


def route_cluster_ips(lab: Lab, node: Node) -> None:
    """Let the outside client reach ClusterIPs through ``node``, as some on-premises networks do."""
    lab.core.ip(*(f"route replace {cidr} via {node.address.of(4 + 2 * i)}" for i, cidr in enumerate(SERVICE_CIDR)))


class Capture:
    """Captures the frames that a device receives or sends, from now on, until one satisfies ``match``."""

    def __init__(
        self, namespace: Namespace, device: str, match: Callable[[bytes], bool], deadline: float = 10.0
    ) -> None:
        wait, ready = multiprocessing.Pipe(duplex=False)
        self._task = namespace.start(_capture, device, match, deadline, ready)
        ready.close()
        wait.recv()  # from here on no frame is missed
        wait.close()

    def done(self) -> bool:
        """Whether the frame has come or the time is over."""
        return self._task.done()

    def frame(self) -> bytes | None:
        """The frame with its Ethernet header; None if none came in time."""
        return self._task.result()


def _capture(device: str, match: Callable[[bytes], bool], deadline: float, ready: Any) -> bytes | None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as sock:
        sock.bind((device, 3))
        ready.send("ready")
        end = time.monotonic() + deadline
        while (left := end - time.monotonic()) > 0:
            sock.settimeout(left)
            try:
                frame = sock.recv(65536)
            except TimeoutError:
                break
            if match(frame):
                return frame
    return None
