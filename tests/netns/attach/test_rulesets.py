# SPDX-License-Identifier: Apache-2.0
"""Rulesets of other software, created by its own tools: which of them close the fast path, and why."""

from __future__ import annotations

import errno
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.rulesets import kernel
from tests.support import aws_rules
from tests.support.kube_proxy_tools import make_nfacct, recorded

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.usefixtures("namespace")]

Shell = Callable[[str], str]
FOLDER = Path(__file__).parent / "rulesets"
FILES = sorted(path.stem for path in FOLDER.glob("*.iptables"))
SETS = "for set in cali40s cali40d KUBE-SRC; do ipset create $set hash:net; done"


def closed() -> dict[int, str]:
    """The reason for each closed family."""
    return {family: str(verdict) for family, verdict in kernel.read().verdicts.items() if verdict.closes}


def marks() -> tuple[int, int]:
    """By family, the bits of marks with which packets prove nothing."""
    verdicts = kernel.read().verdicts
    return verdicts[4].marks, verdicts[6].marks


@pytest.mark.parametrize("variant", ["nft", "legacy"])
@pytest.mark.parametrize("name", FILES)
def test_common_rulesets_keep_the_fast_path_open(name: str, variant: str, shell: Shell) -> None:
    if "--match-set" in (FOLDER / f"{name}.iptables").read_text():
        shell(SETS)
    text = (FOLDER / f"{name}.iptables").read_text()
    if "-m nfacct" in text:
        make_nfacct("ct_state_invalid_dropped_pkts")
    shell(f"iptables-{variant}-restore <<'END'\n{text}END")
    assert shell(f"iptables-{variant}-save").count("-A ") == len(re.findall("^-A ", text, re.MULTILINE)), (
        "all rules are loaded"
    )
    assert closed() == {}


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_kube_proxys_accounting_keeps_the_fast_path_open(variant: str, family: int, shell: Shell) -> None:
    """Its objects have no quota: one counts invalid packets, the other NodePorts at a loopback address."""
    text = recorded(family)
    for name in set(re.findall(r"--nfacct-name +(\S+)", text)):
        make_nfacct(name)
    shell(f"{'iptables' if family == 4 else 'ip6tables'}-{variant}-restore <<'END'\n{text}\nEND")
    assert closed() == {}


@pytest.mark.parametrize("name", ["calico", "firewalld", "plain"])
def test_common_nftables_rulesets_keep_the_fast_path_open(name: str, shell: Shell) -> None:
    shell(f"nft -f {FOLDER / name}.nft")
    assert closed() == {}


QUEUE = "queue flags bypass to 101"


@pytest.mark.parametrize("statement", [QUEUE, "log"])
@pytest.mark.parametrize("name", ["kindnet-policy", "kube-network-policies/policy"])
def test_a_policy_with_a_queue_closes_the_fast_path(name: str, statement: str, shell: Shell) -> None:
    """kindnet's policy: a packet goes to its process unless the process has accepted the flow, or the flow is not new.
    Without a pod that has a policy no packet does.
    """
    rule = f"nft 'table inet queues {{ chain a {{ {statement}; }}; }}'"
    if subprocess.run(["sh", "-ec", rule], capture_output=True, check=False).returncode:
        pytest.skip("this kernel has no nft_queue")
    shell("nft delete table inet queues")
    text = (FOLDER / f"{name}.nft").read_text().replace(QUEUE, statement)
    pods = re.findall(r"set (\S+) \{\s+type \S+\s+elements = (\{.*\})", text)
    assert len(pods) == 2
    text = re.sub(r"elements = .*", "", text)
    shell(f"nft -f - <<'END'\n{text}\nEND")
    assert closed() == {}
    for of, elements in pods:
        shell(f"nft 'add element inet kindnet-network-policies {of} {elements}'")
        place = r"nftables table inet kindnet-network-policies, chain postrouting, rule handle \d+: "
        assert re.search(place + statement.split()[0], closed()[6 if "v6" in of else 4])


