# SPDX-License-Identifier: Apache-2.0
"""What the agent's nftables table does with the tag in a packet's priority: masquerade, proof of a new flow, and
others.

Instead of the programs, a chain of the test sets the priority, early in prerouting.
"""

from __future__ import annotations

import json
import re
import socket
from contextlib import closing

import pytest

from pyebpf_proxy.datapath.netfilter.nft import Table
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour, port_key
from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.see import facts
from tests.netns.attach.datagrams import BACKEND, MARK, SECONDS, af, decide, exchange, packed
from tests.netns.attach.router import Router, Shell

pytestmark = [pytest.mark.needs_netns, pytest.mark.usefixtures("namespace")]

MASQUERADED = "meta priority set ed12:3456"
TRANSLATED = "meta priority set eb12:3456"


def watch(shell: Shell) -> None:
    """Count the packets that leave towards the server by their priority, after all other rules."""
    names = {
        "plain": "meta priority and ffff:fff0 == 0:0",
        "proof": "meta priority ee00:0001",
        "tag": "meta priority and f800:0000 == e800:0000 meta priority != ee00:0001",
        "foreign": "meta priority 1:5",
    }
    rules = "\n".join(f'oifname s0 {match} counter comment "{name}"' for name, match in names.items())
    shell(f"""nft -f - <<'END'
        table inet watch {{
            chain last {{
                type filter hook postrouting priority 300
                {rules}
            }}
        }}
END""")


def left(shell: Shell) -> dict[str, int]:
    found = re.findall(r'packets (\d+) bytes \d+ comment "(\w+)"', shell("nft list chain inet watch last"))
    return {name: int(number) for number, name in found if number != "0"}


def ready(table: Table, router: Router, family: int, behaviour: Behaviour, port: int = 8080) -> None:
    table.ensure(behaviour)
    table.update({BACKEND: (packed(router.SERVER[family]), port)})


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_the_masquerade_tag_masquerades(protocol: str, family: int, router: Router, table: Table, shell: Shell) -> None:
    ready(table, router, family, Behaviour(MARK))
    decide(shell, f"{MASQUERADED} meta mark set 8")
    seen, answered = exchange(router, family, protocol, (router.VIP[family], 80))
    assert (seen, answered) == (router.TOWARDS_SERVER[family], router.VIP[family])
    late = shell("nft list chain inet decision late")
    assert re.search(r'packets 0 bytes 0 comment "proxy bit left"', late), "the masquerade bit is cleared"
    assert not re.search(r'packets 0 bytes 0 comment "others kept"', late)


def test_a_mark_that_is_restored_erases_no_masquerade(family: int, router: Router, table: Table, shell: Shell) -> None:
    """CONNMARK --restore-mark without a mask in mangle PREROUTING, as CNIs and QoS scripts use it (finding D9)."""
    ready(table, router, family, Behaviour(MARK))
    decide(shell, MASQUERADED)
    shell("""
        nft add table inet mangling
        nft 'add chain inet mangling restore { type filter hook prerouting priority -150 ; }'
        nft add rule inet mangling restore meta mark set ct mark
    """)
    seen, _ = exchange(router, family, "tcp", (router.VIP[family], 80))
    assert seen == router.TOWARDS_SERVER[family]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside kube-proxy"])
def test_masqueraded_ports_are_in_the_range(
    beside: bool, family: int, router: Router, table: Table, shell: Shell
) -> None:
    """Young flows use the other ports. A kube-proxy that starts later has the same bit, and masquerades to all
    ports.
    """
    ready(table, router, family, Behaviour(MARK, conntrack_ports=(50000, 50009)))
    decide(shell, MASQUERADED)
    if beside:
        shell(f"""
            nft add table inet kube-proxy
            nft 'add chain inet kube-proxy nat-postrouting {{ type nat hook postrouting priority srcnat ; }}'
            nft add rule inet kube-proxy nat-postrouting mark and {MARK} == {MARK} masquerade fully-random
        """)
    with router.inside("server"):
        server = socket.socket(af(family), socket.SOCK_DGRAM)
    with closing(server):
        server.bind((router.SERVER[family], 8080))
        server.settimeout(SECONDS)
        ports = set()
        for _ in range(10):
            with router.inside("client"):
                client = socket.socket(af(family), socket.SOCK_DGRAM)
            with closing(client):
                client.sendto(b"question", (router.VIP[family], 80))
                _, source = server.recvfrom(100)
                assert source[0] == router.TOWARDS_SERVER[family]
                ports.add(source[1])
    assert ports <= set(range(50000, 50010))
    assert len(ports) > 1


