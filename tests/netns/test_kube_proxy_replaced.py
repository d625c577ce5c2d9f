# SPDX-License-Identifier: Apache-2.0
"""Replacing kube-proxy on a node with traffic: connections continue, rules are removed, and a warning if they return.

The rules are recorded ones with the lab's addresses: the service ``lb`` of the recording is the lab's.
"""

from __future__ import annotations

import fcntl
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.migration import leftovers
from pyebpf_proxy.lab.addresses import CLIENT, CLIENT_CIDR, vip
from pyebpf_proxy.lab.client import ANSWERED, ask
from pyebpf_proxy.lab.cluster import Lab, Node, Pod
from tests.support.kube_proxy_tools import DATA, load_kube_proxy, recorded, saved
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import wait_until
from tests.support.logs import Log, Message

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

LB = Kind("lb", 10)
QUICK = {"iptables": {"minSyncPeriod": "10ms", "syncPeriod": "500ms"}}
ECHO_PORT = 8080
_sockets: dict[str, socket.socket] = {}


@pytest.fixture
def node_lab() -> Iterator[Lab]:
    """One node, one pod, no agent; each test starts the pod's server."""
    with Lab(nodes=1) as lab:
        LB.endpoints = (lab.add_pod("web-1", lab.nodes[0], serve=False),)
        write_nodes(lab)
        write_services(lab, LB)
        lab.route_vips(lab.nodes[0])
        yield lab


def in_the_lab(text: str, pod: Pod) -> str:
    """The recorded rules with the lab's addresses. Both endpoints are the one pod."""
    for number in (2, 3):
        text = text.replace(f"10.244.1.{number}:8080", f"{pod.address.v4}:8080")
        text = text.replace(f"[fd00:10:244:1::{number}]:8080", f"[{pod.address.v6}]:8080")
        text = text.replace(f"10.244.1.{number} . 8080", f"{pod.address.v4} . 8080")
        text = text.replace(f"fd00:10:244:1::{number} . 8080", f"{pod.address.v6} . 8080")
    return text.replace("2001:db8:203::10", vip(10).v6).replace("2001:db8:51::/64", CLIENT_CIDR[1])


def serve_echo(family: int) -> None:
    with socket.create_server(("::" if family == 6 else "", ECHO_PORT), family=_family(family)) as server:
        while True:
            connection, _ = server.accept()
            with connection:  # one at a time is enough: the test has one connection
                while data := connection.recv(4096):
                    connection.sendall(data)


def _family(family: int) -> socket.AddressFamily:
    return socket.AF_INET6 if family == 6 else socket.AF_INET


def connect(address: str, port: int) -> None:
    _sockets["one"] = socket.create_connection((address, port), timeout=5)


def exchange(text: str) -> str:
    sock = _sockets["one"]
    sock.settimeout(5)
    sock.sendall(text.encode())
    return sock.recv(4096).decode()


@pytest.mark.parametrize("mode", ["iptables-nft", "iptables-legacy", "nftables"])
def test_a_connection_through_kube_proxy_continues(node_lab: Lab, family: int, mode: str) -> None:
    node, client, pod = node_lab.nodes[0], node_lab.client, LB.endpoints[0]
    server = pod.namespace.start(serve_echo, family)
    kind = mode.removeprefix("iptables-")
    if mode == "nftables":
        node.namespace.run("nft", "-f", "-", stdin=in_the_lab((DATA / "nftables.nft").read_text(), pod))
    else:
        load_kube_proxy(node.namespace, kind, family, in_the_lab(recorded(family), pod))
    try:
        wait_until(lambda: pod.namespace.run("ss", "-Hlnt", f"sport = :{ECHO_PORT}"), "the server listens")
        client.call(connect, vip(10).of(family), 80)
        assert client.call(exchange, "by kube-proxy") == "by kube-proxy"

        node.agent.start(QUICK)
        node.agent.wait_synced()
        Log(node.agent).wait(Message.KUBE_PROXY_REMOVED)
        # Not before the agent's programs carry the traffic.
        lines = Log(node.agent).lines()
        carried = next(number for number, line in enumerate(lines) if "attached" in line.text)
        assert carried < lines.index(Log(node.agent).lines(Message.KUBE_PROXY_REMOVED)[0])
        assert node.namespace.call(leftovers.running) == set()
        if mode != "nftables":
            assert not [line for line in saved(node.namespace, kind, family) if "KUBE-S" in line]
        for number in range(5):
            assert client.call(exchange, f"by pyebpf-proxy {number}") == f"by pyebpf-proxy {number}"
        Log(node.agent).none("kube-proxy", level="warning")
    finally:
        server.stop()
        node.agent.stop()


def test_a_masqueraded_flow_keeps_its_source_port(node_lab: Lab, family: int) -> None:
    """kube-proxy uses all ports, young flows those below 32768."""
    node, (pod,) = node_lab.nodes[0], LB.endpoints
    ends = ["-s", CLIENT.of(family), "-d", vip(10).of(family), "--sport", "40000", "--dport", "80"]
    ends += ["-r", pod.address.of(family), "-q", node.address.of(family)]
    ends += ["--reply-port-src", str(ECHO_PORT), "--reply-port-dst", "20000"]
    node.namespace.run("conntrack", "-I", "-p", "tcp", "--state", "ESTABLISHED", "-t", "600", *ends)
    node.agent.start(QUICK)
    try:
        node.agent.wait_synced()
        log = Log(node.agent)
        log.wait(Message.MASQUERADED_FLOWS)
        (line,) = log.lines(Message.MASQUERADED_FLOWS)
        assert line.text.endswith("flows=1")
        # After a restart the flow table has the flow.
        node.agent.stop()
        log = log.from_now()
        node.agent.start(QUICK)
        node.agent.wait_synced()
        log.none(Message.MASQUERADED_FLOWS)
    finally:
        node.agent.stop()


