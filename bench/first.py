# SPDX-License-Identifier: Apache-2.0
"""Figure 4: the first packet of a flow, by the features of its service, compared with the plainest service.

``bpf_prog_test_run`` of ``tc_ethernet`` with one packet at a time, each of a new flow: decision, choice, and the choice
written into the packet's priority for netfilter. The variants take turns, packet by packet, so that other load of the
machine affects all of them equally. The time of an empty program, mostly reading the clock, is subtracted.
"""

from __future__ import annotations

import ipaddress
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pyebpf_proxy.datapath.loader.libbpf import Object, Program, SkBuff
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.lab.namespace import Namespace

from . import workload
from .filled import Filled, fill
from .measure import TOOLS, Result, Row, machine, say, speed, summary, undisturbed
from .rows import ratio

#: Services in the maps in addition to those under test.
SERVICES = 1_000
RANGES = 100
GOAL = 1.5
#: New flows of each variant in a round.
FLOWS = 300

NODE, GATEWAY, POD, OUTSIDER = "192.0.2.11", "192.0.2.1", "10.32.64.9", "198.51.100.7"
#: Of both devices of the node: frames to another address are not for it.
MAC = "02:00:00:00:00:02"
#: The tag in a packet's priority for a chosen backend; the second one: also to be masqueraded.
CHOSEN = (0xEB, 0xED)
PLAIN = "plain, to the ClusterIP"
EMPTY = "an empty program"


class Variant(NamedTuple):
    """``spec``: fields of the Service except its addresses. ``kind``: the address that is used."""

    what: str
    kind: str
    source: str
    spec: dict[str, Any]
    compared_with: str = PLAIN
    goal: bool = True
    many_clients: bool = False


_RANGES = [f"203.0.{i}.0/24" for i in range(RANGES - 1)] + ["198.51.100.0/24"]
_LOCAL = {"externalTrafficPolicy": "Local"}
VIP = "plain, to the load balancer's address (masqueraded)"
VARIANTS = (
    Variant(PLAIN, "clusterIP", POD, {}, goal=False),
    Variant("affinity, a client that is remembered", "clusterIP", POD, {"sessionAffinity": "ClientIP"}),
    Variant("affinity, a new client", "clusterIP", POD, {"sessionAffinity": "ClientIP"}, many_clients=True),
    Variant("externalTrafficPolicy Local, to the load balancer's address", "vip", OUTSIDER, _LOCAL),
    Variant("internalTrafficPolicy Local, to the ClusterIP", "clusterIP", POD, {"internalTrafficPolicy": "Local"}),
    Variant(
        f"{RANGES} source ranges and externalTrafficPolicy Local",
        "vip",
        OUTSIDER,
        {"loadBalancerSourceRanges": _RANGES, **_LOCAL},
    ),
    Variant(VIP, "vip", OUTSIDER, {}, goal=False),
    Variant(f"{RANGES} source ranges (masqueraded)", "vip", OUTSIDER, {"loadBalancerSourceRanges": _RANGES}, VIP),
)


def _address(kind: str, number: int) -> str:
    return f"{'172.31.0' if kind == 'clusterIP' else '203.0.113'}.{number + 1}"


def objects() -> Iterator[dict[str, Any]]:
    """A Service of each variant with ten endpoints, two of them local."""
    for number, variant in enumerate(VARIANTS):
        made = workload.service(number)
        cluster_ip = _address("clusterIP", number)
        made["metadata"]["name"] = f"first-{number}"
        made["spec"] |= {"type": "LoadBalancer", "clusterIP": cluster_ip, "clusterIPs": [cluster_ip], **variant.spec}
        made["spec"]["ports"] = [{"name": "main", "protocol": "TCP", "port": 80}]
        made["status"] = {"loadBalancer": {"ingress": [{"ip": _address("vip", number)}]}}
        yield made
        endpoints = workload.endpoint_slice(number, first_pod=100 * (1 + number))
        endpoints["metadata"]["name"] = f"first-{number}-a"
        endpoints["metadata"]["labels"]["kubernetes.io/service-name"] = f"first-{number}"
        endpoints["ports"] = [{"name": "main", "protocol": "TCP", "port": 8080}]
        for endpoint in endpoints["endpoints"][:2]:
            endpoint["nodeName"] = "node1"
        yield endpoints


def changes() -> list[Change]:
    return [*workload.parsed(SERVICES), *(change for made in objects() for change in workload.read(made))]


