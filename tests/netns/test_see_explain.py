# SPDX-License-Identifier: Apache-2.0
"""``explain`` on nodes of the lab: its answer matches what happens on both paths, and it leaves no trace."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.lab.addresses import CLIENT, Dual, cluster_ip, vip
from pyebpf_proxy.lab.client import ask
from pyebpf_proxy.lab.cluster import Lab, Node
from pyebpf_proxy.lab.load import Load, failed
from pyebpf_proxy.lab.manifests import Port, service, slices
from pyebpf_proxy.lab.namespace import LabError
from pyebpf_proxy.lab.rules import Destination, decide, expect
from pyebpf_proxy.lab.servers import Ports
from pyebpf_proxy.see import explain as explain_module
from pyebpf_proxy.see.explain import ask as explain
from pyebpf_proxy.see.model import Explanation
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import counted_between, detach_program, reasons, wait_until
from tests.support.see_tools import answer, error, see

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 10)
NEARBY = Kind("nearby", 11, externalTrafficPolicy="Local", internalTrafficPolicy="Local")
RANGES = Kind("ranges", 12, loadBalancerSourceRanges=["192.0.2.0/24", "2001:db8:1::/64"])
EMPTY = Kind("empty", 13)
STICKY = Kind("sticky", 14, sessionAffinity="ClientIP")
SINGLE = Kind("single", 16)
ASSOCIATED = Kind("associated", 15)
ASSOCIATED.ports = [Port("messages", 36412, 36412, "SCTP", 31015)]
KINDS: tuple[Destination, ...] = ("ClusterIP", "ExternalIP", "LoadBalancer", "NodePort")


@pytest.fixture(scope="module")
def world() -> Iterator[Lab]:
    """node1 has the fast path, node2 has none. web-1 and toolbox are on node1, web-2 on node2."""
    with Lab(nodes=2) as made:
        here, there = made.nodes
        pods = (made.add_pod("web-1", here), made.add_pod("web-2", there))
        made.add_pod("toolbox", here)
        WEB.endpoints = RANGES.endpoints = STICKY.endpoints = pods
        ASSOCIATED.endpoints = NEARBY.endpoints = pods[1:]
        SINGLE.endpoints = pods[:1]
        write_nodes(made)
        write_services(made, WEB, NEARBY, RANGES, EMPTY, STICKY, ASSOCIATED, SINGLE)
        here.agent.start()
        there.agent.start(own={"fastPath": False})
        for node in made.nodes:
            node.agent.wait_synced()
        yield made


def place(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("service", [WEB, NEARBY], ids=["web", "nearby"])
@pytest.mark.parametrize("source", ["pod", "external"])
def test_the_answer_matches_the_rules_and_the_program(
    world: Lab, kind: Destination, service: Kind, source: str, family: int
) -> None:
    node = world.nodes[0]
    target = service.target(kind, node)
    sender = world.pods["toolbox"].address if source == "pod" else CLIENT
    decision = decide(
        kind,
        "pod" if source == "pod" else "external",
        external_local=target.external_local,
        internal_local=target.internal_local,
    )
    expected = expect(family, decision, node, sender.of(family), service.endpoints)
    asked = place(target.address.of(family), target.ports["tcp"])
    found: Explanation = node.namespace.call(explain, node.agent.directory, sender.of(family), asked, "TCP")
    assert found.disagreements == []
    assert found.program.ran
    assert found.frontend == kind
    assert found.verdict == {"": "served", "timed out": "dropped", "refused": "refused"}[expected.failure]
    seen = {each.address: each.masquerade_as or sender.of(family) for each in found.endpoints}
    pods = {place(world.pods[name].address.of(family), 8080): address for name, address in expected.sources.items()}
    assert seen == pods


def test_explain_leaves_no_state(world: Lab) -> None:
    node = world.nodes[0]
    before = reasons(node), node.namespace.run("conntrack", "-L"), _affinities(node)
    for words in ((vip(10).v4, "tcp"), (vip(13).v4, "tcp"), (vip(14).v4, "udp"), (vip(12).v4, "tcp")):
        see(node, "explain", CLIENT.v4, f"{words[0]}:{80 if words[1] == 'tcp' else 53}", words[1])
    assert counted_between(before[0], reasons(node)) == {}
    assert _flows(node.namespace.run("conntrack", "-L")) == _flows(before[1])
    assert _affinities(node) == before[2] == "[]"


def _flows(listed: str) -> list[str]:
    return [line for line in listed.splitlines() if f"src={CLIENT.v4}" in line]


def _affinities(node: Node) -> str:
    return node.namespace.run("bpftool", "-j", "map", "dump", "pinned", str(node.agent.pin("affinities"))).strip()


def test_a_missing_fast_path_is_reported(world: Lab) -> None:
    found = answer(world.nodes[1], "explain", CLIENT.v4, f"{vip(10).v4}:80")
    paths = {(each["path"], each["pathReason"], each["pathWhy"]) for each in found["endpoints"]}
    assert paths == {("netfilter", "", "the fast path is off")}
    assert [each["pod"] for each in found["endpoints"]] == ["default/web-1", "default/web-2"]
    assert found["disagreements"] == []


def one_flow(world: Lab, family: int, port: int = 80) -> str:
    """A flow of toolbox to a Service with one endpoint; returns the reason that shows its path."""
    node = world.nodes[0]
    before = reasons(node)
    assert world.pods["toolbox"].namespace.call(ask, cluster_ip(16).of(family), port).kind == "answered"
    (path,) = [name for name in counted_between(before, reasons(node)) if name.startswith("new_flow_")]
    return path


def asked(world: Lab, family: int) -> dict[str, Any]:
    """The answer about the next flow."""
    source = world.pods["toolbox"].address.of(family)
    (choice,) = answer(world.nodes[0], "explain", source, place(cluster_ip(16).of(family), 80))["endpoints"]
    found: dict[str, Any] = choice
    return found


def test_the_path_of_the_next_flow_is_shown(world: Lab, family: int) -> None:
    """Without a permit, with one, with a void one, with a closed family: each is then tried."""
    assert (asked(world, family)["path"], asked(world, family)["pathReason"]) == ("netfilter", "slow_no_permit")
    assert one_flow(world, family) == "new_flow_netfilter"

    def permitted() -> bool:
        one_flow(world, family)
        return one_flow(world, family) == "new_flow_fast"

    wait_until(permitted, "young flows", 20.0)
    # A permit is valid for a second, and the command may take longer: new flows renew it meanwhile.
    load = Load(world.pods["toolbox"].namespace, cluster_ip(16).of(family), 80, pause=0.05)
    try:
        output = wait_until(lambda: _fast(world, family), "explain sees a permit", 90.0)
    finally:
        samples = load.stop()
    assert not failed(samples)
    assert (output["pathReason"], output["pathWhy"].partition(" for ")[0]) == ("", "the permit of this pair is valid")
    time.sleep(1.1)
    output = asked(world, family)
    assert (output["path"], output["pathReason"]) == ("netfilter", "slow_no_permit")
    assert output["pathWhy"].startswith("its permit expired ")
    run = world.nodes[0].namespace.run
    rule = ("dport", "9", "lookup", "main", "pref", "98")
    run("ip", f"-{family}", "rule", "add", *rule)
    try:
        why = f"the fast path is closed for IPv{family}: ip rule 98 selects by destination port"
        output = wait_until(lambda: _closed(world, family), "the family is closed")
        assert (output["pathReason"], output["pathWhy"]) == ("stack_policy_routed", why)
        assert {one_flow(world, family) for _ in range(4)} == {"new_flow_netfilter"}
    finally:
        run("ip", f"-{family}", "rule", "del", *rule)


def _fast(world: Lab, family: int) -> dict[str, Any] | None:
    found = asked(world, family)
    return found if found["path"] == "fast" else None


def _closed(world: Lab, family: int) -> dict[str, Any] | None:
    found = asked(world, family)
    return found if found["pathReason"].startswith("stack_") else None


def test_no_agent_no_fast_path(world: Lab) -> None:
    """The agent's state expires after five seconds."""
    node = world.nodes[0]
    node.agent.kill()
    try:
        output = wait_until(lambda: _closed(world, 4), "the agent's word has run out", 20.0)
        assert (output["pathReason"], output["pathWhy"]) == ("stack_no_agent", "no agent follows rules and routes")
        assert {one_flow(world, 4) for _ in range(4)} == {"new_flow_netfilter"}
    finally:
        node.agent.start()
        node.agent.wait_synced()


