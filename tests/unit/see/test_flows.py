# SPDX-License-Identifier: Apache-2.0
"""``flows``: the Service of a flow, by the address to which its client sent; addresses as filters."""

from __future__ import annotations

import pytest

from pyebpf_proxy.datapath.netlink.uapi import IPS_DST_NAT
from pyebpf_proxy.see import model
from pyebpf_proxy.see.flows import Flow, Names, parse_filter
from pyebpf_proxy.see.state import Service, State
from pyebpf_proxy.services.model import FrontendKind, IPFamily, Protocol, ServicePortName

NODE_PORT = 30080
NODE, WITHOUT_NODE_PORTS = bytes([192, 0, 2, 11]), bytes([192, 168, 9, 1])
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
        (WITHOUT_NODE_PORTS, IPS_DST_NAT, "default/web:http"),
        (WITHOUT_NODE_PORTS, 0, ""),
        (NODE, 0, "default/web:http"),
        (bytes([192, 0, 2, 12]), IPS_DST_NAT, ""),
        (bytes(15) + b"\1", IPS_DST_NAT, ""),
    ],
    ids=[
        *(
            "the node",
            "localhost",
            "127.1.2.3",
            "localhost, not translated",
            "no NodePorts",
            "no NodePorts, not translated",
        ),
        *("the node, not translated", "another node", "::1"),
    ],
)
def test_node_ports_of_the_node_and_of_its_loopback_addresses(address: bytes, status: int, service: str) -> None:
    """With socketLB: off, of SCTP and of a former kube-proxy, conntrack has flows to NodePorts on loopback."""
    place = (bytes([10, 244, 1, 10]), 8080)
    client = (NODE, 40000)
    flow = Flow(Protocol.TCP, client, (address, NODE_PORT), place, client, status, "OPEN", 0, None, None, None)
    assert Names(STATE, {NODE: True, WITHOUT_NODE_PORTS: False}).service(flow) == service


def seen(client: str, destination: str) -> model.FlowView:
    return model.FlowView(
        protocol="TCP",
        client=client,
        client_name="",
        destination=destination,
        service="default/web:http",
        endpoint="[fd00:10:244:1::10]:8080",
        endpoint_name="default/web-1",
        masqueraded_as="",
        state="ESTABLISHED",
        seconds_left=0,
        seconds=None,
        packets=None,
        bytes=None,
        fast_path=None,
        age="kernel",
        path="netfilter",
    )


@pytest.mark.parametrize(
    ("word", "matches"),
    [
        ("2001:db8:2::2", True),
        ("2001:DB8:2::2", True),
        ("2001:0db8:2:0:0:0:0:2", True),
        ("[2001:db8:2:0::2]", True),
        ("client=2001:0db8:2:0:0:0:0:2", True),
        ("[2001:db8:2:0::2]:40000", True),
        ("[2001:db8:2:0::2]:40001", False),
        ("2001:db8:2:0::3", False),
        ("endpoint=2001:db8:2:0::2", False),
    ],
)
def test_an_ipv6_address_in_any_form(word: str, matches: bool) -> None:
    view = seen("[2001:db8:2::2]:40000", "[2001:db8:3::10]:80")
    assert parse_filter([word], {"default/web"})(view) == matches


@pytest.mark.parametrize("word", ["198.51.100.2", "::ffff:198.51.100.2", "198.51.100.2:40000"])
def test_an_ipv4_address_in_any_form(word: str) -> None:
    assert parse_filter([word], {"default/web"})(seen("198.51.100.2:40000", "203.0.113.10:80"))
