# SPDX-License-Identifier: Apache-2.0
"""CNI configuration files: conflicts are named with their fix, other files cause no message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.see.doctor import checks, cni

MARK = 0x4000
PTP = {"type": "ptp", "ipam": {"type": "host-local"}}


def write(folder: Path, *plugins: dict[str, Any], name: str = "10-net.conflist") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({"cniVersion": "1.0.0", "name": "net", "plugins": list(plugins)}))
    return folder


def found(tmp_path: Path, *plugins: dict[str, Any], cilium: object = None, socket_programs: bool = False) -> cni.Read:
    state = tmp_path / "cilium.json"
    if cilium is not None:
        state.write_text(json.dumps({"KubeProxyReplacement": cilium}))
    return cni.read(MARK, socket_programs, (write(tmp_path / "net.d", *plugins),), state)


@pytest.mark.parametrize(
    ("plugin", "bad", "words"),
    [
        ({"type": "bandwidth"}, False, "kubernetes.io/egress-bandwidth"),
        ({"type": "portmap", "markMasqBit": 14}, False, "markMasqBit 14 is pyebpf-proxy's masquerade bit"),
        ({"type": "portmap", "externalSetMarkChain": "KUBE-MARK-MASQ"}, False, "the chain KUBE-MARK-MASQ"),
        ({"type": "portmap", "conditionsV4": ["!", "-d", "192.0.2.0/24"]}, False, "conditionsV4 apply to hostPorts"),
        ({"type": "calico", "linuxDataplane": "BPF"}, True, "eBPF data plane implements Services"),
        ({"type": "ovn-k8s-cni-overlay"}, True, "OVN-Kubernetes"),
        ({"type": "antrea"}, False, "AntreaProxy"),
    ],
)
def test_conflicting_plugins_are_named_with_the_fix(
    tmp_path: Path, plugin: dict[str, Any], bad: bool, words: str
) -> None:
    (clash,) = found(tmp_path, PTP, plugin).clashes
    assert clash.bad is bad
    assert words in clash.text
    assert clash.remedy


@pytest.mark.parametrize("mode", [True, "true", "strict", "partial"])
def test_cilium_that_serves_services(tmp_path: Path, mode: object) -> None:
    (clash,) = found(tmp_path, {"type": "cilium-cni"}, cilium=mode, socket_programs=True).clashes
    assert clash.bad
    assert "kubeProxyReplacement: false" in clash.remedy


def test_cilium_does_not_start_again_beside_socket_programs(tmp_path: Path) -> None:
    (clash,) = found(tmp_path, {"type": "cilium-cni"}, socket_programs=True).clashes
    assert not clash.bad
    assert "does not start again" in clash.text
    assert "socketLB: off" in clash.remedy
    assert found(tmp_path, PTP, socket_programs=True).clashes == []


@pytest.mark.parametrize("mode", [None, False, "false", "disabled"])
def test_plugins_without_conflict(tmp_path: Path, mode: object) -> None:
    read = found(tmp_path, PTP, {"type": "portmap"}, {"type": "cilium-cni"}, {"type": "calico"}, cilium=mode)
    assert read.clashes == []
    assert read.plugins == ["ptp", "portmap", "cilium-cni", "calico"]


def test_the_first_file_counts(tmp_path: Path) -> None:
    folder = write(tmp_path / "net.d", PTP)
    write(folder, {"type": "bandwidth"}, name="20-other.conflist")
    (folder / "05-notes.txt").write_text("not for the runtime")
    (folder / "00-old.conf").write_text('{"cniVersion": "0.3.1", "name": "old", "type": "bridge"}')
    read = cni.read(MARK, True, (tmp_path / "none", folder), tmp_path / "none.json")
    assert (read.file, read.plugins, read.clashes) == (folder / "00-old.conf", ["bridge"], [])


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"plugins": ["ptp"]}', '"ptp"', "{\x00", '{"plugins": null}', '{"plugins": 5}'),
        pytest.param("[" * 5000, id="nested deeply"),
    ],
)
def test_an_invalid_file_is_named(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "net.d"
    folder.mkdir()
    (folder / "10-net.conf").write_text(text)
    monkeypatch.setattr(cni, "read", lambda *arguments, read=cni.read: read(*arguments, (folder,)))
    (finding,) = checks._cni(MARK, True)
    assert (finding.what, finding.state) == ("CNI", "warning")
    assert finding.text.startswith(f"{folder}/10-net.conf cannot be read: ")


def test_doctor_reports_each_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "net.d", {"type": "bandwidth"}, {"type": "calico", "linuxDataplane": "BPF"})
    monkeypatch.setattr(cni, "read", lambda *arguments, read=cni.read: read(*arguments, (folder,)))
    assert [(each.state, bool(each.remedy)) for each in checks._cni(MARK, True)] == [("warning", True), ("bad", True)]
