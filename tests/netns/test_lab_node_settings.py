# SPDX-License-Identifier: Apache-2.0
"""The node settings of spec/service-semantics §12, read in the node's namespace, and their effect."""

from __future__ import annotations

import json
import multiprocessing
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.l2 import Dot1AD, Dot1Q, Ether
from scapy.packet import Packet

from pyebpf_proxy.config.datapath_model import API_VERSION, KIND
from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.datapath.preflight import effective_capabilities
from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.client import ANSWERED, ask
from pyebpf_proxy.lab.cluster import Lab, Node
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import counted_between, reasons, wait_until
from tests.support.logs import Log, Message

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 1)
CAP_SYS_RESOURCE = 24
NETFILTER = "net.netfilter.nf_conntrack_"
CONF = "net.ipv4.conf.all."
TIMEOUTS = {
    "tcpEstablishedTimeout": ("tcp_timeout_established", "1h0m1.9s", 3601),
    "tcpCloseWaitTimeout": ("tcp_timeout_close_wait", "90s", 90),
    "udpTimeout": ("udp_timeout", "41s", 41),
    "udpStreamTimeout": ("udp_timeout_stream", "181s", 181),
}


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """One node with one pod that serves. Each test starts the agent; clean-up follows."""
    with Lab(nodes=1) as lab:
        WEB.endpoints = (lab.add_pod("web-1", lab.nodes[0]),)
        write_nodes(lab)
        write_services(lab, WEB)
        yield lab.nodes[0]


@pytest.fixture(autouse=True)
def as_before(node: Node) -> Iterator[None]:
    """Clean-up restores every setting that a test has changed."""
    before = every(node)
    yield
    if node.agent.process is not None:
        node.agent.kill()
    node.agent.cleanup()
    assert every(node) == before


def every(node: Node) -> dict[str, int]:
    """All settings of a network namespace that an agent could change."""
    names = [NETFILTER + name for name, _, _ in TIMEOUTS.values()]
    names += [NETFILTER + name for name in ("max", "tcp_be_liberal", "tcp_ignore_invalid_rst", "tcp_timeout_fin_wait")]
    names += [NETFILTER + "tcp_timeout_unacknowledged"]
    names += [CONF + name for name in ("route_localnet", "arp_ignore", "arp_announce")] + ["net.ipv4.ip_forward"]
    return {name: number(node, name) for name in names}


def number(node: Node, name: str) -> int:
    return int(node.namespace.run("sysctl", "-n", name))


def started(node: Node, **config: Any) -> None:
    node.agent.start(config)
    node.agent.wait_synced()


def set_by_us(node: Node) -> set[str]:
    return set(json.loads((node.agent.directory / "node-settings.json").read_text()))


def test_the_configured_settings_are_set(node: Node) -> None:
    timeouts = {field: text for field, (_, text, _) in TIMEOUTS.items()}
    started(node, conntrack=timeouts | {"tcpBeLiberal": True})
    assert {name: number(node, NETFILTER + name) for name, _, _ in TIMEOUTS.values()} == {
        name: value for name, _, value in TIMEOUTS.values()
    }
    assert number(node, NETFILTER + "tcp_be_liberal") == 1
    assert number(node, CONF + "route_localnet") == 1
    assert (number(node, CONF + "arp_ignore"), number(node, CONF + "arp_announce")) == (0, 0)


def test_defaults_are_those_of_kube_proxy_and_zero_changes_nothing(node: Node) -> None:
    before = every(node)
    started(node)
    assert number(node, NETFILTER + "tcp_timeout_established") == 86400
    assert number(node, NETFILTER + "tcp_timeout_close_wait") == 3600
    node.agent.stop()
    assert number(node, NETFILTER + "tcp_timeout_established") == 86400, "an agent that ends keeps all settings"
    node.agent.cleanup()
    nothing = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
    # The fast path has its own settings.
    node.agent.start({"conntrack": nothing, "iptables": {"localhostNodePorts": False}}, own={"fastPath": False})
    node.agent.wait_synced()
    assert every(node) == before
    assert not (node.agent.directory / "node-settings.json").exists()


