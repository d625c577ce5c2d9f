# SPDX-License-Identifier: Apache-2.0
"""Remedies of ``status`` and ``doctor`` if nftables cannot be read, or its table is missing; how full conntrack is."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.see import explain, facts, model, status
from pyebpf_proxy.see.doctor import checks


@pytest.mark.parametrize(
    ("writable", "remedy"),
    [(True, "apt-get install python3-nftables"), (False, "nothing can be installed here; use an image built from")],
)
def test_without_the_binding_the_remedy_is_possible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, writable: bool, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, "nftables", None)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    (finding,) = checks._mark_users(tmp_path, 0x4000)
    assert (finding.state, finding.text) == ("warning", "python3-nftables is not installed")
    assert finding.remedy.startswith(remedy)


def test_with_the_binding_nothing_has_to_be_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(command: str) -> list[dict[str, Any]]:
        raise OSError("nftables: Operation not permitted")

    # The spec only means that the module can be imported.
    monkeypatch.setattr(facts, "find_spec", lambda name: object())
    monkeypatch.setattr(facts, "nft", refused)
    (finding,) = checks._mark_users(tmp_path, 0x4000)
    assert "install" not in finding.remedy


def test_status_reports_why_it_cannot_read_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(directory: Path) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(facts, "nft_rules", refused)
    (trouble,) = status._about_netfilter(tmp_path)
    assert trouble.what == "the nftables table cannot be read: Operation not permitted"
    assert "as root" in trouble.remedy


@pytest.mark.parametrize(("rules", "word"), [(None, "missing"), (0, "empty")])
def test_a_lost_table_is_restored_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rules: int | None, word: str
) -> None:
    monkeypatch.setattr(facts, "nft_rules", lambda directory: rules)
    (trouble,) = status._about_netfilter(tmp_path)
    assert f"is {word}:" in trouble.what
    assert trouble.remedy.startswith("a running agent restores it at once")


@pytest.mark.parametrize(
    ("limit", "state", "text", "is_full"),
    [(100, "bad", "90 of 100 entries in use", False), (90, "bad", "90 of 90 entries in use", True)],
    ids=["nearly full", "full"],
)
def test_conntrack_is_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int, state: str, text: str, is_full: bool
) -> None:
    (finding, fill) = conntrack(monkeypatch, tmp_path, limit)
    assert (finding.state, finding.text, fill.is_full()) == (state, text, is_full)


def test_conntrack_without_a_limit_is_never_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel takes nf_conntrack_max = 0 for no limit, and kube-proxy's maxPerCore: 0 leaves it so."""
    (finding, fill) = conntrack(monkeypatch, tmp_path, 0)
    assert (finding.state, finding.text) == ("good", "entries in use: 90, without a limit")
    assert status._fill_text(fill) == ("90, without a limit", "")
    view = served()
    explain._add_full_conntrack(view)
    assert (view.verdict, view.steps) == ("served", [])


def conntrack(monkeypatch: pytest.MonkeyPatch, folder: Path, limit: int) -> tuple[model.Finding, model.Fill]:
    """What doctor finds, with 90 entries."""
    (folder / "nf_conntrack_count").write_text("90\n")
    (folder / "nf_conntrack_max").write_text(f"{limit}\n")
    monkeypatch.setattr(facts, "_NETFILTER", folder)
    fill = facts.conntrack_fill()
    assert fill is not None
    return next(iter(checks._conntrack())), fill


def served() -> model.Explanation:
    return model.Explanation(
        source="198.51.100.2:49152",
        destination="203.0.113.10:80",
        protocol="TCP",
        device="eth0",
        service="default/web:http",
        frontend="LoadBalancer",
        verdict="served",
        reason="",
        steps=[],
        endpoints=[],
        left_out=[],
        program=model.ProgramView(ran=True),
        disagreements=[],
    )