@pytest.mark.parametrize("tag", [TRANSLATED, MASQUERADED], ids=["translated", "masqueraded"])
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_only_the_first_packet_of_a_translated_flow_gets_the_proof(
    tag: str, protocol: str, family: int, router: Router, table: Table, shell: Shell
) -> None:
    ready(table, router, family, Behaviour(MARK, prove_new=True))
    decide(shell, tag)
    watch(shell)
    exchange(router, family, protocol, (router.VIP[family], 80))
    found = left(shell)
    assert found.pop("proof") == 1
    assert found.keys() <= {"plain"}
    exchange(router, family, "udp", (router.SERVER[family], 8080))
    assert left(shell).get("proof") == 1, "an untranslated flow gets no proof"


def test_packets_that_other_rules_drop_get_no_proof(family: int, router: Router, table: Table, shell: Shell) -> None:
    ready(table, router, family, Behaviour(MARK, prove_new=True))
    decide(shell, TRANSLATED)
    watch(shell)
    shell("""
        nft add table inet denying
        nft 'add chain inet denying forward { type filter hook forward priority 0 ; policy drop ; }'
        nft 'add rule inet denying forward icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept'
    """)
    with router.inside("client"):
        client = socket.socket(af(family), socket.SOCK_DGRAM)
    with closing(client):
        client.sendto(b"question", (router.VIP[family], 80))
    assert "proof" not in left(shell)


def test_packets_of_the_node_itself_get_no_proof(family: int, router: Router, table: Table, shell: Shell) -> None:
    ready(table, router, family, Behaviour(MARK, prove_new=True))
    watch(shell)
    ip, server = ("ip", router.SERVER[4]) if family == 4 else ("ip6", f"[{router.SERVER[6]}]")
    shell(f"""
        nft add table inet docker
        nft 'add chain inet docker out {{ type nat hook output priority -100 ; }}'
        nft 'add rule inet docker out {ip} daddr {router.VIP[family]} meta l4proto udp dnat {ip} to {server}:8080'
        ip route add default via {router.SERVER[4]}; ip -6 route add default via {router.SERVER[6]}
    """)
    with router.inside("server"):
        receiver = socket.socket(af(family), socket.SOCK_DGRAM)
    with closing(receiver), closing(socket.socket(af(family), socket.SOCK_DGRAM)) as sender:
        receiver.bind((router.SERVER[family], 8080))
        receiver.settimeout(SECONDS)
        sender.sendto(b"question", (router.VIP[family], 80))
        receiver.recv(100)
    assert "proof" not in left(shell)


def test_a_foreign_priority_stays(family: int, router: Router, table: Table, shell: Shell) -> None:
    """For example by a CLASSIFY target: then the flow gets no proof, and the packet keeps that priority."""
    ready(table, router, family, Behaviour(MARK, prove_new=True))
    decide(shell, TRANSLATED)
    watch(shell)
    shell("""
        nft add table inet classify
        nft 'add chain inet classify post { type filter hook postrouting priority -150 ; }'
        nft add rule inet classify post oifname s0 meta priority set 1:5
    """)
    exchange(router, family, "udp", (router.VIP[family], 80))
    found = left(shell)
    assert found["foreign"] >= 1
    assert found.keys() <= {"foreign", "plain"}, "only packets sent before the rule existed are plain"


@pytest.mark.parametrize("prove", [False, True], ids=["", "prove"])
@pytest.mark.parametrize(
    "tag",
    [TRANSLATED, MASQUERADED, "meta priority set eb00:0077", "meta priority set ed00:0077", "meta priority set ec00:1"],
    ids=["known", "known masqueraded", "unknown", "unknown masqueraded", "reject"],
)
def test_no_tag_leaves_the_node(tag: str, prove: bool, family: int, router: Router, table: Table, shell: Shell) -> None:
    """Also for IPv6, where the kernel does not reset the priority, and for packets of established flows."""
    ready(table, router, family, Behaviour(MARK, prove_new=prove))
    watch(shell)
    exchange(router, family, "udp", (router.SERVER[family], 8080))
    decide(shell, tag)
    with router.inside("server"):
        server = socket.socket(af(family), socket.SOCK_DGRAM)
    with router.inside("client"):
        clients = [socket.socket(af(family), socket.SOCK_DGRAM) for _ in range(2)]
    with closing(server), closing(clients[0]), closing(clients[1]):
        server.bind((router.SERVER[family], 8080))
        server.settimeout(SECONDS)
        for client in clients:
            for _ in range(3):
                client.sendto(b"question", (router.SERVER[family], 8080))
        if "ec00" not in tag:
            for _ in range(6):
                server.recv(100)
    assert "tag" not in left(shell)


