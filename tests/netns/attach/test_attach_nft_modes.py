# SPDX-License-Identifier: Apache-2.0
"""The agent's nftables table where kube-proxy's modes differ: INVALID packets, and addresses without a frontend."""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress

import pytest

from pyebpf_proxy.config import flags
from pyebpf_proxy.config.complete import complete
from pyebpf_proxy.config.effective import effective
from pyebpf_proxy.datapath.managers.cluster_sets import ClusterSets
from pyebpf_proxy.datapath.managers.nft_table import NftTable
from pyebpf_proxy.datapath.netfilter.nfnetlink import Channel, Step
from pyebpf_proxy.datapath.netfilter.nft import Table
from pyebpf_proxy.datapath.netfilter.nft_rules import MAP_SHAPES, Behaviour, port_key
from pyebpf_proxy.services.node_facts import NodeFacts
from tests.netns.attach.datagrams import BACKEND, MARK, SECONDS, af, decide, exchange, packed
from tests.netns.attach.router import Router, Shell
from tests.support.lab_tools import wait_until

pytestmark = [pytest.mark.needs_netns, pytest.mark.usefixtures("namespace")]


# ---- addresses without an entry, and what conntrack does not understand -------------------


def refused(router: Router, family: int, destination: str, where: str, patience: float = SECONDS) -> str:
    """The result of a UDP datagram to a closed or unknown address: ``refused``, or ``nothing`` after so many
    seconds.
    """
    with router.inside(where) if where else nullcontext():
        sender = socket.socket(af(family), socket.SOCK_DGRAM)
    with closing(sender):
        sender.settimeout(patience)
        sender.connect((destination, 4242))
        # If the output hook drops or rejects a packet, sendto() fails too.
        with suppress(PermissionError):
            sender.send(b"anybody?")
        try:
            sender.recv(100)
        except ConnectionRefusedError:
            return "refused"
        except TimeoutError:
            return "nothing"
    raise AssertionError("there was an answer")


def add_local(shell: Shell, address: str) -> None:
    """Add an address to the loopback device, and wait until it is local."""
    shell(f"ip addr add {address} dev lo {'nodad' if ':' in address else ''}")
    # The kernel adds the local route of an IPv6 address later, in a worker thread.
    wait_until(lambda: shell(f"ip route get {address}").startswith("local"), f"{address} is local")


CIDRS = [(packed("10.96.0.0"), 16), (packed("fd96::"), 112)]
UNALLOCATED = {4: "10.96.3.3", 6: "fd96::303"}


@pytest.fixture
def left(shell: Shell, router: Router) -> Callable[[], int]:
    """How many datagrams of these tests the node has forwarded to the server, which has every service address."""
    shell(f"""
        ip route add default via {router.SERVER[4]}
        ip route add default via {router.SERVER[6]}
        nft add table inet spy
        nft 'add chain inet spy out {{ type filter hook postrouting priority 300 ; }}'
        nft 'add rule inet spy out oifname s0 udp dport 4242 counter'
    """)
    with router.inside("server"):
        shell("ip link set lo up")
        for address in (*UNALLOCATED.values(), *router.VIP.values()):
            add_local(shell, address)
    return lambda: int(re.findall(r"counter packets (\d+)", shell("nft list chain inet spy out"))[0])


@pytest.mark.parametrize("where", ["client", ""], ids=["forwarded", "own"])
def test_a_cluster_ip_rejects_undefined_ports_and_other_service_addresses_drop(
    where: str, family: int, router: Router, table: Table, left: Callable[[], int]
) -> None:
    vip = packed(router.VIP[family])
    table.ensure(Behaviour(MARK))
    # The datagram reaches the server, where the port is closed: the table of mode iptables does not stop it.
    assert refused(router, family, UNALLOCATED[family], where) == "refused"
    assert left() == 1
    table.ensure(Behaviour(MARK, refuse_unknown=True))
    table.set_addresses("cluster_ips", [(vip, 8 * len(vip))])
    table.set_addresses("service_cidrs", CIDRS)
    assert refused(router, family, router.VIP[family], where) == "refused"
    assert refused(router, family, UNALLOCATED[family], where, 0.5) == "nothing"
    assert left() == 1
    table.set_addresses("service_cidrs", [])
    assert refused(router, family, UNALLOCATED[family], where) == "refused"
    assert left() == 2


def test_served_ports_of_a_cluster_ip_are_translated_first(
    family: int, router: Router, table: Table, shell: Shell
) -> None:
    vip = packed(router.VIP[family])
    table.ensure(Behaviour(MARK, refuse_unknown=True))
    table.set_addresses("cluster_ips", [(vip, 8 * len(vip))])
    table.set_addresses("service_cidrs", CIDRS)
    table.update({BACKEND: (packed(router.SERVER[family]), 8080)})
    decide(shell, "meta priority set eb12:3456")
    assert exchange(router, family, "tcp", (router.VIP[family], 80))[1] == router.VIP[family]


def test_an_address_of_the_node_is_never_unknown(router: Router, table: Table, left: Callable[[], int]) -> None:
    own = packed(router.TOWARDS_SERVER[4])
    table.ensure(Behaviour(MARK, refuse_unknown=True))
    table.set_addresses("service_cidrs", [(own, 24)])
    # The port is closed, so the node itself refuses.
    assert refused(router, 4, router.TOWARDS_SERVER[4], "client") == "refused"