def test_a_device_without_a_program(world: Lab) -> None:
    """The agent would attach it again at once, so it must not run."""
    node = world.nodes[0]
    assert world.client.call(ask, vip(16).v4, 80).kind == "answered"
    node.agent.kill()
    try:
        assert node.namespace.call(detach_program, node.agent.directory, "eth0")
        for number in (16, 13, 12):  # served, without endpoints, with source ranges
            found = answer(node, "explain", CLIENT.v4, f"{vip(number).v4}:80", status=1)
            assert (found["verdict"], found["reason"], found["endpoints"]) == ("left", "", [])
            assert found["steps"][-1] == "no program is attached to eth0: the packet is not changed"
        assert world.client.call(ask, vip(16).v4, 80, timeout=0.5).kind != "answered"
        # No Service, so nothing is wrong.
        assert answer(node, "explain", CLIENT.v4, f"{vip(16).v4}:81")["verdict"] == "left"
    finally:
        node.agent.start()
        node.agent.wait_synced()


@pytest.fixture(scope="module")
def with_pod_sockets() -> Iterator[Lab]:
    with Lab() as made:
        web = Kind("web", 10)
        web.endpoints = (made.add_pod("web-1", made.nodes[0]),)
        made.add_pod("toolbox", made.nodes[0])
        write_nodes(made)
        write_services(made, web)
        made.start_agents(own={"socketLB": "all"})
        yield made


