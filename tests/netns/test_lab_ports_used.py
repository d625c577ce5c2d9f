# SPDX-License-Identifier: Apache-2.0
"""Source ports to an endpoint that conntrack already uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pyebpf_proxy.lab.addresses import cluster_ip, vip
from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.client import ANSWERED, ask
from pyebpf_proxy.lab.cluster import Lab, Node, Pod
from pyebpf_proxy.lab.manifests import Port, node, service, slices
from tests.support.damage import enter
from tests.support.lab_tools import wait_until

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

PORTS = [Port("web", 80, 8080), Port("dns", 80, 5353, "UDP")]
METRIC = re.compile(r'^pyebpf_proxy_conntrack_refusals_total\{reason="insert_failed"\} (\S+)$', re.MULTILINE)
#: Young flows have lower ports (docs/fast-path.md).
FIRST_OF_CONNTRACK = 32768
#: Above the ports that the kernel gives to sockets.
TAKEN, FREE = range(61000, 61200), range(62000, 62050)


def refused(of: Node) -> float:
    found = METRIC.search(of.agent.metrics())
    return float(found[1]) if found else -1.0


@contextmanager
def served(own: dict[str, Any] | None = None) -> Iterator[tuple[Lab, Node, Pod]]:
    """A node whose agent serves one Service with one endpoint."""
    with Lab(nodes=1) as lab:
        (only,) = lab.nodes
        pod = lab.add_pod("web-1", only)
        lab.write("nodes.yaml", [node(only.name, only.address, only.pod_cidr)])
        endpoints = slices("web", PORTS, [(pod.address, only.name)])
        lab.write("web.yaml", [service("web", PORTS, cluster_ip(10), vip=vip(10)), *endpoints])
        only.agent.start(own=own)
        only.agent.wait_synced()
        yield lab, only, pod


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_conntrack_does_not_choose_the_port_of_a_young_flow(protocol: str, family: int) -> None:
    """A masqueraded flow has the port of one of the node's own sockets, to the same endpoint.

    conntrack gives the second flow another source port. It does not know young flows: a young flow with that port would
    get the replies.
    """
    with served() as (_, only, pod):
        first = only.namespace.call(ask, cluster_ip(10).of(family), 80, protocol)
        assert first.answer is not None, first
        seen, client = first.answer.peer[0], "198.18.0.7" if family == 4 else "2001:2::7"
        target = 8080 if protocol == "tcp" else 5353
        state = "-u SEEN_REPLY,ASSURED" + (" --state ESTABLISHED" if protocol == "tcp" else "")
        enter(
            only.namespace,
            (
                f"-I -p {protocol} -s {client} -d {vip(10).of(family)} --sport {port} --dport 80 -t 600"
                f" -r {pod.address.of(family)} -q {seen} --reply-port-src {target} --reply-port-dst {port} {state}"
                for port in TAKEN
            ),
        )
        used = []
        for port in TAKEN:
            outcome = only.namespace.call(ask, cluster_ip(10).of(family), 80, protocol, source_port=port)
            assert outcome.answer is not None, outcome
            used.append(outcome.answer.peer[1])
        assert not set(used) & set(TAKEN)
        assert min(used) >= FIRST_OF_CONNTRACK, sorted(used)
        for port in set(FREE) - set(used):
            outcome = only.namespace.call(ask, cluster_ip(10).of(family), 80, protocol, source_port=port)
            assert outcome.answer is not None, outcome
            assert outcome.answer.peer[1] == port


@pytest.mark.parametrize("fast", [True, False])
def test_masquerading_without_a_free_port_is_counted_and_named(fast: bool) -> None:
    with served({"fastPath": fast}) as (lab, only, pod):
        seen = only.gateway.v4
        state = "-t 600 -u SEEN_REPLY,ASSURED --state ESTABLISHED"
        lines = (
            f"-I -p tcp -s 198.18.{port >> 12}.7 -d {vip(10).v4} --sport {port} --dport 80 -r {pod.address.v4}"
            f" -q {seen} --reply-port-src 8080 --reply-port-dst {port} {state}"
            for port in range(1, 65536)
        )
        enter(only.namespace, lines)
        status = [*command(), "status", "--directory", str(only.agent.directory)]
        assert "ports are in use" not in only.namespace.run(*status, check=False)
        before = refused(only)
        assert before >= 0
        for _ in range(5):
            assert lab.client.call(ask, vip(10).v4, 80, timeout=0.3).kind != ANSWERED
        wait_until(lambda: refused(only) >= before + 5, "refusals in the metrics", 20.0)
        shown = " ".join(only.namespace.run(*status, check=False).split())
        assert "conntrack refused a new flow whose ports are in use" in shown
        only.namespace.run("conntrack", "-D", "-p", "tcp", "-r", pod.address.v4, "-q", seen)
        assert lab.client.call(ask, vip(10).v4, 80, timeout=5.0).kind == ANSWERED