#: For iptables: table, chain, rule, and the word that is shown.
RULES = {
    "limit": ("filter", "FORWARD", "-m limit --limit 10/sec -j ACCEPT", "limit"),
    "hashlimit": ("filter", "FORWARD", "-m hashlimit --hashlimit-upto 5/sec --hashlimit-name a -j ACCEPT", "hashlimit"),
    "connlimit": ("filter", "FORWARD", "-p tcp -m connlimit --connlimit-above 9 -j REJECT", "connlimit"),
    "connbytes": (
        "filter",
        "FORWARD",
        "-m connbytes --connbytes 9: --connbytes-dir both --connbytes-mode bytes -j DROP",
        "connbytes",
    ),
    "quota": ("filter", "FORWARD", "-m quota --quota 1000 -j ACCEPT", "quota"),
    "nfacct": ("filter", "FORWARD", "-m nfacct --nfacct-name monthly -j DROP", "nfacct monthly"),
    "statistic": ("filter", "FORWARD", "-m statistic --mode random --probability 0.1 -j DROP", "statistic"),
    "recent": ("filter", "FORWARD", "-m recent --update --seconds 9 -j DROP", "recent"),
    "string": ("filter", "FORWARD", "-m string --algo bm --string evil -j DROP", "string"),
    "log": ("filter", "FORWARD", "-j LOG", "LOG"),
    "nflog": ("mangle", "POSTROUTING", "-j NFLOG --nflog-group 3", "LOG"),
    "log of new flows": ("nat", "PREROUTING", "-j LOG", "LOG"),
    "queue": ("filter", "FORWARD", "-j NFQUEUE --queue-num 1", "NFQUEUE"),
    "tproxy": ("mangle", "PREROUTING", "-p tcp -j TPROXY --on-port 99", "TPROXY"),
    "tee": ("mangle", "PREROUTING", "-j TEE --gateway {address}", "TEE"),
    "tcpmss": ("mangle", "FORWARD", "-p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu", "TCPMSS"),
    "tos": ("mangle", "POSTROUTING", "-j TOS --set-tos 0x10", "TOS"),
    "dscp": ("mangle", "PREROUTING", "-j DSCP --set-dscp 10", "DSCP"),
    "classify": ("mangle", "POSTROUTING", "-j CLASSIFY --set-class 1:2", "CLASSIFY"),
    "zone": ("raw", "PREROUTING", "-j CT --zone 4", "CT --zone"),
    "no tracking of anything": ("raw", "PREROUTING", "-p tcp -j CT --notrack", "CT --notrack"),
    "trace": ("raw", "PREROUTING", "-j TRACE", "TRACE"),
    "hl": ("mangle", "PREROUTING", "-j {ttl} 64", "{TTL}"),
    "small segments": ("filter", "FORWARD", "-p tcp --syn -m tcpmss --mss 1:500 -j DROP", "tcpmss"),
    "a tcp option": ("filter", "FORWARD", "-p tcp --tcp-option 4 -j DROP", "option"),
    "length": ("mangle", "PREROUTING", "-m length --length 0:60 -j DROP", "length"),
    "hops": ("filter", "FORWARD", "-m {match}-lt 9 -j DROP", "{match}"),
    "dscp of packets": ("filter", "FORWARD", "-m dscp ! --dscp 0 -j DROP", "dscp"),
    "source port": ("filter", "FORWARD", "-p tcp --sport 0:1023 -j DROP", "source ports"),
    "source ports": ("raw", "PREROUTING", "-p udp -m multiport --sports 53,123 -j DROP", "source ports"),
    "source port of new flows": (
        "filter",
        "FORWARD",
        "-p udp --sport 53 -m conntrack ! --ctstate ESTABLISHED -j DROP",
        "source ports",
    ),
    "source port of a flow": (
        "filter",
        "FORWARD",
        "-p tcp -m conntrack --ctproto tcp --ctorigsrcport 6000:6010 -j DROP",
        "source ports",
    ),
    "destination port of replies": (
        "filter",
        "FORWARD",
        "-p tcp -m conntrack --ctstate NEW,ESTABLISHED --ctproto tcp --ctrepldstport 6000:6010 -j DROP",
        "source ports",
    ),
    "source port of translated flows": (
        "filter",
        "FORWARD",
        "-p udp --sport 53 -m conntrack --ctstate DNAT -j DROP",
        "source ports",
    ),
}


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_an_accounting_rule_without_a_target_closes_nothing(variant: str, shell: Shell) -> None:
    make_nfacct("web")
    shell(f"iptables-{variant} -A FORWARD -p tcp --dport 80 -m nfacct --nfacct-name web")
    assert closed() == {}
    shell(f"iptables-{variant} -A FORWARD -p tcp --dport 80 -m nfacct --nfacct-name web -m limit --limit 9/s -j ACCEPT")
    assert closed().keys() == {4}


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("variant", ["nft", "legacy"])
@pytest.mark.parametrize("which", RULES)
def test_a_rule_that_must_see_each_packet(which: str, variant: str, family: int, shell: Shell) -> None:
    if which == "nfacct":
        make_nfacct("monthly")
    table, chain, rule, words = RULES[which]
    names = {4: ("TTL --ttl-set", "TTL", "192.0.2.1"), 6: ("HL --hl-set", "HL", "2001:db8::1")}[family]
    match = {4: "ttl --ttl", 6: "hl --hl"}[family]
    rule = rule.format(ttl=names[0], address=names[2], match=match)
    words = words.format(TTL=names[1], match=match.partition(" ")[0])
    tool = f"{'iptables' if family == 4 else 'ip6tables'}-{variant}"
    # In a separate chain, so that jump targets are read, and after a rule that closes nothing.
    shell(f"{tool} -t {table} -A {chain} -p icmp -j RETURN; {tool} -t {table} -N own; {tool} -t {table} -A own {rule}")
    assert closed() == {}, "no rule jumps to it"
    shell(f"{tool} -t {table} -A {chain} -j own")
    of = {"legacy": f"{tool} table", "nft": "nftables table ip6" if family == 6 else "nftables table ip"}[variant]
    where = f"{of} {table}, chain own, rule "
    found = closed()
    assert set(found) == {family}
    assert re.fullmatch(re.escape(where) + r"(handle \d+|1): (?i:.*" + re.escape(words) + ".*)", found[family]), found
    shell(f"{tool} -t {table} -D {chain} -j own")
    assert closed() == {}