def test_sockets_of_pods_are_named(with_pod_sockets: Lab, family: int) -> None:
    """tc serves the first connection and learns the pod by it, so the step is there from the second one on."""
    node, pod = with_pod_sockets.nodes[0], with_pod_sockets.pods["toolbox"]

    def says(address: str, protocol: str = "tcp") -> bool:
        steps = answer(node, "explain", pod.address.of(family), place(address, 80), protocol)["steps"]
        return any("(path socket)" in step for step in steps)

    def path(address: str) -> set[str]:
        before = reasons(node)
        assert pod.namespace.call(ask, address, 80).kind == "answered"
        return {name for name in counted_between(before, reasons(node)) if name.startswith("new_flow_")}

    inside, outside = cluster_ip(10).of(family), vip(10).of(family)
    assert not says(inside)
    assert path(inside) == {"new_flow_netfilter"}
    assert says(inside)
    assert path(inside) == {"new_flow_socket"}
    # It must be masqueraded, which sockets cannot do.
    assert not says(outside)
    assert "new_flow_socket" not in path(outside)


def test_a_source_outside_the_ranges(world: Lab) -> None:
    found = answer(world.nodes[0], "explain", CLIENT.v4, f"{vip(12).v4}:80", status=1)
    assert (found["verdict"], found["reason"]) == ("dropped", "drop_source_range")
    assert found["steps"][-1] == f"{CLIENT.v4} is not in loadBalancerSourceRanges (192.0.2.0/24): dropped"
    assert found["program"]["counted"] == ["drop_source_range"]


def test_endpoints_without_a_route(world: Lab, family: int) -> None:
    """The program selects them all the same. Clients get an ICMP error, and nothing else says why."""
    node, (here, there) = world.nodes[0], WEB.endpoints
    source, target = CLIENT.of(family), place(vip(10).of(family), 80)
    rules = [f"to {pod.address.of(family)} pref 90 unreachable" for pod in (here, there)]

    def rule(verb: str, words: str) -> None:
        node.namespace.run("ip", f"-{family}", "rule", verb, *words.split())

    try:
        rule("add", rules[1])
        found = answer(node, "explain", source, target)
        assert (found["verdict"], found["disagreements"]) == ("served", [])
        lost = place(there.address.of(family), 8080)
        assert found["steps"][-1] == f"the node has no route to {lost}: such packets do not leave it"
        assert {each["address"]: each["egress"] for each in found["endpoints"]}[lost] == "no route"
        rule("add", rules[0])
        found = answer(node, "explain", source, target, status=1)
        assert (found["verdict"], found["program"]["verdict"], found["disagreements"]) == ("dropped", "served", [])
        assert world.client.call(ask, vip(10).of(family), 80, timeout=0.5).answer is None
    finally:
        for each in rules:
            with contextlib.suppress(LabError):
                rule("del", each)


