# SPDX-License-Identifier: Apache-2.0
"""An agent on a machine that was just switched on: conntrack and NAT are modules, and nobody has loaded them."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_services import Kind, write_nodes, write_services
from lab_tools import moved, reasons

from pyebpf_proxy.lab.client import ANSWERED, ask
from pyebpf_proxy.lab.cluster import Lab

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

CONNTRACK, NAT = Path("/sys/module/nf_conntrack"), Path("/sys/module/nf_nat")
WEB = Kind("web", 1)


def test_the_agent_brings_conntrack_and_says_which_lane_it_took() -> None:
    if CONNTRACK.exists() or NAT.exists():
        pytest.skip("conntrack is built in, or was loaded before: this is for the first agent after a boot")
    with Lab(nodes=1) as lab:
        (node,) = lab.nodes
        WEB.endpoints = (lab.add_pod("web-1", node),)
        write_nodes(lab)
        write_services(lab, WEB)
        assert not CONNTRACK.exists()
        lab.start_agents()
        assert CONNTRACK.exists()
        assert NAT.exists()
        log = node.agent.log()
        before = reasons(node)
        for family in (4, 6):
            for protocol in ("tcp", "udp"):
                target = WEB.target("LoadBalancer", node)
                outcome = lab.client.call(ask, target.address.of(family), target.ports[protocol], protocol)
                assert outcome.kind == ANSWERED, (outcome, log)
        seen = moved(before, reasons(node))
        if "every flow takes the netfilter lane" in log:
            # By the kernel's own word, not because its functions were not there yet.
            assert "the kernel does not accept" in log
            assert "call #0" not in log
            assert seen["new_flow_netfilter"] == 4
        else:
            assert "flows to pods take the direct lane" in log
            assert seen["new_flow_direct"] == 4
