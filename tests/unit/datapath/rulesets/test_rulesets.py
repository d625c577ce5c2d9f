# SPDX-License-Identifier: Apache-2.0
"""The kernel's answers about rulesets (recorded by tests/netns/attach/record_rulesets.py), and their evaluation."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from dataclasses import replace
from typing import Any

import pytest

from pyebpf_proxy.datapath.netlink.messages import attribute
from pyebpf_proxy.datapath.node import policy_routing
from pyebpf_proxy.datapath.rulesets import kernel, legacy, nft, xtables
from pyebpf_proxy.datapath.rulesets.expressions import expressions
from pyebpf_proxy.datapath.rulesets.judge import judge
from pyebpf_proxy.datapath.rulesets.model import Chain, Kind, Mark, Part, Rule, Rulesets, Table
from pyebpf_proxy.datapath.rulesets.watch import Commits
from tests import ROOT

RECORDED: dict[str, Any] = json.loads((ROOT / "tests" / "unit" / "recordings" / "rulesets.json").read_text())


def messages(texts: list[str]) -> list[bytes]:
    return [base64.b64decode(each) for each in texts]


def blobs(name: str) -> list[tuple[int, legacy.Info, bytes]]:
    return [
        (
            each["family"],
            legacy.info(zlib.decompress(base64.b64decode(each["info"]))),
            zlib.decompress(base64.b64decode(each["blob"])),
        )
        for each in RECORDED[name]["legacy"]
    ]


def tables(name: str) -> list[Table]:
    recorded = RECORDED[name]
    found = nft.tables(messages(recorded["tables"]))
    nft.add_chains(found, messages(recorded["chains"]))
    for each in recorded["of"]:
        table = found[each["table"][0], each["table"][1]]
        for of_map in nft.add_sets(table, messages(each["sets"])):
            nft.add_elements(table, of_map, messages(each["elements"][of_map]))
        nft.add_rules(table, messages(each["rules"]), {})
    return [*found.values(), *(legacy.table(*each, {}) for each in blobs(name))]


def closed(*found: Table, marks: dict[int, list[Mark]] | None = None) -> dict[int, str]:
    verdicts = judge(Rulesets(list(found), marks or {}))
    return {family: str(verdict) for family, verdict in verdicts.items() if verdict.closes}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_rulesets_keep_the_fast_path_open(name: str) -> None:
    found = tables(name)
    assert sum(len(chain.rules) for table in found for chain in table.chains.values()) > 1
    assert closed(*found) == {}


@pytest.mark.parametrize("name", RECORDED)
def test_nothing_recorded_is_unknown(name: str) -> None:
    parts = [
        part for table in tables(name) for chain in table.chains.values() for rule in chain.rules for part in rule.parts
    ]
    assert [part for part in parts if part.kind is Kind.UNKNOWN] == []
    assert {Kind.CONDITION, Kind.IGNORED} & {part.kind for part in parts}


@pytest.mark.parametrize(
    ("name", "chain"),
    [("ufw by iptables-legacy", "FORWARD"), ("ufw by ip6tables-legacy", "FORWARD"), ("plain", "forward")],
)
def test_the_same_with_a_policy_that_accepts(name: str, chain: str) -> None:
    """Then packets that are logged at the end are not dropped."""
    found = tables(name)
    for table in found:
        table.chains[chain].policy_drops = False
    assert closed(*found)


@pytest.mark.parametrize("name", [name for name in RECORDED if "kube-router" in name])
def test_a_log_without_the_rule_that_refuses(name: str) -> None:
    (found,) = tables(name)
    chain = found.chains["KUBE-POD-FW-AAAA"]
    chain.rules = [rule for rule in chain.rules if not any(part.kind is Kind.DROP for part in rule.parts)]
    assert "chain KUBE-POD-FW-AAAA, rule" in closed(found)[4]


@pytest.mark.parametrize("mask", [0x10000, 0x20000])
def test_marks_of_a_policy_controller_and_a_rule_of_routing(mask: int) -> None:
    (found,) = tables("kube-router by iptables-legacy")
    marks = {4: [Mark(mask, mask)]}
    assert "MARK" in closed(found, marks=marks)[4]
    assert closed(found, marks={4: [Mark(0x40000, 0x40000)]}) == {}


def test_a_blob_that_is_cut_is_refused() -> None:
    family, info, blob = blobs("ufw by iptables-legacy")[0]
    broken = blob[:84] + b"\0" * 8 + blob[92:]
    for data in (broken,):
        with pytest.raises(ValueError, match="an entry at 0 of"):
            legacy.table(family, info, data, {})


def test_the_digest_is_of_the_rules_and_not_of_their_counters() -> None:
    family, _, blob = blobs("ufw by iptables-legacy")[0]
    counted = blob[:96] + b"\7" * 16 + blob[112:]
    assert legacy.digest(family, counted) == legacy.digest(family, blob)
    assert legacy.digest(family, b"\7" + blob[1:]) != legacy.digest(family, blob)


# ---- single expressions --------------------------------------------------------------------------------------------


def expression(name: str, *parts: bytes) -> Part:
    inner = attribute(1, name.encode() + b"\0") + attribute(2, b"".join(parts), nested=True)
    data = attribute(1, inner, nested=True)
    (part,) = expressions(data, 0, len(data), {})
    return part


@pytest.mark.parametrize("name", ["flow_offload", "queue", "synproxy", "tproxy", "dup", "fwd"])
def test_expressions_that_take_packets_elsewhere(name: str) -> None:
    assert expression(name).kind is Kind.TAKES


@pytest.mark.parametrize("name", ["quantum", "match", "target"])
def test_unknown_expressions_close(name: str) -> None:
    part = expression(name, attribute(1, b"NDPI\0"), attribute(2, b"\0\0\0\1"))
    assert part.kind is Kind.UNKNOWN
    assert "unknown" in part.words
    assert "unknown" in closed(forward(part))[6]


@pytest.mark.parametrize(("name", "kind"), [("geoip", Kind.CONDITION), ("quota2", Kind.COUNTS), ("u32", Kind.INSPECTS)])
def test_matches_of_iptables(name: str, kind: Kind) -> None:
    assert xtables.match(name, 0, b"").kind is kind


@pytest.mark.parametrize("revision", [0, 1])
def test_an_accounting_object_may_have_a_quota(revision: int) -> None:
    """The rule does not show it. kube-proxy's own objects only count."""
    quota = xtables.match("nfacct", revision, b"monthly".ljust(40, b"\0"))
    assert (quota.kind, quota.words) == (Kind.COUNTS, "nfacct monthly, which may have a quota")
    for name in (b"ct_state_invalid_dropped_pkts", b"localhost_nps_accepted_pkts"):
        assert xtables.match("nfacct", revision, name.ljust(40, b"\0")).kind is Kind.IGNORED