def test_an_endpoint_that_does_not_answer_at_its_link(world: Lab, family: int) -> None:
    """As of a pod that is gone while its EndpointSlice is not."""
    node, ports, absent = world.nodes[0], [Port("http", 80, 8080)], Dual("192.0.2.77", "2001:db8:1::77")
    world.write("absent.yaml", [service("absent", ports, cluster_ip(20)), *slices("absent", ports, [(absent, "")])])
    node.agent.wait_synced()
    frontend, client = cluster_ip(20).of(family), world.pods["toolbox"]

    def last_step() -> str:
        client.namespace.call(ask, frontend, 80, timeout=0.1)
        found = answer(node, "explain", client.address.of(family), place(frontend, 80))
        return str(found["steps"][-1])

    said = f"{absent.of(family)} does not answer on eth0 (ip neigh: FAILED)"
    wait_until(lambda: last_step() == said, "the neighbour has failed")


def test_the_wrong_port_is_distinguished_from_the_right_one(world: Lab) -> None:
    found = answer(world.nodes[0], "explain", CLIENT.v4, f"{vip(10).v4}:8080")
    assert (found["verdict"], found["program"]["verdict"]) == ("left", "left")
    assert found["steps"] == [
        f"{vip(10).v4}:8080/TCP is not a frontend of any service: the packet is not changed",
        f"frontends at {vip(10).v4}: 53/UDP (default/web:dns), 80/TCP (default/web:http)",
    ]


def test_affinity_is_seen_and_kept(world: Lab) -> None:
    node, toolbox = world.nodes[0], world.pods["toolbox"]
    outcome = toolbox.namespace.call(ask, cluster_ip(14).v4, 80)
    assert outcome.answer is not None
    before = _affinities(node)
    found = answer(node, "explain", toolbox.address.v4, f"{cluster_ip(14).v4}:80")
    assert [each["address"] for each in found["endpoints"]] == [f"{world.pods[outcome.answer.pod].address.v4}:8080"]
    assert found["disagreements"] == []
    assert any(step.startswith("session affinity: the client's last connection") for step in found["steps"])
    assert _affinities(node) == before


def test_a_loopback_source_is_an_unbound_socket_of_the_node(world: Lab, family: int) -> None:
    """Its session affinity is that of the Node's address."""
    node, address = world.nodes[0], cluster_ip(14).of(family)
    outcome = node.namespace.call(ask, address, 80)
    assert outcome.answer is not None
    found = answer(node, "explain", {4: "127.0.0.1", 6: "::1"}[family], place(address, 80))
    assert found["steps"][0] == f"a socket of this node has the source address {node.address.of(family)} here"
    assert [each["address"] for each in found["endpoints"]] == [
        place(world.pods[outcome.answer.pod].address.of(family), 8080)
    ]


