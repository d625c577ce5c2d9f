# SPDX-License-Identifier: Apache-2.0
"""The fast path on real packets: what arrives is right, and goes on being right when the node changes under it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fast_lab import FAR, LIBERAL, NEAR, ON, Ask, World, asking, made
from lab_tools import wait_until
from talk import Talk

from pyebpf_proxy.lab.addresses import Dual
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.namespace import Namespace

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    with Lab() as lab:
        yield made(lab)


@pytest.fixture(scope="module")
def bridged() -> Iterator[World]:
    with Lab(pod_network="bridge") as lab:
        yield made(lab)


@pytest.fixture
def ask() -> Iterator[Ask]:
    with asking() as begin:
        yield begin


@pytest.fixture
def far(shared: World, ask: Ask) -> Talk:
    """A connection of the pod with the other node's pod, by the cache."""
    talk = ask(shared.client.namespace, FAR.v4)
    shared.fast(talk)
    return talk


# ---- what arrives is right ------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [FAR, NEAR], ids=["other node", "same node"])
def test_pod_to_cluster_ip(shared: World, ask: Ask, address: Dual, family: int, protocol: str) -> None:
    talk = ask(shared.client.namespace, address.of(family), protocol)
    shared.fast(talk)
    assert talk.peer == shared.client.address.of(family)


def test_client_to_node_port(shared: World, ask: Ask, family: int, protocol: str) -> None:
    talk = ask(shared.lab.client, shared.node.address.of(family), protocol, 30007)
    shared.fast(talk)
    assert talk.peer == shared.node.address.of(family), "masqueraded"


@pytest.mark.parametrize("size", [1400, 40_000], ids=["whole packets", "a stream"])
def test_much_in_one_question(shared: World, ask: Ask, size: int, family: int) -> None:
    shared.fast(ask(shared.client.namespace, FAR.of(family), size=size))


@pytest.mark.parametrize("address", [FAR, NEAR], ids=["other node", "same bridge"])
def test_pods_on_a_bridge(bridged: World, ask: Ask, address: Dual, family: int, protocol: str) -> None:
    talk = ask(bridged.client.namespace, address.of(family), protocol)
    if address is FAR:
        bridged.fast(talk)
    talk.wait()
    assert talk.peer == bridged.client.address.of(family)


# ---- what closes it --------------------------------------------------------------------------------------------------


def test_policy_routing_closes_it_and_opens_it_again(shared: World, far: Talk) -> None:
    before = shared.count("stack_policy_routed")
    shared.node.namespace.ip("rule add fwmark 0x77 lookup main")
    try:
        wait_until(lambda: shared.count("stack_policy_routed") > before, "closed for policy routing", 60.0)
        far.wait()
    finally:
        shared.node.namespace.ip("rule del fwmark 0x77 lookup main")
    shared.fast(far)


def test_ipsec_closes_it(shared: World, far: Talk) -> None:
    policy = "xfrm policy {} src 198.18.0.0/15 dst 198.18.0.0/15 dir fwd"
    try:
        shared.node.namespace.ip(policy.format("add"))
    except Exception as error:
        pytest.skip(f"this kernel has no IPsec: {error}")
    before = shared.count("stack_ipsec")
    try:
        wait_until(lambda: shared.count("stack_ipsec") > before, "closed for IPsec", 60.0)
        far.wait()
    finally:
        shared.node.namespace.ip(policy.format("del"))
    shared.fast(far)


# ---- the agent ------------------------------------------------------------------------------------------------


KEEP = """table ip keep { chain c { type nat hook prerouting priority 0;
 ip daddr 203.0.113.250 tcp dport 1 dnat to 203.0.113.251; }; }"""


def test_the_agent_comes_and_goes(shared: World, far: Talk) -> None:
    """One connection through it all; few starts, since each takes seconds."""
    agent, namespace = shared.node.agent, shared.node.namespace

    before = shared.count("stack_no_agent")
    agent.kill()
    wait_until(lambda: shared.count("stack_no_agent") > before, "nobody watches: the kernel's way", 60.0)
    far.wait()

    before = shared.count("stack_device")
    agent.start(own={**ON, "fastPathExcludedDevices": ["eth0"]})
    agent.wait_synced()
    wait_until(lambda: shared.count("stack_device") > before, "to the kernel, for the device's sake", 60.0)
    far.wait()
    assert value(namespace) == "1"
    assert "invalid" in namespace.run("nft", "list", "ruleset"), "that it is liberal is our own doing"
    agent.stop()

    agent.start(own=ON)
    agent.wait_synced()
    shared.fast(far)
    agent.stop()

    # Turned off, conntrack is strict again, and what it calls invalid is dropped.
    agent.start(own={"fastPath": False})
    agent.wait_synced()
    assert value(namespace) == "0"
    assert "invalid" in namespace.run("nft", "list", "ruleset")
    hits = shared.count("flow_hit")
    far.wait(100)
    assert shared.count("flow_hit") == hits
    agent.stop()

    agent.start(own=ON)
    agent.wait_synced()
    shared.fast(far)
    # Somebody else's NAT, as every node has it: without any the kernel translates nothing any more.
    namespace.run("nft", "-f", "-", stdin=KEEP)
    agent.stop()
    agent.cleanup()
    assert value(namespace) == "0"
    far.wait(100)


def value(namespace: Namespace) -> str:
    return namespace.run("sysctl", "-n", LIBERAL).strip()
