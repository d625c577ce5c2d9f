# SPDX-License-Identifier: Apache-2.0
"""An agent on a machine that has just booted: conntrack and NAT are modules that are not loaded."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.lab.agent import THREE_CAPABILITIES, command
from pyebpf_proxy.lab.client import ANSWERED, ask
from pyebpf_proxy.lab.cluster import Lab
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import counted_between, reasons
from tests.support.logs import Log, Message

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

CONNTRACK, NAT = Path("/sys/module/nf_conntrack"), Path("/sys/module/nf_nat")
WEB = Kind("web", 1)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """One node with one pod that serves; its agent is the first since the boot, and is not started yet."""
    if CONNTRACK.exists() or NAT.exists():
        pytest.skip("conntrack is built in, or was loaded before: this is for the first agent after a boot")
    with Lab(nodes=1) as made:
        WEB.endpoints = (made.add_pod("web-1", made.nodes[0]),)
        write_nodes(made)
        write_services(made, WEB)
        yield made


def test_the_agent_loads_conntrack_with_few_rights(lab: Lab) -> None:
    """The kernel loads modules for an nftables table; programs that need their functions load afterwards."""
    (node,) = lab.nodes
    assert not CONNTRACK.exists()
    node.agent.start(enter=("nsenter", f"--net=/run/netns/{node.namespace.name}", *THREE_CAPABILITIES))
    node.agent.wait_synced()
    assert CONNTRACK.exists()
    assert NAT.exists()
    log = node.agent.log()
    Log(log).none("call #0")
    Log(log).none(Message.KERNEL_REFUSES)
    Log(log).some(Message.LOOKUP_NEEDS_SYS_ADMIN)
    before = reasons(node)
    for family in (4, 6):
        for protocol in ("tcp", "udp"):
            target = WEB.target("LoadBalancer", node)
            outcome = lab.client.call(ask, target.address.of(family), target.ports[protocol], protocol)
            assert outcome.kind == ANSWERED, (outcome, log)
    # The first flow of each pair.
    assert counted_between(before, reasons(node))["new_flow_netfilter"] == 4


def test_top_measures_packets_or_reports_that_this_kernel_cannot_attach_its_meter(lab: Lab) -> None:
    """While the agent of the previous test runs."""
    (node,) = lab.nodes
    has_place = b"\0BPF_TCX_INGRESS\0" in Path("/sys/kernel/btf/vmlinux").read_bytes()
    top = ["ip", "netns", "exec", node.namespace.name, *command(), "top"]
    words = ["--directory", str(node.agent.directory), "-o", "json", "-i", "0.5"]
    with subprocess.Popen([*top, *words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            found = json.loads(process.stdout.readline())
            notes = [note for note in found["notes"] if note.startswith("packets and bytes are not measured: ")]
            assert bool(notes) != has_place, notes
            assert all(note.endswith("the meter needs tcx, Linux 6.6 or newer") for note in notes)
            assert lab.client.call(ask, WEB.target("LoadBalancer", node).address.v4, 80).kind == ANSWERED
            flows, packets = 0.0, 0.0
            while flows < 0.99:
                found = json.loads(process.stdout.readline())
                flows += found["newFlows"] * found["seconds"]
                packets += (found["packets"] or 0) * found["seconds"]
            # A connection with an answer: more packets in both directions than the two that open it.
            assert packets >= 6 if has_place else found["packets"] is None
        finally:
            process.kill()
