# SPDX-License-Identifier: Apache-2.0
"""The check in the agent's nftables table that a packet still goes to a frontend, and the sets that it needs."""

from __future__ import annotations

import errno
import socket
from contextlib import closing
from unittest.mock import Mock

import pytest

from pyebpf_proxy.datapath.netfilter.nfnetlink import Channel
from pyebpf_proxy.datapath.netfilter.nft import NftError, Table
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour, port_key
from tests.netns.attach.datagrams import BACKEND, MARK, SECONDS, af, decide, exchange, packed
from tests.netns.attach.router import Router, Shell

pytestmark = [pytest.mark.needs_netns, pytest.mark.usefixtures("namespace")]

CHECKED = Behaviour(MARK, check_destination=True)
TRANSLATED, MASQUERADED, REJECTED, MIDSTREAM = "eb12:3456", "ed12:3456", "ec00:1", "ec00:2"
NUMBERS = {"tcp": 6, "udp": 17}
NODE_PORT = 30080


def known(router: Router, family: int, protocol: str, *node_ports: int) -> set[bytes]:
    """The frontends: the VIP, and NodePorts."""
    vip, number = packed(router.VIP[family]), NUMBERS[protocol]
    return {port_key(vip, number, 80), *(port_key(bytes(len(vip)), number, port) for port in node_ports)}


def make(table: Table, router: Router, family: int, port: int, frontends: set[bytes]) -> None:
    """The table, with a backend at this port of the server."""
    table.ensure(CHECKED, lambda: frontends)
    table.update({BACKEND: (packed(router.SERVER[family]), port)})


@pytest.mark.parametrize("node_port", [NODE_PORT, 8080], ids=["", "whose port is a NodePort"])
@pytest.mark.parametrize("tag", [TRANSLATED, MASQUERADED, REJECTED, MIDSTREAM])
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_packet_to_another_host_is_left_alone(
    protocol: str, tag: str, node_port: int, family: int, router: Router, table: Table, shell: Shell
) -> None:
    """Another program has translated it meanwhile: to this server, at another port than that of the backend."""
    make(table, router, family, 9, known(router, family, protocol, node_port))
    decide(shell, f"meta priority set {tag}")
    addresses = router.CLIENT[family], router.SERVER[family]
    assert exchange(router, family, protocol, (router.SERVER[family], 8080)) == addresses


@pytest.mark.parametrize("tag", [TRANSLATED, MASQUERADED, REJECTED, MIDSTREAM])
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_packet_to_the_node_is_left_alone(
    protocol: str, tag: str, family: int, router: Router, table: Table, shell: Shell
) -> None:
    """Another program has translated it to an endpoint in the network of the node."""
    make(table, router, family, 8080, known(router, family, protocol, NODE_PORT))
    decide(shell, f"meta priority set {tag}")
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    with router.inside("client"):
        client = socket.socket(af(family), kind)
    with closing(client), closing(socket.socket(af(family), kind)) as server:
        server.bind((router.TOWARDS_CLIENT[family], 8080))
        for each in (client, server):
            each.settimeout(SECONDS)
        if protocol == "tcp":
            server.listen()
            client.connect(server.getsockname()[:2])
            server.accept()[0].close()
        else:
            client.sendto(b"question", server.getsockname()[:2])
            assert server.recv(100) == b"question"


@pytest.mark.parametrize("kind", ["VIP", "NodePort"])
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_packet_to_a_frontend_is_translated(
    protocol: str, kind: str, family: int, router: Router, table: Table, shell: Shell
) -> None:
    make(table, router, family, 8080, known(router, family, protocol, NODE_PORT))
    decide(shell, f"meta priority set {TRANSLATED}")
    address, port = (router.VIP[family], 80) if kind == "VIP" else (router.TOWARDS_CLIENT[family], NODE_PORT)
    assert exchange(router, family, protocol, (address, port)) == (router.CLIENT[family], address)