def test_the_kernel_itself_resets_the_priority_of_ipv4_alone(router: Router, shell: Shell) -> None:
    """This is why the rule exists. A kernel that does it for both families needs none: see ``clear_mark``."""
    decide(shell, TRANSLATED)
    watch(shell)
    exchange(router, 4, "udp", (router.SERVER[4], 8080))
    assert left(shell).keys() == {"plain"}
    exchange(router, 6, "udp", (router.SERVER[6], 8080))
    assert left(shell)["tag"] >= 1


# ---- NOTRACK ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", [TRANSLATED, MASQUERADED, "meta priority set ec00:1"])
def test_untracked_packets_to_an_address_of_the_node_are_left_alone(
    tag: str, family: int, router: Router, table: Table, shell: Shell
) -> None:
    """NodeLocal DNSCache: the node has the Service's address, and raw-table rules set NOTRACK (finding D5)."""
    ready(table, router, family, Behaviour(MARK, drop_invalid=True, refuse_unknown=True, prove_new=True))
    table.set_addresses("cluster_ips", [(packed(router.VIP[family]), 32 if family == 4 else 128)])
    decide(shell, tag, "meta l4proto udp")
    ip = "ip" if family == 4 else "ip6"
    shell(f"""
        ip addr add {router.VIP[family]} dev lo {"nodad" if family == 6 else ""}
        nft add table inet raw
        nft 'add chain inet raw pre {{ type filter hook prerouting priority -300 ; }}'
        nft 'add chain inet raw out {{ type filter hook output priority -300 ; }}'
        nft add rule inet raw pre {ip} daddr {router.VIP[family]} udp dport 53 notrack
        nft add rule inet raw out {ip} saddr {router.VIP[family]} udp sport 53 notrack
    """)
    with router.inside("client"):
        client = socket.socket(af(family), socket.SOCK_DGRAM)
    with closing(client), closing(socket.socket(af(family), socket.SOCK_DGRAM)) as cache:
        cache.bind((router.VIP[family], 53))
        cache.settimeout(SECONDS)
        client.settimeout(SECONDS)
        client.connect((router.VIP[family], 53))
        client.send(b"question")
        data, source = cache.recvfrom(100)
        assert source[0] == router.CLIENT[family]
        cache.sendto(data, source)
        assert client.recv(100) == b"question"


# ---- nftables mode: devices that carry no program yet --------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_defined_port_is_not_refused_where_no_program_has_chosen(
    protocol: str, family: int, router: Router, table: Table, shell: Shell
) -> None:
    """A pod that was created a moment ago: its first packet is lost, and the next one is served (finding D10)."""
    table.ensure(Behaviour(MARK, refuse_unknown=True))
    vip = packed(router.VIP[family])
    number = {"tcp": 6, "udp": 17}[protocol]
    table.set_ports("cluster_ports", [port_key(vip, number, 80), port_key(vip, 23 - number, 81)])
    table.set_addresses("cluster_ips", [(vip, 8 * len(vip))])
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM

    def asks(port: int, seconds: float = SECONDS) -> None:
        with router.inside("client"):
            client = socket.socket(af(family), kind)
        with closing(client):
            client.settimeout(seconds)
            client.connect((router.VIP[family], port))
            client.send(b"question")
            client.recv(100)

    with pytest.raises(TimeoutError):
        asks(80, 0.5)
    for port in (79, 81):
        with pytest.raises(ConnectionRefusedError):
            asks(port)
    table.set_ports("cluster_ports", [])
    with pytest.raises(ConnectionRefusedError):
        asks(80)