def frame(variant: Variant, number: int, flow: int) -> bytes:
    """A SYN; each ``flow`` is another flow."""
    source = int(ipaddress.ip_address(variant.source))
    if variant.many_clients:
        source = int(ipaddress.ip_address("10.33.0.0")) + flow
    destination = socket.inet_aton(_address(variant.kind, number))
    port = 1024 + flow % 64000
    tcp = port.to_bytes(2, "big") + b"\0\x50" + bytes(8) + b"\x60\x02\xff\xff\0\0\0\0" + b"\2\4\5\xb4"
    ip = b"\x45\0" + (20 + len(tcp)).to_bytes(2, "big") + bytes(4) + b"\x40\6\0\0" + source.to_bytes(4, "big")
    return bytes.fromhex(MAC.replace(":", "")) + b"\2\0\0\0\0\1" + b"\x08\0" + ip + destination + tcp


@contextmanager
def node() -> Iterator[dict[str, int]]:
    """Move this process to a namespace with the node's interfaces; returns their indexes."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    made = Namespace(f"bench-first-{os.getpid()}")
    made.create()
    try:
        made.ip("link add dev nic type veth peer name nic-far", "link set nic-far up", "link set nic up",
                "link add dev pods type veth peer name pods-far", "link set pods-far up", "link set pods up",
                f"link set nic address {MAC}", f"link set pods address {MAC}",
                f"addr add {NODE}/24 dev nic", "addr add 10.32.64.1/18 dev pods",
                f"route add default via {GATEWAY}", f"route add {workload.POD_CIDR} via {GATEWAY}")  # fmt: skip
        made.sysctl({"net.ipv4.ip_forward": 1})
        with open(made.path, "rb") as namespace:
            _enter(namespace.fileno())
        yield {name: socket.if_nametoindex(name) for name in ("nic", "pods")}
    finally:
        _enter(home)
        os.close(home)
        made.remove()


def _enter(namespace: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0x40000000):
        raise OSError(ctypes.get_errno(), "setns")


def _u32(number: int) -> bytes:
    return number.to_bytes(4, sys.byteorder)


def _describe(filled: Filled) -> None:
    """The agent's map entries about the node."""
    filled.loaded.maps["node_addresses4"].update(socket.inet_aton(NODE), _u32(1))


def run(quick: bool) -> Result:
    rounds = 5 if quick else 21
    samples: dict[str, list[float]] = {what: [] for what in (EMPTY, *(variant.what for variant in VARIANTS))}
    with node() as devices, Object.open(TOOLS / "empty.bpf.o") as reference:
        empty = reference.load().programs["empty"]
        filled = fill(changes())
        _describe(filled)
        speeds = speed(1)
        for number in range(rounds):
            subprocess.run(["conntrack", "-F"], check=True, capture_output=True)
            with undisturbed():
                for what, median in _round(filled, empty, devices, number).items():
                    samples[what].append(median)
        speeds += speed(1)
    made = rows(samples)
    for row in made:
        say(f"first: {row.what}: {row.measured.median:.0f} ns, {row.judged.median:.2f} times")
    return Result(
        figure="first",
        title=f"The first packet of a flow, by what its service asks for ({rounds} rounds of {FLOWS} flows each)",
        quick=quick,
        machine=machine(speeds),
        rows=made,
        samples={"round_medians_ns": samples, "speed_seconds": speeds},
    )


def rows(samples: dict[str, list[float]]) -> list[Row]:
    """The table; ``samples``: medians of the rounds, in nanoseconds, of every variant and of the empty program."""
    own = {what: [a - b for a, b in zip(of, samples[EMPTY], strict=True)] for what, of in samples.items()}
    made = []
    for variant in VARIANTS:
        if variant.what == variant.compared_with:
            continue
        made.append(
            ratio(
                variant.what,
                "ns",
                own[variant.what],
                variant.compared_with,
                own[variant.compared_with],
                most=GOAL if variant.goal else None,
                judged_unit="times",
            )
        )
    return made


def _round(filled: Filled, empty: Program, devices: dict[str, int], number: int) -> dict[str, float]:
    """The median of each variant's flows, in nanoseconds. The order changes, so that no variant is always first."""
    program = filled.loaded.tc.programs["tc_ethernet"]
    contexts = {POD: SkBuff(ifindex=devices["pods"]), OUTSIDER: SkBuff(ifindex=devices["nic"])}
    taken: dict[str, list[float]] = {what: [] for what in (EMPTY, *(variant.what for variant in VARIANTS))}
    order = list(enumerate(VARIANTS))
    shuffle = random.Random(number).shuffle
    for i in range(FLOWS):
        shuffle(order)
        for index, variant in order:
            made = frame(variant, index, number * FLOWS + i)
            ran = program.test_run(made, contexts[variant.source])
            if ran.skb is None or ran.skb.priority >> 24 not in CHOSEN:
                raise RuntimeError(f"{variant.what}: no backend was chosen: {ran.retval}, {ran.skb}")
            taken[variant.what].append(ran.duration)
        taken[EMPTY].append(empty.test_run(made, contexts[variant.source]).duration)
    return {what: summary(times).median for what, times in taken.items()}