def test_frontends_are_adopted_repaired_and_removed(table: Table, shell: Shell) -> None:
    keys = {port_key(packed("10.96.0.1"), 6, 80), port_key(bytes(4), 17, 30053), port_key(packed("fd00::1"), 132, 1)}
    assert not table.checks_destination()
    table.ensure(Behaviour(MARK))
    table.change_ports("frontends", keys, [])
    without = shell("nft list table inet pyebpf-proxy")
    assert "frontends" not in without
    table.ensure(CHECKED, lambda: keys)
    before = shell("nft list table inet pyebpf-proxy")
    for element in ("10.96.0.1 . tcp . 80", "0.0.0.0 . udp . 30053", "fd00::1 . sctp . 1"):
        assert element in before
    again = Table()
    assert again.checks_destination()
    again.ensure(CHECKED)
    again.set_ports("frontends", keys)
    assert shell("nft list table inet pyebpf-proxy") == before
    shell("nft flush set inet pyebpf-proxy frontends4")
    again.ensure(CHECKED)
    assert shell("nft list table inet pyebpf-proxy") == before
    shell("nft flush ruleset")
    again.change_ports("frontends", [], [port_key(packed("fd00::1"), 132, 1)])
    after = shell("nft list table inet pyebpf-proxy")
    assert "0.0.0.0 . udp . 30053" in after
    assert "fd00::1" not in after
    again.ensure(Behaviour(MARK))
    assert shell("nft list table inet pyebpf-proxy") == without


def test_sets_without_their_rules_are_not_adopted(table: Table, shell: Shell) -> None:
    """A former run was killed before it had filled them. Or an older version, which does not know them, has made its
    own rules: since then the sets lack new frontends.
    """
    known_then = port_key(packed("10.96.0.1"), 6, 80)
    table.ensure(Behaviour(MARK))
    without = shell("nft list table inet pyebpf-proxy")
    table.ensure(CHECKED, lambda: {known_then})
    shell("nft flush chain inet pyebpf-proxy translate")
    again = Table()
    behaviour = Behaviour(MARK, check_destination=again.checks_destination())
    again.ensure(behaviour)
    assert shell("nft list table inet pyebpf-proxy") == without
    again.ensure(CHECKED, lambda: {port_key(packed("10.96.0.2"), 6, 80)})
    listed = shell("nft list table inet pyebpf-proxy")
    assert "10.96.0.2 . tcp . 80" in listed
    assert "10.96.0.1" not in listed


def test_both_kinds_of_sets_in_one_table(table: Table, shell: Shell) -> None:
    """Mode nftables beside a program that translates."""
    cluster, frontend = port_key(packed("10.96.0.1"), 6, 80), port_key(packed("192.0.2.1"), 6, 80)
    both = CHECKED._replace(refuse_unknown=True)
    table.ensure(both, lambda: {frontend})
    table.set_ports("cluster_ports", {cluster})
    listed = shell("nft list table inet pyebpf-proxy")
    assert "10.96.0.1 . tcp . 80" in listed
    assert "192.0.2.1 . tcp . 80" in listed
    table.ensure(Behaviour(MARK, refuse_unknown=True))
    listed = shell("nft list table inet pyebpf-proxy")
    assert "10.96.0.1 . tcp . 80" in listed
    assert "192.0.2.1" not in listed


def test_the_frontends_are_complete_after_a_failure(
    table: Table, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With empty sets, no packet to a Service would be translated."""
    keys = {port_key(packed("10.96.0.1"), 6, 80)}
    table.ensure(Behaviour(MARK))
    with monkeypatch.context() as patched, pytest.raises(NftError):
        patched.setattr(Channel, "has_table", Mock(side_effect=OSError(errno.ENOBUFS, "no memory")))
        table.ensure(CHECKED, lambda: keys)
    assert "10.96.0.1" not in shell("nft list table inet pyebpf-proxy")
    table.ensure(CHECKED, lambda: keys)
    assert "10.96.0.1 . tcp . 80" in shell("nft list table inet pyebpf-proxy")
