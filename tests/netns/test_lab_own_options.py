# SPDX-License-Identifier: Apache-2.0
"""The agent with a DatapathConfiguration: map sizes that change under connections, and no socket programs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

import pytest

from pyebpf_proxy.lab.addresses import CLIENT, Dual, cluster_ip
from pyebpf_proxy.lab.client import ANSWERED, ask, ask_many
from pyebpf_proxy.lab.cluster import Lab, Node
from pyebpf_proxy.lab.load import Load, failed
from pyebpf_proxy.lab.manifests import Port, service, slices
from pyebpf_proxy.lab.servers import Ports, start_servers
from pyebpf_proxy.services.addresses import format_address_port
from tests.netns.transfers import ECHO, Transfers
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import wait_until
from tests.support.logs import Log, Message
from tests.support.see_tools import answer

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_bpf, pytest.mark.needs_netns]

LOOPBACK = Dual("127.0.0.1", "::1")
STICKY = Kind("sticky", 21, sessionAffinity="ClientIP")
WEB = Kind("web", 10)
SMALL = {
    **dict.fromkeys(
        ("frontends4", "frontends6", "services", "serviceNames", "serviceConfigs", "backends4", "backends6"), 512
    ),
    **dict.fromkeys(("affinities", "socketRevnat4", "socketRevnat6", "socketFlows"), 2048),
    "slots": 4096,
}


@pytest.fixture(scope="module")
def small() -> Iterator[Lab]:
    """One node with two pods that serve and one that asks; each test starts the agent."""
    with Lab(nodes=1) as lab:
        (node,) = lab.nodes
        pods = (lab.add_pod("web-1", node), lab.add_pod("web-2", node))
        lab.add_pod("toolbox", node)
        for kind in (WEB, ECHO, STICKY):
            kind.endpoints = pods
        write_nodes(lab)
        write_services(lab, WEB, ECHO, STICKY)
        yield lab


@pytest.fixture(autouse=True)
def ended(small: Lab) -> Iterator[None]:
    yield
    small.nodes[0].agent.stop()


def shown(node: Node, name: str) -> int:
    """The size in bpftool's output."""
    found: dict[str, Any] = json.loads(
        node.namespace.run("bpftool", "-j", "map", "show", "pinned", str(node.agent.pin(name)))
    )
    return int(found["max_entries"])


def snake(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: "_" + letter[0].lower(), name)


def pods_of(lab: Lab, address: str) -> set[str]:
    return {outcome.answer.pod for outcome in lab.client.call(ask_many, 5, address, 80) if outcome.answer}


def wait_for_progress(transfers: list[Transfers]) -> None:
    """Every connection makes progress."""
    least = [each.least() for each in transfers]
    wait_until(
        lambda: (
            any(each.done() for each in transfers)
            or all(each.least() > was + 3 for each, was in zip(transfers, least, strict=True))
        ),
        "transfers continue",
    )
    assert not any(each.done() for each in transfers), [each.stop() for each in transfers if each.done()]


@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_other_map_sizes_while_connections_run(small: Lab, ending: str) -> None:
    node = small.nodes[0]
    agent = node.agent
    toolbox = small.pods["toolbox"].namespace
    sticky = STICKY.target("LoadBalancer", node).address
    agent.start()
    agent.wait_synced()
    assert shown(node, "slots") == 524288
    kept = {address: pods_of(small, address) for address in sticky}
    assert {len(pods) for pods in kept.values()} == {1}
    echo = ECHO.target("LoadBalancer", node).address
    own = ECHO.target("ClusterIP", node).address
    transfers = [
        Transfers(small.client, echo.v4, 7, 3), Transfers(small.client, echo.v6, 7, 3),
        Transfers(toolbox, own.v4, 7, 3), Transfers(node.namespace, own.v6, 7, 3),
    ]  # fmt: skip
    web = WEB.target("LoadBalancer", node).address
    loads = [Load(small.client, web.v4, 80), Load(toolbox, WEB.target("ClusterIP", node).address.v6, 80)]
    wait_for_progress(transfers)
    for sizes in (SMALL, {}, {"slots": 100_000, "affinities": 5000, "devices": 200}):
        getattr(agent, ending)()
        agent.start(own={"maps": sizes})
        agent.wait_synced()
        assert {name: shown(node, snake(name)) for name in sizes} == sizes
        wait_for_progress(transfers)
        assert {address: pods_of(small, address) for address in sticky} == kept
    assert [text for each in transfers if (text := each.stop())] == []
    for load in loads:
        samples = load.stop()
        assert samples
        assert not failed(samples)
    Log(agent).some("map=slots old=4096 new=524288")
    assert not list(agent.directory.glob("bpf/**/maps-*"))


