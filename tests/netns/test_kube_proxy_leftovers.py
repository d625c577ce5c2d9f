# SPDX-License-Identifier: Apache-2.0
"""The leftovers of the real kube-proxy are removed exactly, and other software's rules do not change."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.migration import iptables, ipvs, leftovers
from pyebpf_proxy.datapath.node.sysctls import RECORD
from pyebpf_proxy.datapath.report import Report
from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.namespace import Namespace
from tests.support.kube_proxy_tools import (
    DATA,
    FOREIGN,
    FOREIGN_AFTER,
    load_kube_proxy,
    recorded,
    remove,
    restore,
    saved,
    without_kube_proxy,
)
from tests.support.logs import Log, Message

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns]

_numbers = itertools.count(1)


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    namespace = Namespace(f"pep-left-{os.getpid()}-{next(_numbers)}")
    namespace.create()
    try:
        yield namespace
    finally:
        namespace.remove()


@pytest.fixture(params=("nft", "legacy"))
def kind(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


def test_only_kube_proxys_rules_are_removed(namespace: Namespace, kind: str, family: int) -> None:
    restore(namespace, kind, family, FOREIGN)
    load_kube_proxy(namespace, kind, family)
    restore(namespace, kind, family, FOREIGN_AFTER)
    before = saved(namespace, kind, family)
    wanted = without_kube_proxy(before)
    assert len(before) > len(wanted) + 100  # otherwise this test shows nothing
    # ip6tables-nft-restore of iptables 1.8.9 takes no counters.
    assert any("[7:420]" in line for line in wanted) or (kind, family) == ("nft", 6)

    report = remove(namespace)
    assert report.problems == []
    assert [line.split(":")[0] for line in report.removed] == [f"iptables-{kind} IPv{family}"]
    assert saved(namespace, kind, family) == wanted

    assert remove(namespace) == Report()
    assert saved(namespace, kind, family) == wanted


def test_both_variants_and_families_at_once(namespace: Namespace) -> None:
    pairs = [(kind, family) for kind in ("nft", "legacy") for family in (4, 6)]
    for pair in pairs:
        load_kube_proxy(namespace, *pair)
    assert namespace.call(leftovers.running) == {"iptables"}
    report = remove(namespace, at_start=True)
    assert report.problems == []
    assert len(report.removed) == 4
    for pair in pairs:
        assert not [line for line in saved(namespace, *pair) if "KUBE-" in line and "KUBE-FIREWALL" not in line]
    assert namespace.call(leftovers.running) == set()


def test_the_canary_is_seen_in_either_variant(namespace: Namespace, kind: str, family: int) -> None:
    assert namespace.call(leftovers.running) == set()
    load_kube_proxy(namespace, kind, family)
    assert namespace.call(leftovers.running) == {"iptables"}


def test_the_families_with_rules_for_services(namespace: Namespace, kind: str, family: int) -> None:
    assert namespace.call(leftovers.serving) == set()
    load_kube_proxy(namespace, kind, family)
    assert namespace.call(leftovers.serving) == {f"IPv{family}"}
    namespace.run("nft", "-f", str(DATA / "nftables.nft"))
    assert namespace.call(leftovers.serving) == {"IPv4", "IPv6"}
    remove(namespace, at_start=True)
    assert namespace.call(leftovers.serving) == set()


def test_detection_creates_no_table(namespace: Namespace) -> None:
    assert remove(namespace) == Report()
    assert namespace.call(leftovers.running) == set()
    assert namespace.run("cat", "/proc/net/ip_tables_names", "/proc/net/ip6_tables_names") == ""
    assert namespace.run("nft", "list", "ruleset") == ""


def test_a_chain_that_other_rules_use_stays_with_its_rules(namespace: Namespace, kind: str, family: int) -> None:
    """A CNI plugin may send packets to KUBE-MARK-MASQ (portmap's externalSetMarkChain)."""
    load_kube_proxy(namespace, kind, family)
    restore(namespace, kind, family, "*nat\n:CNI-SETMARK - [0:0]\n-A CNI-SETMARK -j KUBE-MARK-MASQ\nCOMMIT\n")
    report = remove(namespace)
    assert report.problems == [
        f"iptables-{kind} IPv{family}: table nat: chain KUBE-MARK-MASQ stays,"
        " because a rule of another program uses it: CNI-SETMARK -j KUBE-MARK-MASQ"
    ]
    left = [line for line in saved(namespace, kind, family) if "KUBE-" in line and "KUBE-FIREWALL" not in line]
    assert left == [
        ":KUBE-MARK-MASQ - [0:0]",
        "[0:0] -A CNI-SETMARK -j KUBE-MARK-MASQ",
        "[0:0] -A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000",
    ]


def test_a_missing_tool_is_reported(namespace: Namespace, kind: str) -> None:
    load_kube_proxy(namespace, kind, 4)
    before = saved(namespace, kind, 4)
    report = namespace.call(_remove_without_tools)
    assert report.removed == []
    if kind == "nft":
        assert report.problems == [f"iptables-nft IPv4: {_missing('iptables-nft-save')}"]
    else:
        # Without the tool it is unknown whether the legacy tables hold rules of kube-proxy.
        assert f"iptables-legacy IPv4: {_missing('iptables-legacy-save')}" in report.problems
    assert saved(namespace, kind, 4) == before


def _missing(name: str) -> str:
    return f"tables exist that may hold rules of kube-proxy, but there is no {name}: install iptables"


def _remove_without_tools() -> Report:
    path, folders = os.environ["PATH"], iptables.FOLDERS
    os.environ["PATH"] = iptables.FOLDERS = "/nowhere"
    try:
        return leftovers.remove([])
    finally:
        os.environ["PATH"], iptables.FOLDERS = path, folders


def test_a_missing_right_is_reported(namespace: Namespace, tmp_path: Path) -> None:
    load_kube_proxy(namespace, "legacy", 4)
    load_kube_proxy(namespace, "nft", 6)
    namespace.run("nft", "-f", str(DATA / "nftables.nft"))
    done = run_cleanup(
        namespace, tmp_path / "state", before=["setpriv", "--bounding-set=-net_raw", "--inh-caps=-net_raw"]
    )
    assert done.returncode == 1
    error = next(line for line in done.stderr.splitlines() if " error " in line)
    assert "iptables-legacy IPv4: iptables-legacy-save: " in error
    assert "Permission denied (you must be root); iptables-legacy needs CAP_NET_RAW" in error
    assert "iptables-nft" not in error
    assert done.stderr.count("removed what kube-proxy left behind") == 3


def test_a_table_that_iptables_cannot_read_is_reported(namespace: Namespace) -> None:
    load_kube_proxy(namespace, "nft", 4)
    namespace.run("nft", "add chain ip nat native; add rule ip nat native ct mark set 5")
    namespace.run("nft", "add rule ip nat native ip daddr @nothing drop", check=False)
    report = remove(namespace)
    left = namespace.run("nft", "list", "table", "ip", "nat")
    # The other tables are clean in either case.
    assert "KUBE-SERVICES" not in namespace.run("nft", "list", "table", "ip", "filter")
    assert "chain native" in left
    if "KUBE-SERVICES" in left:
        assert any("table nat holds rules that iptables cannot read" in problem for problem in report.problems)


@pytest.mark.parametrize("at_start", [False, True])
def test_a_forward_policy_of_drop_is_reported(namespace: Namespace, kind: str, at_start: bool) -> None:
    load_kube_proxy(namespace, kind, 4)
    namespace.run(f"iptables-{kind}", "-P", "FORWARD", "DROP")
    before = [line for line in saved(namespace, kind, 4) if "KUBE-FORWARD" in line]
    assert len(before) == 5
    for _ in range(2):
        report = remove(namespace, at_start=at_start)
        assert report.problems == []
        left = [line for line in saved(namespace, kind, 4) if "KUBE-" in line and "KUBE-FIREWALL" not in line]
        assert left == (before if at_start else [])
        assert ":FORWARD DROP [0:0]" in saved(namespace, kind, 4)
        if at_start:
            assert [text for text in report.warnings if "stays; --cleanup removes it" in text]
    assert bool(report.warnings) is at_start  # reported when it is removed, and as long as it stays


@pytest.mark.parametrize(
    "rules",
    [
        '-A FORWARD -m comment --comment "999 drop \\"all\\"" -j DROP',
        '-A FORWARD -m comment --comment last -g LAST\n-A LAST -m comment --comment "a b" -j REJECT',
    ],
    ids=["comment", "chain"],
)
def test_a_rule_that_drops_everything_is_noticed(namespace: Namespace, kind: str, family: int, rules: str) -> None:
    """As puppetlabs-firewall writes it, and as the tools of both variants save it."""
    load_kube_proxy(namespace, kind, family)
    restore(namespace, kind, family, f"*filter\n:LAST - [0:0]\n{rules}\nCOMMIT\n")
    before = [line for line in saved(namespace, kind, family) if "KUBE-FORWARD" in line]
    report = remove(namespace, at_start=True)
    assert [text for text in report.warnings if "stays; --cleanup removes it" in text]
    assert [line for line in saved(namespace, kind, family) if "KUBE-FORWARD" in line] == before


@pytest.mark.parametrize("at_start", [False, True])
def test_an_input_policy_of_drop_is_reported(namespace: Namespace, kind: str, family: int, at_start: bool) -> None:
    load_kube_proxy(namespace, kind, family)
    namespace.run(f"{'iptables' if family == 4 else 'ip6tables'}-{kind}", "-P", "INPUT", "DROP")
    (warning,) = remove(namespace, at_start=at_start).warnings
    assert warning.startswith(f"iptables-{kind} IPv{family}: the built-in chain INPUT drops by default")
    assert "must accept TCP to the healthCheckNodePort of each Service (now 32000), otherwise" in warning
    assert remove(namespace, at_start=at_start) == Report()  # once: the rule is gone


def test_only_kube_proxys_nftables_tables_are_removed(namespace: Namespace) -> None:
    namespace.run("nft", "add table ip kube-proxy-of-others; add table inet kube-proxy; add table ip6 foreign")
    others = namespace.run("nft", "list", "ruleset")
    namespace.run("nft", "-f", str(DATA / "nftables.nft"))
    assert namespace.call(leftovers.running) == {"nftables"}
    report = remove(namespace)
    assert report == Report(removed=["nftables table ip kube-proxy", "nftables table ip6 kube-proxy"])
    assert namespace.run("nft", "list", "ruleset") == others
    assert remove(namespace) == Report()


def _make_sets(names: list[str]) -> None:
    from pyroute2 import IPSet

    with IPSet() as ipset:
        for name in names:
            ipset.create(name, stype="hash:ip,port")


def _sets() -> list[str]:
    from pyroute2 import IPSet

    with IPSet() as ipset:
        return sorted(message.get_attr("IPSET_ATTR_SETNAME") for message in ipset.list())


def _no_ipset() -> str:
    return "" if ipvs.ipset_loaded() else "this kernel has no ipset loaded (/sys/module/ip_set)"


@pytest.mark.skipif(bool(_no_ipset()), reason=_no_ipset() or "-")
@pytest.mark.parametrize("at_start", [False, True])
def test_rules_and_ipsets_of_mode_ipvs(namespace: Namespace, kind: str, at_start: bool) -> None:
    names = ["KUBE-CLUSTER-IP", "KUBE-IPVS-IPS", "KUBE-6-CLUSTER-IP", "KUBE-OTHERS", "foreign"]
    namespace.call(_make_sets, names)
    restore(namespace, kind, 4, FOREIGN)
    load_kube_proxy(namespace, kind, 4, (DATA / "ipvs.rules").read_text())
    wanted = without_kube_proxy(saved(namespace, kind, 4))
    report = remove(namespace, at_start=at_start)
    assert report.problems == []
    assert saved(namespace, kind, 4) == wanted
    assert namespace.call(_sets) == ["KUBE-OTHERS", "foreign"]


@pytest.mark.skipif(bool(_no_ipset()), reason=_no_ipset() or "-")
def test_a_start_keeps_ipsets_without_signs_of_mode_ipvs(namespace: Namespace) -> None:
    namespace.call(_make_sets, ["KUBE-CLUSTER-IP"])
    assert remove(namespace, at_start=True) == Report()
    assert namespace.call(_sets) == ["KUBE-CLUSTER-IP"]
    assert remove(namespace) == Report(removed=["ipset KUBE-CLUSTER-IP"])


@pytest.mark.skipif(bool(_no_ipset()), reason=_no_ipset() or "-")
def test_an_ipset_in_use_is_a_problem_and_the_others_are_removed(namespace: Namespace) -> None:
    namespace.call(_make_sets, ["KUBE-CLUSTER-IP", "KUBE-IPVS-IPS"])
    namespace.run("iptables-nft", "-A", "INPUT", "-m", "set", "--match-set", "KUBE-CLUSTER-IP", "dst,dst", "-j", "DROP")
    report = remove(namespace)
    assert report.removed == ["ipset KUBE-IPVS-IPS"]
    assert len(report.problems) == 1
    assert report.problems[0].startswith("ipset KUBE-CLUSTER-IP: ")


def _remove_device(cidrs: tuple[str, ...], kind: str) -> Report:
    from pyebpf_proxy.config.addresses import parse_cidr

    report = Report()
    kept = [cidr for text in cidrs if (cidr := parse_cidr(text))]
    ipvs.remove_addresses(kept, report, kind=kind)
    ipvs.remove_device(kept, report, kind=kind)
    return report


def test_the_device_of_mode_ipvs(namespace: Namespace) -> None:
    """A bridge with that name: not every kernel has dummy devices, and only the kind differs."""
    assert namespace.call(_remove_device, (), "bridge") == Report()
    namespace.ip(f"link add {ipvs.DEVICE} type bridge")
    namespace.ip(
        f"addr add 10.96.0.1/32 dev {ipvs.DEVICE}",
        f"addr add 10.50.0.1/32 dev {ipvs.DEVICE}",
        f"addr add fd00:10:96::1/128 dev {ipvs.DEVICE}",
    )
    assert namespace.call(leftovers.running) == {"ipvs"}
    report = remove(namespace)
    assert report.problems == [f"device {ipvs.DEVICE} is of kind bridge, not dummy: it stays"]

    report = namespace.call(_remove_device, ("10.50.0.0/16",), "bridge")
    assert report.problems == []
    assert sorted(report.removed) == [
        f"address 10.96.0.1 on {ipvs.DEVICE}",
        f"address fd00:10:96::1 on {ipvs.DEVICE}",
    ]
    shown = json.loads(namespace.run("ip", "-j", "addr", "show", "dev", ipvs.DEVICE))
    assert [each["local"] for each in shown[0]["addr_info"]] == ["10.50.0.1"]

    assert namespace.call(_remove_device, (), "bridge").removed == [f"device {ipvs.DEVICE}"]
    assert namespace.run("ip", "-o", "link", "show", "dev", ipvs.DEVICE, check=False) == ""


def test_virtual_servers(namespace: Namespace) -> None:
    if not ipvs.ipvs_loaded():
        pytest.skip("this kernel has no IPVS loaded (/proc/net/ip_vs): only the decision is tested")
    namespace.call(_make_servers, ["10.96.0.1", "10.50.0.1"])
    report = remove(namespace, "10.50.0.0/16")
    assert report.problems == []
    assert report.removed == ["IPVS service 10.96.0.1 port 80 protocol 6"]
    assert "0A320001:0050" in namespace.run("cat", "/proc/net/ip_vs")


def _make_servers(addresses: list[str]) -> None:
    from pyroute2 import IPVS, IPVSService

    with IPVS() as handle:
        for address in addresses:
            handle.service("add", IPVSService(addr=address, port=80, protocol=6, sched_name="rr"))


def run_cleanup(
    namespace: Namespace, folder: Path, before: Sequence[str] = (), after: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the command itself. ``before``: a command that runs it; ``after``: more arguments."""
    return subprocess.run(
        ["ip", "netns", "exec", namespace.name, *before, *command(), "--cleanup", "--directory", str(folder), *after],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command(namespace: Namespace, tmp_path: Path) -> None:
    load_kube_proxy(namespace, "nft", 4)
    load_kube_proxy(namespace, "legacy", 6)
    namespace.run("nft", "-f", str(DATA / "nftables.nft"))
    done = run_cleanup(namespace, tmp_path / "state")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("removed what kube-proxy left behind") == 4
    assert namespace.call(leftovers.running) == set()
    again = run_cleanup(namespace, tmp_path / "state")
    assert (again.returncode, "removed" in again.stderr) == (0, False)


def test_the_command_names_what_the_firewall_must_accept(namespace: Namespace, tmp_path: Path) -> None:
    load_kube_proxy(namespace, "nft", 4)
    namespace.run("iptables-nft", "-P", "INPUT", "DROP")
    done = run_cleanup(namespace, tmp_path / "state")
    assert done.returncode == 0, done.stderr
    Log(done.stderr).only(Message.HEALTH_CHECKS_GONE, "now 32000", level="warning")


def test_the_command_during_the_rollback_to_kube_proxy(namespace: Namespace, tmp_path: Path) -> None:
    load_kube_proxy(namespace, "nft", 4)
    before = saved(namespace, "nft", 4)
    setting = "net/ipv4/conf/all/route_localnet"
    namespace.run("sysctl", "-qw", f"{setting}=1")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / RECORD).write_text(json.dumps({f"proc/sys/{setting}": {"was": "0", "wrote": "1"}}))
    done = run_cleanup(namespace, tmp_path / "state", after=["--keep-kube-proxy-rules"])
    assert done.returncode == 0, done.stderr
    assert re.findall("kube-proxy.*", done.stderr.replace("pyebpf-proxy", "")) == [
        f'kube-proxy what="setting {setting}=1"'
    ]
    assert namespace.run("sysctl", "-n", setting).strip() == "1"
    assert not (tmp_path / "state").exists()
    assert saved(namespace, "nft", 4) == before
    assert namespace.call(leftovers.running) == {"iptables"}


def test_a_kube_proxy_in_mode_nftables_does_not_keep_the_loopback_open(namespace: Namespace, tmp_path: Path) -> None:
    """It needs no route_localnet, and drops no packets of other hosts to 127.0.0.0/8."""
    namespace.run("nft", "-f", str(DATA / "nftables.nft"))
    settings = {"net/ipv4/conf/all/route_localnet": "0", "net/netfilter/nf_conntrack_udp_timeout": "41"}
    changes = {f"proc/sys/{name}": {"was": "0", "wrote": "1"} for name in settings}
    changes["proc/sys/net/netfilter/nf_conntrack_udp_timeout"] = {"was": "30", "wrote": "41"}
    namespace.run("sysctl", "-qw", "net/ipv4/conf/all/route_localnet=1", "net/netfilter/nf_conntrack_udp_timeout=41")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / RECORD).write_text(json.dumps(changes))
    done = run_cleanup(namespace, tmp_path / "state", after=["--keep-kube-proxy-rules"])
    assert done.returncode == 0, done.stderr
    assert {name: namespace.run("sysctl", "-n", name).strip() for name in settings} == settings
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(("drops", "left"), [(True, "0"), (False, "1")])
def test_conntrack_stays_liberal_for_a_kube_proxy_that_started_with_it(
    namespace: Namespace, tmp_path: Path, kind: str, drops: bool, left: str
) -> None:
    """kube-proxy reads the setting only at its start, and makes no rule for INVALID packets then."""
    rules = recorded(4)
    if not drops:
        rules = "".join(line for line in rules.splitlines(keepends=True) if "INVALID" not in line)
    load_kube_proxy(namespace, kind, 4, rules)
    setting = "net/netfilter/nf_conntrack_tcp_be_liberal"
    namespace.run("sysctl", "-qw", f"{setting}=1")
    change = {"was": "0", "wrote": "1", "holder": "fastPath"}
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / RECORD).write_text(json.dumps({f"proc/sys/{setting}": change}))
    done = run_cleanup(namespace, tmp_path / "state", after=["--keep-kube-proxy-rules"])
    assert done.returncode == 0, done.stderr
    assert namespace.run("sysctl", "-n", setting).strip() == left
    assert ("kept for kube-proxy" in done.stderr) == (not drops)
    assert not (tmp_path / "state").exists()


def test_the_command_when_a_part_fails(namespace: Namespace, tmp_path: Path) -> None:
    """One line, exit status 1, and every other part is removed."""
    load_kube_proxy(namespace, "nft", 4)
    restore(namespace, "nft", 4, "*nat\n:CNI-SETMARK - [0:0]\n-A CNI-SETMARK -j KUBE-MARK-MASQ\nCOMMIT\n")
    namespace.run("nft", "-f", str(DATA / "nftables.nft"))
    done = run_cleanup(namespace, tmp_path / "state")
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if " error " in line]
    assert len(errors) == 1
    assert "encountered an error while tearing down rules: iptables-nft IPv4: table nat: chain KUBE-MARK" in errors[0]
    assert namespace.call(leftovers.running) == set()
    assert "KUBE-SERVICES" not in "\n".join(saved(namespace, "nft", 4))