def test_a_set_whose_counters_are_compared() -> None:
    plain = struct.pack("=HBBxxxxQB7xQB7xI", 1, 1, 1, 0, 0, 0, 0, 0)
    assert xtables.match("set", 4, plain).kind is Kind.CONDITION
    over = struct.pack("=HBBxxxxQB7xQB7xI", 1, 1, 1, 100, 4, 0, 0, 0)
    assert xtables.match("set", 4, over).kind is Kind.COUNTS


def forward(*parts: Part, name: str = "table") -> Table:
    return Table(name, frozenset({4, 6}), {"forward": Chain("forward", hook=True, rules=[Rule("1", parts)])})


def test_further_rules_are_counted_in_the_reason() -> None:
    table = forward(Part(Kind.LOGS, "log"))
    table.chains["forward"].rules *= 8
    assert closed(table)[4].endswith("; and 3 more rules")


def test_unreadable_rules_close() -> None:
    verdicts = judge(Rulesets(unread={6: ["ip6tables-legacy could not be read: no"]}))
    assert not verdicts[4].closes
    assert str(verdicts[6]) == "ip6tables-legacy could not be read: no"


def test_chains_that_jump_in_a_circle_end() -> None:
    """The kernel rejects them; a read during a change may show them."""
    log = Rule("1", (Part(Kind.LOGS, "log"),))
    table = forward(Part(Kind.JUMP, target="one"))
    table.chains["one"] = Chain("one", rules=[log, Rule("2", (Part(Kind.JUMP, target="two"),))])
    table.chains["two"] = Chain("two", rules=[Rule("1", (Part(Kind.JUMP, target="one"),))])
    assert "chain one" in closed(table)[4]