NFT_RULES = {
    "limit": ("limit rate 10/second accept", "limit", {4, 6}),
    "limit over": ("limit rate over 10/second drop", "limit", {4, 6}),
    "of one family": ("ip saddr 10.0.0.0/8 limit rate 10/second accept", "limit", {4}),
    "of the other": ("meta nfproto ipv6 log", "log", {6}),
    "quota": ("quota over 10 mbytes drop", "quota", {4, 6}),
    "connections": ("ct count over 10 drop", "ct count", {4, 6}),
    "bytes": ("ct bytes > 100000 drop", "ct bytes", {4, 6}),
    "random": ("numgen random mod 10 0 drop", "numgen", {4, 6}),
    "log": ('log prefix "seen "', "log", {4, 6}),
    "log and accept": ("tcp dport 80 log accept", "log", {4, 6}),
    "meter": ("tcp dport 80 meter flood { ip saddr limit rate over 10/second } drop", "limit", {4}),
    "learns": ("tcp dport 81 add @seen { ip saddr }", "set seen updated by packets", {4}),
    "a set's limit": ("ip saddr @limited drop", "set limited", {4}),
    "copy": ("dup to 127.0.0.9", "dup", {4}),
    "mss": ("tcp flags syn tcp option maxseg size set rt mtu", "tcp option set", {4, 6}),
    "dscp": ("ip dscp set cs1", "header", {4}),
    "ttl": ("ip6 hoplimit set 3", "header", {6}),
    "priority": ("meta priority set 1:2", "meta priority", {4, 6}),
    "payload": ("@th,160,32 0x1 drop", "packet contents", {4, 6}),
    "contents of one protocol": ("meta l4proto tcp @th,160,16 5 drop", "packet contents", {4, 6}),
    "small segments": ("tcp option maxseg size 1-500 drop", "tcp option", {4, 6}),
    "length": ("meta length > 1000 drop", "meta length", {4, 6}),
    "length of udp": ("udp length < 20 drop", "packet contents", {4, 6}),
    "window": ("tcp window 0 drop", "packet contents", {4, 6}),
    "dscp of packets": ("ip dscp != cs0 drop", "header fields that differ", {4}),
    "hops": ("ip6 hoplimit < 9 drop", "header fields that differ", {6}),
    "source port": ("tcp sport < 1024 drop", "source ports", {4, 6}),
    "source port, hashed": ("jhash udp sport . udp dport mod 4 0 drop", "source ports", {4, 6}),
    "a hash of the flow": ("symhash mod 4 0 drop", "symhash", {4, 6}),
    "source port of a flow": ("meta l4proto tcp ct original proto-src 6000-6010 drop", "source ports", {4, 6}),
    "destination port of replies": ("meta l4proto tcp ct reply proto-dst 6000 drop", "source ports", {4, 6}),
    "source port of new flows": ("ct state new udp sport 53 drop", "source ports", {4, 6}),
    "source port, not of replies": ("ct state ! established,related udp sport 53 drop", "source ports", {4, 6}),
    "the same in bits": ("udp sport 53 ct state & (established|related) == 0 drop", "source ports", {4, 6}),
    "not of established flows": (
        "ct state & (established|related) != established udp sport 53 drop",
        "source ports",
        {4, 6},
    ),
    "helper": ('tcp dport 21 ct helper set "ftp-21"', "ct helper", {4, 6}),
    "by a map": ("tcp dport vmap { 80 : jump counted }", "quota", {4, 6}),
    "by a named map": ("tcp dport vmap @ports", "quota", {4, 6}),
    "a verdict map's limit": ("ip saddr vmap @limits", "map limits|set limits", {4}),
    "source port, and a flow's mark": ("tcp sport < 1024 ct mark set 1 drop", "source ports", {4, 6}),
    "dscp, and a flow's mark": ("ip dscp != cs0 ct mark set 2 drop", "header fields that differ", {4}),
    "dscp, and a flow's label": ("ip dscp != cs0 ct label set 2 drop", "header fields that differ", {4}),
}


@pytest.mark.parametrize("which", NFT_RULES)
def test_an_nftables_rule_that_must_see_each_packet(which: str, shell: Shell) -> None:
    rule, words, families = NFT_RULES[which]
    dup = "table ip mine" if which == "copy" else "table inet mine"
    shell(f"""nft -f - <<'END'
    {dup} {{
        set seen {{ type ipv4_addr; flags dynamic; size 128; }}
        set limited {{ type ipv4_addr; limit rate over 5/second; elements = {{ 192.0.2.1 }} }}
        map ports {{ type inet_service : verdict; elements = {{ 99 : goto counted }} }}
        map limits {{ type ipv4_addr : verdict; limit rate over 5/second; elements = {{ 192.0.2.3 : drop }} }}
        {'ct helper ftp-21 { type "ftp" protocol tcp; }' if which == "helper" else ""}
        chain counted {{
            quota over 10 mbytes drop
        }}
        chain forward {{
            type filter hook forward priority 0;
            tcp dport 443 accept
        }}
        chain input {{
            type filter hook input priority 0;
            jump counted
            log
        }}
    }}
END""")
    assert closed() == {}
    shell(f"nft 'add rule {dup.removeprefix('table ')} forward {rule}'")
    found = closed()
    assert set(found) == families
    for text in found.values():
        assert re.fullmatch(rf"nftables {dup}, chain (forward|counted), rule handle \d+: .*({words}).*", text), text


def test_an_element_of_a_verdict_map_leads_to_a_chain(shell: Shell) -> None:
    shell("""nft 'table inet mine {
        map ports { type inet_service : verdict; }
        chain logged { log; }
        chain forward { type filter hook forward priority 0; tcp dport vmap @ports; }
    }'""")
    assert closed() == {}
    shell("nft 'add element inet mine ports { 80 : jump logged }'")
    assert "log" in closed()[4]


@pytest.mark.parametrize(("state", "closes"), [("limit rate 5/second", True), ("counter", False)])
def test_an_element_of_a_verdict_map_may_have_a_limit_of_its_own(state: str, closes: bool, shell: Shell) -> None:
    shell("""nft 'table inet mine {
        map some { type ipv4_addr : verdict; flags dynamic; elements = { 192.0.2.1 : drop } }
        chain forward { type filter hook forward priority 0; ip saddr vmap @some; }
    }'""")
    assert closed() == {}
    shell(f"nft 'add element inet mine some {{ 192.0.2.3 {state} : accept }}'")
    assert set(closed()) == ({4} if closes else set())


