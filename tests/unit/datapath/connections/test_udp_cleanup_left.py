# SPDX-License-Identifier: Apache-2.0
"""Sockets that nothing translates, and flows of pods' sockets to endpoints that are gone."""

from __future__ import annotations

import errno
from typing import Any

import msgspec
import pytest

from pyebpf_proxy.datapath.connections import ctnetlink, sock_diag
from pyebpf_proxy.datapath.connections.udp_cleanup import UdpCleanup
from pyebpf_proxy.services.model import (
    Endpoint,
    Frontend,
    FrontendKind,
    IPFamily,
    Protocol,
    ServicePort,
    ServicePortName,
)

VIP, EXTERNAL, NODE = bytes([10, 96, 0, 1]), bytes([192, 0, 2, 1]), bytes([203, 0, 113, 1])
POD_A, POD_B, POD_C = ((bytes([10, 0, 0, n]), 5353) for n in (1, 2, 3))
CLIENT = (bytes([10, 0, 1, 1]), 40000)
NAME = ServicePortName("ns", "dns", "", Protocol.UDP, IPFamily.IPV4)
Place = tuple[bytes, int]


def dns(*serving: Place, any_endpoints: bool = True) -> ServicePort:
    frontends = (
        Frontend(FrontendKind.CLUSTER_IP, VIP, 53),
        Frontend(FrontendKind.EXTERNAL_IP, EXTERNAL, 53),
        Frontend(FrontendKind.NODE_PORT, bytes(4), 30053),
    )
    endpoints = tuple(Endpoint(address, port, True) for address, port in serving)
    return ServicePort(NAME, frontends, serving=endpoints, any_endpoints=any_endpoints)


class Kernel:
    """Its connected sockets and UDP flows."""

    def __init__(self) -> None:
        self.sockets: list[sock_diag.Socket] = []
        self.ended: list[sock_diag.Socket] = []
        self.flows: list[ctnetlink.Flow] = []
        #: By original destination: who replies.
        self.repliers: dict[Place, Place] = {}

    def destroy(self, found: sock_diag.Socket) -> bool:
        self.ended.append(found)
        return True

    def delete(self, flows: list[ctnetlink.Flow]) -> int:
        self.flows = [flow for flow in self.flows if flow not in flows]
        return len(flows)

    def lookup(self, netlink: Any, protocol: int, source: Place, destination: Place) -> ctnetlink.TrackedEntry | None:
        if source != CLIENT or destination not in self.repliers:
            return None
        (address, port), (to, to_port) = self.repliers[destination], source
        ports = port.to_bytes(2, "big"), to_port.to_bytes(2, "big")
        return ctnetlink.TrackedEntry(None, ctnetlink.Tuple(protocol, address, to, *ports), b"")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(sock_diag, "connected_udp", lambda: iter(made.sockets))
    monkeypatch.setattr(sock_diag, "destroy", made.destroy)
    monkeypatch.setattr(ctnetlink, "udp_flows", lambda family: [f for f in made.flows if f.family is family])
    monkeypatch.setattr(ctnetlink, "delete", made.delete)
    monkeypatch.setattr(ctnetlink, "lookup", made.lookup)
    return made


def connected(peer: Place) -> sock_diag.Socket:
    return sock_diag.Socket(*peer, 1, IPFamily.IPV4, b"", *CLIENT)


def flow(destination: Place, replier: Place) -> ctnetlink.Flow:
    return ctnetlink.Flow(IPFamily.IPV4, *destination, *replier, bytes([*destination[0], *replier[0]]))


@pytest.mark.parametrize(
    ("peer", "ended"),
    [((VIP, 53), True), ((EXTERNAL, 53), True), ((NODE, 30053), False), ((VIP, 54), False), (POD_B, False)],
    ids=["ClusterIP", "externalIP", "NodePort", "other port", "an endpoint itself"],
)
def test_a_socket_that_is_connected_to_a_service_address_itself_is_ended(
    kernel: Kernel, peer: Place, ended: bool
) -> None:
    kernel.sockets = [connected(peer)]
    cleanup = UdpCleanup(lambda cookie, endpoint: None, lambda address: False)
    cleanup.apply({NAME: dns(POD_A)})
    cleanup.clean_now()
    assert bool(kernel.ended) == ended
    assert not cleanup.waiting


@pytest.mark.parametrize("why", ["no programs", "a cache on the node", "no endpoints", "a local client"])
def test_such_a_socket_is_left_alone(kernel: Kernel, why: str) -> None:
    kernel.sockets = [connected((VIP, 53))]
    itself = (VIP, 53) if why == "a local client" else None
    own = None if why == "no programs" else lambda address: why == "a cache on the node"
    cleanup = UdpCleanup(lambda cookie, endpoint: itself, own)
    cleanup.apply({NAME: dns(POD_A, any_endpoints=why != "no endpoints")})
    cleanup.clean_now()
    assert not kernel.ended


