# SPDX-License-Identifier: Apache-2.0
"""The kernel's UDP flows and connected UDP sockets: found, deleted, ended. In a namespace of the test's own."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from pyebpf_proxy.datapath.connections import ctnetlink, sock_diag
from pyebpf_proxy.datapath.netfilter.nft import Table
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour
from pyebpf_proxy.services.model import IPFamily
from tests.netns.attach.datagrams import MARK, af, exchange, packed
from tests.netns.attach.router import Router, Shell

pytestmark = [pytest.mark.needs_netns, pytest.mark.usefixtures("namespace")]


def inserted(shell: Shell, router: Router, family: int, port: int, endpoint_port: int = 5353) -> None:
    endpoint = router.SERVER[family] if family == 4 else f"[{router.SERVER[family]}]"
    shell(
        f"conntrack -I -p udp -t 60 -s {router.CLIENT[family]} -d {router.VIP[family]} "
        f"--sport {port} --dport 53 --dst-nat {endpoint}:{endpoint_port}"
    )


def test_translated_flows_are_listed_and_deleted_one_by_one(
    family: int, router: Router, table: Table, shell: Shell
) -> None:
    table.ensure(Behaviour(MARK))
    other = 10 - family
    for port in (40001, 40002):
        inserted(shell, router, family, port)
    inserted(shell, router, other, 40003)
    exchange(router, family, "tcp", (router.SERVER[family], 8080))
    flows = list(ctnetlink.udp_flows(IPFamily(family)))
    assert len(flows) == 2
    assert {flow[:5] for flow in flows} == {
        (IPFamily(family), packed(router.VIP[family]), 53, packed(router.SERVER[family]), 5353)
    }
    assert ctnetlink.delete([flows[0], flows[0]]) == 1
    assert list(ctnetlink.udp_flows(IPFamily(family))) == flows[1:]
    assert len(list(ctnetlink.udp_flows(IPFamily(other)))) == 1
    assert "tcp" in shell("conntrack -L 2>/dev/null")


def test_a_flow_with_a_new_endpoint_stays(family: int, router: Router, table: Table, shell: Shell) -> None:
    """Its next datagram came between the listing and the deletion: the flow is the same, but its entry is new."""
    table.ensure(Behaviour(MARK))
    inserted(shell, router, family, 40001)
    listed = list(ctnetlink.udp_flows(IPFamily(family)))
    shell("conntrack -D -p udp")
    inserted(shell, router, family, 40001, endpoint_port=5354)
    assert ctnetlink.delete(listed) == 0
    assert [flow.replier_port for flow in ctnetlink.udp_flows(IPFamily(family))] == [5354]


def test_a_long_list_of_flows_takes_several_messages(router: Router, table: Table, shell: Shell) -> None:
    table.ensure(Behaviour(MARK))
    with router.inside("client"):
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with closing(sender):
        for port in range(1, 3001):
            sender.sendto(b"x", (router.TOWARDS_CLIENT[4], port))
    ports = {flow.destination_port for flow in ctnetlink.udp_flows(IPFamily.IPV4)}
    assert ports == set(range(1, 3001))


def test_a_flow_in_another_zone_is_deleted_there(router: Router, table: Table, shell: Shell) -> None:
    table.ensure(Behaviour(MARK))
    inserted(shell, router, 4, 40001)
    shell(
        f"conntrack -I -p udp -t 60 -s {router.CLIENT[4]} -d {router.VIP[4]} --sport 40001 --dport 53 --zone 7"
        f" --reply-src {router.VIP[4]} --reply-dst {router.CLIENT[4]} --reply-port-src 53 --reply-port-dst 40001"
    )
    flows = list(ctnetlink.udp_flows(IPFamily.IPV4))
    assert len(flows) == 2
    in_zone = next(flow for flow in flows if flow.replier_port == 53)
    assert ctnetlink.delete([in_zone]) == 1
    assert [flow.replier_port for flow in ctnetlink.udp_flows(IPFamily.IPV4)] == [5353]


@pytest.mark.parametrize(
    ("family", "mapped"), [(4, False), (6, False), (4, True)], ids=["ipv4", "ipv6", "ipv4 by an ipv6 socket"]
)
def test_connected_sockets_are_found_and_ended(mapped: bool, family: int) -> None:
    address = "127.0.0.1" if family == 4 else "::1"
    kind = socket.AF_INET6 if mapped else af(family)
    with (
        closing(socket.socket(af(family), socket.SOCK_DGRAM)) as peer,
        closing(socket.socket(kind, socket.SOCK_DGRAM)) as ended,
        closing(socket.socket(kind, socket.SOCK_DGRAM)) as spared,
    ):
        peer.bind((address, 0))
        port = peer.getsockname()[1]
        for sock in (ended, spared):
            sock.connect((f"::ffff:{address}" if mapped else address, port))
            sock.settimeout(1)
        cookie = int.from_bytes(ended.getsockopt(socket.SOL_SOCKET, 57, 8), "little")  # SO_COOKIE
        found = [each for each in sock_diag.connected_udp() if each.cookie == cookie]
        assert [(each.peer, each.peer_port) for each in found] == [(packed(address), port)]
        assert sock_diag.destroy(found[0])
        with pytest.raises(ConnectionAbortedError):
            ended.recv(10)
        assert not any(each.cookie == cookie for each in sock_diag.connected_udp())
        assert spared.send(b"still there") == 11
