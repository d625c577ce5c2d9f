# SPDX-License-Identifier: Apache-2.0
"""Which node settings a configuration requires, and their effect on files below a folder that stands for /."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.common.bpf_constants import NOT_ON_LOOPBACK, ON_ALL_LOOPBACK, ON_LOCALHOST, ON_OTHER_LOOPBACK
from pyebpf_proxy.common.run_directory import replace_file
from pyebpf_proxy.config.defaults import with_defaults, with_platform_defaults
from pyebpf_proxy.config.kernel import Conntrack, Ipvs, KernelSettings, kernel_settings, localhost_node_ports
from pyebpf_proxy.config.loader import decode_text
from pyebpf_proxy.config.model import KubeProxyConfiguration
from pyebpf_proxy.datapath.node import node_settings, sysctls
from pyebpf_proxy.datapath.node.node_settings import HASHSIZE, conntrack_max, count_cpus, wanted

NETFILTER = "net/netfilter/nf_conntrack_"
LOCALNET = "net/ipv4/conf/all/route_localnet"
BY_DEFAULT = {
    f"{NETFILTER}max": 131072,
    f"/{HASHSIZE}": 32768,
    f"{NETFILTER}tcp_timeout_established": 86400,
    f"{NETFILTER}tcp_timeout_close_wait": 3600,
}
HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


def completed(text: str) -> KubeProxyConfiguration:
    return with_platform_defaults(with_defaults(decode_text((HEAD + text).encode()).config))


def names(text: str, cpus: int = 4) -> dict[str, int]:
    return {setting.name: setting.value for setting in wanted(kernel_settings(completed(text)), cpus)}


@pytest.mark.parametrize(
    ("text", "differs"),
    [
        ("", {LOCALNET: 1}),
        ("mode: iptables", {LOCALNET: 1}),
        ("mode: nftables", {}),
        ("mode: ipvs", {"net/ipv4/ip_forward": 1}),
        ("mode: ipvs\nipvs: {strictARP: true}", {"net/ipv4/ip_forward": 1, "arp_ignore": 1, "arp_announce": 2}),
        ("ipvs: {strictARP: true, tcpTimeout: 5s}", {LOCALNET: 1}),
        ("iptables: {localhostNodePorts: false}", {}),
        # spec/service-semantics §8: no IPv4 CIDR, or one with a loopback address
        ("nodePortAddresses: ['::/0']", {LOCALNET: 1}),
        ("nodePortAddresses: [0.0.0.0/0]", {LOCALNET: 1}),
        ("nodePortAddresses: [127.0.0.1/32, 192.0.2.0/24]", {LOCALNET: 1}),
        ("nodePortAddresses: [192.0.2.0/24, '::1/128']", {}),
        ("mode: nftables\nnodePortAddresses: [127.0.0.0/8]", {}),
        ("conntrack: {maxPerCore: 0, min: 9}", {LOCALNET: 1, "max": None, "hashsize": None}),
        ("conntrack: {maxPerCore: 100, min: 9}", {LOCALNET: 1, "max": 400, "hashsize": 100}),
        ("conntrack: {maxPerCore: 100, min: 0}", {LOCALNET: 1, "max": 400, "hashsize": 100}),
        ("conntrack: {tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}",
            {LOCALNET: 1, "tcp_timeout_established": None, "tcp_timeout_close_wait": None}),
        ("conntrack: {tcpEstablishedTimeout: 1999ms, tcpCloseWaitTimeout: 999ms}",
            {LOCALNET: 1, "tcp_timeout_established": 1, "tcp_timeout_close_wait": 0}),
        ("conntrack: {tcpBeLiberal: true, udpTimeout: 40s, udpStreamTimeout: 2m}",
            {LOCALNET: 1, "tcp_be_liberal": 1, "udp_timeout": 40, "udp_timeout_stream": 120}),
        ("conntrack: {udpTimeout: 1ns}", {LOCALNET: 1, "udp_timeout": 0}),
        ("mode: ipvs\nipvs: {tcpTimeout: 15m, tcpFinTimeout: 2m, udpTimeout: 5m}\nconntrack: {udpTimeout: 40s}",
            {"net/ipv4/ip_forward": 1, "tcp_timeout_established": 900, "tcp_timeout_fin_wait": 120,
             "udp_timeout": 300, "udp_timeout_stream": 300}),
        ("mode: ipvs\nipvs: {tcpTimeout: 999ms}", {"net/ipv4/ip_forward": 1}),
    ],
)  # fmt: skip
def test_the_settings_that_a_configuration_requires(text: str, differs: dict[str, int | None]) -> None:
    found = {name: value for name, value in names(text).items() if "/vs/" not in name}
    assert ("net/ipv4/vs/conntrack" in names(text)) == ("mode: ipvs" in text)
    want: dict[str, int | None] = dict(BY_DEFAULT)
    short = {"hashsize": f"/{HASHSIZE}", "arp_ignore": "net/ipv4/conf/all/arp_ignore"}
    short["arp_announce"] = "net/ipv4/conf/all/arp_announce"
    for name, value in differs.items():
        want[name if "/" in name else short.get(name, NETFILTER + name)] = value
    assert found == {name: value for name, value in want.items() if value is not None}


def test_the_order_is_that_of_kube_proxy() -> None:
    found = list(names("conntrack: {tcpBeLiberal: true, udpTimeout: 40s, udpStreamTimeout: 2m}"))
    assert [name.removeprefix(NETFILTER) for name in found] == [
        "max", f"/{HASHSIZE}", "tcp_timeout_established", "tcp_timeout_close_wait", "tcp_be_liberal",
        "udp_timeout", "udp_timeout_stream", LOCALNET,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("per_core", "minimum", "cpus", "expected"),
    [
        (32768, 131072, 4, 131072),  # the examples of spec/service-semantics §12
        (32768, 131072, 8, 262144),
        (32768, 131072, 1, 131072),
        (0, 131072, 8, 0),
        (1, 0, 3, 3),
        (32768, 131072, 32, 1 << 20),
        (32768, 131072, 33, 1 << 20),
        (32768, 2 << 20, 33, 1 << 20),
        (1, 2 << 20, 1, 2 << 20),
    ],
)
def test_the_limit_of_the_connection_table(per_core: int, minimum: int, cpus: int, expected: int) -> None:
    assert conntrack_max(Conntrack(max_per_core=per_core, min=minimum), cpus) == expected


@pytest.mark.parametrize(
    ("networks", "expected"),
    [
        ("[]", ON_ALL_LOOPBACK),
        ("['::/0']", ON_ALL_LOOPBACK),
        ("['0.0.0.0/0', '10.0.0.0/8']", ON_ALL_LOOPBACK),
        ("['127.0.0.0/8']", ON_LOCALHOST),
        ("['10.0.0.0/8', '127.0.0.1/32']", ON_LOCALHOST),
        ("['127.0.0.2/32']", ON_OTHER_LOOPBACK),
        ("['10.0.0.0/8']", NOT_ON_LOOPBACK),
        ("[primary]", ON_ALL_LOOPBACK),
    ],
)
def test_where_node_ports_are_served_on_loopback(networks: str, expected: int) -> None:
    config = completed(f"mode: iptables\nnodePortAddresses: {networks}")
    assert localhost_node_ports(config) == expected
    assert kernel_settings(config).route_localnet == bool(expected)


def test_localhost_node_ports_stay_in_mode_ipvs_without_the_setting() -> None:
    config = completed("mode: ipvs")
    assert localhost_node_ports(config)
    assert not kernel_settings(config).route_localnet


def test_cpus_are_those_in_use(tmp_path: Path) -> None:
    assert count_cpus(tmp_path, 3) == 3
    for number, online in (("0", None), ("1", "1"), ("2", "0"), ("10", "1"), ("freq", None)):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology/core_id").write_text("0\n")
        if online:
            (folder / "online").write_text(f"{online}\n")
    (tmp_path / "sys/devices/system/cpu/cpu11").mkdir()  # switched off: no topology
    assert count_cpus(tmp_path, 3) == 3
    (tmp_path / "sys/devices/system/cpu/cpu10/online").write_text("0")
    assert count_cpus(tmp_path, 3) == 2


# ---- files -----------------------------------------------------------------------------------------------------------


class Tree:
    """A folder that stands for /, with files as the kernel has them, and a run folder."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.directory = folder / "run"
        self.directory.mkdir()
        self.warnings: list[tuple[str, str]] = []
        for name, value in {
            "max": "262144",
            "tcp_timeout_established": "432000",
            "tcp_timeout_close_wait": "60",
            "tcp_timeout_fin_wait": "120",
            "tcp_be_liberal": "0",
            "udp_timeout": "30",
            "udp_timeout_stream": "120",
        }.items():
            self.put(f"proc/sys/{NETFILTER}{name}", value)
        for name in ("conf/all/route_localnet", "conf/all/arp_ignore", "conf/all/arp_announce", "ip_forward"):
            self.put(f"proc/sys/net/ipv4/{name}", "0")
        self.put(HASHSIZE, "65536")
        self.put("proc/self/oom_score_adj", "0")

    def put(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file

    def get(self, path: str) -> str:
        return (self.root / path).read_text().strip()

    def netfilter(self, name: str) -> str:
        return self.get(f"proc/sys/{NETFILTER}{name}")

    def apply(self, settings: KernelSettings) -> None:
        sysctls.apply(settings, self.directory, lambda *event: self.warnings.append(event), self.root)

    def restore(self) -> tuple[list[str], list[str]]:
        return sysctls.restore(self.directory, self.root)

    def record(self) -> dict[str, Any]:
        file = self.directory / sysctls.RECORD
        return json.loads(file.read_text()) if file.exists() else {}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


ESTABLISHED = KernelSettings(Conntrack(tcp_established=900))
EVERYTHING = KernelSettings(
    Conntrack(1, 1000000, 900, 3600, True, 40, 180), True, Ipvs(strict_arp=True, tcp_fin=20), oom_score_adj=-999
)


def refuse(monkeypatch: pytest.MonkeyPatch, path: Path, number: int, mode: int | None = None) -> None:
    """Opening this file for writing fails, as the kernel refuses it even to root."""
    real = os.open

    def fake(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        if Path(name) == path and flags & os.O_WRONLY:
            raise OSError(number, os.strerror(number), str(name))
        return real(name, flags, *rest, **more)

    monkeypatch.setattr(os, "open", fake)
    if mode is not None:
        path.chmod(mode)


def test_all_settings_are_written_and_restored(tree: Tree) -> None:
    before = {path: path.read_text().strip() for path in tree.root.rglob("*") if path.is_file()}
    tree.apply(EVERYTHING)
    assert {name: tree.netfilter(name) for name in ("max", "tcp_timeout_established", "tcp_timeout_close_wait")} == {
        "max": "1000000", "tcp_timeout_established": "900", "tcp_timeout_close_wait": "3600"
    }  # fmt: skip
    assert [tree.netfilter(name) for name in ("tcp_be_liberal", "udp_timeout", "udp_timeout_stream")] == [
        "1", "40", "180"
    ]  # fmt: skip
    assert tree.netfilter("tcp_timeout_fin_wait") == "20"
    assert tree.get(HASHSIZE) == "250000"
    conf = "proc/sys/net/ipv4/conf/all/"
    assert [tree.get(conf + name) for name in ("route_localnet", "arp_ignore", "arp_announce")] == ["1", "1", "2"]
    assert tree.get("proc/sys/net/ipv4/ip_forward") == "1"
    assert tree.warnings == []

    restored, problems = tree.restore()
    assert problems == []
    assert len(restored) == len(before) - 1  # all but oom_score_adj
    assert {path: path.read_text().strip() for path in before} == before
    assert list(tree.directory.iterdir()) == []
    assert tree.restore() == ([], [])


def test_settings_stay_while_a_kube_proxy_runs(tree: Tree) -> None:
    """It has written the same settings at its start, and does not write them again."""
    tree.apply(ESTABLISHED)
    assert sysctls.hold(node_settings.LIBERAL, tree.directory, tree.root) == ""
    value = tree.netfilter("tcp_timeout_established")
    assert sysctls.leave(tree.directory) == [f"setting net/netfilter/nf_conntrack_tcp_timeout_established={value}"]
    restored, problems = tree.restore()
    assert (len(restored), problems) == (1, [])  # that of the fast path
    assert tree.netfilter("tcp_timeout_established") == value != "432000"
    assert list(tree.directory.iterdir()) == []
    assert sysctls.leave(tree.directory) == []


def test_the_settings_of_the_fast_path_are_restored_last(tree: Tree) -> None:
    """This includes a setting that the configuration asks for: connections still use the fast path."""
    tree.apply(EVERYTHING)
    assert sysctls.hold(node_settings.LIBERAL, tree.directory, tree.root) == ""
    assert sysctls.changed(node_settings.LIBERAL, tree.directory)
    sysctls.restore(tree.directory, tree.root, holder="", keep=(node_settings.LIBERAL,))
    assert (tree.netfilter("tcp_be_liberal"), tree.netfilter("udp_timeout")) == ("1", "30")
    tree.restore()
    assert tree.netfilter("tcp_be_liberal") == "0"
    assert not sysctls.changed(node_settings.LIBERAL, tree.directory)


LIBERAL_TOO = KernelSettings(Conntrack(tcp_be_liberal=True))


def test_a_setting_of_the_fast_path_stays_once_the_configuration_asks_for_it(tree: Tree) -> None:
    """The kube-proxy that runs again asks for the same. It must not become 0 with the end of the fast path."""
    assert sysctls.hold(node_settings.LIBERAL, tree.directory, tree.root) == ""
    assert sysctls.held(node_settings.LIBERAL, tree.directory)
    tree.apply(LIBERAL_TOO)
    assert not sysctls.held(node_settings.LIBERAL, tree.directory)
    assert sysctls.hold(node_settings.LIBERAL, tree.directory, tree.root) == ""
    assert sysctls.leave(tree.directory) == ["setting net/netfilter/nf_conntrack_tcp_be_liberal=1"]
    assert tree.restore() == ([], [])
    assert tree.netfilter("tcp_be_liberal") == "1"


def test_without_a_running_kube_proxy_it_is_restored_to_the_value_before_the_fast_path(tree: Tree) -> None:
    assert sysctls.hold(node_settings.LIBERAL, tree.directory, tree.root) == ""
    tree.apply(LIBERAL_TOO)
    assert tree.restore() == (["setting net/netfilter/nf_conntrack_tcp_be_liberal=1, restored to 0"], [])
    assert tree.netfilter("tcp_be_liberal") == "0"


def test_a_setting_that_the_configuration_asks_for_stays_after_the_fast_path_has_set_it_again(tree: Tree) -> None:
    """Another program has changed it meanwhile."""
    tree.apply(LIBERAL_TOO)
    tree.put(f"proc/sys/{NETFILTER}tcp_be_liberal", "0")
    assert sysctls.hold(node_settings.LIBERAL, tree.directory, tree.root, configured=True) == ""
    assert not sysctls.held(node_settings.LIBERAL, tree.directory)
    assert sysctls.leave(tree.directory) == ["setting net/netfilter/nf_conntrack_tcp_be_liberal=1"]


def test_a_record_that_cannot_be_written_does_not_end_a_start_with_right_settings(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert sysctls.hold(node_settings.LIBERAL, tree.directory, tree.root) == ""

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sysctls, "replace_file", broken)
    tree.apply(LIBERAL_TOO)
    assert "the record of changed node settings cannot be written" in caplog.text
    assert sysctls.held(node_settings.LIBERAL, tree.directory)


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no file can be made in a run folder: its file system is full."""
    real = os.open

    def full(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(name))
        return real(name, flags, *rest, **more)

    monkeypatch.setattr(os, "open", full)


def test_settings_are_restored_though_the_run_folder_is_full(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.apply(KernelSettings(Conntrack(tcp_established=900, tcp_close_wait=3600, udp=40)))
    assert sysctls.hold(node_settings.LIBERAL, tree.directory, tree.root) == ""
    fill(monkeypatch)
    restored, problems = sysctls.restore(tree.directory, tree.root, keep=(node_settings.LIBERAL,))
    assert (len(restored), problems) == (3, [])
    assert list(tree.record()) == [node_settings.LIBERAL.path]
    assert (len(tree.restore()[0]), tree.record()) == (1, {})
    assert not list(tree.directory.iterdir())


def test_settings_are_left_to_kube_proxy_though_the_run_folder_is_full(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.apply(KernelSettings(Conntrack(tcp_established=900, tcp_close_wait=3600)))
    fill(monkeypatch)
    assert len(sysctls.leave(tree.directory)) == 2
    assert tree.restore() == ([], [])
    assert tree.netfilter("tcp_timeout_established") == "900"


def test_a_record_that_does_not_fit_is_named(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch)
    with pytest.raises(sysctls.SysctlError, match=r"run/node-settings\.json cannot be written: No space left"):
        tree.apply(ESTABLISHED)


def test_a_full_run_folder_does_not_lead_to_a_write_through_a_link(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.apply(KernelSettings(Conntrack(tcp_established=900, tcp_close_wait=3600)))
    record = tree.directory / sysctls.RECORD
    other = tmp_path / "other"
    record.rename(other)
    for link in (record.symlink_to, record.hardlink_to):
        link(other)
        before = other.read_bytes()
        with monkeypatch.context() as full:
            fill(full)
            with pytest.raises(OSError, match="No space left"):
                replace_file(record, b"{}")
        assert other.read_bytes() == before
        record.unlink()


def test_a_setting_that_the_kernel_refuses_keeps_its_holder(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sysctls.hold(node_settings.LIBERAL, tree.directory, tree.root) == ""
    refuse(monkeypatch, tree.put(f"proc/sys/{NETFILTER}tcp_be_liberal", "0"), errno.EACCES)
    with pytest.raises(sysctls.SysctlError):
        tree.apply(LIBERAL_TOO)
    assert sysctls.held(node_settings.LIBERAL, tree.directory)


def test_settings_that_are_right_are_not_written(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.apply(EVERYTHING)
    sysctls.adjust_oom_score(-999, tree.root)
    record = tree.record()

    def never(*_: object) -> None:
        raise AssertionError("written though equal")

    monkeypatch.setattr(os, "write", never)
    tree.apply(EVERYTHING)
    sysctls.adjust_oom_score(-999, tree.root)
    assert tree.record() == record


def test_a_larger_hash_table_stays(tree: Tree) -> None:
    tree.apply(KernelSettings(Conntrack(max_per_core=1, min=1000)))
    assert (tree.netfilter("max"), tree.get(HASHSIZE)) == ("1000", "65536")


def test_the_original_value_stays_recorded(tree: Tree) -> None:
    tree.apply(ESTABLISHED)
    tree.apply(KernelSettings(Conntrack(tcp_established=1000)))
    assert tree.record() == {
        f"proc/sys/{NETFILTER}tcp_timeout_established": {"was": "432000", "wrote": "1000"},
    }
    tree.apply(KernelSettings())  # no longer required: kube-proxy keeps it, and clean-up still knows the old value
    assert tree.netfilter("tcp_timeout_established") == "1000"
    tree.restore()
    assert tree.netfilter("tcp_timeout_established") == "432000"


def test_an_agent_that_dies_while_it_writes_has_remembered(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", dies)
        with pytest.raises(KeyboardInterrupt):
            tree.apply(ESTABLISHED)
    assert tree.record() == {f"proc/sys/{NETFILTER}tcp_timeout_established": {"was": "432000", "wrote": "900"}}


def test_settings_that_others_have_changed_since_stay(tree: Tree) -> None:
    tree.apply(KernelSettings(Conntrack(tcp_established=900, udp=40)))
    tree.put(f"proc/sys/{NETFILTER}udp_timeout", "77")
    restored, problems = tree.restore()
    assert (len(restored), problems) == (1, [])
    assert (tree.netfilter("udp_timeout"), tree.netfilter("tcp_timeout_established")) == ("77", "432000")
    assert tree.record() == {}


def test_a_missing_setting_ends_the_start(tree: Tree) -> None:
    (tree.root / f"proc/sys/{NETFILTER}tcp_timeout_established").unlink()
    with pytest.raises(sysctls.SysctlError) as caught:
        tree.apply(ESTABLISHED)
    assert str(caught.value) == (
        "net/netfilter/nf_conntrack_tcp_timeout_established cannot be set to 900 (conntrack.tcpEstablishedTimeout):"
        " No such file or directory;"
        " set it beforehand, or have it left alone with conntrack.tcpEstablishedTimeout: 0s"
    )
    assert tree.record() == {}


def test_settings_of_ipvs_are_set_only_if_they_exist(tree: Tree) -> None:
    tree.apply(KernelSettings(ipvs=Ipvs()))
    tree.put("proc/sys/net/ipv4/vs/conntrack", "0")
    tree.apply(KernelSettings(ipvs=Ipvs()))
    assert tree.get("proc/sys/net/ipv4/vs/conntrack") == "1"


def test_a_read_only_proc_ends_the_start(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, tree.root / f"proc/sys/{NETFILTER}max", errno.EROFS)
    with pytest.raises(sysctls.SysctlError, match=r"nf_conntrack_max cannot be set to 131072.*Read-only file system"):
        tree.apply(KernelSettings(Conntrack(max_per_core=1, min=131072, tcp_established=900)))
    assert tree.netfilter("tcp_timeout_established") == "432000"


def test_a_read_only_sys_is_an_event_on_the_node(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, tree.root / HASHSIZE, errno.EROFS)
    tree.apply(KernelSettings(Conntrack(max_per_core=1, min=1000000, tcp_established=900)))
    assert tree.warnings == [
        (
            "readOnlySysFS",
            "CRI error: /sys is read-only: cannot modify conntrack limits, problems may arise later"
            " (If running Docker, see docker issue #24000)",
        )
    ]
    assert tree.netfilter("tcp_timeout_established") == "900"
    assert f"{HASHSIZE}" not in tree.record()


def test_in_a_container_the_mount_of_the_node_is_written(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/sys and /sys are read-only there, /host/proc/sys/net is not; the hash table has another name."""
    for name, value in (("max", "262144"), ("buckets", "65536"), ("udp_timeout", "30")):
        tree.put(f"host/proc/sys/{NETFILTER}{name}", value)
    refuse(monkeypatch, tree.root / HASHSIZE, errno.EROFS)
    tree.apply(KernelSettings(Conntrack(max_per_core=1, min=1000000, udp=41)))
    host = {name: tree.get(f"host/proc/sys/{NETFILTER}{name}") for name in ("max", "buckets", "udp_timeout")}
    assert host == {"max": "1000000", "buckets": "250000", "udp_timeout": "41"}
    assert (tree.netfilter("max"), tree.netfilter("udp_timeout"), tree.get(HASHSIZE)) == ("262144", "30", "65536")
    assert tree.warnings == []
    restored, problems = tree.restore()
    assert (len(restored), problems) == (3, [])
    assert tree.get(f"host/proc/sys/{NETFILTER}buckets") == "65536"


def test_another_refusal_of_the_hash_table_ends_the_start(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, tree.root / HASHSIZE, errno.ENOMEM)
    with pytest.raises(sysctls.SysctlError, match="hashsize cannot be set to 250000"):
        tree.apply(KernelSettings(Conntrack(max_per_core=1, min=1000000)))
    assert tree.warnings == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_settings_of_the_machine_stay_in_another_network_namespace(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As the kernel shows it there: without write permission."""
    refuse(monkeypatch, tree.root / f"proc/sys/{NETFILTER}max", number, 0o444)
    tree.apply(KernelSettings(Conntrack(max_per_core=1, min=1000000, tcp_established=900)))
    assert (tree.netfilter("max"), tree.get(HASHSIZE)) == ("262144", "65536")
    assert tree.netfilter("tcp_timeout_established") == "900"
    assert tree.warnings == []


def test_a_hash_table_of_the_machine_stays_in_another_network_namespace(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limit is right, its size is not, and the kernel does not allow changing it from there."""
    refuse(monkeypatch, tree.root / HASHSIZE, errno.EOPNOTSUPP)
    tree.apply(KernelSettings(Conntrack(max_per_core=1, min=300000, tcp_established=900)))
    assert (tree.get(HASHSIZE), tree.netfilter("tcp_timeout_established")) == ("65536", "900")
    assert tree.warnings == []


def test_no_permission_for_a_writable_limit_ends_the_start(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, tree.root / f"proc/sys/{NETFILTER}max", errno.EACCES, 0o644)
    with pytest.raises(sysctls.SysctlError, match="Permission denied"):
        tree.apply(KernelSettings(Conntrack(max_per_core=1, min=1000000)))


def test_a_value_that_does_not_take_effect_ends_the_start(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda descriptor, content: len(content))
    limit = tree.put(f"proc/sys/{NETFILTER}udp_timeout", "30")
    real = os.open
    monkeypatch.setattr(os, "open", lambda name, flags, *rest: real(name, flags & ~os.O_TRUNC, *rest))
    problem = r"udp_timeout cannot be set to 40 .*did not accept it: the value is 30"
    with pytest.raises(sysctls.SysctlError, match=problem):
        tree.apply(KernelSettings(Conntrack(udp=40)))
    assert limit.read_text() == "30\n"
    assert tree.record() == {}


def test_timeouts_of_ipvs_are_only_logged(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, tree.root / f"proc/sys/{NETFILTER}tcp_timeout_fin_wait", errno.EROFS)
    tree.apply(KernelSettings(ipvs=Ipvs(tcp_fin=20, udp=50)))
    assert tree.netfilter("udp_timeout") == "50"


def test_the_oom_score_is_only_logged(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    sysctls.adjust_oom_score(None, tree.root)
    assert tree.get("proc/self/oom_score_adj") == "0"
    sysctls.adjust_oom_score(-998, tree.root)
    assert tree.get("proc/self/oom_score_adj") == "-998"
    refuse(monkeypatch, tree.root / "proc/self/oom_score_adj", errno.EACCES)
    sysctls.adjust_oom_score(-1000, tree.root)
    assert tree.get("proc/self/oom_score_adj") == "-998"


def test_a_setting_that_cannot_be_restored_is_reported_and_stays_recorded(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.apply(KernelSettings(Conntrack(tcp_established=900, udp=40)))
    with monkeypatch.context() as patch:
        refuse(patch, tree.root / f"proc/sys/{NETFILTER}udp_timeout", errno.EROFS)
        restored, problems = tree.restore()
    assert len(restored) == 1
    assert problems == ["net/netfilter/nf_conntrack_udp_timeout cannot be set back to 30: Read-only file system"]
    assert list(tree.record()) == [f"proc/sys/{NETFILTER}udp_timeout"]
    assert tree.restore()[1] == []


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1}', '{"a": {"was": "1"}}'])
def test_a_broken_record_affects_no_other_setting(tree: Tree, content: str) -> None:
    (tree.directory / sysctls.RECORD).write_text(content)
    tree.apply(ESTABLISHED)
    assert tree.netfilter("tcp_timeout_established") == "900"
    tree.restore()
    assert list(tree.directory.iterdir()) == []


DEEP = "[" * 10_000 + "]" * 10_000


@pytest.mark.parametrize("entry", ["path", "value", "deep", "FIFO", "link"])
def test_a_forged_record_writes_no_other_file(tree: Tree, entry: str) -> None:
    """What runs in the agent's container can write the record, and the clean-up on the node can write every file."""
    tree.apply(ESTABLISHED)
    core = tree.put("proc/sys/kernel/core_pattern", "core")
    record = tree.directory / sysctls.RECORD
    whole = tree.record()
    evil = {"was": "|/run/pyebpf-proxy/evil", "wrote": "core"}
    route = f"proc/sys/{LOCALNET}"
    if entry == "path":
        outside = os.path.relpath(core, tree.root / "proc/sys/net")
        whole |= {str(core): evil, "proc/sys/kernel/core_pattern": evil, f"proc/sys/net/{outside}": evil}
    elif entry == "value":
        whole |= {route: {"was": "1; id", "wrote": "0"}}
    record.write_text(json.dumps(whole))
    if entry == "deep":
        record.write_text(DEEP)
    elif entry in ("FIFO", "link"):
        record.unlink()
        if entry == "FIFO":
            os.mkfifo(record)
        else:
            core.with_name("secret").write_text(json.dumps(whole))
            record.symlink_to(core.with_name("secret"))
    restored, problems = tree.restore()
    assert (core.read_text(), tree.get(route), problems) == ("core\n", "0", [])
    # The genuine entries are restored.
    assert (tree.netfilter("tcp_timeout_established") == "432000") == bool(restored) == (entry in ("path", "value"))
    assert list(tree.directory.iterdir()) == []


def test_the_record_is_not_written_through_a_link(tree: Tree) -> None:
    victim = tree.put("etc/victim", "as it was")
    (tree.directory / "node-settings.new").symlink_to(victim)
    tree.apply(ESTABLISHED)
    assert victim.read_text() == "as it was\n"
    assert list(tree.record()) == [f"proc/sys/{NETFILTER}tcp_timeout_established"]


def test_the_files_that_the_proxy_changes_are_known() -> None:
    written = {setting.path for setting in wanted(EVERYTHING, 4)}
    extra = {node_settings.BUCKETS, *(setting.path for setting in node_settings.FAST_PATH)}
    assert written | extra == node_settings.PATHS


def test_a_half_written_record_does_not_stay(tmp_path: Path) -> None:
    """An agent that was killed while it wrote the record, or a full file system, leaves the new file."""
    (tmp_path / "node-settings.new").write_text("{")
    assert sysctls.restore(tmp_path) == ([], [])
    assert not list(tmp_path.iterdir())