def test_sub_second_timeouts_are_zero(node: Node) -> None:
    started(node, conntrack={"udpTimeout": "999ms"})
    assert number(node, NETFILTER + "udp_timeout") == 0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 1),
        ({"iptables": {"localhostNodePorts": False}}, 0),
        ({"nodePortAddresses": ["192.0.2.0/24"]}, 0),
        ({"nodePortAddresses": ["127.0.0.0/8"]}, 1),
        ({"nodePortAddresses": ["primary"]}, 0),
        ({"nodePortAddresses": ["primary"], "bindAddress": "127.0.0.1"}, 1),
        ({"mode": "nftables"}, 0),
        ({"mode": "ipvs"}, 0),
    ],
    ids=[
        "by default",
        "switched off",
        "no loopback address",
        "a loopback address",
        "primary",
        "primary, which is a loopback address",
        "nftables",
        "ipvs",
    ],
)
def test_route_localnet_is_set_only_with_localhost_node_ports(
    node: Node, config: dict[str, Any], expected: int
) -> None:
    started(node, **config)
    assert number(node, CONF + "route_localnet") == expected
    served = bool(expected) or config.get("mode") == "ipvs"
    outcome = node.namespace.call(ask, "127.0.0.1", WEB.target("NodePort", node).ports["tcp"])
    assert (outcome.kind == ANSWERED) == served, outcome


def test_mode_ipvs(node: Node) -> None:
    node.namespace.sysctl({"net.ipv4.ip_forward": 0})
    try:
        started(
            node,
            mode="ipvs",
            ipvs={"strictARP": True, "tcpTimeout": "15m", "tcpFinTimeout": "70s", "udpTimeout": "50s"},
        )
        assert (number(node, CONF + "arp_ignore"), number(node, CONF + "arp_announce")) == (1, 2)
        assert number(node, "net.ipv4.ip_forward") == 1
        found = {name: number(node, NETFILTER + name) for name in ("tcp_timeout_established", "tcp_timeout_fin_wait")}
        assert found == {"tcp_timeout_established": 900, "tcp_timeout_fin_wait": 70}
        assert (number(node, NETFILTER + "udp_timeout"), number(node, NETFILTER + "udp_timeout_stream")) == (50, 50)
        node.agent.stop()
        node.agent.cleanup()
        assert number(node, "net.ipv4.ip_forward") == 0
    finally:
        node.namespace.sysctl({"net.ipv4.ip_forward": 1})


def test_the_machines_conntrack_limit_is_not_set_from_a_namespace(node: Node) -> None:
    """A network namespace may not change the limit; the agent logs that in one line, and serves."""
    before = number(node, NETFILTER + "max")
    hashsize = Path("/sys/module/nf_conntrack/parameters/hashsize").read_text()
    node.agent.log_file.unlink(missing_ok=True)
    started(node, conntrack={"maxPerCore": 1, "min": before + 4096})
    line = Log(node.agent).only(Message.ONE_VALUE_FOR_ALL)
    assert "setting=net/netfilter/nf_conntrack_max" in line.text
    assert "field=conntrack.maxPerCore" in line.text
    assert number(node, NETFILTER + "max") == before
    assert Path("/sys/module/nf_conntrack/parameters/hashsize").read_text() == hashsize


def test_restarts_keep_the_original_value_and_foreign_settings_stay(node: Node) -> None:
    started(node, conntrack={"tcpEstablishedTimeout": "100s", "udpTimeout": "41s"})
    node.agent.kill()
    started(node, conntrack={"tcpEstablishedTimeout": "200s", "udpTimeout": "41s"})
    assert number(node, NETFILTER + "tcp_timeout_established") == 200
    node.agent.stop()
    former = number(node, CONF + "arp_ignore")
    node.namespace.sysctl({NETFILTER + "udp_timeout": 77})
    node.agent.cleanup()
    try:
        assert number(node, NETFILTER + "udp_timeout") == 77
        assert number(node, CONF + "arp_ignore") == former
    finally:
        node.namespace.sysctl({NETFILTER + "udp_timeout": 30})  # the kernel's default, which as_before compares with


