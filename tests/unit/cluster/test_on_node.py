# SPDX-License-Identifier: Apache-2.0
"""What task pods say where kube-proxy's rules cannot be read, or stay."""

from __future__ import annotations

import pytest

from pyebpf_proxy.cluster import on_node
from pyebpf_proxy.cluster.on_node import Place
from pyebpf_proxy.datapath.migration import iptables, leftovers, nftables
from pyebpf_proxy.datapath.report import Report

WHY = "iptables-legacy-save: Permission denied (you must be root)"
SERVICE = "-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 443 -j KUBE-SVC-NPX46M4PTMTKRN6Y\n"
MARK = "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000\n"


def rules(monkeypatch: pytest.MonkeyPatch, nft: str = "", legacy: str | None = "") -> None:
    """What iptables has; ``legacy``: None if it cannot be read."""

    def saved(variant: iptables.Variant) -> str:
        if variant.kind == "legacy" and legacy is None:
            raise iptables.ToolError(WHY)
        return (nft if variant.kind == "nft" else legacy or "") if variant.family == 4 else ""

    monkeypatch.setattr(iptables, "saved", saved)
    monkeypatch.setattr(nftables, "present", list)


def test_rules_that_cannot_be_read_are_no_missing_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    rules(monkeypatch, legacy=None)
    problems = on_node.await_rules([Place("10.96.0.1", 443)], patience=0)
    assert problems == [
        "kube-proxy has no rule for the Service at 10.96.0.1",
        *(f"rules cannot be read: iptables-legacy IPv{family}: {WHY}" for family in (4, 6)),
    ]
    assert f"kube-proxy's rules cannot be read: iptables-legacy IPv4: {WHY}" in on_node.fit()
    # Where the others have the rule, all is well.
    rules(monkeypatch, nft=SERVICE, legacy=None)
    assert on_node.await_rules([Place("10.96.0.1", 443)], patience=0) == []


@pytest.mark.parametrize(("left", "fails"), [(MARK, False), (SERVICE, True)])
def test_only_rules_of_services_must_not_stay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], left: str, fails: bool
) -> None:
    rules(monkeypatch, nft=left)
    kept = "iptables-nft IPv4: table nat: chain KUBE-MARK-MASQ stays, because a rule of another program uses it: …"
    monkeypatch.setattr(leftovers, "remove", lambda *_, **__: Report(problems=[kept]))
    problems = on_node.remove_rules()
    said = capsys.readouterr().out
    if fails:
        assert problems == ["iptables-nft IPv4: rules of kube-proxy for Services remain", kept]
    else:
        assert (problems, said) == ([], f"warning: {kept}\n")


def test_what_the_firewall_must_accept_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agent's log does not have it if this program has removed the rule."""
    rules(monkeypatch)
    monkeypatch.setattr(leftovers, "remove", lambda *_, **__: Report(warnings=["INPUT drops"]))
    assert on_node.remove_rules() == []
    assert capsys.readouterr().out == "warning: INPUT drops\n"


def test_places_of_a_command_line() -> None:
    words = ["10.96.0.10", "53", "10.96.0.10", "53/UDP", "fd00::a", "443"]
    places = on_node.places_of(words)
    assert places == [Place("10.96.0.10", 53), Place("10.96.0.10", 53, True), Place("fd00::a", 443)]
    assert " ".join(place.argument for place in places).split() == words
