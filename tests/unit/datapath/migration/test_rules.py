# SPDX-License-Identifier: Apache-2.0
"""Which iptables rules, virtual servers and ipsets of kube-proxy are removed: the decisions, without a kernel."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from pyebpf_proxy.config.addresses import parse_cidr
from pyebpf_proxy.datapath.migration.ipvs import SETS, VirtualServer, excluded, to_remove
from pyebpf_proxy.datapath.migration.rules import is_kube_proxys, plan
from tests import ROOT

RECORDED = ROOT / "tests" / "support" / "kube_proxy"
BUILT_IN = ":PREROUTING ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]\n"


@pytest.mark.parametrize("name", ["iptables-ipv4", "iptables-ipv6", "ipvs"])
def test_every_chain_and_jump_of_kube_proxy_is_removed(name: str) -> None:
    text = (RECORDED / f"{name}.rules").read_text()
    script = plan(text).script
    chains = [line.split()[0] for line in text.splitlines() if line.startswith(":KUBE-")]
    chains = [chain for chain in chains if chain != ":KUBE-FIREWALL"]
    assert sorted(line.split()[0] for line in script.splitlines() if line.startswith(":")) == sorted(chains)
    assert sorted(f":{line[3:]}" for line in script.splitlines() if line.startswith("-X ")) == sorted(chains)
    jumps = [
        line[3:]
        for line in text.splitlines()
        if line.startswith("-A ") and not line.startswith("-A KUBE-") and "KUBE-FIREWALL" not in line
    ]
    assert sorted(line[3:] for line in script.splitlines() if line.startswith("-D ")) == sorted(jumps)
    assert "KUBE-FIREWALL" not in script
    assert plan(text).kept == []
    assert plan(text).ipvs == (name == "ipvs")


@pytest.mark.parametrize(
    ("table", "chain", "removed"),
    [
        ("nat", "KUBE-SVC-ABC", True),
        ("nat", "KUBE-SEP-ABC", True),
        ("nat", "KUBE-SVL-ABC", True),
        ("nat", "KUBE-EXT-ABC", True),
        ("nat", "KUBE-FW-ABC", True),
        ("filter", "KUBE-SVC-ABC", False),
        ("mangle", "KUBE-PROXY-CANARY", True),
        ("raw", "KUBE-SERVICES", False),
        ("mangle", "KUBE-SERVICES", False),
        ("filter", "KUBE-FIREWALL", False),
        ("filter", "KUBE-PROXY-FIREWALL", True),
        ("mangle", "KUBE-IPTABLES-HINT", False),
        ("nat", "KUBE-KUBELET-CANARY", False),
        ("nat", "KUBE-MARK-DROP", False),
        ("nat", "CNI-HOSTPORT-DNAT", False),
        ("filter", "cali-KUBE-SVC-1", False),
    ],
)
def test_names(table: str, chain: str, removed: bool) -> None:
    assert is_kube_proxys(table, chain) is removed


def test_without_rules_of_kube_proxy_there_is_nothing_to_do() -> None:
    assert plan("").script == ""
    assert (
        plan(f"*nat\n{BUILT_IN}:KUBE-KUBELET-CANARY - [0:0]\n-A PREROUTING -j KUBE-KUBELET-CANARY\nCOMMIT\n").script
        == ""
    )


@pytest.mark.parametrize(
    "rule",
    [
        "-A PREROUTING -j KUBE-SERVICES",
        '-A PREROUTING -m comment --comment "my own" -j KUBE-SERVICES',
        "-A PREROUTING -g KUBE-SERVICES",
        '-A MINE -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
    ],
)
def test_a_chain_that_a_foreign_rule_uses_stays_with_its_targets(rule: str) -> None:
    planned = plan(
        f"*nat\n{BUILT_IN}:MINE - [0:0]\n:KUBE-SERVICES - [0:0]\n:KUBE-SVC-A - [0:0]\n:KUBE-SEP-A - [0:0]\n"
        f":KUBE-SVC-B - [0:0]\n{rule}\n"
        '-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES\n'
        "-A KUBE-SERVICES -j KUBE-SVC-A\n-A KUBE-SVC-A -j KUBE-SEP-A\n-A KUBE-SVC-B -j KUBE-SEP-A\nCOMMIT\n"
    )
    assert planned.script == (
        "*nat\n:KUBE-SVC-B - [0:0]\n"
        '-D PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES\n'
        "-X KUBE-SVC-B\nCOMMIT\n"
    )
    why = "because a rule of another program uses it"
    assert planned.kept == [f"table nat: chain KUBE-SERVICES stays, {why}: {rule[3:]}"]


def test_comments_are_no_jumps() -> None:
    planned = plan(
        f"*nat\n{BUILT_IN}:KUBE-SERVICES - [0:0]\n"
        r'-A PREROUTING -m comment --comment "a \" -j KUBE-SERVICES b" -j RETURN'
        "\nCOMMIT\n"
    )
    assert planned.script == "*nat\n:KUBE-SERVICES - [0:0]\n-X KUBE-SERVICES\nCOMMIT\n"
    assert planned.kept == []


def test_older_kube_proxies_jumps_by_other_conditions() -> None:
    rule = 'INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES'
    planned = plan(f"*filter\n:INPUT ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n-A {rule}\nCOMMIT\n")
    assert f"-D {rule}\n" in planned.script
    assert (planned.chains, planned.jumps) == (1, 1)


#: Other programs' chains.
CHAINS = (
    ":DROPS - [0:0]\n:ACCEPTS - [0:0]\n:RETURNS - [0:0]\n:LEADS - [0:0]\n:LOOPS - [0:0]\n:USER - [0:0]\n"
    '-A DROPS -j LOG --log-prefix "-j RETURN "\n-A DROPS -m comment --comment last -j REJECT\n'
    "-A ACCEPTS -j ACCEPT\n-A RETURNS -s 192.0.2.0/24 -j DROP\n-A RETURNS -j RETURN\n-A RETURNS -j DROP\n"
    "-A LEADS -j RETURNS\n-A LEADS -g DROPS\n-A LOOPS -j LOOPS\n-A LOOPS -g LOOPS\n"
    "-A USER -g RETURNS\n-A USER -j DROP\n"
)
FORWARD = (
    "*filter\n:FORWARD {} [0:0]\n:KUBE-FORWARD - [0:0]\n:KUBE-SERVICES - [0:0]\n"
    + CHAINS
    + '-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD\n'
    "{}COMMIT\n"
)


@pytest.mark.parametrize(
    ("policy", "rule", "drops"),
    [
        ("DROP", "", True),
        ("ACCEPT", "-A FORWARD -j REJECT --reject-with icmp-host-prohibited\n", True),
        ("ACCEPT", "-A FORWARD -j DROP\n", True),
        ("ACCEPT", "-A FORWARD -p udp -j DROP\n", False),
        ("ACCEPT", "", False),
        ("ACCEPT", '-A FORWARD -m comment --comment "999 drop \\"all\\"" -j DROP\n', True),
        ("ACCEPT", "-A FORWARD -m comment --comment 999 -m comment --comment b -j REJECT\n", True),
        ("ACCEPT", '-A FORWARD -p udp -m comment --comment "-j DROP" -j DROP\n', False),
        ("ACCEPT", '-A FORWARD -m comment --comment "x -j DROP" -j LOG\n', False),
        ("ACCEPT", "-A FORWARD -m comment --comment no -m mark --mark 0x1 -j DROP\n", False),
        ("ACCEPT", "-A FORWARD -j DROPS\n", True),
        ("ACCEPT", '-A FORWARD -m comment --comment "a b" -g DROPS\n', True),
        ("ACCEPT", "-A FORWARD -p udp -j DROPS\n", False),
        ("ACCEPT", "-A FORWARD -j LEADS\n", True),
        ("ACCEPT", "-A FORWARD -j RETURNS\n-A FORWARD -j LOOPS\n-A FORWARD -j USER\n", False),
        ("ACCEPT", "-A FORWARD -j RETURNS\n-A FORWARD -j LOOPS\n-A FORWARD -j USER\n-A FORWARD -j DROP\n", True),
        ("ACCEPT", "-A FORWARD -g RETURNS\n-A FORWARD -j DROP\n", False),
        ("ACCEPT", "-A FORWARD -j ACCEPTS\n-A FORWARD -j DROP\n", False),
        ("DROP", "-A FORWARD -j ACCEPT\n", True),
    ],
)
def test_with_forward_policy_drop_kube_proxys_accepts_stay_until_cleanup(policy: str, rule: str, drops: bool) -> None:
    text = FORWARD.format(policy, rule)
    assert plan(text).forward_drops is drops
    assert "-X KUBE-FORWARD" in plan(text).script
    kept = plan(text, keep_forward=True)
    assert kept.forward_drops is drops
    assert ("KUBE-FORWARD" in kept.script) is not drops
    assert "-X KUBE-SERVICES" in kept.script
    assert kept.kept == []


def accept(port: int) -> str:
    comment = f'"demo/lb:http --dport {port + 1} health check node port"'
    return f"-A KUBE-NODEPORTS -p tcp -m comment --comment {comment} -m tcp --dport {port} -j ACCEPT\n"


BY_SET = (
    '-A KUBE-NODE-PORT -m comment --comment "Kubernetes health check node port"'
    " -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT\n"
)
TO_NODEPORTS = '-A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS\n'
TO_NODE_PORT = '-A INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT\n'
DROP_ALL = '-A INPUT -m comment --comment "drop all" -j DROP\n'


@pytest.mark.parametrize(
    ("policy", "rules", "ports"),
    [
        ("DROP", TO_NODEPORTS + accept(32000), [32000]),
        ("ACCEPT", TO_NODEPORTS + DROP_ALL + accept(32010) + accept(32000), [32000, 32010]),
        ("ACCEPT", TO_NODEPORTS + "-A INPUT -g DROPS\n" + accept(32000), [32000]),
        ("DROP", TO_NODE_PORT + BY_SET, []),
        ("ACCEPT", TO_NODEPORTS + accept(32000), None),
        ("DROP", TO_NODEPORTS, None),
        ("DROP", TO_NODEPORTS.replace("INPUT", "FORWARD") + accept(32000), None),
        # The rules stay, because another program's rule leads to them.
        ("DROP", TO_NODEPORTS + "-A INPUT -j KUBE-NODEPORTS\n" + accept(32000), None),
        ("DROP", TO_NODEPORTS + "-A KUBE-NODEPORTS -p tcp -j RETURN\n", None),
    ],
)
def test_health_check_node_ports_are_named_where_input_drops(policy: str, rules: str, ports: list[int] | None) -> None:
    chains = ":KUBE-NODEPORTS - [0:0]\n:KUBE-NODE-PORT - [0:0]\n"
    planned = plan(f"*filter\n:INPUT {policy} [0:0]\n:FORWARD ACCEPT [0:0]\n{chains}{CHAINS}{rules}COMMIT\n")
    assert planned.input_drops is (ports is not None)
    assert planned.health_check_ports == (ports or [])


def test_the_ports_of_nodeports_in_other_tables_are_no_health_checks() -> None:
    rules = TO_NODEPORTS + accept(32000)
    assert not plan(f"*nat\n:INPUT DROP [0:0]\n:KUBE-NODEPORTS - [0:0]\n{rules}COMMIT\n").input_drops


def test_virtual_servers_in_excluded_ranges_stay() -> None:
    cidrs = [cidr for text in ("10.50.0.0/16", "fd00:50::/64") if (cidr := parse_cidr(text))]
    servers = {
        text: VirtualServer(ip_address(text), 6, 80) for text in ("10.50.1.1", "10.51.1.1", "fd00:50::1", "fd00:51::1")
    }
    assert to_remove(servers.values(), cidrs) == [servers["10.51.1.1"], servers["fd00:51::1"]]
    assert to_remove(servers.values(), []) == list(servers.values())
    assert excluded(ip_address("10.50.255.255"), cidrs)
    assert not excluded(ip_address("::ffff:10.50.0.1"), cidrs)


def test_ipset_names_are_those_the_kernel_takes() -> None:
    assert len(SETS) == len(set(SETS)) == 34
    assert all(len(name) <= 31 for name in SETS)
    assert "KUBE-6-LOAD-BALANCER-SOURCE-CID" in SETS
