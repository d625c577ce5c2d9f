# SPDX-License-Identifier: Apache-2.0
"""Which UDP flows are stale (spec/service-semantics §10)."""

from __future__ import annotations

import msgspec
import pytest

from pyebpf_proxy.datapath.connections.udp_services import UdpServices
from pyebpf_proxy.services.model import (
    Endpoint,
    Frontend,
    FrontendKind,
    IPFamily,
    Protocol,
    ServicePort,
    ServicePortName,
)

VIP = bytes([10, 96, 0, 1])
EXTERNAL = bytes([192, 0, 2, 1])
NODE = bytes([203, 0, 113, 1])
POD_A, POD_B = (bytes([10, 0, 0, 1]), 5353), (bytes([10, 0, 0, 2]), 5353)


def dns(*serving: tuple[bytes, int], protocol: Protocol = Protocol.UDP, number: int = 0) -> ServicePort:
    name = ServicePortName("ns", f"dns{number}", "", protocol, IPFamily.IPV4)
    frontends = (
        Frontend(FrontendKind.CLUSTER_IP, VIP, 53 + number),
        Frontend(FrontendKind.EXTERNAL_IP, EXTERNAL, 53 + number),
        Frontend(FrontendKind.NODE_PORT, bytes(4), 30053 + number),
    )
    return ServicePort(name, frontends, serving=tuple(Endpoint(address, port, True) for address, port in serving))


def known(*ports: ServicePort) -> UdpServices:
    services = UdpServices()
    services.apply({port.name: port for port in ports})
    return services


@pytest.mark.parametrize("destination", [(VIP, 53), (EXTERNAL, 53), (NODE, 30053)])
def test_a_flow_is_stale_when_others_serve_and_its_endpoint_does_not(destination: tuple[bytes, int]) -> None:
    services = known(dns(POD_A))
    assert not services.is_stale(IPFamily.IPV4, destination, POD_A)
    assert services.is_stale(IPFamily.IPV4, destination, POD_B)
    # Never translated: the service address itself is the endpoint in the entry.
    assert services.is_stale(IPFamily.IPV4, destination, destination)
    # The port counts too.
    assert services.is_stale(IPFamily.IPV4, destination, (POD_A[0], 5354))


@pytest.mark.parametrize(
    "destination", [(VIP, 54), (NODE, 53), (NODE, 30054)], ids=["other port", "other address", "no NodePort"]
)
def test_flows_to_no_service_port_are_not_stale(destination: tuple[bytes, int]) -> None:
    assert not known(dns(POD_A)).is_stale(IPFamily.IPV4, destination, POD_B)


def test_a_complete_change_removes_all_others() -> None:
    services = known(dns(POD_A), dns(POD_A, number=1))
    assert services.apply({dns(POD_A).name: dns(POD_A)}, complete=True)
    assert services.is_stale(IPFamily.IPV4, (VIP, 53), POD_B)
    assert not services.is_stale(IPFamily.IPV4, (VIP, 54), POD_B)


def test_without_a_serving_endpoint_flows_stay() -> None:
    assert not known(dns()).is_stale(IPFamily.IPV4, (VIP, 53), POD_B)


def test_only_udp_counts() -> None:
    services = UdpServices()
    tcp = dns(POD_A, protocol=Protocol.TCP)
    assert not services.apply({tcp.name: tcp})
    assert not services
    assert not services.is_stale(IPFamily.IPV4, (VIP, 53), POD_B)


def test_what_counts_as_a_change() -> None:
    services = UdpServices()
    name = dns().name
    assert services.apply({name: dns(POD_A)})
    assert not services.apply({name: dns(POD_A)})
    assert services.apply({name: dns(POD_A, POD_B)})
    assert services.apply({name: None})
    assert not services.apply({name: None})


def test_an_address_that_gains_endpoints() -> None:
    """Not an address that moves, nor a NodePort: any destination has its number."""
    services = UdpServices()
    plan = dns(POD_A)
    name, usable = plan.name, msgspec.structs.replace(plan, any_endpoints=True)
    steps = [
        (msgspec.structs.replace(plan, any_endpoints=False), False),
        (msgspec.structs.replace(usable, frontends=usable.frontends[2:]), False),
        (msgspec.structs.replace(usable, frontends=usable.frontends[:1]), True),
        (usable, True),
        (usable, False),
        (msgspec.structs.replace(usable, serving=dns(POD_B).serving), False),
        (None, False),
        (usable, True),
    ]
    for changed, gained in steps:
        services.apply({name: changed})
        assert services.gained == gained
    moved = msgspec.structs.replace(usable, name=name._replace(name="a"))
    services.apply({moved.name: moved, name: None})
    assert not services.gained


def test_a_deleted_service_leaves_its_flows() -> None:
    services = known(dns(POD_A))
    services.apply({dns().name: None})
    assert not services.is_stale(IPFamily.IPV4, (VIP, 53), POD_B)
    assert not services.is_stale(IPFamily.IPV4, (NODE, 30053), POD_B)


def test_an_address_that_moves_from_one_service_to_another_in_one_change() -> None:
    old, new = dns(POD_A), dns(POD_B)
    moved = ServicePort(ServicePortName("ns", "a", "", Protocol.UDP, IPFamily.IPV4), new.frontends, serving=new.serving)
    for order in ([(moved.name, moved), (old.name, None)], [(old.name, None), (moved.name, moved)]):
        services = known(old)
        services.apply(dict(order))
        assert services.is_stale(IPFamily.IPV4, (VIP, 53), POD_A)
        assert not services.is_stale(IPFamily.IPV4, (NODE, 30053), POD_B)