def test_why_affinity_does_not_apply_is_named(world: Lab) -> None:
    """Either the client's entry is too old, or its endpoint is not usable."""
    node, address = world.nodes[0], cluster_ip(14).v4
    toolbox, pods = world.pods["toolbox"], STICKY.endpoints

    def step() -> str:
        steps = answer(node, "explain", toolbox.address.v4, f"{address}:80")["steps"]
        return next(step for step in steps if step.startswith("session affinity"))

    try:
        outcome = toolbox.namespace.call(ask, address, 80)
        assert outcome.answer is not None
        STICKY.endpoints = tuple(pod for pod in pods if pod.name != outcome.answer.pod)
        node.agent.wait_synced(write_services(world, STICKY))
        assert step() == (
            "session affinity: the endpoint of the client's last connection is not usable now: any endpoint"
        )
        STICKY.endpoints = pods
        STICKY.spec = {**STICKY.spec, "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 1}}}
        node.agent.wait_synced(write_services(world, STICKY))
        toolbox.namespace.call(ask, address, 80)
        time.sleep(1.1)
        pattern = r"session affinity, 1 s: the client's last connection was \d+ s ago: any endpoint"
        assert re.fullmatch(pattern, step())
    finally:
        STICKY.endpoints = pods
        STICKY.spec.pop("sessionAffinityConfig", None)
        node.agent.wait_synced(write_services(world, STICKY))


def explain_during_a_change(directory: Path, destination: str, manifest: Path) -> Explanation:
    """Explain; the manifest with the suffix ``next`` replaces this one after the maps have been read."""
    read = explain_module.state.read

    def and_change(maps: Any) -> Any:
        found = read(maps)
        with contextlib.suppress(FileNotFoundError):
            manifest.with_suffix(".next").replace(manifest)
            wait_until(lambda: read(maps).backends.keys() != found.backends.keys(), "the change is in the maps")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain_module.state, "read", and_change)
        return explain(directory, CLIENT.v4, destination, "TCP")


def test_a_change_between_reading_and_the_dry_run_is_no_disagreement(world: Lab) -> None:
    node, changing = world.nodes[0], Kind("changing", 17)
    manifest = world.manifests / "changing.yaml"
    changing.endpoints = (world.pods["web-2"],)
    write_services(world, changing)
    manifest.rename(manifest.with_suffix(".next"))
    changing.endpoints = (world.pods["web-1"],)
    node.agent.wait_synced(write_services(world, changing))
    try:
        asked = (node.agent.directory, f"{vip(17).v4}:80", manifest)
        found: Explanation = node.namespace.call(explain_during_a_change, *asked)
        assert found.disagreements == []
        assert [each.address for each in found.endpoints] == [f"{world.pods['web-2'].address.v4}:8080"]
    finally:
        manifest.unlink()


def test_an_existing_flow_continues(world: Lab) -> None:
    node = world.nodes[0]
    outcome = world.client.call(ask, vip(10).v4, 53, "udp")
    assert outcome.local is not None
    found = answer(node, "explain", f"{CLIENT.v4}:{outcome.local[1]}", f"{vip(10).v4}:53", "udp")
    assert found["disagreements"] == []
    assert found["steps"][-1].startswith("a flow with these addresses and ports exists")


def test_hairpin(world: Lab) -> None:
    node, pod = world.nodes[0], world.pods["web-1"]
    found = answer(node, "explain", pod.address.v6, f"[{cluster_ip(10).v6}]:80")
    assert {each["address"]: each["masquerade"] for each in found["endpoints"]} == {
        place(pod.address.v6, 8080): True,
        place(world.pods["web-2"].address.v6, 8080): False,
    }
    assert found["disagreements"] == []


def test_the_address_of_the_masquerade_where_the_pods_device_has_none(family: int) -> None:
    """The kernel takes the first device's address, also if the Node's address is another one."""
    with Lab(nodes=1, pod_network="bare") as lab:
        (node,) = lab.nodes
        alone = Kind("alone", 17)
        alone.endpoints = (lab.add_pod("web-1", node),)
        node.namespace.ip(
            "link add second type bridge",
            "link set second up",
            "addr add 192.168.9.11/24 dev second",
            "addr add 2001:db8:9::11/64 dev second nodad",
        )
        write_nodes(lab)
        write_services(lab, alone)
        own = "192.168.9.11" if family == 4 else "2001:db8:9::11"
        node.agent.start({"bindAddress": own, "metricsBindAddress": "127.0.0.1:10249"})
        node.agent.wait_synced()
        target = alone.target("LoadBalancer", node).address.of(family)
        seen = lab.client.call(ask, target, 80).answer
        assert seen is not None
        (choice,) = answer(node, "explain", CLIENT.of(family), place(target, 80))["endpoints"]
        assert choice["masqueradeAs"] == seen.peer[0] == node.address.of(family)


