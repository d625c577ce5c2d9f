# SPDX-License-Identifier: Apache-2.0
"""``doctor``: replies between two ports of a bridge that netfilter does not see, and other proxies' pins."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.loader.libbpf import BpfError
from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.datapath.node.plan import State
from pyebpf_proxy.see import model
from pyebpf_proxy.see.doctor import checks, loading
from pyebpf_proxy.see.programs import Programs

NAME = "bridge-nf-call-iptables"


def found(monkeypatch: pytest.MonkeyPatch, folder: Path, value: str) -> list[model.Finding]:
    (folder / "net/bridge").mkdir(parents=True)
    (folder / "net/bridge" / NAME).write_text(f"{value}\n")
    monkeypatch.setattr(checks, "_PROC", folder)
    return list(checks._bridges(folder))


def refuse(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    def attempt(program: str, settings: Mapping[str, int]) -> None:
        assert settings["conntrack_lookup"]
        if refused:
            raise BpfError(f"load {program}", errno.EINVAL, "bpf_skb_ct_lookup")

    monkeypatch.setattr(loading, "attempt", attempt)


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("lookup", [True, False])
def test_bridged_replies_need_the_lookup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attached: bool, lookup: bool
) -> None:
    """The attached programs count. Another process may load programs that the agent may not."""
    refuse(monkeypatch, lookup if attached else not lookup)
    settings = {"conntrack_lookup": lookup} if attached else None
    monkeypatch.setattr(checks, "_attached", lambda directory: Programs([], settings, [], State()))
    (finding,) = found(monkeypatch, tmp_path, "0")
    assert (finding.what, finding.state) == (NAME, "good" if lookup else "warning")
    assert finding.remedy == ("" if lookup else "sysctl -w net.bridge.bridge-nf-call-iptables=1")
    assert ("are not translated" in finding.text) is not lookup


def test_bridged_replies_that_netfilter_translates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuse(monkeypatch, True)
    monkeypatch.setattr(checks, "_attached", lambda directory: None)
    assert found(monkeypatch, tmp_path, "1") == []


def test_without_the_module_there_is_no_such_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "_PROC", tmp_path)
    assert list(checks._bridges(tmp_path)) == []


#: Of Cilium 1.18: these exist in any case.
_CILIUM = ("cilium_lb4_services_v2", "cilium_lb4_backends_v3", "cilium_ct4_global", "cilium_calls_hostns_00123")


@pytest.mark.parametrize(
    ("pins", "named"),
    [
        (_CILIUM, []),
        ((*_CILIUM, "cilium_snat_v4_external", "cilium_nodeport_neigh4"), ["Cilium"]),
        (("cilium_lb6_services_v2", "cilium_snat_v6_external"), ["Cilium"]),
        (("cilium_snat_v4_external", "cilium_snat_v6_external", "cali_v4_nat_fe3"), ["Calico", "Cilium"]),
    ],
)
def test_cilium_is_another_proxy_only_if_it_serves_node_ports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pins: tuple[str, ...], named: list[str]
) -> None:
    (tmp_path / "tc/globals").mkdir(parents=True)
    for name in pins:
        (tmp_path / "tc/globals" / name).touch()
    monkeypatch.setattr(mounts, "SYSTEM_BPFFS", tmp_path)
    assert [finding.text.split()[0] for finding in checks._other_pins()] == named
