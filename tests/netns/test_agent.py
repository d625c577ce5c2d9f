# SPDX-License-Identifier: Apache-2.0
"""The agent on real packets: what it learns while it runs, changes by other software, and its end."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.lab.agent import FEW_RIGHTS, command
from pyebpf_proxy.lab.client import ANSWERED, ask
from pyebpf_proxy.lab.cluster import Lab
from tests.support.lab_services import Kind, write_services
from tests.support.lab_tools import wait_until
from tests.support.logs import Log

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_bpf, pytest.mark.needs_netns]

WEB = Kind("web", 1)
QUICK = {"iptables": {"minSyncPeriod": "10ms", "syncPeriod": "500ms"}}


@pytest.fixture(scope="module")
def small() -> Iterator[Lab]:
    """One node with one pod that serves; each test starts the agent."""
    with Lab(nodes=1) as lab:
        WEB.endpoints = (lab.add_pod("web-1", lab.nodes[0]),)
        write_services(lab, WEB)
        yield lab


@pytest.fixture
def started(small: Lab) -> Iterator[Lab]:
    agent = small.nodes[0].agent
    agent.start(QUICK)
    agent.wait_synced()
    yield small
    if agent.process is not None:
        agent.stop()


def test_the_table_is_restored_after_a_firewall_flushes_nftables(started: Lab, family: int) -> None:
    node = started.nodes[0]
    address = WEB.target("LoadBalancer", node).address.of(family)
    node.namespace.run("nft", "flush", "ruleset")
    wait_until(lambda: "chain translate" in node.namespace.run("nft", "list", "ruleset"), "the agent's table is back")
    assert started.client.call(ask, address, 80).kind == ANSWERED


@pytest.mark.parametrize("few", [False, True])
def test_a_variable_reduces_the_capabilities_of_a_labs_agents(
    small: Lab, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    """CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON are left."""
    node = small.nodes[0]
    monkeypatch.setenv(FEW_RIGHTS, "1" if few else "0")
    node.agent.start(QUICK)
    try:
        node.agent.wait_synced()
        assert node.agent.process is not None
        status = Path(f"/proc/{node.agent.process.pid}/status").read_text()
        assert (f"CapEff:\t{1 << 12 | 1 << 38 | 1 << 39:016x}\n" in status) == few
        assert small.client.call(ask, WEB.target("LoadBalancer", node).address.v4, 80).kind == ANSWERED
    finally:
        node.agent.stop()


def test_a_second_agent_on_the_same_folder_exits_and_the_first_continues(started: Lab) -> None:
    node = started.nodes[0]
    arguments = ["--manifests", str(started.manifests), "--directory", str(node.agent.directory)]
    second = subprocess.run(
        ["ip", "netns", "exec", node.namespace.name, *command(), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    assert "another agent (process " in second.stderr
    assert "stop it first, or give this one its own --directory" in second.stderr
    address = WEB.target("LoadBalancer", node).address.v4
    assert started.client.call(ask, address, 80).kind == ANSWERED
    assert node.agent.process is not None
    assert node.agent.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_agent_with_status_0(started: Lab, number: signal.Signals) -> None:
    agent = started.nodes[0].agent
    agent.signal(number)
    assert agent.wait_ended() == 0
    Log(agent).some(f"signal={number.name}")


def test_another_masquerade_bit_after_a_restart(small: Lab) -> None:
    """The programs and the nft table must use the same bit: the programs set it, and the table masquerades."""
    node = small.nodes[0]
    for bit in (14, 3):
        node.agent.start(QUICK | {"iptables": QUICK["iptables"] | {"masqueradeBit": bit}})
        try:
            node.agent.wait_synced()
            assert f"meta mark & 0x{1 << bit:08x}" in node.namespace.run("nft", "list", "ruleset")
            outcome = small.client.call(ask, WEB.target("NodePort", node).address.v4, 30001)
            assert outcome.answer is not None
            assert outcome.answer.peer[0] == node.source_towards(WEB.endpoints[0]).v4
        finally:
            node.agent.stop()