def test_a_process_of_the_node(world: Lab) -> None:
    found = answer(world.nodes[0], "explain", world.nodes[0].address.v4, f"{cluster_ip(13).v4}:80", status=1)
    assert (found["verdict"], found["reason"]) == ("refused", "reject_no_endpoints_socket")
    assert not found["program"]["ran"]
    found = answer(world.nodes[0], "explain", world.nodes[0].address.v4, f"{vip(10).v4}:80")
    assert {each["masquerade"] for each in found["endpoints"]} == {False}
    assert found["steps"][-1].startswith("the socket connects to the endpoint from the route's source address")


def test_sctp_of_the_node_is_not_translated_at_its_socket(world: Lab) -> None:
    """No socket program sees SCTP: nftables translates the node's packets."""
    found = answer(world.nodes[0], "explain", world.nodes[0].address.v4, f"{vip(15).v4}:36412", "sctp")
    (choice,) = found["endpoints"]
    assert (choice["masquerade"], choice["masqueradeAs"]) == (True, world.nodes[0].address.v4)
    assert found["program"]["why"].startswith("nftables handles SCTP packets of this node")


def test_an_endpoint_in_the_host_network_is_not_masqueraded(world: Lab, family: int) -> None:
    """The kernel delivers the packet, and masquerades only those that leave the node."""
    node = world.nodes[0]
    ports = [Port("http", 80, 18080, "TCP", 30018)]
    node.serve(Ports(http=(18080,), echo=(), udp=()))
    found = slices("host", ports, [(node.address, node.name)])
    world.wait_synced(world.write("host.yaml", [service("host", ports, cluster_ip(18), vip=vip(18)), *found]))
    try:
        target = vip(18).of(family)
        seen = world.client.call(ask, target, 80).answer
        assert seen is not None
        assert seen.peer[0] == CLIENT.of(family)
        told = answer(node, "explain", CLIENT.of(family), place(target, 80))
        (choice,) = told["endpoints"]
        assert (choice["masquerade"], choice["masqueradeAs"]) == (False, "")
        assert told["steps"][-1] == "an endpoint in the network of this node itself sees the client's address"
        assert told["disagreements"] == []
    finally:
        world.wait_synced(world.write("host.yaml", []))
        node.stop_servers()


def test_the_text_output(world: Lab) -> None:
    text = see(world.nodes[0], "explain", CLIENT.v4, f"{vip(10).v4}:80", COLUMNS="100").stdout
    assert "1. 203.0.113.10:80/TCP is a LoadBalancer of default/web:http" in text
    assert "3. externalTrafficPolicy Cluster: all endpoints, masqueraded" in text
    assert "eth0 through 192.0.2.12" in text
    assert "It agrees with the rules." in " ".join(text.split())
    narrow = see(world.nodes[0], "explain", CLIENT.v6, f"[{vip(10).v6}]:80", COLUMNS="40").stdout
    assert max(map(len, narrow.splitlines())) <= 40


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("198.51.100", "203.0.113.10:80"), "SRC: 198.51.100 is not an IP address"),
        (("198.51.100.2", "203.0.113.10"), "DST needs a port, as in 203.0.113.10:80; put IPv6 addresses in brackets"),
        (
            ("2001:db8::2", "2001:db8:3::10"),
            "DST needs a port, as in [2001:db8:3::10]:80; put IPv6 addresses in brackets",
        ),
        (("198.51.100.2", "203.0.113.10:0"), "DST: 0 is not a port (1–65535)"),
        (("198.51.100.2", "203.0.113.10:80", "icmp"), "icmp is not a protocol of Services: use TCP, UDP or SCTP"),
        (
            ("198.51.100.2", "[2001:db8:3::10]:80"),
            "198.51.100.2 and [2001:db8:3::10]:80 are of different IP families",
        ),
        (
            ("198.51.100.2", "203.0.113.10:80", "--device", "eth1"),
            "no program is attached to a device eth1, or should be; did you mean eth0?",
        ),
    ],
)
def test_invalid_arguments(world: Lab, words: tuple[str, ...], text: str) -> None:
    assert error(world.nodes[0], "explain", *words, status=2) == text