def test_a_cache_at_a_cluster_ip_serves_the_node_at_defined_ports(
    family: int, router: Router, table: Table, shell: Shell
) -> None:
    """Without NOTRACK rules: the socket programs leave these packets to the cache."""
    vip = packed(router.VIP[family])
    shell("ip link set lo up")
    add_local(shell, router.VIP[family])
    table.ensure(Behaviour(MARK, refuse_unknown=True))
    table.set_ports("cluster_ports", [port_key(vip, 17, 53)])
    table.set_addresses("cluster_ips", [(vip, 8 * len(vip))])
    table.set_addresses("service_cidrs", CIDRS)
    with closing(socket.socket(af(family), socket.SOCK_DGRAM)) as cache:
        cache.bind((router.VIP[family], 53))
        cache.settimeout(SECONDS)
        with closing(socket.socket(af(family), socket.SOCK_DGRAM)) as client:
            client.connect((router.VIP[family], 53))
            client.send(b"question")
            assert cache.recv(100) == b"question"
    # Another program's port, which is not the Service's: 4242.
    with closing(socket.socket(af(family), socket.SOCK_DGRAM)) as other:
        other.bind((router.VIP[family], 4242))
        assert refused(router, family, router.VIP[family], "") == "refused"


@pytest.mark.parametrize("drop_invalid", [True, False])
def test_invalid_packets_are_dropped_if_so_configured(
    drop_invalid: bool, router: Router, table: Table, shell: Shell
) -> None:
    """conntrack considers an echo reply without a request INVALID."""
    table.ensure(Behaviour(MARK, drop_invalid=drop_invalid))
    reply = struct.pack("!BBHHH", 0, 0, 0xFFFF - 0x0107, 0x0100, 7)
    with router.inside("server"):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    with router.inside("client"):
        sender = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    with closing(receiver), closing(sender):
        receiver.settimeout(SECONDS)
        sender.sendto(reply, (router.SERVER[4], 0))
        # A later packet arrives: so the reply is not only late.
        sender.sendto(struct.pack("!BBHHH", 8, 0, 0xFFFF - 0x0800 - 0x0100 - 8, 0x0100, 8), (router.SERVER[4], 0))
        first = receiver.recv(100)[20]
    assert first == (8 if drop_invalid else 0)


def test_sets_are_adopted_and_repaired(table: Table, shell: Shell) -> None:
    ips = [(packed("10.96.0.1"), 32), (packed("fd96::1"), 128)]
    table.ensure(Behaviour(MARK, refuse_unknown=True))
    table.set_addresses("cluster_ips", ips)
    table.set_addresses("service_cidrs", CIDRS)
    wanted = shell("nft list ruleset")
    shell("nft flush ruleset")
    table.ensure(Behaviour(MARK, refuse_unknown=True))
    assert sorted(shell("nft list ruleset").splitlines()) == sorted(wanted.splitlines())
    again = Table()
    again.ensure(Behaviour(MARK, refuse_unknown=True))
    generation = again._generation()
    again.set_addresses("cluster_ips", ips)
    again.set_addresses("service_cidrs", CIDRS)
    assert again._generation() == generation
    # The other mode has no such chains and sets, and updating them does nothing.
    third = Table()
    third.ensure(Behaviour(MARK, drop_invalid=True))
    third.set_addresses("cluster_ips", ips)
    assert "cluster_ips4" not in shell("nft list ruleset")
    assert "ct state invalid" in shell("nft list ruleset")


def test_service_cidrs_may_overlap(table: Table, shell: Shell) -> None:
    """As while the cluster's range is extended: a wider ServiceCIDR is added, later the first one is deleted."""
    settings = effective(complete(flags.parse([]), lambda text, file: None), flags.parse([]))
    nft = NftTable(settings)
    nft.table = table
    table.ensure(Behaviour(MARK, refuse_unknown=True))
    sets = ClusterSets(settings, nft)
    first, wide, inside, six = "10.96.0.0/16", "10.96.0.0/12", "10.97.0.0/16", "fd96::/112"
    steps = [
        ([first, six], {"10.96.0.0/16", "fd96::/112"}),
        ([first, wide, six], {"10.96.0.0/12", "fd96::/112"}),
        ([first, wide, inside], {"10.96.0.0/12"}),
        ([first, inside], {"10.96.0.0/15"}),
        ([first], {"10.96.0.0/16"}),
        ([wide], {"10.96.0.0/12"}),
        ([], set()),
    ]
    for cidrs, wanted in steps:
        sets.node_changed(NodeFacts(service_cidrs=frozenset(map(ipaddress.ip_network, cidrs))))
        shown = shell(f"nft list set inet {table.name} service_cidrs4; nft list set inet {table.name} service_cidrs6")
        assert set(re.findall(r"[0-9a-f.:]+/\d+", shown)) == wanted


def test_after_a_large_transaction_was_refused_answers_are_right(table: Table, shell: Shell) -> None:
    """The kernel answers each of its messages, and these are more than the socket's buffer holds."""
    channel = Channel()
    step = Step(False, "backends4", MAP_SHAPES["backends4"], [n.to_bytes(4) + bytes(8) for n in range(400_000)])
    for _ in range(2):
        with pytest.raises(OSError, match=r"No such file|No buffer space"):
            channel.change(table.name, [step])
        assert not channel.has_table(table.name)
        assert channel.generation() is not None
    table.ensure(Behaviour(MARK))
    assert channel.has_table(table.name)
    assert channel.generation() == table._generation()
    channel.close()
