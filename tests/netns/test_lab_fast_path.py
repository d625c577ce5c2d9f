# SPDX-License-Identifier: Apache-2.0
"""The fast path on real packets: they arrive correctly, also when the node changes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.lab.addresses import Dual
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.namespace import Namespace
from tests.support.conversation import PORT, Conversation
from tests.support.fast_lab import FAR, LIBERAL, NEAR, ON, Ask, FastWorld, build_fast_world
from tests.support.lab_tools import wait_until
from tests.support.new_flows import NewFlows, ask_once, ending, entries, wait_until_fast
from tests.support.see_tools import answer

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


@pytest.fixture(scope="module")
def bridged() -> Iterator[FastWorld]:
    with Lab(pod_network="bridge") as lab:
        yield build_fast_world(lab)


# ---- what arrives is right ------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [FAR, NEAR], ids=["other node", "same node"])
def test_pod_to_cluster_ip(fast_world: FastWorld, ask: Ask, address: Dual, family: int, protocol: str) -> None:
    conversation = ask(fast_world.client.namespace, address.of(family), protocol)
    fast_world.fast(conversation)
    assert conversation.peer == fast_world.client.address.of(family)


def test_client_to_node_port(fast_world: FastWorld, ask: Ask, family: int, protocol: str) -> None:
    conversation = ask(fast_world.lab.client, fast_world.node.address.of(family), protocol, 30007)
    fast_world.fast(conversation)
    assert conversation.peer == fast_world.node.address.of(family), "masqueraded"


@pytest.mark.parametrize("size", [1400, 40_000], ids=["whole packets", "a stream"])
def test_large_requests(fast_world: FastWorld, ask: Ask, size: int, family: int) -> None:
    fast_world.fast(ask(fast_world.client.namespace, FAR.of(family), size=size))


@pytest.mark.parametrize("address", [FAR, NEAR], ids=["other node", "same bridge"])
def test_pods_on_a_bridge(bridged: FastWorld, ask: Ask, address: Dual, family: int, protocol: str) -> None:
    conversation = ask(bridged.client.namespace, address.of(family), protocol)
    if address is FAR:
        bridged.fast(conversation)
    conversation.wait()
    assert conversation.peer == bridged.client.address.of(family)


def test_flows_shows_the_flow_table(fast_world: FastWorld, far: Conversation) -> None:
    port = FAR.v4 + f":{PORT}"
    assert port in {flow["destination"] for flow in answer(fast_world.node, "flows")["flows"] if flow["fastPath"]}
    far.wait()


# ---- listeners of conntrack's events ------------------------------------------------------------------------------


class Events:
    """The output of ``conntrack -E`` on a node, from now on, about flows from ``client`` to ``service``."""

    def __init__(self, node: Namespace, client: str, service: str, protocol: str, path: Path) -> None:
        family = 6 if ":" in service else 4
        self._path, self._protocol, self._ends = path, protocol, f"src={client} dst={service}"
        # First create the file: the process opens it.
        path.touch()
        self.task = node.start(_listen, family, str(path))
        ports = itertools.count(2000)
        source, destination = ("198.18.0.1", "198.18.0.2") if family == 4 else ("fd18::1", "fd18::2")

        def listens() -> bool:
            flow = f"-s {source} -d {destination} -p udp --sport {next(ports)} --dport 9 -t 1"
            node.run("conntrack", "-I", *flow.split())
            return bool(path.read_text())

        wait_until(listens, "it listens")

    def of(self, port: int) -> list[str]:
        """Lines about flows from this port of the client."""
        lines = self._path.read_text().splitlines()
        mine = (line for line in lines if f"] {self._protocol} " in line)
        return [line for line in mine if f" {self._ends} sport={port} " in line]


def _listen(family: int, path: str) -> None:
    os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), 1)
    os.execvp("conntrack", ["conntrack", "-E", "-f", f"ipv{family}"])


def test_listeners_of_conntracks_events(
    fast_world: FastWorld, ask: Ask, family: int, protocol: str, tmp_path: Path
) -> None:
    """They see slow-path flows, and fast-path flows when they are promoted; no other flows (finding D8)."""
    asker, address, node = fast_world.client.namespace, NEAR.of(family), fast_world.node.namespace
    events = Events(node, fast_world.client.address.of(family), address, protocol, tmp_path / "events")
    try:
        fast: list[int] = []
        slow: list[int] = []
        own_ports = iter(range(22_000, 22_900))

        def of_both_kinds() -> bool:
            before, port = fast_world.count("new_flow_fast"), next(own_ports)
            assert asker.call(ask_once, address, PORT, protocol, 5.0, port)
            (fast if fast_world.count("new_flow_fast") > before else slow).append(port)
            return len(fast) >= 3 and bool(slow)

        wait_until(of_both_kinds, "short flows by both ways")
        flows = NewFlows(asker, address, protocol)
        with ending(flows):
            wait_until_fast(fast_world, flows)
            conversations = [ask(asker, address, protocol) for _ in range(4)]
            reported = {each.own_port for each in conversations if events.of(each.own_port)}
            found = {e["client"] for e in entries(fast_world) if e["young"]}
        young = [each.own_port for each in conversations if each.client in found]
        assert young, "one of the flows is young"
        assert not reported & set(young), "conntrack has no young flow"
        for port in young:
            wait_until(lambda port=port: events.of(port), "it is promoted")
            node.run("conntrack", "-D", "-f", f"ipv{family}", "-p", protocol, "--sport", str(port))
            wait_until(lambda port=port: any("[DESTROY]" in line for line in events.of(port)), "the end of its entry")
            first = events.of(port)[0]
            assert "[NEW]" in first
            assert protocol == "udp" or " ESTABLISHED " in first
        assert all("[NEW]" in events.of(port)[0] for port in slow)
        assert not any(map(events.of, fast)), "short flows of the fast path"
    finally:
        events.task.stop()


# ---- what closes it --------------------------------------------------------------------------------------------------


def test_policy_routing_closes_the_fast_path_and_its_end_opens_it(fast_world: FastWorld, far: Conversation) -> None:
    before = fast_world.count("stack_policy_routed")
    fast_world.node.namespace.ip("rule add dport 7 lookup main")
    try:
        wait_until(lambda: fast_world.count("stack_policy_routed") > before, "closed for policy routing", 60.0)
        far.wait()
    finally:
        fast_world.node.namespace.ip("rule del dport 7 lookup main")
    fast_world.fast(far)


def test_a_rule_that_counts_closes_the_fast_path_and_its_end_opens_it(fast_world: FastWorld, far: Conversation) -> None:
    before = fast_world.count("stack_rules")
    node = fast_world.node.namespace
    hook = "type filter hook forward priority 0"
    node.run("nft", f"table inet counts {{ chain c {{ {hook}; tcp dport 7 limit rate 9/second accept; }}; }}")
    try:
        wait_until(lambda: fast_world.count("stack_rules") > before, "closed for a rule", 60.0)
        far.wait()
    finally:
        node.run("nft", "delete table inet counts")
    fast_world.fast(far)


def test_ipsec_closes_the_fast_path(fast_world: FastWorld, far: Conversation) -> None:
    policy = "xfrm policy {} src 198.18.0.0/15 dst 198.18.0.0/15 dir fwd"
    try:
        fast_world.node.namespace.ip(policy.format("add"))
    except Exception as error:
        pytest.skip(f"this kernel has no IPsec: {error}")
    before = fast_world.count("stack_ipsec")
    try:
        wait_until(lambda: fast_world.count("stack_ipsec") > before, "closed for IPsec", 60.0)
        far.wait()
    finally:
        fast_world.node.namespace.ip(policy.format("del"))
    fast_world.fast(far)


def test_a_setting_that_another_program_changes_is_set_again(fast_world: FastWorld, far: Conversation) -> None:
    """A strict conntrack takes the packets of the fast path's connections for invalid."""
    fast_world.fast(far)
    namespace = fast_world.node.namespace
    namespace.run("sysctl", "-w", f"{LIBERAL}=0")
    wait_until(lambda: value(namespace) == "1", "conntrack is liberal again", 60.0)
    far.wait(100)
    fast_world.fast(far)


