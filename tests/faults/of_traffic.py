# SPDX-License-Identifier: Apache-2.0
"""Faults that consist of packets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyebpf_proxy.lab.addresses import CLIENT, vip
from tests.faults.floods import datagrams, flooding, syns
from tests.faults.ground import NODE_PORT, NOWHERE, VICTIM, VICTIM_NODE_PORT, VICTIM_UDP_NODE_PORT, Ground


@contextmanager
def syn_flood(ground: Ground) -> Iterator[None]:
    """From forged addresses."""
    with flooding(ground.lab.client, syns(NOWHERE, [vip(VICTIM).v4], [80])):
        yield


@contextmanager
def udp_flood(ground: Ground) -> Iterator[None]:
    closed = [port for port in range(30000, 32768) if port not in (NODE_PORT, VICTIM_NODE_PORT, VICTIM_UDP_NODE_PORT)]
    with flooding(ground.lab.client, datagrams(NOWHERE, [ground.node.address.v4], closed)):
        yield


@contextmanager
def scan(ground: Ground) -> Iterator[None]:
    """Addresses of VIPs from outside, addresses of ClusterIPs from a pod, many ports of each."""
    ports = range(1, 20000)
    virtual = syns(f"{CLIENT.v4}/32", [f"203.0.113.{number}" for number in range(100, 255)], ports)
    pod = f"{ground.toolbox.address.v4}/32"
    inside = syns(pod, [f"10.96.{number >> 8}.{number & 255}" for number in range(256, 4096)], ports)
    with flooding(ground.lab.client, virtual), flooding(ground.toolbox.namespace, inside):
        yield