def test_defined_ports_are_adopted_and_repaired(table: Table, shell: Shell) -> None:
    keys = {port_key(packed("10.96.0.1"), 6, 80), port_key(packed("fd00::1"), 132, 65535)}
    table.ensure(Behaviour(MARK, refuse_unknown=True))
    table.set_ports("cluster_ports", keys)
    before = shell("nft list table inet pyebpf-proxy")
    assert "10.96.0.1 . tcp . 80" in before
    assert "fd00::1 . sctp . 65535" in before
    again = Table()
    again.ensure(Behaviour(MARK, refuse_unknown=True))
    again.set_ports("cluster_ports", keys)
    assert shell("nft list table inet pyebpf-proxy") == before
    shell("nft flush set inet pyebpf-proxy cluster_ports4")
    again.ensure(Behaviour(MARK, refuse_unknown=True))
    assert shell("nft list table inet pyebpf-proxy") == before
    shell("nft flush ruleset")
    again.change_ports("cluster_ports", [], [port_key(packed("fd00::1"), 132, 65535)])
    after = shell("nft list table inet pyebpf-proxy")
    assert "10.96.0.1 . tcp . 80" in after
    assert "fd00::1" not in after


def test_status_reads_the_rules_without_the_elements(table: Table, shell: Shell) -> None:
    """With 10 000 Services the sets have 20 000 elements, and reading them takes a second."""
    table.ensure(Behaviour(MARK, refuse_unknown=True))
    table.set_ports("cluster_ports", {port_key(packed("10.96.0.1"), 6, 80)})
    assert "10.96.0.1" in shell("nft list table inet pyebpf-proxy")
    listed = json.loads(shell("nft -j list table inet pyebpf-proxy"))["nftables"]
    assert facts.nft_rules(mounts.DEFAULT_DIRECTORY) == sum("rule" in entry for entry in listed) > 0
    assert "10.96.0.1" not in str(facts.nft("list ruleset inet"))
    shell("nft flush ruleset")
    assert facts.nft_rules(mounts.DEFAULT_DIRECTORY) is None


# ---- the table of an older version ---------------------------------------------------------------------------------

OLDER = """
table inet pyebpf-proxy {
    map backends4 {
        type classid : ipv4_addr . inet_service
        elements = { eb12:3456 : 10.2.0.2 . 8080, eb00:1 : 10.2.0.9 . 9 }
    }
    map backends6 {
        type classid : ipv6_addr . inet_service
        elements = { eb12:3456 : fd02::2 . 8080 }
    }
    chain translate {
        type nat hook prerouting priority -100
        meta nfproto ipv4 meta l4proto { tcp, udp, sctp } dnat ip to meta priority map @backends4
        meta nfproto ipv6 meta l4proto { tcp, udp, sctp } dnat ip6 to meta priority map @backends6
    }
    chain masquerading {
        type nat hook postrouting priority 100
        meta mark and 0x4000 == 0x4000 masquerade fully-random
    }
    chain gone {
    }
}
"""


@pytest.mark.parametrize("ports", [(32768, 65535), (10000, 65535), (50000, 50009), None])
def test_the_source_ports_of_a_former_run_are_read(ports: tuple[int, int] | None, table: Table) -> None:
    assert table.conntrack_ports() is None
    table.ensure(Behaviour(MARK, prove_new=True, conntrack_ports=ports))
    assert Table().conntrack_ports() == ports


def test_a_table_of_an_older_version_is_replaced_in_one_step(family: int, router: Router, shell: Shell) -> None:
    """Its elements serve what the attached programs still choose; no packet meets a partial table."""
    shell(f"nft -f - <<'END'\n{OLDER}\nEND")
    table = Table()
    before = table._generation()
    table.ensure(Behaviour(MARK, prove_new=True, conntrack_ports=(32768, 65535)))
    assert before is not None
    assert table._generation() == before + 1
    assert table.elements.keys() == {1, BACKEND}
    assert "gone" not in shell("nft list chains inet")
    assert "priority srcnat - 1; policy" in shell("nft list chain inet pyebpf-proxy masquerading")
    fresh = shell("nft list table inet pyebpf-proxy")
    assert fresh.count("ee00:1") == 2
    decide(shell, MASQUERADED)
    seen, _ = exchange(router, family, "tcp", (router.VIP[family], 80))
    assert seen == router.TOWARDS_SERVER[family]
