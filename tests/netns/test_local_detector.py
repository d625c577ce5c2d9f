# SPDX-License-Identifier: Apache-2.0
"""Which clients are local pods: traffic of others to a ClusterIP is masqueraded (spec/service-semantics §5.1, §6)."""

from __future__ import annotations

import pytest

from pyebpf_proxy.lab.client import ask
from pyebpf_proxy.lab.cluster import Lab
from tests.support.lab_services import Kind, write_nodes, write_services

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_bpf, pytest.mark.needs_netns]

PREFIX = {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "pod"}}
BRIDGE = {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cbr0"}}
PLUS = {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "pod+"}, "mode": "iptables"}
STAR = {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "pod*"}, "mode": "nftables"}


@pytest.mark.parametrize(
    ("config", "network"),
    [
        ({"detectLocalMode": "NodeCIDR"}, "routed"),
        (PREFIX, "routed"),
        (BRIDGE, "bridge"),
        (PLUS, "routed"),
        (STAR, "routed"),
    ],
    ids=["NodeCIDR", "InterfaceNamePrefix", "BridgeInterface", "wildcard of iptables", "wildcard of nftables"],
)
def test_only_traffic_of_external_clients_is_masqueraded(config: dict[str, object], network: str) -> None:
    web = Kind("web", 1)
    with Lab(nodes=1, pod_network=network) as lab:  # type: ignore[arg-type]
        node = lab.nodes[0]
        server, pod = lab.add_pod("web-1", node), lab.add_pod("asker", node)
        web.endpoints = (server,)
        write_nodes(lab)
        write_services(lab, web)
        node.agent.start(config)
        node.agent.wait_synced()
        for family in (4, 6):
            address = web.target("ClusterIP", node).address.of(family)
            lab.core.ip(f"route replace {address} via {node.address.of(family)}")
            inside = pod.namespace.call(ask, address, 80).answer
            outside = lab.client.call(ask, address, 80).answer
            assert inside is not None
            assert outside is not None
            assert inside.peer[0] == pod.address.of(family)
            assert outside.peer[0] == node.source_towards(server).of(family)