def read_only_proc(node: Node, config: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Start an agent with a read-only /proc/sys, in its own namespaces, until it ends or has synced once."""
    script = 'mount -o bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && exec "$@"'
    path = node.agent.folder / "config.yaml"
    path.write_text(json.dumps(node.agent.configuration(config)))
    # Another test covers the settings that the fast path needs.
    own = node.agent.folder / "datapath.yaml"
    own.write_text(json.dumps({"apiVersion": API_VERSION, "kind": KIND, "fastPath": False}))
    arguments = ["--config", str(path), "--datapath-config", str(own), "--manifests", str(node.agent.manifests)]
    arguments += ["--directory", str(node.agent.directory)]
    inside = ["unshare", "--mount", "sh", "-c", script, "sh", *command(), *arguments]
    process = subprocess.Popen(
        ["ip", "netns", "exec", node.namespace.name, *inside],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # The metrics are served, with zeros, before the settings are written.
        wait_until(
            lambda: process.poll() is not None or sum(at > 0 for at in node.agent.synced().values()) == 2,
            "it ended or has synced",
            60,
        )
        process.terminate()
        _, output = process.communicate(timeout=30)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, "", output)


def test_settings_that_are_right_are_not_written(node: Node) -> None:
    """With a read-only /proc/sys the agent starts if no setting differs; otherwise it ends with one clear line."""
    same = {"maxPerCore": 0, "tcpEstablishedTimeout": "100s", "tcpCloseWaitTimeout": "0s"}
    # The fast path has its own settings.
    node.agent.start({"conntrack": same}, own={"fastPath": False})
    node.agent.wait_synced()
    node.agent.stop()
    done = read_only_proc(node, {"conntrack": same})
    assert done.returncode == 0, done.stderr
    assert "net/" not in done.stderr

    done = read_only_proc(node, {"conntrack": same | {"tcpEstablishedTimeout": "101s"}})
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if " error " in line]
    assert (
        "net/netfilter/nf_conntrack_tcp_timeout_established cannot be set to 101 (conntrack.tcpEstablishedTimeout):"
        " Read-only file system; set it beforehand, or have it left alone with conntrack.tcpEstablishedTimeout: 0s"
    ) in error
    assert "Traceback" not in done.stderr
    assert number(node, NETFILTER + "tcp_timeout_established") == 100


def test_a_first_start_that_fails_changes_nothing(node: Node) -> None:
    """The last of three settings exceeds the kernel's range: the two before it are restored at once."""
    before = every(node)
    node.agent.log_file.unlink(missing_ok=True)
    node.agent.start(
        {"conntrack": {"tcpEstablishedTimeout": "100s", "udpTimeout": "41s", "udpStreamTimeout": "99999h"}}
    )
    assert node.agent.wait_ended(60) == 1
    log = Log(node.agent)
    log.some(
        "nf_conntrack_udp_timeout_stream cannot be set to 359996400 (conntrack.udpStreamTimeout): Invalid argument"
    )
    log.none("Traceback")
    log.some("setting=net/netfilter/nf_conntrack_udp_timeout value=41 before=30")
    assert every(node) == before
    assert not (node.agent.directory / "node-settings.json").exists()


def test_oom_score_adj(node: Node) -> None:
    own = Path("/proc/self/oom_score_adj").read_text().strip()
    higher = str(min(int(own) + 300, 1000))
    for value in (int(higher), -999):
        node.agent.log_file.unlink(missing_ok=True)
        started(node, oomScoreAdj=value)
        assert node.agent.process is not None
        found = Path(f"/proc/{node.agent.process.pid}/oom_score_adj").read_text().strip()
        if value < int(own) and not effective_capabilities() >> CAP_SYS_RESOURCE & 1:
            # Not even root may lower it here: the agent only logs that.
            assert found == own
            Log(node.agent).some(f'{Message.OOM_SCORE_FAILS} value=-999 error="Permission denied"')
        else:
            assert found == str(value)
            Log(node.agent).none("oomScoreAdj")
        node.agent.stop()


# ---- the guard ---------------------------------------------------------------------------------------------------


def _send(device: str, packet: bytes) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((device, 0))
        sock.send(packet)


def _mac(node: Node) -> str:
    (link,) = json.loads(node.namespace.run("ip", "-j", "link", "show", "dev", "eth0"))
    address: str = link["address"]
    return address


@pytest.mark.parametrize("carried", [TCP(dport=30001, flags="S"), UDP(dport=30001), ICMP()], ids=["TCP", "UDP", "ICMP"])
def test_packets_to_loopback_from_other_hosts_are_dropped(node: Node, carried: Packet) -> None:
    """The router sends a packet for 127.0.0.1 directly to the node: it is dropped and counted."""
    port = WEB.target("NodePort", node).ports["tcp"]
    started(node)
    assert number(node, CONF + "route_localnet") == 1
    assert node.namespace.call(ask, "127.0.0.1", port).kind == ANSWERED
    frame = Ether(dst=_mac(node)) / IP(src="192.0.2.77", dst="127.0.0.1") / carried
    before = reasons(node)
    node.lab.core.call(_send, node.name, bytes(frame))
    wait_until(lambda: counted_between(before, reasons(node)), "the packet was counted")
    assert counted_between(before, reasons(node)) == {"drop_loopback_destination": 1}


@pytest.mark.parametrize("outer", [Dot1Q, Dot1AD], ids=["802.1Q", "802.1ad"])
def test_packets_to_loopback_with_two_vlan_tags_reach_no_socket(node: Node, outer: type[Packet]) -> None:
    """tc sees only the inner tag, which the kernel removes later. The nftables table drops the packet."""
    started(node)
    assert number(node, CONF + "route_localnet") == 1
    frame = Ether(dst=_mac(node)) / outer(vlan=0) / Dot1Q(vlan=0) / IP(src="192.0.2.77", dst="127.0.0.1")
    dropped = _guarded(node)
    node.lab.core.call(_send, node.name, bytes(frame / UDP(dport=30001)))
    wait_until(lambda: _guarded(node) == dropped + 1, "the packet was dropped")


def _guarded(node: Node) -> int:
    listed = node.namespace.run(
        "nft", "-j", "list", "chain", "inet", mounts.table_name(node.agent.directory), "guard_loopback"
    )
    (rule,) = (each["rule"] for each in json.loads(listed)["nftables"] if "rule" in each)
    return sum(each["counter"]["packets"] for each in rule["expr"] if "counter" in each)


@pytest.mark.parametrize(
    "config",
    [{"mode": "nftables"}, {"mode": "ipvs"}, {"iptables": {"localhostNodePorts": False}}],
    ids=["nftables", "ipvs", "switched off"],
)
def test_loopback_stays_guarded_when_localhost_node_ports_are_no_longer_wanted(
    node: Node, config: dict[str, Any]
) -> None:
    """route_localnet stays 1 then, as with kube-proxy, whose rule in KUBE-FIREWALL stays, too."""
    started(node)
    node.agent.stop()
    started(node, **config)
    assert number(node, CONF + "route_localnet") == 1
    frame = Ether(dst=_mac(node)) / IP(src="192.0.2.77", dst="127.0.0.1") / UDP(dport=30001, sport=7) / b"hello"
    waiting, ready = multiprocessing.Pipe(duplex=False)
    task = node.namespace.start(_receive, "127.0.0.1", 30001, 1.0, ready)
    waiting.recv()
    node.lab.core.call(_send, node.name, bytes(frame))
    assert task.result(30) == b""


def _receive(address: str, port: int, seconds: float, ready: Any) -> bytes:
    """The first datagram to this address; b"" if none arrives in time."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((address, port))
        sock.settimeout(seconds)
        ready.send("ready")
        try:
            return sock.recv(100)
        except TimeoutError:
            return b""


def test_without_localhost_node_ports_no_guard_is_needed(node: Node) -> None:
    started(node, iptables={"localhostNodePorts": False})
    assert number(node, CONF + "route_localnet") == 0
    frame = Ether(dst=_mac(node)) / IP(src="192.0.2.77", dst="127.0.0.1") / TCP(dport=30001, flags="S")
    martians = _martians(node)
    before = reasons(node)
    node.lab.core.call(_send, node.name, bytes(frame))
    wait_until(lambda: _martians(node) > martians, "the kernel has dropped it")
    assert counted_between(before, reasons(node)) == {}


def _martians(node: Node) -> int:
    """How many packets the kernel did not route because of their addresses (IpInAddrErrors and similar counters)."""
    text = node.namespace.run("cat", "/proc/net/stat/rt_cache")
    names, *rows = (line.split() for line in text.splitlines())
    return sum(int(row[names.index("in_martian_dst")], 16) for row in rows)