def test_tables_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[Table]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(kernel, "_nft", refuse)
    monkeypatch.setattr(kernel, "_names", refuse)
    verdicts = kernel.read().verdicts
    assert "nftables could not be read: [Errno 1] Operation not permitted" in str(verdicts[4])
    assert "iptables-legacy could not be read: [Errno 1] Operation not permitted" in str(verdicts[6])


# ---- users of marks -------------------------------------------------------------------------------------------------


def tc_filter(kind: str, options: bytes = b"") -> bytes:
    head = struct.pack("=BxxxiIII", 0, 3, 0, 0x10000, 0)
    return head + attribute(1, kind.encode() + b"\0") + attribute(2, options)


def test_tc_filters() -> None:
    selector = attribute(5, bytes(32))
    assert kernel.goes_by_mark(tc_filter("fw"))
    assert kernel.goes_by_mark(tc_filter("u32", selector + attribute(10, bytes(12))))
    assert not kernel.goes_by_mark(tc_filter("u32", selector))
    assert not kernel.goes_by_mark(tc_filter("bpf"))


def test_an_attribute_of_a_rule_of_routing_that_is_not_known_selects() -> None:
    head = struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 0, 0, 0, 1, 2)
    plain = policy_routing.parse(head + attribute(6, struct.pack("=I", 7)) + attribute(10, struct.pack("=I", 3)))
    assert plain == policy_routing.RoutingRule(7, "", 3, 0xFFFFFFFF, inverted=True)
    assert policy_routing.parse(head + attribute(99, b"1234")).selects == "unknown attribute 99"


def test_a_mark_for_an_inverted_rule() -> None:
    part = Part(Kind.MARK, "MARK", number=0xFF, value=1)
    inverted = Mark(2, 0xFF, inverted=True)
    assert closed(forward(part), marks={4: [inverted], 6: [replace(inverted, inverted=False)]}).keys() == {4}


# ---- commits -------------------------------------------------------------------------------------------------------


def reported(kind: int, family: int = 1, *names: str) -> bytes:
    body = bytes([family, 0, 0, 0]) + b"".join(attribute(n, name.encode() + b"\0") for n, name in enumerate(names, 1))
    return struct.pack("=IHHII", 16 + len(body), 10 << 8 | kind, 0, 0, 0) + body + bytes(-len(body) % 4)


NEW_RULE, NEW_ELEMENT, NEW_GENERATION = 6, 12, 15
END = reported(NEW_GENERATION)
AGENTS = reported(NEW_ELEMENT, 1, "agent", "backends4")
MAPS = frozenset({(1, "foreign", "verdicts")})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (AGENTS + AGENTS + END, (False, False)),
        (AGENTS + END + END, (True, True)),  # no message about the second commit
        (reported(NEW_RULE, 2, "agent", "a") + END, (True, True)),  # of another family
        (reported(NEW_RULE, 1, "foreign", "a") + END, (True, True)),
        (reported(NEW_ELEMENT, 1, "foreign", "blocked") + END, (True, False)),
        (reported(NEW_ELEMENT, 1, "foreign", "verdicts") + END, (True, True)),
        (AGENTS + reported(NEW_RULE, 1, "foreign", "a") + AGENTS + END, (True, True)),
        (reported(NEW_RULE, 1, "foreign", "a"), (False, False)),  # its end is still to come
    ],
)
def test_whether_a_commit_was_the_agents(data: bytes, expected: tuple[bool, bool]) -> None:
    assert Commits("agent").take(data, MAPS) == expected


def test_a_commit_in_several_reads() -> None:
    commits = Commits("agent")
    assert commits.take(reported(NEW_RULE, 1, "foreign", "a") + AGENTS, MAPS) == (False, False)
    assert commits.take(AGENTS, MAPS) == (False, False)
    assert commits.take(END + AGENTS + END, MAPS) == (True, True)
    assert commits.take(AGENTS + END, MAPS) == (False, False)