def test_connections_continue_and_start_where_forward_drops(node_lab: Lab, family: int) -> None:
    """As with Docker on the node, and a pod network without rules."""
    node, client, pod = node_lab.nodes[0], node_lab.client, LB.endpoints[0]
    server = pod.namespace.start(serve_echo, family)
    load_kube_proxy(node.namespace, "nft", family, in_the_lab(recorded(family), pod))
    node.namespace.run("iptables-nft" if family == 4 else "ip6tables-nft", "-P", "FORWARD", "DROP")
    try:
        wait_until(lambda: pod.namespace.run("ss", "-Hlnt", f"sport = :{ECHO_PORT}"), "the server listens")
        client.call(connect, vip(10).of(family), 80)
        assert client.call(exchange, "by kube-proxy") == "by kube-proxy"
        node.agent.start(QUICK)
        node.agent.wait_synced()
        Log(node.agent).wait(Message.KUBE_PROXY_REMOVED)
        assert client.call(exchange, "by pyebpf-proxy") == "by pyebpf-proxy"
        client.call(connect, vip(10).of(family), 80)  # this ends the first one, so that the server accepts this one
        assert client.call(exchange, "a new one") == "a new one"
        Log(node.agent).wait(Message.FORWARD_CHAIN_STAYS)
    finally:
        server.stop()
        node.agent.stop()


def test_a_start_names_what_the_firewall_must_accept(node_lab: Lab) -> None:
    node = node_lab.nodes[0]
    load_kube_proxy(node.namespace, "nft", 4)
    node.namespace.run("iptables-nft", "-A", "INPUT", "-m", "comment", "--comment", "the rest", "-j", "DROP")
    node.agent.start(QUICK)
    try:
        Log(node.agent).wait(Message.HEALTH_CHECKS_GONE, "now 32000", level="warning")
    finally:
        node.agent.stop()


def test_a_running_kube_proxy_is_logged_once(node_lab: Lab) -> None:
    node = node_lab.nodes[0]
    LB.endpoints[0].serve()
    load_kube_proxy(node.namespace, "nft", 4)
    node.agent.start(QUICK)
    try:
        node.agent.wait_synced()
        Log(node.agent).wait(Message.KUBE_PROXY_REMOVED)
        load_kube_proxy(node.namespace, "nft", 4)
        Log(node.agent).wait("mode iptables", Message.KUBE_PROXY_RUNS)
        node.namespace.run("nft", "-f", str(DATA / "nftables.nft"))
        Log(node.agent).wait("mode nftables", Message.KUBE_PROXY_RUNS)
        Log(node.agent).only("mode iptables", Message.KUBE_PROXY_RUNS)
        # The agent reports it, and does not remove its rules.
        assert node.namespace.call(leftovers.running) == {"iptables", "nftables"}
        assert node_lab.client.call(ask, vip(10).v4, 80).kind == ANSWERED
    finally:
        node.agent.stop()


def test_leftovers_that_stay_are_no_running_kube_proxy(node_lab: Lab) -> None:
    node = node_lab.nodes[0]
    load_kube_proxy(node.namespace, "nft", 4)
    node.namespace.run("iptables-nft", "-t", "mangle", "-A", "PREROUTING", "-j", "KUBE-PROXY-CANARY")
    node.agent.start(QUICK)
    try:
        node.agent.wait_synced()
        Log(node.agent).wait(Message.KUBE_PROXY_REST)
        assert node.namespace.call(leftovers.running) == {"iptables"}
        node.namespace.run("nft", "-f", str(DATA / "nftables.nft"))
        Log(node.agent).wait("mode nftables", Message.KUBE_PROXY_RUNS)
        Log(node.agent).none("mode iptables", Message.KUBE_PROXY_RUNS)
    finally:
        node.agent.stop()


def test_the_end_does_not_wait_for_the_tools(node_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """iptables-legacy-restore waits 10 s for its lock, which the test holds; the agent's end must not wait."""
    node = node_lab.nodes[0]
    load_kube_proxy(node.namespace, "legacy", 4)
    before = chains(node)
    lock = tmp_path / "xtables.lock"
    monkeypatch.setenv("XTABLES_LOCKFILE", str(lock))
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        node.agent.start(QUICK)
        node.agent.wait_synced()
        wait_until(lambda: _restore_waits(node.namespace.name), "the tool waits for the lock")
        node.agent.terminate()
        assert node.agent.wait_ended(5) == 0
        assert chains(node) == before


def chains(node: Node) -> list[str]:
    """kube-proxy's chains, without counters."""
    return [line.split()[0] for line in saved(node.namespace, "legacy", 4) if line.startswith(":KUBE-")]


def _restore_waits(namespace: str) -> bool:
    """Whether an iptables-legacy-restore runs in the namespace."""
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True).stdout.split()
    return any(b"iptables-legacy-restore" in _command_line(pid) for pid in pids)


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # ended meanwhile
        return b""
