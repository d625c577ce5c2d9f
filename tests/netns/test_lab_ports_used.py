# SPDX-License-Identifier: Apache-2.0
"""All source ports for masquerading to an endpoint are in use: conntrack refuses new flows, and that is named."""

from __future__ import annotations

import re

import pytest

from pyebpf_proxy.lab.addresses import cluster_ip, vip
from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.client import ANSWERED, ask
from pyebpf_proxy.lab.cluster import Lab, Node
from pyebpf_proxy.lab.manifests import Port, node, service, slices
from tests.support.damage import enter
from tests.support.lab_tools import wait_until

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

PORTS = [Port("web", 80, 8080)]
METRIC = re.compile(r'^pyebpf_proxy_conntrack_refusals_total\{reason="insert_failed"\} (\S+)$', re.MULTILINE)


def refused(of: Node) -> float:
    found = METRIC.search(of.agent.metrics())
    return float(found[1]) if found else -1.0


@pytest.mark.parametrize("fast", [True, False])
def test_masquerading_without_a_free_port_is_counted_and_named(fast: bool) -> None:
    with Lab(nodes=1) as lab:
        (only,) = lab.nodes
        pod = lab.add_pod("web-1", only)
        lab.write("nodes.yaml", [node(only.name, only.address, only.pod_cidr)])
        objects = [
            service("web", PORTS, cluster_ip(10), vip=vip(10)),
            *slices("web", PORTS, [(pod.address, only.name)]),
        ]
        lab.write("web.yaml", objects)
        only.agent.start(own={"fastPath": fast})
        only.agent.wait_synced()
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
