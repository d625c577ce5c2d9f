# SPDX-License-Identifier: Apache-2.0
"""Remedies of ``status`` and ``doctor`` if nftables cannot be read, or the agent's table is missing."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.see import doctor, facts, status


@pytest.mark.parametrize(
    ("writable", "remedy"),
    [(True, "apt-get install python3-nftables"), (False, "nothing can be installed here; use an image built from")],
)
def test_without_the_binding_the_remedy_is_possible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, writable: bool, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, "nftables", None)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    (finding,) = doctor._mark_users(tmp_path, 0x4000)
    assert (finding.state, finding.text) == ("warning", "python3-nftables is not installed")
    assert finding.remedy.startswith(remedy)


def test_with_the_binding_nothing_has_to_be_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(command: str) -> list[dict[str, Any]]:
        raise OSError("nftables: Operation not permitted")

    # The spec only means that the module can be imported.
    monkeypatch.setattr(facts, "find_spec", lambda name: object())
    monkeypatch.setattr(facts, "nft", refused)
    (finding,) = doctor._mark_users(tmp_path, 0x4000)
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