# ---- the agent ------------------------------------------------------------------------------------------------


KEEP = """table ip keep { chain c { type nat hook prerouting priority 0;
 ip daddr 203.0.113.250 tcp dport 1 dnat to 203.0.113.251; }; }"""


def test_a_connection_survives_starts_and_stops_of_the_agent(fast_world: FastWorld, far: Conversation) -> None:
    """One connection during all changes; few starts, since each takes seconds."""
    agent, namespace = fast_world.node.agent, fast_world.node.namespace

    # A young flow would stay in the flow table.
    address, protocol, port = far.client
    flow = ["-L", "-p", protocol, "--orig-src", address, "--orig-port-src", str(port)]
    wait_until(lambda: "ESTABLISHED" in namespace.run("conntrack", *flow), "the kernel has it", 60.0)
    before = fast_world.count("stack_no_agent")
    agent.kill()
    wait_until(lambda: fast_world.count("stack_no_agent") > before, "without an agent, the slow path", 60.0)
    far.wait()

    before = fast_world.count("stack_device")
    agent.start(own={**ON, "fastPathExcludedDevices": ["eth0"]})
    agent.wait_synced()
    wait_until(lambda: fast_world.count("stack_device") > before, "to the kernel, for the device's sake", 60.0)
    far.wait()
    assert value(namespace) == "1"
    assert "invalid" in namespace.run("nft", "list", "ruleset"), "the agent has set be_liberal"
    agent.stop()

    agent.start(own=ON)
    agent.wait_synced()
    fast_world.fast(far)
    agent.stop()

    # Without the fast path conntrack is strict again, and INVALID packets are dropped.
    agent.start(own={"fastPath": False})
    agent.wait_synced()
    assert value(namespace) == "0"
    assert "invalid" in namespace.run("nft", "list", "ruleset")
    hits = fast_world.count("flow_hit")
    far.wait(100)
    assert fast_world.count("flow_hit") == hits
    agent.stop()

    agent.start(own=ON)
    agent.wait_synced()
    fast_world.fast(far)
    # Other NAT rules, as every node has: without any the kernel translates no packet.
    namespace.run("nft", "-f", "-", stdin=KEEP)
    agent.stop()
    agent.cleanup()
    assert value(namespace) == "0"
    far.wait(100)

    # The configuration asks for one of the fast path's settings: conntrack becomes strict after the fast path has gone.
    agent.start({"conntrack": {"tcpBeLiberal": True}}, own=ON)
    agent.wait_synced()
    fast_world.fast(far)
    agent.stop()
    agent.cleanup()
    assert value(namespace) == "0"
    far.wait(100)


def value(namespace: Namespace) -> str:
    return namespace.run("sysctl", "-n", LIBERAL).strip()