def test_a_socket_that_conntrack_translates_is_ended_when_its_entry_is_gone(kernel: Kernel) -> None:
    kernel.sockets = [connected((VIP, 53))]
    cleanup = UdpCleanup(lambda cookie, endpoint: None, lambda address: False)
    cleanup.apply({NAME: dns(POD_A)})
    kernel.repliers[VIP, 53] = POD_A
    cleanup.clean_now()
    assert (kernel.ended, cleanup.waiting) == ([], True)
    kernel.repliers[VIP, 53] = POD_B
    cleanup.clean_now()
    assert (kernel.ended, cleanup.waiting) == (kernel.sockets, False)


def test_a_socket_that_waits_is_looked_at_again_though_sockets_could_not_be_listed(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services may not change for an hour."""
    kernel.sockets = [connected((VIP, 53))]
    cleanup = UdpCleanup(lambda cookie, endpoint: None, lambda address: False)
    cleanup.apply({NAME: dns(POD_A)})
    kernel.repliers[VIP, 53] = POD_A
    cleanup.clean_now()

    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as without:
        without.setattr(sock_diag, "connected_udp", refuse)
        assert cleanup.clean_now().refused
    assert cleanup.waiting


@pytest.mark.parametrize("programs", [True, False])
def test_a_socket_at_an_address_that_the_service_gets_later_is_to_be_looked_at(kernel: Kernel, programs: bool) -> None:
    cleanup = UdpCleanup(lambda cookie, endpoint: None, (lambda address: False) if programs else None)
    plan = dns(POD_A)
    cleanup.apply({NAME: msgspec.structs.replace(plan, frontends=plan.frontends[:1])})
    cleanup.clean_now()
    assert not cleanup.waiting
    assert not cleanup.apply({NAME: plan}), "the serving endpoints are the same"
    assert cleanup.waiting == programs
    kernel.sockets = [connected((EXTERNAL, 53))]
    cleanup.clean_now()
    assert bool(kernel.ended) == programs
    assert not cleanup.waiting


@pytest.mark.parametrize("moves", [True, False])
def test_flows_to_an_endpoint_that_is_gone_end_where_tc_cannot_expire_them(kernel: Kernel, moves: bool) -> None:
    """Of pods' sockets: translated to it, and moved to it by tc. Once."""
    straight, moved = flow(POD_A, POD_A), flow(POD_C, POD_A)
    others = [flow(POD_B, POD_B), flow((VIP, 53), POD_B)]
    kernel.flows = [straight, moved, *others]
    cleanup = UdpCleanup(lambda cookie, endpoint: None, None, moves)
    cleanup.apply({NAME: dns(POD_A, POD_B)})
    cleanup.clean_now()
    assert kernel.flows == [straight, moved, *others]
    cleanup.apply({NAME: dns(POD_B)})
    cleanup.clean_now()
    assert kernel.flows == (others if moves else [straight, moved, *others])
    # Another pod has the address by now.
    kernel.flows = [straight]
    cleanup.clean_now()
    assert kernel.flows == [straight]


def test_without_another_endpoint_they_stay_until_there_is_one(kernel: Kernel) -> None:
    kernel.flows = [flow(POD_A, POD_A)]
    cleanup = UdpCleanup(lambda cookie, endpoint: None, None, True)
    cleanup.apply({NAME: dns(POD_A)})
    cleanup.apply({NAME: dns()})
    cleanup.clean_now()
    assert kernel.flows
    cleanup.apply({NAME: dns(POD_B)})
    cleanup.clean_now()
    assert not kernel.flows


def test_flows_of_a_deleted_service_stay(kernel: Kernel) -> None:
    kernel.flows = [flow(POD_A, POD_A)]
    cleanup = UdpCleanup(lambda cookie, endpoint: None, None, True)
    cleanup.apply({NAME: dns(POD_A, POD_B)})
    cleanup.apply({NAME: dns(POD_B)})
    cleanup.apply({NAME: None})
    cleanup.clean_now()
    assert kernel.flows


def test_what_a_former_run_had_is_lost_too(kernel: Kernel) -> None:
    """The endpoint left while no agent ran: a pod's socket still sends to it."""
    left, stays = flow(POD_A, POD_A), flow(POD_B, POD_B)
    kernel.flows = [left, stays]
    cleanup = UdpCleanup(lambda cookie, endpoint: None, lambda address: False, True)
    cleanup.start({NAME: dns(POD_A, POD_B)}, {NAME: dns(POD_B)})
    assert cleanup.waiting, "the former run may have translated no sockets"
    cleanup.clean_now()
    assert kernel.flows == [stays]
    cleanup = UdpCleanup(lambda cookie, endpoint: None, None, True)
    cleanup.start({NAME: dns(POD_A)}, {NAME: None})
    assert not cleanup.is_stale((VIP, 53), POD_A), "flows of a deleted Service stay"
