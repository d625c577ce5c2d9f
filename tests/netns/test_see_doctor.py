# SPDX-License-Identifier: Apache-2.0
"""``doctor`` on a node of the lab: first it finds nothing; then it finds what is broken, with the fix."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping

import pytest

from pyebpf_proxy.datapath.loader.libbpf import BpfError
from pyebpf_proxy.lab.cluster import Lab, Node
from pyebpf_proxy.see.doctor import checks, loading
from tests.support.lab_services import write_nodes
from tests.support.see_tools import answer, see

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """Without an agent: doctor runs before an installation too."""
    with Lab(nodes=1) as lab:
        write_nodes(lab)
        yield lab.nodes[0]


def findings(node: Node, status: int) -> dict[str, dict[str, str]]:
    return {each["what"]: each for each in answer(node, "doctor", status=status)["findings"]}


def test_a_machine_that_can_carry_services(node: Node) -> None:
    ran = see(node, "doctor", COLUMNS="60")
    assert max(map(len, ran.stdout.splitlines())) <= 60
    found = findings(node, ran.returncode)
    loaded = ("programs", "conntrack lookup", "socket programs", "socketLB: all", "fast path", "XDP")
    for what in (
        "kernel",
        "BTF",
        "libbpf",
        "BPF objects",
        "rights",
        *loaded,
        "fast path, IPv4",
        "fast path, IPv6",
        "devices",
        "cgroup2",
        "kube-proxy",
        "masquerade bit",
    ):
        assert found[what]["state"] == "good", found[what]
    assert all(each["remedy"] for each in found.values() if each["state"] != "good")
    assert node.namespace.run("nft", "list", "ruleset") == ""


def test_optional_features_are_not_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CAP_SYS_ADMIN programs cannot look up a modular conntrack: no Service needs that."""
    load = loading.attempt

    def attempt(program: str, settings: Mapping[str, int]) -> None:
        if settings["conntrack_lookup"]:
            raise BpfError(f"load {program}", errno.EINVAL, "bpf_skb_ct_lookup")
        load(program, settings)

    monkeypatch.setattr(loading, "attempt", attempt)
    found = {each.what: each for each in checks._programs()}
    assert {each.state for each in found.values()} == {"good"}
    assert found["conntrack lookup"].text.startswith("not available, not required: the kernel rejects it: ")


def test_the_reason_that_closes_the_fast_path_is_named(node: Node) -> None:
    """As the agent sees it: a rule with a quota, an ip rule that selects by ports, another program on a device."""
    findings(node, see(node, "doctor").returncode)
    run = node.namespace.run
    run("nft", "add", "table", "ip", "counting")
    run("nft", "add", "chain", "ip", "counting", "forward", "{ type filter hook forward priority 0; }")
    run(
        "nft",
        "add",
        "rule",
        "ip",
        "counting",
        "forward",
        "tcp",
        "dport",
        "8080",
        "quota",
        "over",
        "10",
        "mbytes",
        "drop",
    )
    run("ip", "-6", "rule", "add", "dport", "443", "lookup", "main", "pref", "99")
    run("tc", "qdisc", "add", "dev", "eth0", "clsact")
    run("tc", "filter", "add", "dev", "eth0", "ingress", "bpf", "bytecode", "1,6 0 0 0,")
    try:
        found = [each for each in answer(node, "doctor", status=1)["findings"] if each["state"] != "good"]
        texts = {each["what"]: each["text"] for each in found}
        assert texts["fast path, IPv4"].startswith("closed by other rules: ")
        assert "counting" in texts["fast path, IPv4"]
        assert texts["fast path, IPv6"] == "closed: ip rule 99 selects by destination port"
        assert texts["devices"].startswith("the fast path does not use eth0: after the agent's program: clsact ")
        assert all(each["remedy"] for each in found)
    finally:
        run("nft", "delete", "table", "ip", "counting")
        run("ip", "-6", "rule", "del", "pref", "99")
        run("tc", "qdisc", "del", "dev", "eth0", "clsact")
    whats = {
        each["what"]: each["state"]
        for each in answer(node, "doctor", status=see(node, "doctor").returncode)["findings"]
    }
    assert (whats["fast path, IPv4"], whats["fast path, IPv6"], whats["devices"]) == ("good", "good", "good")


def test_the_masquerade_bit_is_used_by_other_rules(node: Node) -> None:
    node.namespace.run("nft", "add table inet firewall")
    node.namespace.run("nft", "add chain inet firewall forward { type filter hook forward priority 0; }")
    node.namespace.run("nft", "add rule inet firewall forward meta mark set 0x8000")
    before = {each["what"]: each["state"] for each in json.loads(see(node, "doctor", "-o", "json").stdout)["findings"]}
    assert before["masquerade bit"] == "good"
    node.namespace.run("nft", "add rule inet firewall forward meta mark set meta mark or 0x4000")
    try:
        found = findings(node, 1)["masquerade bit"]
        assert found["text"].startswith("0x4000 is also set by other rules: inet firewall forward")
        assert "masqueradeBit" in found["remedy"]
    finally:
        node.namespace.run("nft", "delete table inet firewall")


def test_disabled_forwarding_and_rules_of_kube_proxy_are_named(node: Node) -> None:
    node.namespace.sysctl({"net.ipv4.ip_forward": 0})
    node.namespace.run("nft", "add table ip kube-proxy")
    node.namespace.run("nft", "add chain ip kube-proxy services")
    try:
        found = findings(node, 1)
        assert found["net.ipv4.ip_forward"]["remedy"] == "sysctl -w net.ipv4.ip_forward=1"
        assert found["kube-proxy"]["text"] == "rules of kube-proxy exist, mode nftables"
    finally:
        node.namespace.sysctl({"net.ipv4.ip_forward": 1})
        node.namespace.run("nft", "delete table ip kube-proxy")
