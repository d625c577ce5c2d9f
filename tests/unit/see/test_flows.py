# SPDX-License-Identifier: Apache-2.0
"""``flows``: the Service of a flow, by the address to which its client sent."""

from __future__ import annotations

import pytest

from pyebpf_proxy.datapath.netlink.uapi import IPS_DST_NAT
from pyebpf_proxy.see.flows import Flow, Names
from pyebpf_proxy.see.state import Service, State
from pyebpf_proxy.services.model import FrontendKind, IPFamily, Protocol, ServicePortName

NODE_PORT = 30080
NODE = bytes([192, 0, 2, 11])
WEB = Service(
    1, ServicePortName("default", "web", "http", Protocol.TCP, IPFamily.IPV4), 1, 0, 0, True, False, False, False, False
)
STATE = State(services={1: WEB}, frontends={(bytes(4), NODE_PORT, int(Protocol.TCP)): (1, FrontendKind.NODE_PORT)})


@pytest.mark.parametrize(
    ("address", "status", "service"),
    [
        (NODE, IPS_DST_NAT, "default/web:http"),
        (bytes([127, 0, 0, 1]), IPS_DST_NAT, "default/web:http"),
        (bytes([127, 1, 2, 3]), IPS_DST_NAT, "default/web:http"),
        (bytes([127, 0, 0, 1]), 0, ""),
        (bytes([192, 0, 2, 12]), IPS_DST_NAT, ""),
        (bytes(15) + b"\1", IPS_DST_NAT, ""),
    ],
    ids=["the node", "localhost", "127.1.2.3", "localhost, not translated", "another node", "::1"],
)
def test_node_ports_of_the_node_and_of_its_loopback_addresses(address: bytes, status: int, service: str) -> None:
    """With socketLB: off, of SCTP and of a former kube-proxy, conntrack has flows to NodePorts on loopback."""
    place = (bytes([10, 244, 1, 10]), 8080)
    client = (NODE, 40000)
    flow = Flow(Protocol.TCP, client, (address, NODE_PORT), place, client, status, "OPEN", 0, None, None, None)
    assert Names(STATE, frozenset({NODE})).service(flow) == service