def test_what_does_not_fit_into_a_map_is_shown_with_the_reason(small: Lab) -> None:
    """The map is not full: what is left is too little for the second Service, and enough for others."""
    node = small.nodes[0]
    for number, namespace in ((41, "a"), (42, "b")):
        port = Port("http", 80, 8080)
        objects = [
            service("big", [port], cluster_ip(number)),
            *slices("big", [port], [(Dual(f"10.244.9.{i}", f"fd00:10:244:9::{i}"), None) for i in range(1, 251)]),
        ]
        for each in objects:
            each["metadata"]["namespace"] = namespace
        small.write(f"big-{namespace}.yaml", objects)
    node.agent.start(own={"maps": {"backends4": 400}})
    try:
        node.agent.wait_synced()
        why = (
            r"b/big:http TCP IPv4 is not in the kernel as it should be: map backends4 is full \(\d+ of 400 entries used"
        )
        warnings = [each["what"] for each in answer(node, "status", status=1)["warnings"]]
        assert [text for text in warnings if re.match(why, text)], warnings
        (text,) = answer(node, "services", "b/big")["notServed"]
        assert re.match(why, text)
        steps = answer(node, "explain", CLIENT.v4, f"{cluster_ip(42).v4}:80")["steps"]
        assert steps[-2] == "b/big:http specifies this address and port, but is not served there"
        assert re.match(why, steps[-1])
        assert not [text for text in answer(node, "services", "a/big")["notServed"] if "kernel" in text]
    finally:
        for namespace in "ab":
            (small.manifests / f"big-{namespace}.yaml").unlink()


def test_a_start_with_too_small_maps_fails_and_services_continue(small: Lab, family: int) -> None:
    node = small.nodes[0]
    agent = node.agent
    many = Kind("many", 30)
    many.ports = [Port(f"port-{number}", number, 8080) for number in range(1, 100)]
    write_services(small, many)
    agent.start()
    agent.wait_synced()
    agent.stop()
    agent.start(own={"maps": {"frontends4": 256}})
    assert agent.wait_ended() == 1
    Log(agent).some(f"map frontends4{Message.MAP_TOO_SMALL}256: it has ")
    assert small.client.call(ask, WEB.target("LoadBalancer", node).address.of(family), 80).kind == ANSWERED
    (small.manifests / "many.yaml").unlink()