def test_chains_are_read_again_if_others_were_removed_meanwhile(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts the chains that it has sent. A change of the agent's own table causes no other reading."""
    many = "\n".join(f"chain vip-{number} {{ }}" for number in range(600))
    shell(f"nft -f - <<'END'\ntable inet pyebpf-proxy {{\n{many}\n}}\nEND")
    chains = "\n".join(f"chain c{number} {{ }}" for number in range(400))
    shell(f"""nft -f - <<'END'
    table inet mine {{
        {chains}
        chain counted {{
            limit rate over 10/second drop
        }}
        chain forward {{
            type filter hook forward priority 0;
            jump counted
        }}
    }}
END""")
    assert set(closed()) == {4, 6}
    send, receive = RequestSocket.send, RequestSocket.receive
    asked: list[int] = []

    def noted(self: RequestSocket, data: bytes) -> None:
        asked.append(int.from_bytes(data[4:6], "little"))
        send(self, data)

    def interrupted(self: RequestSocket) -> bytes:
        answer = receive(self)
        if asked == [*asked[:-1], uapi.NFT_MSG_GETCHAIN] and asked.count(uapi.NFT_MSG_GETCHAIN) == 1:
            asked.append(0)
            deleted = "\n".join(f"delete chain inet pyebpf-proxy vip-{number}" for number in range(300))
            shell(f"nft -f - <<'END'\n{deleted}\nEND")
        return answer

    monkeypatch.setattr(RequestSocket, "send", noted)
    monkeypatch.setattr(RequestSocket, "receive", interrupted)
    assert set(closed()) == {4, 6}
    assert asked.count(uapi.NFT_MSG_GETCHAIN) == 2


@pytest.mark.parametrize(
    ("state", "closes"), [("limit rate 5/second", True), ("counter", False), ('comment "a limit"', False)]
)
def test_an_element_of_a_set_may_have_a_limit_of_its_own(state: str, closes: bool, shell: Shell) -> None:
    shell("""nft 'table inet mine {
        set some { type ipv4_addr; flags dynamic; elements = { 192.0.2.1, 192.0.2.2 } }
        chain forward { type filter hook forward priority 0; ip saddr @some accept; }
    }'""")
    assert closed() == {}
    shell(f"nft 'add element inet mine some {{ 192.0.2.3 {state} }}'")
    found = closed()
    assert set(found) == ({4} if closes else set())
    assert all("a limit or quota of an element of set some" in text for text in found.values())
    assert bool({name for _, _, name in kernel.read().maps}), "its elements are part of the rules"


@pytest.mark.parametrize(
    ("rule", "empty", "filled"),
    [
        ("ip saddr @some log", set(), {4}),
        ("ip daddr @some limit rate 5/second accept", set(), {4}),
        ("ip saddr != @some log", {4}, {4}),
        ("ip saddr @some ip daddr @other log", set(), set()),
        ("ip saddr @ranges log", set(), set()),
        ("ip saddr @expiring log", {4}, {4}),
        ("ip saddr @added log", {4}, {4}),
    ],
)
def test_a_rule_for_the_elements_of_an_empty_set_closes_nothing(
    rule: str, empty: set[int], filled: set[int], shell: Shell
) -> None:
    """Except for a set to which packets add, or whose elements expire."""
    shell(f"""nft 'table inet mine {{
        set some {{ type ipv4_addr; }}
        set other {{ type ipv4_addr; }}
        set ranges {{ type ipv4_addr; flags interval; }}
        set expiring {{ type ipv4_addr; flags timeout; }}
        set added {{ type ipv4_addr; flags dynamic; }}
        chain forward {{ type filter hook forward priority 0; {rule}; }}
    }}'""")
    assert set(closed()) == empty
    shell("nft 'add element inet mine some { 192.0.2.1 }'")
    assert set(closed()) == filled
    shell("nft 'add element inet mine other { 192.0.2.1 }; add element inet mine ranges { 192.0.2.0/24 }'")
    assert set(closed()) == {4} if "@some" not in rule or "other" in rule else filled
    shell("nft 'flush set inet mine some; flush set inet mine other; flush set inet mine ranges'")
    assert set(closed()) == empty


def test_of_a_large_set_only_the_beginning_is_read(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    elements = ", ".join(f"10.0.{number // 250}.{number % 250}" for number in range(5000))
    shell(f"""nft -f - <<'END'
table inet mine {{
    set some {{ type ipv4_addr; elements = {{ {elements} }}; }}
    chain forward {{ type filter hook forward priority 0; ip saddr @some log; }}
}}
END""")
    received = 0
    receive = RequestSocket.receive

    def counted(self: RequestSocket) -> bytes:
        nonlocal received
        answer = receive(self)
        received += len(answer)
        return answer

    monkeypatch.setattr(RequestSocket, "receive", counted)
    assert set(closed()) == {4}
    assert received < 20_000, "all elements have 80 000 bytes"


#: Rules for forwarded packets, and the families in which only a commit changes what they do to a pair of a permit.
LASTING = {
    "nothing": ("", {4, 6}),
    "addresses and ports": ("ip saddr 10.0.0.1 tcp dport { 80, 443 } ct state new drop", {4, 6}),
    "devices": ("iifname eth0 oifname != lo meta mark & 1 == 0 fib daddr type local drop", {4, 6}),
    "a set": ("ip saddr @fixed drop", {4, 6}),
    "a verdict map": ("ip saddr vmap @chains", {4, 6}),
    "the hour": ("meta hour 8-18 drop", set()),
    "the day": ("meta day Sunday drop", set()),
    "a cgroup": ("meta cgroup 7 drop", set()),
    "the owner of a socket": ("meta skuid 7 drop", set()),
    "elements that expire": ("ip saddr @expiring drop", set()),
    "elements that packets add": ("ip saddr @changing drop", set()),
    "verdicts that expire": ("ip saddr vmap @expiring_chains", set()),
}


@pytest.mark.parametrize("name", LASTING)
def test_rules_that_only_a_commit_changes(name: str, shell: Shell) -> None:
    rule, families = LASTING[name]
    shell(f"""nft -f - <<'END'
table inet mine {{
    set fixed {{ type ipv4_addr; elements = {{ 192.0.2.1 }}
    }}
    set expiring {{ type ipv4_addr; flags timeout;
    }}
    set changing {{ type ipv4_addr; flags dynamic;
    }}
    map chains {{ type ipv4_addr : verdict; elements = {{ 192.0.2.1 : drop }}
    }}
    map expiring_chains {{ type ipv4_addr : verdict; flags timeout;
    }}
    chain forward {{ type filter hook forward priority 0; {rule}
    }}
}}
END""")
    assert kernel.read().lasting == families


#: The same for rules of iptables-nft, in both families.
LASTING_CONDITIONS = {
    "-p tcp -m multiport --dports 80,443 -m conntrack --ctstate NEW": True,
    "-i eth0 -m comment --comment words -m mark --mark 1 -m addrtype --dst-type LOCAL": True,
    "-m time --timestart 08:00 --timestop 18:00": False,
    "-m set --match-set names{family} dst": False,
}


@pytest.mark.parametrize("condition", LASTING_CONDITIONS)
def test_conditions_of_iptables_that_only_a_commit_changes(condition: str, shell: Shell) -> None:
    for family, tool in ((4, "iptables"), (6, "ip6tables")):
        if "--match-set" in condition:
            shell(f"ipset create names{family} hash:net family inet{'' if family == 4 else '6'}")
        rule = f"-A FORWARD {condition.format(family=family)} -j DROP"
        shell(f"{tool}-nft {rule}")
        assert (family in kernel.read().lasting) is LASTING_CONDITIONS[condition]
        shell(f"{tool}-nft -D{rule.removeprefix('-A')}")
        assert family in kernel.read().lasting


def test_changes_of_iptables_legacy_are_not_reported(shell: Shell) -> None:
    shell("iptables-legacy -A FORWARD -s 192.0.2.1 -j DROP")
    assert kernel.read().lasting == {6}


DROPPED = {
    "in the same rule": "tcp dport 23 log drop",
    "by the next one": "tcp dport 23 log\n tcp dport 23 drop",
    "with fewer conditions": "ip saddr 10.0.0.1 tcp dport 23 limit rate 1/second log\n tcp dport 23 counter reject",
    "by the policy": "tcp dport 80 accept\n limit rate 1/second log",
    "by a chain": "tcp dport 80 accept\n jump last",
    "behind the jump": "tcp dport 23 jump last\n tcp dport 23 drop\n accept",
}
PASSED = {
    "another port": "tcp dport 23 log\n tcp dport 24 drop\n accept",
    "more conditions": "tcp dport 23 log\n ip saddr 10.0.0.1 tcp dport 23 drop\n accept",
    "accepted before": "tcp dport 23 log\n ip saddr 10.0.0.1 accept\n tcp dport 23 drop",
    "accepted by a chain": "log\n jump web\n drop",
    "a limit that drops": "tcp dport 23 limit rate over 1/second drop\n accept",
    "a counter by a map": "ip saddr 10.0.0.0/8 log\n counter name ip saddr map @counters drop\n accept",
    "a mark by a map": "ip saddr 10.0.0.0/8 log\n meta mark set ip saddr map { 192.0.2.1 : 5 } drop\n accept",
    "a chain that returns": "tcp dport 23 jump last\n tcp dport 23 accept",
}


@pytest.mark.parametrize(
    ("rules", "is_open"),
    [(rules, True) for rules in DROPPED.values()] + [(rules, False) for rules in PASSED.values()],
    ids=[*DROPPED, *PASSED],
)
def test_a_log_before_a_drop_closes_nothing(rules: str, is_open: bool, shell: Shell) -> None:
    shell(f"""nft -f - <<'END'
    table inet mine {{
        counter one {{ }}
        map counters {{ type ipv4_addr : counter; elements = {{ 192.0.2.1 : "one" }} }}
        chain last {{
            log
        }}
        chain web {{
            tcp dport 80 accept
        }}
        chain forward {{
            type filter hook forward priority 0; policy drop;
            {rules}
        }}
    }}
END""")
    assert (closed() == {}) is is_open


@pytest.mark.parametrize("before", ["-j LOG", "-m hashlimit --hashlimit-above 5/sec --hashlimit-name a -j DROP"])
@pytest.mark.parametrize("drop", ["-f", "! -f", "-p udp -f", "! -i other"])
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_a_rule_that_drops_some_packets_does_not_drop_all(variant: str, drop: str, before: str, shell: Shell) -> None:
    """Fragments, for example: the rule before it must see the packets that are not dropped."""
    shell(f"iptables-{variant} -A FORWARD {before}; iptables-{variant} -A FORWARD {drop} -j DROP")
    assert set(closed()) == {4}


@pytest.mark.parametrize(
    ("mark", "rule", "closes"),
    [
        ("-j MARK --set-xmark 0x10000/0x10000", "fwmark 0x20000/0x20000", False),
        ("-j MARK --set-xmark 0x10000/0x10000", "fwmark 0x10000/0x10000", True),
        ("-j MARK --set-xmark 0x40000/0xff0000", "fwmark 0x80000/0xff0000", False),  # Tailscale's
        ("-j MARK --set-mark 7", "fwmark 7", True),
        ("-j MARK --set-mark 7", "fwmark 8", False),
        ("-j MARK --set-mark 7", "not fwmark 8", True),
        ("-j CONNMARK --restore-mark", "fwmark 8", False),
        ("-j CONNMARK --set-mark 8", "fwmark 8", False),
    ],
)
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_marks_close_the_fast_path_if_an_ip_rule_uses_them(
    variant: str, mark: str, rule: str, closes: bool, shell: Shell
) -> None:
    shell(f"iptables-{variant} -t mangle -A PREROUTING {mark}")
    assert closed() == {}, "no packet passes the rule"
    negated = "not " if rule.startswith("not ") else ""
    shell(f"ip rule add {negated}{rule.removeprefix('not ')} lookup 100")
    assert set(closed()) == ({4} if closes else set())


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_packets_with_connection_marks_of_aws_vpc_cni_prove_nothing(variant: str, shell: Shell) -> None:
    """They are restored for packets of pods, and an ip rule matches them. All flows of a pair have the same mark."""
    shell(aws_rules.commands(variant, variant))
    assert closed() == {}
    assert marks() == (0x80, 0)
    shell("ip rule del fwmark 0x80/0x80 lookup main")
    assert marks() == (0, 0), "no ip rule matches the mark"
    shell("ip rule add fwmark 0x80/0x80 lookup main")
    assert marks() == (0x80, 0)
    tool = f"iptables-{variant}"
    shell(f"{tool}-save | grep -v set-xmark | {tool}-restore")
    if variant == "nft":
        shell("nft flush chain ip aws-cni snat-mark")
    assert marks() == (0, 0), "no rule marks a connection"


#: Rules that give flows the mark 0x80, which is restored and used by an ip rule; whether all flows of a pair get it.
MARKED = {
    "by address": ("-t mangle -A PREROUTING -m addrtype --dst-type LOCAL -j CONNMARK --set-xmark 0x80/0x80", True),
    "new ones": ("-t mangle -A PREROUTING -m conntrack --ctstate NEW -j CONNMARK --set-mark 0x80", True),
    "unmarked ones": ("-t mangle -A PREROUTING -m connmark --mark 0 -j CONNMARK --set-mark 0x80", True),
    "in a chain": ("-t mangle -N X; {i} -t mangle -A PREROUTING -d 192.0.2.1 -j X; {i} -t mangle -A X {set}", True),
    "after a verdict": ("-t nat -A PREROUTING -d 192.0.2.1 -j RETURN; {i} -t nat -A PREROUTING {set}", True),
    "other bits": ("-t mangle -A PREROUTING {set}; {i} -t mangle -A PREROUTING -j MARK --set-xmark 4/4", True),
    "by source port": ("-t mangle -A PREROUTING -p tcp --sport 80 {set}", False),
    "later": ("-t mangle -A PREROUTING -m conntrack --ctstate ESTABLISHED {set}", False),
    "later, in a chain": (
        "-t mangle -N X; {i} -t mangle -A PREROUTING -m conntrack --ctstate ESTABLISHED -j X; {i} -t mangle -A X {set}",
        False,
    ),
    "some of them": ("-t nat -A PREROUTING -m statistic --mode random --probability 0.5 {set}", False),
    "some, after a verdict": (
        "-t nat -A PREROUTING -m statistic --mode random --probability 0.5 -j RETURN; {i} -t nat -A PREROUTING {set}",
        False,
    ),
    "packets": (
        "-t mangle -A PREROUTING -p udp -j MARK --set-xmark 0x80/0x80;"
        "{i} -t mangle -A PREROUTING -j CONNMARK --save-mark --mask 0x80",
        False,
    ),
}


@pytest.mark.parametrize("which", MARKED)
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_restored_marks_that_choose_routes(variant: str, which: str, shell: Shell) -> None:
    """They close the fast path unless all flows of a pair have the same: conntrack has none for a promoted flow."""
    rules, opens = MARKED[which]
    tool = f"iptables-{variant}"
    shell(f"{tool} -t mangle -A PREROUTING -j CONNMARK --restore-mark --mask 0x80")
    shell("ip rule add fwmark 0x80/0x80 lookup main")
    assert (closed(), marks()) == ({}, (0, 0))
    shell(f"{tool} {rules.format(i=tool, set='-j CONNMARK --set-xmark 0x80/0x80')}")
    assert set(closed()) == (set() if opens else {4})
    assert marks() == (0x80, 0)


@pytest.mark.parametrize(
    ("rule", "opens"),
    [
        ("ct mark set ct mark | 0x80", True),
        ("ip daddr 192.0.2.1 ct mark set 0x80", True),
        ("ip daddr @filled ct mark set 0x80", True),
        ("ip daddr @expiring ct mark set 0x80", False),
        ("meta hour 10:00-12:00 ct mark set 0x80", False),
        ("ip dscp 46 ct mark set 0x80", False),
        ("ct mark set numgen random mod 256", False),
    ],
)
def test_restored_marks_of_nftables_that_choose_routes(rule: str, opens: bool, shell: Shell) -> None:
    shell("ip rule add fwmark 0x80/0x80 lookup main; ip -6 rule add fwmark 0x40/0x40 lookup main")
    shell(f"""nft 'table inet mine {{
        set filled {{ type ipv4_addr; elements = {{ 192.0.2.1 }} }}
        set expiring {{ type ipv4_addr; flags timeout; }}
        chain a {{ type filter hook prerouting priority 0; {rule}; meta mark set ct mark; }}
    }}'""")
    assert bool(closed()) is not opens
    assert marks() == (0x80, 0x40)


@pytest.mark.parametrize("variant", ["nft", "legacy"])
@pytest.mark.parametrize("name", ["without-marks", "ipv6"])
def test_aws_vpc_cni_without_marks_keeps_the_fast_path_open(name: str, variant: str, shell: Shell) -> None:
    """With SNAT elsewhere and without its support of NodePorts, and in an IPv6 cluster."""
    shell(aws_rules.commands(name, variant))
    assert closed() == {}


@pytest.mark.parametrize(
    "rule",
    [
        "tcp flags & (fin | syn) == (fin | syn) drop",
        "tcp dport 1-1023 accept",
        "ct state established,related tcp sport 80 accept",
        "tcp sport 0 ct state established,related accept",
        "ct state established,related tcp sport 0 accept",
        "ct state ! new,untracked tcp sport 80 accept",
        "meta l4proto tcp ct original proto-dst 80 ct reply proto-src 8080 accept",
        "ip protocol tcp ip saddr 10.0.0.1 accept",
        "ip6 saddr fd00::/8 ip6 nexthdr udp drop",
        "ip6 saddr fd00::/8 drop",
        "ip frag-off & 0x1fff != 0 drop",
        "fib saddr . iif oif missing drop",
        "meta hour 10:00-12:00 drop",
        "ct mark 5 ct label 5 drop",  # which no rule sets
        "ip dscp 46 tcp sport 80 counter",
        "ct mark set ct mark or 1",
        "icmp type echo-request icmp id 7 drop",
    ],
)
def test_rules_that_mean_the_same_for_all_packets_of_two_hosts(rule: str, shell: Shell) -> None:
    shell(f"nft 'table inet mine {{ chain a {{ type filter hook forward priority 0; {rule}; }}; }}'")
    assert closed() == {}


@pytest.mark.parametrize(
    "rule",
    [
        "-p tcp --sport 80 -m conntrack --ctstate ESTABLISHED",
        "-p tcp --sport 80 -m state --state ESTABLISHED",
        "-p tcp -m conntrack --ctstate ESTABLISHED --ctproto tcp --ctorigsrcport 6000",
        "-p tcp -m conntrack --ctproto tcp --ctorigdstport 80 --ctreplsrcport 8080",
    ],
)
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_source_ports_of_replies_close_nothing(rule: str, variant: str, shell: Shell) -> None:
    shell(f"iptables-{variant} -A FORWARD {rule} -j ACCEPT")
    assert closed() == {}


@pytest.mark.parametrize(
    ("kind", "match", "closes"),
    [
        ("hash:ip,port", "src,src", True),
        ("hash:ip,port", "dst,src", True),
        ("hash:ip,port", "src,dst", False),
        ("hash:ip,port,net", "src,src,dst", True),
        ("hash:net,port", "src,dst", False),
        ("hash:net,iface", "src,src", False),
        ("hash:net", "src", False),
        ("bitmap:port range 0-1023", "src", True),
        ("bitmap:port range 0-1023", "dst", False),
        ("list:set", "src,src", True),
        ("list:set", "src", False),
    ],
)
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_ipsets_of_source_ports(variant: str, kind: str, match: str, closes: bool, shell: Shell) -> None:
    shell(f"ipset create another hash:ip; ipset create some {kind}")
    shell(f"iptables-{variant} -A FORWARD -p udp -m set --match-set some {match} -m conntrack --ctstate NEW -j DROP")
    found = closed()
    assert set(found) == ({4} if closes else set())
    assert all("source ports" in text for text in found.values())
    shell(f"iptables-{variant} -F FORWARD")
    shell(f"iptables-{variant} -A FORWARD -m set --match-set some {match} -m state --state ESTABLISHED -j DROP")
    assert closed() == {}


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_a_list_of_ipsets_with_a_bitmap_of_ports(variant: str, shell: Shell) -> None:
    shell("ipset create ports bitmap:port range 0-1023; ipset create some list:set; ipset add some ports")
    shell(f"iptables-{variant} -A FORWARD -p udp -m set --match-set some src -j DROP")
    assert "source ports" in closed()[4]


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_a_rule_that_sets_a_label_and_drops(variant: str, shell: Shell) -> None:
    shell(f"iptables-{variant} -A FORWARD -p udp --sport 53 -m connlabel --label 3 --set -j DROP")
    assert "source ports" in closed()[4]


def test_ipsets_that_cannot_be_listed_close_both_families(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell("ipset create some hash:ip,port; iptables -A FORWARD -p udp -m set --match-set some src,dst -j DROP")
    assert closed() == {}

    def refuse() -> dict[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(kernel, "_ipset_ports", refuse)
    found = closed()
    assert set(found) == {4, 6}
    assert all("Too many open files" in text for text in found.values())
    assert kernel.read().unread


@pytest.mark.parametrize(
    ("sets", "compares", "closes"),
    [
        ("-j CONNMARK --set-xmark 0x6/0xf", "-m connmark ! --mark 6/0xf -j DROP", True),
        ("-j CONNMARK --set-xmark 0x6/0xf", "-m connmark --mark 0x10/0xf0 -j DROP", False),
        ("-j CONNMARK --save-mark", "-m connmark --mark 6 -j RETURN", True),
        ("-j CONNMARK --set-mark 6", "-m connmark --mark 0 -j CONNMARK --set-mark 7", False),
        ("-m connlabel --label 3 --set", "-m connlabel ! --label 3 -j DROP", True),
        ("-m connlabel --label 3 --set", "-m connmark ! --mark 6 -j DROP", False),
        ("-p tcp", "-m connmark --mark 6 -j DROP", False),
    ],
)
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_what_rules_keep_in_conntrack_closes_the_fast_path_if_rules_compare_it(
    variant: str, sets: str, compares: str, closes: bool, shell: Shell
) -> None:
    """conntrack has no marks and labels for promoted flows."""
    shell(f"iptables-{variant} -t mangle -A PREROUTING -m conntrack --ctstate NEW {sets}")
    assert closed() == {}
    shell(f"iptables-{variant} -A FORWARD {compares}")
    assert set(closed()) == ({4} if closes else set())


@pytest.mark.parametrize(
    ("after", "closes"),
    [
        ("", False),
        ("-A FORWARD -m comment --comment later -j ACCEPT", False),
        ("-A FORWARD -j CONNMARK --set-mark 7", False),
        ("-A FORWARD -s 192.0.2.1 -j DROP", True),
        ("-A FORWARD -j MARK --set-mark 7", True),
        ("-P FORWARD DROP", True),
    ],
)
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_a_rule_that_accepts_what_its_chain_accepts_anyway(
    variant: str, after: str, closes: bool, shell: Shell
) -> None:
    shell(f"iptables-{variant} -t mangle -A PREROUTING -m conntrack --ctstate NEW -j CONNMARK --set-mark 6")
    shell(
        f"iptables-{variant} -A FORWARD -m connmark --mark 6 -j ACCEPT; test -z '{after}' || iptables-{variant} {after}"
    )
    assert set(closed()) == ({4} if closes else set())


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_marks_of_flows_that_are_restored_and_compared(variant: str, shell: Shell) -> None:
    mangle = f"iptables-{variant} -t mangle -A PREROUTING"
    shell(f"{mangle} -j CONNMARK --set-xmark 0x80/0x80; {mangle} -j CONNMARK --restore-mark --mask 0x80")
    shell(f"iptables-{variant} -A FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT")
    assert closed() == {}, "another bit"
    shell(f"iptables-{variant} -A FORWARD -m mark ! --mark 0x80/0x80 -j DROP")
    assert "restored from flows" in closed()[4]


@pytest.mark.parametrize(
    ("rule", "closes"),
    [
        ("meta mark set 0x100", True),
        ("meta mark set meta mark or 0x100", True),
        ("meta mark set meta mark and 0xff", False),
        ("meta mark set jhash ip saddr mod 9", True),
        ("meta mark set meta mark or 0x200", False),
        ("meta mark set 0x200", False),
    ],
)
def test_marks_of_nftables(rule: str, closes: bool, shell: Shell) -> None:
    shell("ip rule add fwmark 0x100/0x100 lookup 100")
    shell(f"nft 'table inet mine {{ chain a {{ type filter hook prerouting priority 0; {rule}; }}; }}'")
    assert set(closed()) == ({4} if closes else set())


def test_tc_filters_are_read_if_rules_set_marks(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/unit has filters by mark: not every kernel supports them."""
    seen: list[bytes] = []

    def note(message: bytes) -> bool:
        seen.append(message)
        return False

    monkeypatch.setattr(kernel, "goes_by_mark", note)
    shell("ip link add one type veth peer other; tc qdisc add dev other clsact")
    shell("tc qdisc add dev one root handle 1: htb; tc class add dev one parent 1: classid 1:6 htb rate 1mbit")
    for device, parent in (("one", "parent 1:"), ("other", "egress")):
        shell(f"tc filter add dev {device} {parent} protocol ip u32 match ip dport 80 0xffff flowid 1:6")
    assert closed() == {}
    assert seen == [], "no rule sets marks"
    shell("iptables -t mangle -A POSTROUTING -j MARK --set-mark 6")
    assert closed() == {}
    assert len(seen) == 6, "such a filter takes three messages"
    monkeypatch.setattr(kernel, "goes_by_mark", lambda message: True)
    assert "MARK" in closed()[4]


def test_tc_filters_of_classes_are_read(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell("""
        iptables -t mangle -A POSTROUTING -j MARK --set-mark 6
        ip link add one type veth peer other
        tc qdisc add dev one root handle 1: htb
        tc class add dev one parent 1: classid 1:1 htb rate 9mbit
        tc class add dev one parent 1:1 classid 1:6 htb rate 1mbit
        tc class add dev one parent 1:1 classid 1:7 htb rate 1mbit
        tc qdisc add dev one parent 1:7 handle 7: htb
        tc class add dev one parent 7: classid 7:1 htb rate 1mbit
    """)
    monkeypatch.setattr(kernel, "goes_by_mark", lambda message: kernel._kind(message) == "bpf")
    for parent in ("1:", "1:1", "7:", "7:1"):
        assert closed() == {}
        which = f"dev one parent {parent} protocol ip prio 5"
        shell(f"tc filter add {which} bpf bytecode '1,6 0 0 4294967295' flowid 1:6")
        assert "MARK" in closed()[4], parent
        shell(f"tc filter del {which}")


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_rules_for_a_device_that_the_fast_path_never_uses(variant: str, shell: Shell) -> None:
    """Tailscale and PPP set the maximum segment size of packets to the tunnel."""
    shell("ip tuntap add tun0 mode tun; ip link add tun1 type veth peer other")
    clamp = f"iptables-{variant} -t mangle -%s FORWARD %s -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu"
    for devices, closes in {
        "-o tun0": False,
        "-i tun0": False,
        "-i lo -o other": False,
        "-o tun1": True,
        "-o tun+": True,
        "! -o tun0": True,
        "-o tun00": True,
    }.items():
        shell(clamp % ("A", devices))
        assert bool(closed()) is closes, devices
        shell(clamp % ("D", devices))


def test_reading_creates_no_tables(shell: Shell) -> None:
    shell("iptables-legacy -A FORWARD -j LOG")
    assert "iptables-legacy table filter, chain FORWARD, rule 1: LOG" in closed()[4]
    assert shell("cat /proc/net/ip_tables_names /proc/net/ip6_tables_names").split() == ["filter"]


def test_the_tables_of_the_agent_and_of_kube_proxy_are_ignored(shell: Shell) -> None:
    rules = "{ chain a { type filter hook forward priority 0; log; }; }"
    shell(f"nft 'table inet pyebpf-proxy {rules}; table inet pyebpf-proxy-two {rules}; table ip kube-proxy {rules}'")
    assert closed() == {}
    shell(f"nft 'table inet kube-proxy {rules}'")
    assert set(closed()) == {4, 6}


def test_a_dormant_table(shell: Shell) -> None:
    shell("nft 'table inet mine { flags dormant; chain a { type filter hook forward priority 0; log; }; }'")
    assert closed() == {}