def test_without_socket_programs(small: Lab, family: int, protocol: str) -> None:
    """An earlier agent's socket programs are detached; forwarded packets and the node's own requests are still
    served.
    """
    node = small.nodes[0]
    agent = node.agent
    agent.start()
    agent.wait_synced()
    target = WEB.target("ClusterIP", node)
    asked = target.address.of(family), target.ports[protocol], protocol
    assert node.namespace.call(ask, *asked).kind == ANSWERED
    agent.stop()
    agent.start(own={"socketLB": "off"})
    agent.wait_synced()
    Log(agent).some(Message.SOCKET_PROGRAMS_DETACHED)
    assert not [*agent.directory.glob("bpf/**/links/*")]
    for kind in ("LoadBalancer", "NodePort"):
        other = WEB.target(kind, node)  # type: ignore[arg-type]
        assert small.client.call(ask, other.address.of(family), other.ports[protocol], protocol).kind == ANSWERED
    assert small.pods["toolbox"].namespace.call(ask, *asked).kind == ANSWERED
    assert node.namespace.call(ask, *asked).kind == ANSWERED
    sender, place = node.address.of(family), format_address_port(ip_address(asked[0]).packed, asked[1])
    found = answer(node, "explain", sender, place, protocol)
    assert found["verdict"] == "served"
    message = "the socket programs are not attached (socketLB: off): nftables handles what this node sends"
    assert message in found["steps"]
    assert found["program"]["why"].startswith(f"nftables handles {protocol.upper()} packets of this node")
    node_port = WEB.target("NodePort", node)
    # IPv6 has no NodePorts on loopback.
    for address in (node_port.address.of(family), *([LOOPBACK.v4] if family == 4 else [])):
        outcome = node.namespace.call(ask, address, node_port.ports[protocol], protocol)
        assert outcome.kind == ANSWERED, (address, outcome)
    agent.stop()
    agent.start()
    agent.wait_synced()
    assert node.namespace.call(ask, *asked).kind == ANSWERED


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
@pytest.mark.parametrize("family", [4, 6])
def test_a_cache_at_the_clusterip_serves_the_node_itself(small: Lab, family: int, mode: str) -> None:
    """Like NodeLocal DNSCache: a process of the node listens at the Service's own address."""
    node = small.nodes[0]
    address = WEB.target("ClusterIP", node).address.of(family)
    node.agent.start({"mode": mode})
    node.agent.wait_synced()
    before = node.namespace.call(ask, address, 80)
    assert before.answer is not None
    assert before.answer.pod in ("web-1", "web-2")
    node.namespace.run("ip", "address", "add", f"{address}/{32 if family == 4 else 128}", "dev", "lo")
    cache = start_servers(node.namespace, {"pod": "cache", "node": node.name}, Ports((80,), (), ()))
    try:
        wait_until(
            lambda: (found := node.namespace.call(ask, address, 80).answer) is not None and found.pod == "cache",
            "the cache answers",
        )
    finally:
        cache.stop()
        node.namespace.run("ip", "address", "del", f"{address}/{32 if family == 4 else 128}", "dev", "lo")


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("socket_lb", ["node", "all"])
def test_a_cache_with_notrack_rules_serves_pods(small: Lab, family: int, socket_lb: str) -> None:
    """NodeLocal DNSCache: raw rules exclude the Service's own address from conntrack, and so from NAT (finding D5)."""
    node, toolbox = small.nodes[0], small.pods["toolbox"].namespace
    address = WEB.target("ClusterIP", node).address.of(family)
    word = "ip" if family == 4 else "ip6"
    node.agent.start(own={"socketLB": socket_lb})
    node.agent.wait_synced()
    ways = (80, "tcp"), (53, "udp")
    for way in ways:
        # A pair with a permit too.
        outcomes = toolbox.call(ask_many, 20, address, *way)
        assert {outcome.answer.pod for outcome in outcomes if outcome.answer} <= {"web-1", "web-2"}
    node.namespace.run("ip", "address", "add", f"{address}/{32 if family == 4 else 128}", "dev", "lo")
    node.namespace.run("nft", "add", "table", word, "cache")
    for chain, hook, field in (("in", "prerouting", "daddr"), ("out", "output", "saddr")):
        node.namespace.run("nft", f"add chain {word} cache {chain} {{ type filter hook {hook} priority raw ; }}")
        node.namespace.run("nft", f"add rule {word} cache {chain} {word} {field} {address} notrack")
    cache = start_servers(node.namespace, {"pod": "cache", "node": node.name}, Ports((80,), (), (53,)))
    try:
        for way in ways:
            # For a moment an earlier permit may still lead to a pod.
            wait_until(
                lambda way=way: (
                    [outcome.answer and outcome.answer.pod for outcome in toolbox.call(ask_many, 20, address, *way)]
                    == ["cache"] * 20
                ),
                "the cache answers",
            )
    finally:
        cache.stop()
        node.namespace.run("nft", "delete", "table", word, "cache")
        node.namespace.run("ip", "address", "del", f"{address}/{32 if family == 4 else 128}", "dev", "lo")
